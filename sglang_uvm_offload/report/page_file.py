"""A report page as a file: how this program knows one that it wrote."""

from __future__ import annotations

from pathlib import Path

from sglang_uvm_offload.files import atomic as atomic_file

GENERATOR = "sglang-uvm-offload"
DOCTYPE = "<!doctype html>"
_HEAD_BYTES = 512


def is_page(path: Path) -> bool:
    """Whether the file begins as a page of this program does, of any version that names itself in the page's head."""
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    return head.startswith(DOCTYPE.encode()) and f'<meta name="generator" content="{GENERATOR}">'.encode() in head


PAGE_FILE = atomic_file.Kind("report page", is_page)
