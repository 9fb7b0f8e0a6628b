"""``sglang.launch_server`` with ``--enable-return-routed-experts`` on a machine without a GPU.

SGLang registers the memory it records into with CUDA, and asks a GPU for it even where it computes on a CPU. Its child
processes run this file too before they begin, as spawned processes do with the main program.
"""

from __future__ import annotations

import runpy

from sglang.srt.mem_cache.pool_host import common

common._cuda_host_register = lambda *_, **__: None

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
