#!/usr/bin/env bash
# Measures unified memory on this machine's GPU, section by section, and writes a JSON and a log for each. --list says what each part decides.
# usage: scripts/gpu_session.sh [--list] [--dry-run] [--out DIR] [--again] [--seconds N] [SECTION[:PART]...]
# environment: PYTHON=INTERPRETER instead of python3; it needs torch with CUDA, Triton, cuda-python and ninja, and nvcc must be
# found (CUDA_HOME, PATH or /usr/local/cuda). Nothing is installed and no network is used. See benchmarks/gpu/README.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m benchmarks.gpu.session "$@"
