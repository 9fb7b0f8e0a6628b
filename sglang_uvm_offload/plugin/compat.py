"""Compatibility with the supported SGLang versions. All other files target the newest one.

This file exposes what an older version names differently, or lacks, under its newest name and meaning:

    0.5.22  adds a flag for the number of attention groups, loads plugins in every process that reads the arguments, and keeps
            a rank's settings in contexts, several of which may exist per process
    0.5.23  loads the app of each HTTP process by a configurable name, supports chat templates in Python, exposes a built
            layer's runner and whether the expert map applies to it, and binds its router to the runner
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import sglang
from sglang.srt.arg_groups import overrides
from sglang.srt.arg_groups.arg_utils import with_fallback
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_lora, get_parallel

from sglang_uvm_offload.plugin.since import VERSION

# --- The arguments ---


class _View:
    """SGLang's view of its arguments with the newest fields, as a rank reads them: unset arguments take their fallback.
    Before 0.5.22, ``dp_size`` also counted attention groups."""

    def __init__(self, server_args: Any):
        self._view, self._kind = overrides.resolving_view(server_args), type(server_args)

    def __getattr__(self, name: str) -> Any:
        return with_fallback(self._kind, name, self._newest(name))

    def _newest(self, name: str) -> Any:
        view = self._view
        if name == "attn_dp_size" and VERSION < (0, 5, 22):
            return view.dp_size if view.enable_dp_attention else 1
        if name == "dp_size" and VERSION < (0, 5, 22):
            return 1 if view.enable_dp_attention else view.dp_size
        if name in ("enable_paged_experts", "enable_nvidia_megakernel") and VERSION < (0, 5, 23):
            return False
        return getattr(view, name)


def resolving_view(server_args: Any) -> Any:
    """SGLang's arguments as resolved so far."""
    return _View(server_args)


def problems(cfg: Any) -> list[str]:
    """Settings in the resolved arguments ``cfg`` that this SGLang version cannot combine with offloading."""
    if VERSION < (0, 5, 23) and cfg.tokenizer_worker_num > 1:
        return [
            f"--tokenizer-worker-num {cfg.tokenizer_worker_num}: the HTTP processes of SGLang {sglang.__version__} load no "
            "plugins; give 1, or install 0.5.23 or newer"
        ]
    return []


def maps_engram_shards() -> bool:
    """Whether the ranks of DeepSeek-V4.1 map each other's shards of the Engram tables."""
    return VERSION >= (0, 5, 23) and envs.SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS.get()


def swaps_expert_memory() -> bool:
    """Whether Nemotron-H may move each layer's NVFP4 experts into another layer's tensor between prefill and decode."""
    return VERSION >= (0, 5, 23) and envs.SGLANG_OPT_SM120_NVFP4_PHASE_LAYOUT.get()


# --- The processes and what they serve ---


def loads_plugins(role: str = "") -> bool:
    """Whether SGLang should have loaded plugins in this process, which may publish its arguments for ``role``. Before 0.5.22,
    only the launcher and the schedulers load plugins; since then, every process that reads the arguments does."""
    return VERSION >= (0, 5, 22) or role == "scheduler" or multiprocessing.parent_process() is None


def attn_dp_enabled() -> bool:
    """Whether the ranks of a replica split requests between attention groups."""
    parallel = get_parallel()
    return parallel.enable_dp_attention if VERSION < (0, 5, 22) else parallel.attn_dp_enabled


def num_ranks() -> int:
    """The ranks of this server on all nodes."""
    parallel = get_parallel()
    counts_groups = VERSION < (0, 5, 22) and parallel.enable_dp_attention
    return parallel.tp_size * parallel.pp_size * (1 if counts_groups else parallel.dp_size)


def uses_expert_location(layer: Any) -> bool:
    """Whether SGLang's expert map applies to a ``FusedMoE`` layer. Before 0.5.23 it applied to all of them."""
    return VERSION < (0, 5, 23) or bool(layer.uses_expert_location)


def moe_runner_backend(layer: Any) -> Any:
    """The MoE runner of a built layer; None if its quantisation method calls a kernel itself."""
    if VERSION < (0, 5, 23):
        runners = (getattr(owner, "runner", None) for owner in (layer.quant_method, getattr(layer, "scheme", None)))
        return next((runner.runner_backend for runner in runners if runner is not None), None)
    return layer.quant_method.get_moe_runner_backend(layer)


def routing_shown(router: Any) -> tuple[str, str]:
    """The ``TopKOutputFormat`` in which a built layer's ``TopK`` returns its routing, and SGLang's MoE runner for it."""
    from sglang.srt.layers.moe.utils import get_moe_runner_backend  # imported late: off means no layers are imported

    config = router.topk_config
    runner = get_moe_runner_backend() if VERSION < (0, 5, 23) else config.runner_backend
    shown = "STANDARD"
    if config.output_format is not None:
        shown = config.output_format.name
    elif VERSION < (0, 5, 23) and runner.is_triton_kernels():
        shown = "TRITON_KERNEL"
    elif VERSION < (0, 5, 23) and (runner.is_flashinfer_trtllm() or runner.is_flashinfer_mxfp4()):
        has_ids = (
            get_lora().enable_lora
            if runner.is_experimental_sgl_trtllm()
            else runner.is_flashinfer_mxfp4() and router.is_fp4_experts
        )
        shown = "STANDARD" if has_ids else "BYPASSED"
    return shown, "auto" if runner is None else runner.value
