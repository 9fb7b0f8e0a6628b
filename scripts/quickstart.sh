#!/usr/bin/env bash
# Serves a small mixture-of-experts model with offloaded experts, and shows that its answers match those without. See quickstart.py.
# usage: scripts/quickstart.sh [glm4_moe|deepseek_v3|qwen3_moe|FOLDER OF A CHECKPOINT] [--help and other options]
# environment: VENV=DIR uses (or makes) that environment instead of .venv; PYTHON=FILE uses that interpreter and installs nothing
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
model=${1:-}
if [ -d "$model" ]; then
  set -- "$(cd "$model" && pwd)" "${@:2}"
fi
cd "$root"
if [ -z "${PYTHON:-}" ]; then
  source scripts/environment.sh "${VENV:-.venv}"
  PYTHON=python
fi
exec "$PYTHON" -m scripts.quickstart "$@"
