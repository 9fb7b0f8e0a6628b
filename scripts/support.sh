#!/usr/bin/env bash
# Runs every test of docs/support.md, including nightly ones, and generates the table from their results. Needs no GPU; takes about
# half an hour on two cores.
# usage: scripts/support.sh [PYTEST ARGUMENTS]   with arguments, such as a test file: runs only those and generates no table
# environment: VENV=DIR and TEST_PATIENCE=N, as for scripts/test.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh "${VENV:-.venv}"
source scripts/patience.sh
if [ $# -gt 0 ]; then
  exec python -m pytest --nightly "$@"
fi
results=benchmarks/results/support/support.json
python -m pytest --nightly -m "works or refused or sglang_fails or nightly" --support="$results" --durations=25 || failed=$?
python -m benchmarks.support
exit "${failed:-0}"
