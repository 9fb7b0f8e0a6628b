"""The order of requests that an H200 served on 2026-11-27 beside paged experts (benchmarks/results), through the policy again.

30 layers of 128 experts of 4.5 MiB (3 and 1.5), as many rows in VRAM as half of the experts and two stream buffers take. Then
the server had 16 residents and 48 slots a layer and two buffers, and missed 174 MB a decode step at batch 1 and 617 MB at 4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.trace_checkpoint import MODELS, walk_for
from benchmarks.trace_walk import Walk, read
from sglang_uvm_offload.policy.slot_policy import WHOLE, SlotPolicy, SlotPool, Tails

TRACE = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu" / "routing_trace.npz"
LAYERS, EXPERTS, EXPERT_BYTES = 30, 128, 4.5 * (1 << 20)
ROWS = LAYERS * EXPERTS // 2 + 2 * EXPERTS
STREAMS = 512


class Server:
    """All experts are offloaded, and all rows are slots."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        self.policy = SlotPolicy(np.ones((LAYERS, EXPERTS), dtype=bool), [SlotPool(range(LAYERS), ROWS)])
        self.share = np.full((LAYERS, EXPERTS), WHOLE)

    def serve(self, requests: Sequence[int], prompt: int, tokens: int) -> list[int]:
        """The misses of each decode step."""
        ids, starts = self.walk.routing.ids, [self._start(request) for request in requests]
        self._prefill(ids[np.concatenate([np.arange(start - prompt, start) % len(ids) for start in starts])], prompt)
        return [self._decode(ids[[(start + step) % len(ids) for start in starts]]) for step in range(tokens - 1)]

    def _start(self, request: int) -> int:
        again, stretch = divmod(request, len(self.walk.starts))
        return int(self.walk.starts[stretch]) + again * 61

    def _decode(self, ids: np.ndarray) -> int:
        used = _used(ids)
        self.policy.begin_step()
        return int(used.sum() - self.policy.resolve(used, self.share).hit.sum())

    def _prefill(self, ids: np.ndarray, prompt: int, chunk: int = 8192) -> None:
        if len(ids) <= chunk:
            self._prefill_chunk(ids, [(begin, begin + prompt) for begin in range(0, len(ids) - prompt + 1, prompt)])
            return
        for begin in range(0, len(ids), chunk):
            part = ids[begin : begin + chunk]
            self._prefill_chunk(part, [(0, len(part))] if begin + chunk >= len(ids) else [])

    def _prefill_chunk(self, ids: np.ndarray, requests: Sequence[tuple[int, int]]) -> None:
        policy, used, streams = self.policy, _used(ids), len(ids) >= STREAMS
        policy.begin_step()
        if streams:
            policy.bring(0, self.share[0])
        for layer in range(LAYERS):
            if streams and layer + 1 < LAYERS:
                policy.bring(layer + 1, self.share[layer + 1], layer)
            one = slice(layer, layer + 1)
            tails = Tails.of(ids[:, layer], requests, EXPERTS)
            both = Tails(tails.distance[None], tails.rate[None])
            policy.resolve_prefill(used[one], both, self.share[one], one, fill=not streams)


def _used(ids: np.ndarray) -> np.ndarray:
    used = np.zeros((LAYERS, EXPERTS), dtype=bool)
    used[np.arange(LAYERS)[None, :, None], ids] = True
    return used


def _warm_up(server: Server) -> None:
    for batch in (1, 4, 16, 64):
        server.serve(range(batch), 64, 4)
    for prompt in (512, 4096, 16384, 32000):
        server.serve([0], prompt, 4)
    server.serve([0], 64, 24)
    for number, prompt in enumerate((16, 32, 48, 64, 4096, 4096)):
        server.serve([1000 + number], prompt, 24)


def _megabytes_a_step(server: Server, batch: int) -> Iterator[float]:
    """As the benchmark has it: of 24 tokens without those of 4."""
    for _ in range(3):
        short, long = (sum(server.serve(range(batch), 64, tokens)) for tokens in (4, 24))
        yield (long - short) / 20 * EXPERT_BYTES / 1e6


@pytest.mark.slow
def test_decode_misses_less_than_with_buffers_and_slots_a_layer():
    trace = read(TRACE)
    server = Server(walk_for(MODELS["qwen3-30b-a3b"].sized(trace, LAYERS), trace, None, EXPERTS))
    _warm_up(server)
    for batch, most in ((1, 60), (4, 288)):
        assert np.median(list(_megabytes_a_step(server, batch))) <= most
