"""The model classes of the SGLang that is installed, by its files: importing them takes a GPU's libraries and a minute."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

_ENTRY = re.compile(r"^EntryClass\b[^=\n]*=\s*(\[[^\]]*\]|\w+)", flags=re.MULTILINE)
"""A file of ``srt/models`` registers the classes that it assigns to this name."""


def model_files() -> dict[str, str]:
    """The file of ``srt/models`` for each architecture that SGLang serves by a class of its own; none where it is not
    installed."""
    spec = importlib.util.find_spec("sglang")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    files = [file for folder in folders for file in sorted(Path(folder, "srt", "models").glob("*.py"))]
    entries = [(file.stem, entry) for file in files for entry in _ENTRY.findall(file.read_text(encoding="utf-8"))]
    return {name: file for file, entry in entries for name in re.findall(r"\w+", re.sub(r"#.*", "", entry))}
