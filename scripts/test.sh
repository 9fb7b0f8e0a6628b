#!/usr/bin/env bash
# Runs the test suite except the nightly tests (scripts/support.sh), or the given tests. First creates .venv with SGLang and this
# checkout (about 11 GB, some minutes, once).
# usage: scripts/test.sh [PYTEST ARGUMENTS]
# environment: VENV=DIR uses (or creates) that environment instead of .venv; TEST_PATIENCE=N multiplies the limits for hangs by N,
#   instead of by a factor from the load; TEST_JOBS=N runs N processes of all tests, instead of one more than there are cores
#   scripts/test.sh                    linters, then all three tiers, which fail above their ceilings of processor time
#   scripts/test.sh tests/unit         needs no engine
#   scripts/test.sh tests/compiled     compiles with nvcc, and runs the GPU session over a stand-in for CUDA
#   scripts/test.sh tests/engine       starts SGLang
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh "${VENV:-.venv}"
source scripts/patience.sh
if [ $# -gt 0 ]; then
  exec python -m pytest --durations=25 "$@"
fi
ruff check .
ruff format --check .
# Outside of the checkout: without its cache, mypy takes a minute, most of it for SGLang and torch.
[ -z "${HOME:-}" ] || export MYPY_CACHE_DIR="${MYPY_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/sglang-uvm-offload-mypy}"
mypy
codespell
git ls-files '*.cu' '*.c' '*.h' | xargs clang-format --dry-run -Werror

# More processes than cores, because servers that start wait more than they compute, and each process takes up to 5 GB. Each
# file goes to one of them: its tests share servers.
read -r _ available _ < <(grep MemAvailable /proc/meminfo)
jobs=$((available / 5000000)) most=$(($(nproc) + 1))
exec python -m pytest --ceilings --dist loadfile --numprocesses "${TEST_JOBS:-$((jobs < 1 ? 1 : jobs < most ? jobs : most))}"
