#!/usr/bin/env bash
# Sends mixed traffic to a server of two ranks for some minutes, injects faults, and restarts the server after those that end it.
# Compares every answer with a server without this plugin, and checks whether memory, handles and threads grow.
# Writes benchmarks/results/reliability/soak.json and benchmarks/reliability.md, or only --out FILE.json.
# usage: scripts/soak.sh MINUTES [--out FILE.json]     environment: PYTHON=INTERPRETER instead of python
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
exec nice -n 5 "${PYTHON:-python}" -m faults.soak "$@"
