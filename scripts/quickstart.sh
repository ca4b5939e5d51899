#!/usr/bin/env bash
# Install, train, and say what came out: bash scripts/quickstart.sh [options of train_async.py]
# Exits with the status of the run.
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/install.sh
unset PYTHONDONTWRITEBYTECODE # or every process of the run would compile all that it imports
case " $* " in *" --help "* | *" -h "*) exec .venv/bin/python train_async.py --help ;; esac

# An option given twice counts the second time, so a --run-name of the user's wins over this one.
options=(--run-name "quickstart-$(date +%Y%m%d-%H%M%S)-$$" "$@")
# Read by the run's own parser: a mistake ends here, and what remains knows where the run will be.
run=$(.venv/bin/python -c '
import sys
from asyncrl.job.command_line import parse_config
config = parse_config(sys.argv[1:])
print(f"{config.runs_dir}/{config.run_name}")' "${options[@]}")

status=0
.venv/bin/python train_async.py "${options[@]}" || status=$?
if [ "$status" -ne 0 ]; then
    echo "quickstart: the run ended with status $status; its records, if any, are in $run" >&2
    exit "$status"
fi
.venv/bin/python scripts/report.py "$run"
