"""Lets SGLang serve more models and modes on a CPU without AMX, on a machine without a GPU.

This is an SGLang plugin, which SGLang finds because its folder is on PYTHONPATH. It replaces GPU and AMX kernels with plain
PyTorch, and answers queries about the GPU for the CPU. It does not know expert offloading: engines with and without offloading
run with the same shims.

Each module has one subject:

    attention     torch_native attention for DeepSeek and gpt-oss
    experts       expert kernels: absent experts, and block-FP8, INT8 and 4-bit weights
    ngrams        LongCat's n-gram embedding and zero-computation experts
    parallel      several ranks, expert parallelism, attention data parallelism
    recorder      SGLang's own recorder of expert distributions
    speculation   NEXTN and Triton's attention, in Triton's interpreter (TRITON_INTERPRET=1)
"""

from __future__ import annotations

import os


def install() -> None:
    from cpu_shims import attention, experts, hooks, ngrams, parallel, recorder, speculation

    experts.install()
    ngrams.install()
    parallel.install()
    recorder.install()
    if os.environ.get("TRITON_INTERPRET") == "1":
        speculation.install()
    else:
        attention.install()
    hooks.search_once()
