#!/usr/bin/env bash
# Injects one fault at a time into ranks and servers of this plugin, and judges how each continues or ends. See
# tests/faults/README.md.
# usage: scripts/faults.sh [--sample N] [--minutes M] [--resume] [--ranks-only] [--out FILE.json]
#   Without --out it writes benchmarks/results/reliability/faults.json and benchmarks/reliability.md.
# environment: PYTHON=INTERPRETER instead of python; needs this checkout, SGLang, gcc and nvcc, but no GPU
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
exec nice -n 5 "${PYTHON:-python}" -m faults.run "$@"
