"""The interface to SGLang: the only package that imports it. ``register`` is the ``sglang.srt.plugins`` entry point.

SGLang logs and swallows a plugin's exceptions and would then serve *without* offloading. So while offloading is enabled, any
failure here ends the process with ``SystemExit``, which SGLang does not catch. While it is disabled, SGLang serves as if the
plugin were not installed. This module imports nothing, so an installed plugin costs almost nothing.

Files and rooms, by rank; each imports from its own room or from lower ranks only:

    1  compat enforce hook_points hooks imported_names server_config since weight_writes
    2  launch meta operate
    3  slots
    4  checks rank
    5  roles
    6  server_args server_args_name
    7  dry_launch tool

Rank 1 is the contract with SGLang. ``checks`` runs in the launcher, ``rank`` in each scheduler process.
"""

from __future__ import annotations


def register() -> None:
    """Entry point: SGLang calls this once in each process, before it builds anything."""
    from sglang_uvm_offload.plugin import enforce

    try:
        from sglang_uvm_offload.plugin import hooks, roles, server_args

        server_args.install(hooks.add)
        roles.watch_in_children()
        hooks.install()
    except Exception as error:  # noqa: BLE001 -- SGLang would swallow it; ``enforce`` ends the process or warns
        enforce.fail_to_register(error)
