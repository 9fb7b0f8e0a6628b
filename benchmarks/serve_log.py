"""Server logs: why a server ended, and how logs are stored in a result."""

from __future__ import annotations

import gzip
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOG_BYTES = 8 << 10
"""Larger logs are stored compressed."""

_RAISED = re.compile(r"^(?:\[[^\]]*\]\s*)?((?:\w+\.)*\w*(?:Error|Exception|Exit|Failure): .+)$")
_REFUSED = re.compile(r"\berror: (.+)$")
_LOADED = re.compile(r"Load weight end\. elapsed=([\d.]+) s")
_ECHO = re.compile(r"scheduler died|exit ?code|Received sigquit|resource_tracker", re.IGNORECASE)


def loads(log: str) -> list[float]:
    """Returns how long each rank took to build and load its model, in seconds as SGLang logs them, in log order."""
    return [float(seconds) for seconds in _LOADED.findall(log)]


def load_seconds(log: str) -> float | None:
    """Returns the load time of the first rank that logs one; None if none does."""
    return next(iter(loads(log)), None)


def last_meaningful_line(log: str) -> str:
    """Returns why a server ended: the last exception or refusal in its log that is not another process's echo of it."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    found = [match.group(1) for line in lines if (match := _RAISED.match(line) or _REFUSED.search(line))]
    found = [text for text in found if not _ECHO.search(text)]
    return (found or lines or ["its log is empty"])[-1][:500]


def keep(text: str, path: Path, model: Path, server_folder: Path) -> str:
    """Writes a log to ``path`` without this machine's paths, compressed if large. Returns the file's name."""
    text = without_paths(text, model, server_folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    if len(text) <= LOG_BYTES:
        path.write_text(text)
        return path.name
    packed = path.with_name(path.name + ".gz")
    packed.write_bytes(gzip.compress(text.encode(), mtime=0))
    return packed.name


def read(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode() if path.suffix == ".gz" else path.read_text()


def without_paths(text: str, model: Path, server_folder: Path) -> str:
    names = {
        str(model.absolute()): "MODEL",
        str(server_folder): "SERVER",
        str(ROOT): "REPOSITORY",
        sys.prefix: "PYTHON",
        sys.base_prefix: "PYTHON",
        tempfile.gettempdir(): "TMP",
        str(Path.home()): "HOME",
    }
    for path, name in sorted(names.items(), key=lambda each: -len(each[0])):
        text = text.replace(path, name) if len(path) > 1 else text
    return text
