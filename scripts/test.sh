#!/usr/bin/env bash
# Install, then lint, format check and tests: bash scripts/test.sh [options of pytest]
# All three run, and one that fails is the status.
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/install.sh --dev
status=0
.venv/bin/ruff check . || status=$?
.venv/bin/ruff format --check . || status=$?
.venv/bin/python -m pytest --durations=10 "$@" || status=$?
exit "$status"
