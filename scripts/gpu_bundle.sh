#!/usr/bin/env bash
# Bundles in FOLDER what scripts/gpu_machine.sh needs on a GPU machine without a network: SGLang, the imports that the machine's
# Python lacks, DeepGEMM, and the kernels that are compiled at run time, for sm_90. Under 50 MB; about 15 minutes on two cores.
# usage: scripts/gpu_bundle.sh FOLDER         with an existing FOLDER: adds what is missing
# environment: PYTHON_VERSION=3.12 is that machine's; VENV=DIR, as for scripts/rehearse.sh
set -euo pipefail
out=$(mkdir -p "${1:?usage: scripts/gpu_bundle.sh FOLDER}" && realpath "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
machine=/tmp/sglang-uvm-offload-gpu    # as in gpu_machine.sh, because DeepGEMM looks for its kernels by its own path
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
pack() { tar -C "$1" -cf - "$2" | xz -T0 >"$out/$2.part" && mv "$out/$2.part" "$out/$2.tar.xz"; }
download() { # WHEELS PIP ARGUMENTS...
  local glibc platforms=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
  for glibc in 39 35 34 31 28 27 26 24 17; do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
  python3 -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: "${platforms[@]}" \
    --implementation cp --python-version "${PYTHON_VERSION:-3.12}" --dest "$1" "${@:2}"
}
unpack() { mkdir -p "$2" && for wheel in "$1"/*.whl; do python3 -m zipfile -e "$wheel" "$2"; done; } # WHEELS FOLDER

if [ ! -f "$out/site.tar.xz" ]; then
  download "$work/wheels" --requirement benchmarks/gpu/carried.txt
  unpack "$work/wheels" "$work/site"
  # Triton's attention and MoE never load these: kernels for other GPUs, SGLang's FlashAttention and FlashMLA, images and video.
  rm -rf "$work"/site/{sglang/multimodal_gen,sglang/test,bin} "$work"/site/sglang/srt/{rust_extensions,mem_cache/rust_tree_core}/*.so
  find "$work/site/sgl_kernel" -name '*.so' ! -path '*/sm90/*' ! -name 'spatial_ops*' -delete
  mkdir "$work"/site/{IPython,soundfile}    # SGLang imports these but does not use them here
  echo 'from . import display' >"$work/site/IPython/__init__.py"
  echo 'HTML = display = None' >"$work/site/IPython/display.py"
  touch "$work/site/soundfile/__init__.py"
  cp benchmarks/gpu/carried_kernels.py "$work/site"
  echo 'import sys, carried_kernels; carried_kernels.serve(sys.modules[__name__])' >>"$work/site/sglang/kernels/jit/utils/compile/cache.py"
  pack "$work" site
fi
rm -rf "$machine/deep_gemm"
download "$work/more" sgl-deep-gemm==0.1.5.post1
unpack "$work/more" "$machine/deep_gemm"
pack "$machine" deep_gemm
if [ ! -f "$out/kernels.tar.xz" ]; then
  PYTHONPATH="$machine/deep_gemm" scripts/rehearse.sh --out "$machine/rehearsal" --compile
  scripts/rehearse.sh --out "$machine/rehearsal" server:decode
  mkdir "$work/kernels"
  cp -r "$machine"/rehearsal/caches/{sglang,deep_gemm} "$work/kernels"
  pack "$work" kernels
fi
ls -l "$out"
