#!/usr/bin/env bash
# Runs the test suite except nightly tests (scripts/support.sh), or the given tests. The first run creates .venv with SGLang and
# this checkout (about 11 GB, some minutes).
# usage: scripts/test.sh [PYTEST ARGUMENTS]
# environment: VENV=DIR uses (or creates) that environment instead of .venv; TEST_PATIENCE=N multiplies the limits for hangs by N,
#   instead of a factor from the load; TEST_JOBS=N runs all tests in N processes instead of one more than there are cores
#   scripts/test.sh                    linters, then all three tiers; a tier fails above its ceiling of CPU time
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
# The cache is outside the checkout: without it mypy takes a minute, mostly for SGLang and torch.
[ -z "${HOME:-}" ] || export MYPY_CACHE_DIR="${MYPY_CACHE_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/sglang-uvm-offload-mypy}"
mypy
codespell
git ls-files '*.cu' '*.c' '*.h' | xargs clang-format --dry-run -Werror

# One process more than cores, because starting servers wait more than they compute; each process takes up to 5 GB. A file's tests
# run in one process, because they share servers.
read -r _ available _ < <(grep MemAvailable /proc/meminfo)
jobs=$((available / 5000000)) most=$(($(nproc) + 1))
exec python -m pytest --ceilings --dist loadfile --numprocesses "${TEST_JOBS:-$((jobs < 1 ? 1 : jobs < most ? jobs : most))}"
