"""Lets SGLang serve more models and modes on a CPU that has neither AMX nor a GPU.

A plugin of SGLang's own kind, found because its folder is on PYTHONPATH. It replaces what SGLang would run as a GPU or
AMX kernel by plain torch, and what it asks of a GPU by the CPU's answer; it knows nothing of expert offloading, and engines
with and without offloading run over the same shims.

One module a subject, each function with the reason it is there:

    attention     what DeepSeek and gpt-oss need of torch_native attention
    experts       expert kernels: absent experts, and block-FP8, INT8 and 4-bit weights
    ngrams        LongCat's n-gram embedding, and its experts that compute nothing
    parallel      two ranks, expert parallelism, attention data parallelism
    recorder      SGLang's own recorder of expert distributions
    speculation   NEXTN, under Triton's interpreter (TRITON_INTERPRET=1), which runs Triton's attention too
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
