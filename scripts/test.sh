#!/usr/bin/env bash
# Install, then lint, format check and tests: bash scripts/test.sh [options of pytest]
# All run, and one that fails is the status, as is a choice of no test at all. What needs a GPU runs alone, then two files
# at a time, then two whole jobs; at the end stand once more the closing lines of the parts that ran any test.
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/install.sh --dev
status=0
.venv/bin/ruff check . || status=$?
.venv/bin/ruff format --check . || status=$?
log=$(mktemp)
trap 'rm -f "$log"' EXIT
run_tests() {
    .venv/bin/python -m pytest --durations=10 "$@" | tee -a "$log" || [ $? -eq 5 ] || status=1 # 5: no test was chosen
}
run_tests -m gpu "$@"
run_tests -m "not e2e and not gpu" -n 2 --dist loadfile "$@"
run_tests -m "e2e and not gpu" -n 2 --dist load "$@"
grep -E '^(=+ )?[0-9]+ (failed|passed|errors?)\b' "$log" || { status=1 && echo "error: no test was run" >&2; }
exit "$status"
