#!/usr/bin/env bash
# Real jobs on the first GPU, and a table of what they measured: bash scripts/gpu_check.sh [options of pytest]
# Installs nothing and needs no network. Exits with 2 where torch sees no GPU: nothing has been checked then.
set -euo pipefail
cd "$(dirname "$0")/.."

python=.venv/bin/python
[ -x "$python" ] || python=python3 # packages may also come by PYTHONPATH
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -eq 0 ]; then
    echo "gpu_check: needs an NVIDIA GPU; torch $("$python" -c 'import torch; print(torch.__version__)') sees none here" >&2
    exit 2
fi
exec "$python" -m pytest tests/gpu -m gpu "$@"
