# Source this with a folder and, unless it is the newest, a version of SGLang. Creates a virtual environment there with this
# checkout, SGLang and the test tools, once per pyproject.toml, and puts it first in PATH.
case $1 in /*) venv=$1 ;; *) venv=$PWD/$1 ;; esac
stamp=$venv/.installed-${2:+$2-}$(sha256sum pyproject.toml | cut -c1-16)
if [ ! -f "$stamp" ]; then
  command -v python3 >/dev/null || { echo "python3 (3.10 or newer) is needed" >&2; exit 1; }
  echo "Installing SGLang and this checkout into $venv (about 11 GB; some minutes) ..."
  [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
  # uv takes a third of pip's time; where it finds no solution (prereleases, an index that only pip knows), pip may.
  wanted=(--quiet --editable ".[dev]" ${2:+"sglang==$2"})
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --upgrade pip uv
  "$venv/bin/python" -m uv pip install --python "$venv/bin/python" "${wanted[@]}" ||
    "$venv/bin/python" -m pip install --disable-pip-version-check "${wanted[@]}"
  touch "$stamp"
fi
unset PYTHONDONTWRITEBYTECODE  # hundreds of processes would compile SGLang and this package anew
export PATH="$venv/bin:$PATH"
