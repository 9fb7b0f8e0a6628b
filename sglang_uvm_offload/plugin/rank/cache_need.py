"""Computes the VRAM of a built model's KV cache and states, with SGLang's own configurators."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.model_executor.model_runner_components.layer_setup import resolve_layer_indices
from sglang.srt.model_executor.model_runner_components.load_model_utils import resolve_sliding_window_size
from sglang.srt.model_executor.pool_configurator import create_memory_pool_configurator
from sglang.srt.runtime_context import get_schedule

_MOST_BYTES = 1 << 42
"""More than any GPU has."""
_GIB = 1 << 30


class CacheNeed:
    """The cache of one rank's model."""

    def __init__(self, runner: Any, model: torch.nn.Module):
        """``runner`` is SGLang's model runner and ``model`` its built module."""
        seen = copy.copy(runner)  # SGLang sets these once it has the weights
        seen.model, seen.dtype = model, runner.model_config.dtype
        seen.layer_info = resolve_layer_indices(
            model=model,
            model_config=runner.model_config,
            is_draft_worker=runner.is_draft_worker,
            draft_model_idx=runner.draft_model_idx,
        )
        seen.sliding_window_size = resolve_sliding_window_size(model, runner.model_config)
        with _silent():
            seen.configure_kv_cache_dtype()
            seen.init_kv_cache_configurator()
        self._configurator = seen.kv_cache_configurator

    def nbytes(self, tokens: int, requests: int) -> int:
        """The smallest budget in bytes for a cache of ``tokens`` and the states of ``requests``, to within a millionth. Relies
        on pools that grow with the budget. Raises ``ValueError`` if no GPU is large enough."""

        def enough(budget: int) -> bool:
            return self._serves(budget, tokens, requests)

        with _silent():
            if enough(0):
                return 0
            low, high = 0, 1 << 20
            while not enough(high):
                low, high = high, high * 2
                if high > _MOST_BYTES:
                    raise ValueError(f"SGLang cannot fit a KV cache of {tokens} tokens on any GPU")
            while high - low > 1 + (high >> 20):
                middle = (low + high) // 2
                low, high = (low, middle) if enough(middle) else (middle, high)
            return high

    def _serves(self, budget: int, tokens: int, requests: int) -> bool:
        """Whether ``budget`` bytes beyond the weights are enough."""
        schedule = get_schedule()
        with schedule.override(max_mamba_cache_size=schedule.max_mamba_cache_size):  # SGLang writes its number of states there
            try:
                made, each = self._tokens(budget)
                # If tokens take no memory (no attention), SGLang makes room for one context.
                return (made >= tokens or not each) and self._configurator.resolve_max_num_reqs(made) >= requests
            except (RuntimeError, ValueError):  # SGLang raises these if the cache or states are too small for one request
                return False

    def _tokens(self, budget: int) -> tuple[int, int]:
        """The tokens of the cache, and the bytes per token if the configurator has that number (else 1)."""
        if self._configurator.mambaish_config is not None:
            budget = int(self._configurator._handle_max_mamba_cache(budget / _GIB) * _GIB)
        pools = create_memory_pool_configurator(self._configurator)
        made = pools.calculate_pool_sizes(budget, get_schedule().page_size).max_total_num_tokens
        return made, getattr(pools, "_cell_size", 1)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Silence SGLang's log, which would report a cache for each budget that is tried."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
