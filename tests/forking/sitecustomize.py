"""Where this folder is on PYTHONPATH, a server that starts cold imports SGLang once: its scheduler and its detokenizer are
forks of a copy of it that was made before any plugin was loaded (see ``serving_host.py``), where SGLang would spawn them, to
import all of it again. Python imports this module as it starts; in no other program does it do anything."""

import sys

if sys.orig_argv[1:3] == ["-m", "sglang.launch_server"]:
    from pathlib import Path

    before = [*sys.path]
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    import serving_host

    sys.path[:] = before  # the server finds what it would find
    serving_host.preload()
    serving_host.fork_children_from_here()
