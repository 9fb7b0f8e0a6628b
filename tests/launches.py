"""Run in its own process by test_plugin_arguments.py: hand many launches to SGLang's own argument code, print what it did.

Reads a JSON list of cases ``{"argv": [...]}`` or ``{"engine": {...}}``, each optionally with ``"resolve": true`` and
``"host_bytes"`` of host RAM; writes a list of ``{"exit": code or null, "error": text, "flags": {...}}`` to the file that
the first argument names.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import sys
from typing import Any


def main() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    cases = json.load(sys.stdin)
    with open(sys.argv[1], "w") as file:
        json.dump([run(case) for case in cases], file)


def run(case: dict[str, Any]) -> dict[str, Any]:
    from sglang.srt import server_args

    from sglang_uvm_offload.plugin import auto_resident, launch_checks

    code, errors = None, io.StringIO()
    launch_checks.host_available = auto_resident.host_available = lambda: case.get("host_bytes", 1 << 40)
    flags: dict[str, Any] = {}
    with contextlib.redirect_stderr(errors):
        try:
            argv = case.get("argv")
            made = server_args.prepare_server_args(argv) if argv else server_args.ServerArgs(**case["engine"])
            if case.get("resolve"):
                made.resolve_once()
            made = pickle.loads(pickle.dumps(made))
            shown = ("expert_offload_", "mem_fraction_static")
            flags = {name: value for name, value in made.resolved_dict().items() if name.startswith(shown)}
        except SystemExit as exit:
            code = exit.code
        except ValueError as error:
            print(f"{type(error).__name__}: {error}", file=errors)
    return {"exit": code, "error": errors.getvalue(), "flags": flags}


if __name__ == "__main__":
    main()
