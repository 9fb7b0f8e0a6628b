"""The edge to SGLang: the only package that imports it. ``register`` is the ``sglang.srt.plugins`` entry point.

SGLang logs and swallows what a plugin raises, which would serve *without* offloading. So what goes wrong here ends the
process: ``SystemExit`` passes through. This module stays free of imports, so that an installed plugin costs nothing.
"""

from __future__ import annotations


def register() -> None:
    """Called once in each SGLang process, before anything is built."""
    try:
        from sglang_uvm_offload.plugin import hooks, server_args

        server_args.install(hooks.add)
        hooks.install()
    except Exception as error:
        raise SystemExit(f"sglang-uvm-offload cannot register with this SGLang: {type(error).__name__}: {error}") from error
