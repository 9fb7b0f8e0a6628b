"""The share of a GPU that SGLang 0.5.23 gives to weights and KV cache: its rules, restated without importing it.

``arg_groups/memory_hook.py`` chooses the prefill chunk, the largest decode graph and ``--mem-fraction-static`` from the size of
the GPU; ``kv_cache_configurator.py`` then gives the KV cache ``free before loading * fraction`` less what loading took.
A test compares these functions with the real ones.
"""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20

_TIERS = (
    # below MiB, prefill chunk, decode batch with fewer than 4 ranks, with more
    (20 * 1024, 2048, 8, 8),
    (35 * 1024, 4096, 48, 160),
    (60 * 1024, 4096, 32, 160),
    (90 * 1024, 8192, 256, 512),
    (160 * 1024, 8192, 256, 512),
    (float("inf"), 16384, 512, 512),
)


@dataclass(frozen=True)
class Defaults:
    """SGLang's defaults for flags that the user leaves out."""

    chunked_prefill_size: int
    mem_fraction_static: float


def defaults(
    gpu_bytes: int,
    *,
    tp: int,
    pp: int,
    dp_attention: int,
    latent_attention: bool,
    max_running_requests: int | None = None,
    chunked_prefill_size: int | None = None,
) -> Defaults:
    """SGLang's defaults for a GPU with ``gpu_bytes`` of memory (nvidia-smi's total). ``dp_attention``: the number of
    data-parallel attention groups; 1 without."""
    gpu_mib = gpu_bytes / MIB
    _, chunk, batch, batch_wide = next(tier for tier in _TIERS if gpu_mib < tier[0])
    chunk = chunked_prefill_size or chunk
    batch = batch if tp < 4 else batch_wide
    if max_running_requests is not None:
        batch = min(batch, max_running_requests)
    reserved = 512 + max(chunk, 2048) * 1.5 + tp * pp / 8 * 1024
    reserved += batch * 2
    if dp_attention > 1:
        reserved += batch * dp_attention * (3 if batch <= 300 else 4.5)
    reserved += 1536 if latent_attention else 8 * _prefill_graphs(chunk)
    if gpu_mib > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return Defaults(chunk, round((gpu_mib - reserved) / gpu_mib, 3))


def _prefill_graphs(max_tokens: int) -> int:
    """The number of prefill graphs that are captured."""
    steps = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, max_tokens + 1, 512))
    return sum(len(range(start, min(stop, max_tokens + 1), step)) for start, stop, step in steps)


def pipeline_stages(num_layers: int, pp: int) -> list[range]:
    """The decoder layers of each pipeline rank: an even split, with the remainder on the last ranks (``get_pp_indices``)."""
    base, extra = divmod(num_layers, pp)
    ends = [base * (stage + 1) + max(0, stage + 1 - (pp - extra)) for stage in range(pp)]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
