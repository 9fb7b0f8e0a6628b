#!/usr/bin/env bash
# Runs COMMAND from this checkout on a GPU machine without a network. It uses the machine's Python 3.12, torch 2.11 and nvcc 13, and
# the bundle of scripts/gpu_bundle.sh in FOLDER, which it unpacks once. It writes checkpoints to a RAM disk.
# usage: scripts/gpu_machine.sh FOLDER COMMAND...
# environment: OUT=DIR receives newly compiled kernels as compiled.tar.gz; put it into FOLDER for the next machine
set -euo pipefail
folder=$(realpath "${1:?usage: scripts/gpu_machine.sh FOLDER COMMAND...}")
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export MACHINE=/tmp/sglang-uvm-offload-gpu CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
export PATH="$(python3 -c 'import os, sys; print(os.path.dirname(sys.executable))'):$CUDA_HOME/bin:$PATH"    # ninja and nvcc
export PYTHONPATH="$MACHINE/site" HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export SGLANG_JIT_CACHE_DIR=$MACHINE/kernels/sglang SGLANG_DG_CACHE_DIR=$MACHINE/kernels/deep_gemm
export TRITON_CACHE_DIR=$MACHINE/kernels/triton XDG_CACHE_HOME=/dev/shm/sglang-uvm-offload-gpu
if [ ! -f "$MACHINE/ready" ]; then
  mkdir -p "$MACHINE"
  python3 -c 'import sys, tarfile
for each in sys.argv[2:]: tarfile.open(each).extractall(sys.argv[1], filter="fully_trusted")' "$MACHINE" "$folder"/*.tar.*
  python3 -m compileall -q -j 0 "$MACHINE/site" >/dev/null || true    # files for another Python do not compile
  touch "$MACHINE/ready"
fi
python3 -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation --no-index --upgrade --target "$MACHINE/site" .
code=0
"$@" || code=$?
[ -z "${OUT:-}" ] || (cd "$MACHINE" && find kernels -type f -newer ready | tar -czf "$OUT/compiled.tar.gz" -T -)
exit $code
