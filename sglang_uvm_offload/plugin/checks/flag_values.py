"""Numbers that SGLang's parser accepts for its own flags, and with which no server starts. The other checks compute with them,
so these come first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_uvm_offload.plugin.compat import resolving_view

_LEAST = {
    **dict.fromkeys(("tp_size", "ep_size", "pp_size", "dp_size", "nnodes", "moe_dp_size", "attn_cp_size"), 1),
    **dict.fromkeys(("page_size", "context_length", "max_total_tokens"), 1),
    **dict.fromkeys(("node_rank", "base_gpu_id", "ep_num_redundant_experts", "hicache_size", "hicache_ratio"), 0),
}


def problems(server_args: Any) -> list[str]:
    """One line for each such flag."""
    return list(_too_small(server_args)) + list(_fraction(server_args))


def _too_small(server_args: Any) -> Iterator[str]:
    cfg = resolving_view(server_args)
    for name, least in _LEAST.items():
        value = getattr(cfg, name)
        if value is not None and not value >= least:
            yield f"--{name.replace('_', '-')} {value}: must be {least} or more"
    if cfg.node_rank >= cfg.nnodes > 0:
        yield f"--node-rank {cfg.node_rank}: must be below --nnodes {cfg.nnodes}"


def _fraction(server_args: Any) -> Iterator[str]:
    cfg, given = resolving_view(server_args), server_args.mem_fraction_static
    if given is not None:
        if not 0 < given <= 1:
            yield f"--mem-fraction-static {given}: must be above 0 and at most 1"
    elif cfg.mem_fraction_static is not None and cfg.mem_fraction_static <= 0:
        yield (
            "--mem-fraction-static: not given, and what SGLang keeps for activations (--chunked-prefill-size "
            f"{cfg.chunked_prefill_size}, --max-prefill-tokens {cfg.max_prefill_tokens}) and CUDA graphs makes it "
            f"{cfg.mem_fraction_static}, which leaves nothing for weights; give it, or --chunked-prefill-size 2048"
        )
