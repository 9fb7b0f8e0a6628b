"""The interface to SGLang: the only package that imports it. ``register`` is the ``sglang.srt.plugins`` entry point.

SGLang logs and swallows a plugin's exceptions, and would then serve *without* offloading. So if offloading is enabled, any
failure here ends the process: ``SystemExit`` passes through. If it is not, SGLang serves as if the plugin were not installed.
This module imports nothing, so an installed plugin costs almost nothing.
"""

from __future__ import annotations


def register() -> None:
    """Called once in each SGLang process, before anything is built."""
    from sglang_uvm_offload.plugin import enforce

    try:
        from sglang_uvm_offload.plugin import hooks, server_args

        server_args.install(hooks.add)
        hooks.install()
    except Exception as error:  # noqa: BLE001 -- SGLang would swallow it; ``enforce`` ends the process or warns
        enforce.fail_to_register(error)
