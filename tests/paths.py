"""A file that must survive, and ways for a path to lead to it. Each way creates what it needs in another folder."""

from __future__ import annotations

import os
from pathlib import Path

SAFETENSORS = b"\x02\0\0\0\0\0\0\0{}"
"""The smallest safetensors file."""


def direct(file: Path, folder: Path) -> Path:
    return file


def with_dots(file: Path, folder: Path) -> Path:
    return folder / os.path.relpath(file, folder)


def symbolic_link(file: Path, folder: Path) -> Path:
    (folder / "p").symlink_to(file)
    return folder / "p"


def hard_link(file: Path, folder: Path) -> Path:
    os.link(file, folder / "p")
    return folder / "p"


def link_to_the_folder(file: Path, folder: Path) -> Path:
    (folder / "p").symlink_to(file.parent)
    return folder / "p" / file.name


WAYS = (direct, with_dots, symbolic_link, hard_link, link_to_the_folder)
