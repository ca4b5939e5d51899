#!/usr/bin/env bash
# The default job at several async ratios and seeds, one run after the other: bash scripts/compare_staleness.sh [OUT] [options]
# Leaves run.json and metrics.jsonl of every run in OUT (results/staleness), then a table and a figure of all of them.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-results/staleness}
[ $# -eq 0 ] || shift

python=.venv/bin/python
runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT
for seed in 0 1 2; do
    for ratio in 0 1 2; do # alternating, so that a busy minute of the machine falls on all alike
        name=a$ratio-s$seed
        .venv/bin/torchrun --standalone train_async.py --async-ratio "$ratio" --seed "$seed" \
            --runs-dir "$runs" --run-name "$name" "$@" | tail -n 2
        mkdir -p "$out/$name"
        cp "$runs/$name/run.json" "$runs/$name/metrics.jsonl" "$out/$name/"
    done
done
"$python" scripts/plot.py "$out"/a*-s* --out "$out/staleness.png" >/dev/null
"$python" scripts/table.py "$out"/a*-s* --by async_ratio | tee "$out/table.md"
