#!/usr/bin/env bash
# Measures unified memory on this machine's GPU, section by section, and writes a JSON and a log for each. --list shows the parts.
# usage: scripts/gpu_session.sh [--list] [--dry-run] [--out DIR] [--again] [--seconds N] [SECTION[:PART]...]
# environment: PYTHON=INTERPRETER instead of python3. It needs torch with CUDA, Triton, cuda-python and ninja, and nvcc in
# CUDA_HOME, PATH or /usr/local/cuda. This installs nothing and uses no network. See benchmarks/gpu/README.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m benchmarks.gpu.session "$@"
