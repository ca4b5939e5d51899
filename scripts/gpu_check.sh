#!/usr/bin/env bash
# Tests and measurements on GPUs, in one table: bash scripts/gpu_check.sh [options of scripts/bench/gpu.py]
# With several GPUs it begins with NCCL. It takes two hours at most, in calls of eight minutes: start it again until
# nothing is left. On one GPU the first half hour needs no vLLM, and runs on torch 2.11 or newer. Installs nothing, needs
# no network. It needs pytest: bash scripts/install.sh --dev. Without a GPU it says so, checks nothing, and exits with 0.
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
if ! reason=$("$python" -c 'import scripts.bench.trainer_alone' 2>&1); then
    echo "gpu_check: error: ${reason##*$'\n'}: install the package, or name a folder that has it in PYTHONPATH" >&2
    exit 1
fi
if ! reason=$("$python" -c 'import pytest, pytest_timeout' 2>&1); then
    echo "gpu_check: error: ${reason##*$'\n'}: the parts tests-* need it: bash scripts/install.sh --dev" >&2
    exit 1
fi
exec "$python" scripts/bench/gpu.py "$@"
