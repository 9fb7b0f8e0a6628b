#!/usr/bin/env bash
# Runs the fast unit tests, without SGLang and on a CPU build of torch: some minutes from a bare clone.
# The first run creates .venv-unit (1.4 GB).
# usage: scripts/unit.sh [PYTEST ARGUMENTS]     environment: VENV=DIR uses (or creates) that environment instead of .venv-unit
#   scripts/unit.sh                                  all except slow ones
#   scripts/unit.sh tests/unit/test_policy_slot_policy.py  one file, in seconds
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=${VENV:-.venv-unit}
stamp=$venv/.installed-$(cat pyproject.toml scripts/unit.sh | sha256sum | cut -c1-16)
if [ ! -f "$stamp" ]; then
  [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
  pip=("$venv/bin/python" -m pip --quiet --disable-pip-version-check install)
  # PyTorch's index has the CPU build. If it is unreachable, any torch of this version will do.
  "${pip[@]}" --no-compile --retries 0 --no-deps --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0
  "$venv/bin/python" - > "$stamp.txt" <<'PYTHON'
try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib
with open("pyproject.toml", "rb") as file:
    print("torch", *tomllib.load(file)["project"]["optional-dependencies"]["dev"], sep="\n")
PYTHON
  "${pip[@]}" --no-compile --requirement "$stamp.txt"
  "${pip[@]}" --no-deps --editable .
  mv "$stamp.txt" "$stamp"
fi
[ $# -gt 0 ] || set -- --numprocesses auto -m "not slow" tests/unit
exec "$venv/bin/python" -m pytest "$@"
