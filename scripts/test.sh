#!/usr/bin/env bash
# Install, then lint, format check and tests: bash scripts/test.sh [--slow | --all | --study] [options of pytest]
# Without a word all tests but those marked slow, with --slow these alone, with --all both; with --study those
# alone that take minutes each, and mostly make a table of results/. CI runs it without a word.
# All parts run, and one that fails is the status, as is a choice of no test at all. What needs a GPU runs alone where there
# is one; all else two files at a time, as a third makes all slower on two cores. At the end stand once more the closing
# lines of the parts that ran any test.
set -euo pipefail
cd "$(dirname "$0")/.."

chosen="not slow and not study"
case "${1-}" in
    --slow) chosen="slow and not study" && shift ;;
    --all) chosen="not study" && shift ;;
    --study) chosen="study" && shift ;;
esac
bash scripts/install.sh --dev
status=0
lint() {
    .venv/bin/ruff "$@" . || { status=1 && refused+=("ruff $*"); }
}
refused=()
lint check
lint format --check
unset PYTHONDONTWRITEBYTECODE # or each of the hundreds of processes that tests start would compile the project again
log=$(mktemp)
trap 'rm -f "$log"' EXIT
run_tests() {
    .venv/bin/python -m pytest --durations=10 "$@" | tee -a "$log" || [ $? -eq 5 ] || status=1 # 5: no test was chosen
}
if [ "$(nvidia-smi -L 2>/dev/null | grep -c "^GPU")" -gt 0 ]; then
    run_tests -m "gpu and ($chosen)" "$@"
    chosen="not gpu and ($chosen)"
fi
export OMP_NUM_THREADS=1 # two threads on a busy core wait for each other
# Files in the order of tests/shared_fixtures.py, the long ones first, and not by how many tests they have.
run_tests -m "$chosen" -n 2 --dist loadfile --no-loadscope-reorder "$@"
for command in "${refused[@]}"; do echo "error: $command fails; what it says is above the tests" >&2; done
grep -E '^(=+ )?[0-9]+ (failed|passed|errors?)\b' "$log" || { status=1 && echo "error: no test was run" >&2; }
exit "$status"
