#!/usr/bin/env bash
# Runs the tests that start SGLang with another version of SGLang, in a separate environment, and records the results in
# benchmarks/results/support/versions.json. If its tests pass, the version may be added to TRIED in plugin/hook_points.py.
# usage: scripts/try_sglang.sh VERSION [VENV]     VENV: uses (or creates) that environment instead of .venv-VERSION
# environment: TESTS="FILES AND FOLDERS" runs these instead of all; the record lists what ran
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=${1:?usage: scripts/try_sglang.sh VERSION [VENV]}
tests=${TESTS:-tests/engine}
source scripts/environment.sh "${2:-.venv-$version}" "$version"
results=$(mktemp)
trap 'rm -f "$results"' EXIT
code=0
python -m pytest --junitxml="$results" $tests || code=$?
python -m scripts.record_sglang "$results" $tests
exit $code
