#!/usr/bin/env bash
# Runs every test of docs/support.md, those of each night too, and makes the table from their results. About
# half an hour on two cores; without a GPU.
# usage: scripts/support.sh [PYTEST ARGUMENTS]   with arguments, such as a test file: only what is named, and no table is made
# environment: VENV=DIR uses (or makes) that environment instead of .venv
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh "${VENV:-.venv}"
if [ $# -gt 0 ]; then
  exec python -m pytest --nightly "$@"
fi
results=benchmarks/results/support/support.json
python -m pytest --nightly -m "works or refused or sglang_fails or nightly" --support "$results" --durations=25 || failed=$?
python benchmarks/support.py
exit "${failed:-0}"
