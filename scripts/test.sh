#!/usr/bin/env bash
# Runs the test suite except the nightly tests (scripts/support.sh), or the given tests. First creates .venv with SGLang and this
# checkout (about 11 GB, some minutes, once).
# usage: scripts/test.sh [PYTEST ARGUMENTS]
# environment: VENV=DIR uses (or creates) that environment instead of .venv; TEST_PATIENCE=N multiplies the limits for hangs by N,
#   instead of by a factor from the load
#   scripts/test.sh                    linters, then all three tiers
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
mypy
codespell
git ls-files '*.cu' '*.c' '*.h' | xargs clang-format --dry-run -Werror

# Two runs of about the same length in parallel, since neither keeps two cores busy. The first one's output follows the other's.
apart="tests/engine/test_cuda_serving.py tests/engine/test_cuda_serving_slots.py"
apart+=" tests/engine/test_serve_benchmark.py tests/engine/test_wheel.py"
first=$(mktemp)
trap 'kill $(jobs -p) 2>/dev/null || true; rm -f "$first"' EXIT
python -m pytest --durations=25 tests/unit tests/compiled $apart > "$first" 2>&1 &
engine=0 others=0
python -m pytest --durations=25 tests/engine $(printf -- '--ignore=%s ' $apart) || engine=$?
wait $! || others=$?
cat "$first"
exit $((engine > others ? engine : others))
