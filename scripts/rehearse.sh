#!/usr/bin/env bash
# Rehearses sections of the GPU session without a GPU, including those that start SGLang servers, over the stand-in driver and with
# the arguments and packages of a GPU machine. It shows that every server starts, captures, serves and ends, but measures nothing.
# usage: scripts/rehearse.sh [--out DIR] [SECTION[:PART]...]     default: all sections (over an hour on two cores)
# environment: VENV=DIR uses (or creates) that environment instead of .venv-gpu (7 GB); PYTHON=INTERPRETER (default python3)
#   creates it. Needs gcc and nvcc.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${VENV:=.venv-gpu} in /*) venv=$VENV ;; *) venv=$PWD/$VENV ;; esac
wanted=benchmarks/gpu/requirements.txt carried=benchmarks/gpu/carried.txt
stamp=$venv/.installed-$(cat pyproject.toml "$wanted" "$carried" scripts/rehearse.sh | sha256sum | cut -c1-16)
if [ ! -f "$stamp" ]; then
  echo "Installing the packages of a GPU machine into $venv (7 GB; some minutes) ..."
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
  pip=("$venv/bin/python" -m pip --quiet --disable-pip-version-check install)
  "${pip[@]}" --requirement "$wanted" --requirement <(grep -v ^sglang "$carried")
  "${pip[@]}" --no-deps --requirement "$carried"
  "${pip[@]}" --no-deps --editable .
  # As in the bundle: without kernels for other GPUs and without SGLang's FlashAttention and FlashMLA.
  find "$venv" -path '*/sgl_kernel/*' -name '*.so' ! -path '*/sm90/*' ! -name 'spatial_ops*' -delete
  touch "$stamp"
fi
export PYTHONPATH="$PWD:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}"
exec "$venv/bin/python" -m standin.rehearse "$@"
