#!/usr/bin/env bash
# Install, then lint, format check and tests: bash scripts/test.sh [options of pytest]
# All run, and one that fails is the status. Two files run at a time, then two whole jobs, and what needs a GPU alone.
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/install.sh --dev
status=0
.venv/bin/ruff check . || status=$?
.venv/bin/ruff format --check . || status=$?
run_tests() {
    .venv/bin/python -m pytest --durations=10 "$@" || [ $? -eq 5 ] || status=1 # 5: no test was chosen
}
run_tests -m "not e2e and not gpu" -n 2 --dist loadfile "$@"
run_tests -m "e2e and not gpu" -n 2 --dist load "$@"
run_tests -m gpu "$@"
exit "$status"
