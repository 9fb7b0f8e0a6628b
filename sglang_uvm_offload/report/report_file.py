"""Recognising a report file that this program wrote."""

from __future__ import annotations

from pathlib import Path

from sglang_uvm_offload.files import atomic as atomic_file
from sglang_uvm_offload.files import reading

GENERATOR = "sglang-uvm-offload"
DOCTYPE = "<!doctype html>"
_HEAD_BYTES = 512


def is_report(path: Path) -> bool:
    """Whether the file begins as this program's reports do: the head names the generator."""
    with reading.open_regular(path) as file:
        head = file.read(_HEAD_BYTES)
    return head.startswith(DOCTYPE.encode()) and f'<meta name="generator" content="{GENERATOR}">'.encode() in head


REPORT_FILE = atomic_file.Kind("report", is_report)
