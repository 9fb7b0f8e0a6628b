"""The architectures that SGLang has, and what is known of each: ``found.json`` and ``exceptions.json``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent
FOUND: dict[str, Any] = json.loads((FOLDER / "found.json").read_text())
EXCEPTIONS: dict[str, dict[str, Any]] = json.loads((FOLDER / "exceptions.json").read_text())

DRAFT = re.compile(r"NextN$|MTP$|Draft|Assistant|DSpark|Eagle")
"""Architectures that draft: nobody names them in a launch."""

UNBUILDABLE = {name for name, exception in EXCEPTIONS.items() if "sglang_fails" in exception}


def served(name: str) -> pytest.MarkDecorator:
    """The mark of a test that shows that ``name`` is served."""
    only = EXCEPTIONS.get(name, {}).get("only")
    return pytest.mark.works("Architecture", f"{name} ({only})" if only else name)
