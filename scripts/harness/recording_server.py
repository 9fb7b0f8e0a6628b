"""``sglang.launch_server`` with ``--enable-return-routed-experts`` on a machine without a GPU.

SGLang registers its recording memory with CUDA, which needs a GPU, even if it computes on a CPU. Its child processes also run
this file first, as spawned processes do with the main program.
"""

from __future__ import annotations

import runpy

from sglang.srt.mem_cache.pool_host import common

common._cuda_host_register = lambda *_, **__: None

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
