#!/usr/bin/env bash
# Rehearses sections of the GPU session without a GPU, those that start SGLang's servers among them: over the stand-in driver, with
# the arguments and the packages of a GPU machine. It shows that every server starts, captures, serves and ends; never a figure.
# usage: scripts/rehearse.sh [--out DIR] [SECTION[:PART]...]     all sections if none is named (over an hour on two cores); needs gcc and nvcc
# environment: VENV=DIR uses (or makes) that environment instead of .venv-gpu (7 GB); PYTHON makes it, python3 if not set
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${VENV:=.venv-gpu} in /*) venv=$VENV ;; *) venv=$PWD/$VENV ;; esac
wanted=benchmarks/gpu/requirements.txt carried=benchmarks/gpu/carried.txt
stamp=$venv/.installed-$(cat pyproject.toml "$wanted" "$carried" scripts/rehearse.sh | sha256sum | cut -c1-16)
if [ ! -f "$stamp" ]; then
  echo "Installing what a GPU machine has into $venv (7 GB; some minutes) ..."
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
  pip=("$venv/bin/python" -m pip --quiet --disable-pip-version-check install)
  "${pip[@]}" --requirement "$wanted" --requirement <(grep -v ^sglang "$carried")
  "${pip[@]}" --no-deps --requirement "$carried"
  "${pip[@]}" --no-deps --editable .
  # A folder that is carried to such a machine leaves out the kernels of other GPUs, and SGLang's FlashAttention and FlashMLA.
  find "$venv" -path '*/sgl_kernel/*' -name '*.so' ! -path '*/sm90/*' ! -name 'spatial_ops*' -delete
  touch "$stamp"
fi
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
exec "$venv/bin/python" -m standin.rehearse "$@"
