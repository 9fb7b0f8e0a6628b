"""Runs one of SGLang's own tools that take launch arguments, which parse them before SGLang loads plugins."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

from sglang.srt.plugins import load_plugins

from sglang_uvm_offload.plugin import server_args


def load() -> None:
    """Load plugins as SGLang does in a launch. Raises ``ValueError`` if that excludes this one."""
    load_plugins()
    if not server_args.installed():
        raise ValueError("SGLANG_PLUGINS excludes this plugin; unset it or add uvm_offload")


def run(module: str, arguments: Sequence[str]) -> None:
    """Run ``python -m module`` with these arguments."""
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
