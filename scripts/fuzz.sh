#!/usr/bin/env bash
# Fuzzes all that reads input from outside: flags, ids, profiles, traces, models, statistics, addresses, labels.
# usage: scripts/fuzz.sh [INPUTS] [--seed N] [--jobs N] [--target NAME] [--out FILE.json]
# environment: VENV=DIR, as for scripts/test.sh
# Prints one traceback for each place that fails, as it is found, then a table by target: inputs, refused, accepted, tracebacks.
# Exit code 1: some fail.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh "${VENV:-.venv}"
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec python -W ignore tests/fuzz.py "$@"
