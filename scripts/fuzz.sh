#!/usr/bin/env bash
# Fuzzes all that reads input from outside: flags, ids, profiles, traces, models, statistics, addresses, labels.
# usage: scripts/fuzz.sh [INPUTS] [--seed N] [--jobs N] [--target NAME] [--out FILE.json]
# environment: VENV=DIR, as for scripts/test.sh
# Prints a table by target: inputs, refused, accepted, tracebacks; then one traceback for each place that fails. Exit code 1: some do.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh "${VENV:-.venv}"
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec python -W ignore tests/fuzz.py "$@"
