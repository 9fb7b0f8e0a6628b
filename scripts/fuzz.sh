#!/usr/bin/env bash
# Fuzzes everything that reads external input: flags, ids, profiles, traces, models, statistics, addresses, labels.
# usage: scripts/fuzz.sh [INPUTS] [--seed N] [--jobs N] [--target NAME] [--out FILE.json]
# environment: VENV=DIR, as for scripts/test.sh
# Prints one traceback per failing line of code as it is found, then a table by target: inputs, refused, accepted, tracebacks.
# Exit code 1: some targets fail.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh "${VENV:-.venv}"
PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec python -W ignore tests/fuzz.py "$@"
