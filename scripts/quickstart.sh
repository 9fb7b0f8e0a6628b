#!/usr/bin/env bash
# Serves a small mixture-of-experts model with offloaded experts, and shows that its answers match those without. See quickstart.py.
# usage: scripts/quickstart.sh [OPTIONS] [glm4_moe|deepseek_v3|qwen3_moe|CHECKPOINT FOLDER] [-- SERVER FLAGS]; --help lists the options
# environment: VENV=DIR uses (or makes) that environment instead of .venv; PYTHON=FILE uses that interpreter and installs nothing
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
model=${1:-}
if [ -d "$model" ]; then
  set -- "$(cd "$model" && pwd)" "${@:2}"
fi
cd "$root"
for word in "$@"; do
  case $word in
    -h | --help) exec "${PYTHON:-python3}" -m scripts.quickstart --help ;;
    --) break ;;
  esac
done
if [ -z "${PYTHON:-}" ]; then
  source scripts/environment.sh "${VENV:-.venv}"
  PYTHON=python
fi
exec "$PYTHON" -m scripts.quickstart "$@"
