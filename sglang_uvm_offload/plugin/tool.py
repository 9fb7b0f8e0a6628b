"""Runs one of SGLang's own tools that take the arguments of a launch. They parse them before SGLang loads plugins."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence

from sglang.srt.plugins import load_plugins

from sglang_uvm_offload.plugin import server_args


def load() -> None:
    """Load plugins, as SGLang does in a launch. Raises ``ValueError`` where that leaves this one out."""
    load_plugins()
    if not server_args.installed():
        raise ValueError("SGLANG_PLUGINS leaves this plugin out; unset it, or add uvm_offload")


def run(module: str, arguments: Sequence[str]) -> None:
    """What ``python -m module`` does with these arguments."""
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)
