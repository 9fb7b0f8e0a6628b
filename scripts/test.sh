#!/usr/bin/env bash
# Runs the whole test suite. Makes .venv with SGLang and this checkout first (about 11 GB, some minutes, once).
# usage: scripts/test.sh [PYTEST ARGUMENTS]     environment: VENV=DIR uses (or makes) that environment instead of .venv
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh "${VENV:-.venv}"
if [ $# -eq 0 ]; then
  ruff check .
  ruff format --check .
  mypy
  git ls-files '*.cu' '*.c' '*.h' | xargs clang-format --dry-run -Werror
fi
exec python -m pytest "$@"
