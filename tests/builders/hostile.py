"""A malicious folder, as a downloaded model may be: files with names that Python, SGLang and this package import. Each leaves a
mark when it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from pathlib import Path

LIBRARIES = (
    *("sglang", "torch", "numpy", "safetensors", "transformers", "huggingface_hub", "msgspec", "matplotlib", "packaging"),
    *("cuda", "ninja", "sglang_uvm_offload", "sitecustomize", "usercustomize"),
)
STANDARD = sorted(name for name in sys.stdlib_module_names if name.isidentifier() and name not in sys.builtin_module_names)
PROGRAMS = ("nvcc", "ninja", "gcc", "g++", "cc", "python", "python3")


class Hostile:
    """``packages``: folders with an ``__init__`` instead of files."""

    def __init__(self, folder: Path, packages: bool = False, names: Collection[str] = (*LIBRARIES, *STANDARD)):
        self.folder = folder
        self._marks = folder.with_name(folder.name + "-marks")
        self._marks.mkdir()
        folder.mkdir(exist_ok=True)
        for name in names:
            file = folder / name / "__init__.py" if packages else folder / f"{name}.py"
            file.parent.mkdir(exist_ok=True)
            file.write_text(f"open({str(self._marks / name)!r}, 'w').close()\nraise SystemExit('hostile {name}')\n")
        for name in PROGRAMS if not packages else ():
            (folder / name).write_text(f"#!/bin/sh\ntouch '{self._marks}/{name}'\nexit 3\n")
            (folder / name).chmod(0o755)

    @property
    def ran(self) -> list[str]:
        """Returns the names of files whose code ran."""
        return sorted(os.listdir(self._marks))
