"""Formatting bytes for people."""

from __future__ import annotations


def size(nbytes: float) -> str:
    """``nbytes`` in GiB, or in MiB below 1 GiB."""
    return f"{nbytes / 2**30:.2f} GiB" if abs(nbytes) >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
