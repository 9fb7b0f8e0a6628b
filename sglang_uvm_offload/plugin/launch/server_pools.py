"""Asks SGLang's own configurators how much VRAM a launch's KV cache and states take, before any rank exists.

Since 0.5.22, SGLang keeps a rank's settings in a separate context, so a launcher can see them as a rank would.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
from sglang.srt.model_executor.model_runner_components.layer_setup import resolve_layer_indices
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import resolve_spec_aux_hidden_state_config
from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator
from sglang.srt.model_loader.weight_utils import get_quant_config
from sglang.srt.runtime_context import ParallelContext, RuntimeContext, use_context
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_uvm_offload.plugin.compat import model_config_of, resolving_view
from sglang_uvm_offload.plugin.launch.pipeline import stages
from sglang_uvm_offload.sizing.inputs import Parallel
from sglang_uvm_offload.sizing.server_pools import Point, ServerPools

_MOST_BYTES = 1 << 42
"""More than any GPU has."""

_GIB = 1 << 30


def server_pools(server_args: Any, parallel: Parallel, asked: Mapping[int, int]) -> ServerPools:
    """The pools of each pipeline stage for two or more numbers of tokens (KV cache of one rank), each with the number of
    requests that a rank serves at once. ``server_args`` are resolved. Raises SGLang's exception for a launch that its
    configurators refuse, or ``ValueError`` if no GPU is large enough."""
    with _silent():
        ranks = [_Rank(server_args, stage) for stage in range(parallel.pp)]
        points = tuple(tuple(_point(rank, *each) for each in sorted(asked.items())) for rank in ranks)
    return ServerPools(parallel, points)


def _point(rank: _Rank, tokens: int, requests: int) -> Point:
    return tokens, _least(lambda budget: rank.serves(budget, tokens, requests))


def _least(enough: Callable[[int], bool]) -> int:
    """The smallest sufficient budget, to within a millionth. A larger budget never gives smaller pools."""
    if enough(0):
        return 0
    low, high = 0, 1 << 20
    while not enough(high):
        low, high = high, high * 2
        if high > _MOST_BYTES:
            raise ValueError("SGLang cannot make a KV cache of this size on any GPU")
    while high - low > 1 + (high >> 20):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


class _Rank:
    """One rank of a pipeline stage, as SGLang's configurators see it."""

    def __init__(self, server_args: Any, stage: int):
        self.server_args, self.stage = server_args, stage
        self.cfg, self.model = resolving_view(server_args), model_config_of(server_args)

    def serves(self, budget: int, tokens: int, requests: int) -> bool:
        """Whether ``budget`` bytes after the weights are enough for a cache of ``tokens`` and the states of ``requests``."""
        with _as_a_rank(self.server_args):  # a new context each time: SGLang stores its number of states in it
            try:
                configurator = self._configurator()
                made, each = self._tokens(configurator, budget)
                # If tokens take no memory, as without attention, SGLang makes room for one context.
                return (made >= tokens or not each) and configurator.resolve_max_num_reqs(made) >= requests
            except (RuntimeError, ValueError):  # from SGLang, for a cache or states too small for one request
                return False

    def _tokens(self, configurator: Any, budget: int) -> tuple[int, int]:
        """The tokens of the cache, and the bytes of each if the configurator has that number (else 1)."""
        if configurator.mambaish_config is not None:
            budget = int(configurator._handle_max_mamba_cache(budget / _GIB) * _GIB)
        pools = create_memory_pool_configurator(configurator)
        made = pools.calculate_pool_sizes(budget, self.cfg.page_size).max_total_num_tokens
        return made, getattr(pools, "_cell_size", 1)

    def _configurator(self) -> Any:
        model, part = self.model, self._part()
        dtype = self._dtype()
        algorithm = SpeculativeAlgorithm.from_string(self.cfg.speculative_algorithm)
        whose = {"model_config": model, "is_draft_worker": False}
        drafts = resolve_spec_aux_hidden_state_config(server_args=self.server_args, spec_algorithm=algorithm, **whose)
        return KVCacheConfigurator(
            device=self.cfg.device,
            gpu_id=0,
            attn_dp_size=self.cfg.attn_dp_size,
            pp_size=self.cfg.pp_size,
            pp_group=None,
            model=part,
            server_args=self.server_args,
            kv_cache_dtype=dtype[1],
            kv_cache_dtype_str=dtype[0] or self.cfg.kv_cache_dtype,
            model_dtype=model.dtype,
            page_size=self.cfg.page_size,
            sliding_window_size=model.sliding_window_size if model.is_hybrid_swa else None,
            spec_algorithm=algorithm,
            post_capture_kv_active=False,
            spec_aux_config=drafts,
            is_hybrid_swa=model.is_hybrid_swa,
            is_hybrid_swa_compress=model.is_hybrid_swa_compress,
            use_mla_backend=model.attention_arch == AttentionArch.MLA,
            layer_info=resolve_layer_indices(model=part, **whose),
            forward_stream=None,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=None,
            memory_pool_config=None,
            **whose,
        )

    def _part(self) -> SimpleNamespace:
        """The attributes of the stage's model that the configurators read."""
        if self.cfg.pp_size == 1:
            return SimpleNamespace()
        layers = stages(self.cfg, self.model)[self.stage]
        return SimpleNamespace(start_layer=layers.start, end_layer=layers.stop)

    def _dtype(self) -> tuple[str | None, Any]:
        return configure_kv_cache_dtype(
            server_args_kv_cache_dtype=self.cfg.kv_cache_dtype,
            model=SimpleNamespace(quant_config=self.quantization),
            model_dtype=self.model.dtype,
            is_draft_worker=False,
            is_dflash=False,
            speculative_draft_attention_backend=None,
        )

    @cached_property
    def quantization(self) -> Any:
        """The checkpoint's quantisation, which may set the KV cache's dtype. A copy, because SGLang writes into the config."""
        if self.cfg.kv_cache_dtype != "auto" or self.model.quantization is None:
            return None
        model = copy.copy(self.model)
        model.hf_config = copy.deepcopy(model.hf_config)
        with contextlib.suppress(Exception):  # of any type, from SGLang; the cache then has the model's dtype
            return get_quant_config(model, LoadConfig(download_dir=self.cfg.download_dir), {})
        return None


@contextlib.contextmanager
def _as_a_rank(server_args: Any) -> Iterator[None]:
    """In this block, SGLang's settings are those that a rank has with ``server_args``, except for groups and devices."""
    context = RuntimeContext(parallel=ParallelContext())
    context.set_server_args(server_args)
    with use_context(context):
        context.parallel.override_permanently(attn_dcp_rank=0)
        yield


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Silence SGLang's log, which would report a cache for each budget tried."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
