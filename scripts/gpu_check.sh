#!/usr/bin/env bash
# Tests and measurements on the first GPU, in one table: bash scripts/gpu_check.sh [options of scripts/bench/gpu.py]
# Installs nothing, needs no network, takes eight minutes at most. Without a GPU it says so, checks nothing, exits with 0.
set -euo pipefail
cd "$(dirname "$0")/.."

python=.venv/bin/python
[ -x "$python" ] || python=python3 # packages may also come by PYTHONPATH
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -eq 0 ]; then
    echo "gpu_check: skipped, nothing was checked: torch $("$python" -c 'import torch; print(torch.__version__)') sees no NVIDIA GPU"
    exit 0
fi
source scripts/needs.sh
missing=$(what_is_missing "$python")
if [ -n "$missing" ]; then
    echo "gpu_check: error: ${missing//$'\n'/; }" >&2
    exit 1
fi
warn_of_shared_memory gpu_check
exec "$python" scripts/bench/gpu.py "$@"
