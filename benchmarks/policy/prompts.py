"""Replays requests as a prompt and an answer, and tables what filling slots after a prefill is worth.

Takes some minutes on one core. Routing has one seed; traces of one model are also mixed, their requests in random order. All
VRAM is in slots. Each request is cut into a prompt, which is one prefill, and the rest, which is decoded; ``batch`` requests
run at once, and when one ends the next is prefilled. The first half of the requests warms up. A prompt that streams brings all
experts, whatever slots hold, so the link time is that of decode steps; one that reads in place counts too, each expert once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.policy.sources import SEED, Source, mixed, sources
from benchmarks.policy.verdicts import goal, grid, ratio
from sglang_uvm_offload.policy.slots import WHOLE, SlotPolicy, Tails
from sglang_uvm_offload.routing.trace import Trace

BATCHES = (1, 8)
RESIDENCIES = (0.125, 0.25, 0.5, 0.78)
SHORT_TOKENS = 48
GOAL = 1.01
"""Link time with filling, relative to that without."""


@dataclass(frozen=True)
class Cut:
    name: str
    share: float
    """Of a request's tokens that are its prompt, at most ``tokens`` of them."""
    tokens: int
    streams: bool

    def prompt(self, tokens: int) -> int:
        return min(max(1, int(self.share * tokens)), self.tokens)


CUTS = (
    Cut("half, streams", 0.5, 1 << 30, streams=True),
    Cut("85 %, streams", 0.85, 1 << 30, streams=True),
    Cut(f"{SHORT_TOKENS} tokens, in place", 0.5, SHORT_TOKENS, streams=False),
)


@dataclass(frozen=True)
class Case:
    """How often an expert of a layer crosses the link in a decode step, without and with filling after a prefill."""

    trace: str
    skew: float | None
    cut: str
    batch: int
    residency: float
    without: float
    filling: float

    @property
    def relative(self) -> float:
        return ratio(self.filling, self.without)

    @property
    def shown(self) -> str:
        return f"{self.relative:.3f}"

    def __str__(self) -> str:
        law = "" if self.skew is None else f" skew {self.skew:g}"
        return f"{self.trace}{law}, {self.cut}, batch {self.batch}, {self.residency:.1%}"


class Server:
    """Serves prompts and decode steps from slots, and counts the experts that cross the link."""

    def __init__(self, layers: int, experts: int, slots: int, filling: bool):
        self.crossed = 0
        self._filling = filling
        self._policy = SlotPolicy(np.ones((layers, experts), dtype=bool), slots)
        self._share = np.full((layers, experts), WHOLE)

    def prefill(self, prompts: Sequence[np.ndarray], streams: bool) -> None:
        """``prompts[tokens, layer, k]``, all in one step."""
        ids = np.concatenate(prompts)
        read = np.zeros_like(self._share, dtype=bool) if streams else used(ids, self._share.shape[1])
        hit = read & (self._policy.slot_of >= 0)
        if self._filling:
            ends = np.cumsum([len(prompt) for prompt in prompts]).tolist()
            tails = [Tails.of(ids[:, layer], ends, self._share.shape[1]) for layer in range(len(self._share))]
            both = Tails(np.stack([each.distance for each in tails]), np.stack([each.rate for each in tails]))
            self._policy.begin_step()
            hit = self._policy.resolve_prefill(read, both, self._share).hit
        self.crossed += np.count_nonzero(read & ~hit)

    def decode(self, tokens: np.ndarray) -> None:
        """``tokens[batch, layer, k]``"""
        activated = used(tokens, self._share.shape[1])
        self._policy.begin_step()
        self.crossed += np.count_nonzero(activated & ~self._policy.resolve(activated, self._share).hit)


def used(ids: np.ndarray, experts: int) -> np.ndarray:
    """``bool[layer, expert]`` of ``ids[tokens, layer, k]``."""
    out = np.zeros((ids.shape[1], experts + 1), dtype=bool)
    out[np.arange(ids.shape[1])[None, :, None], ids] = True  # -1 is the last one
    return out[:, :experts]


def crossings(trace: Trace, cut: Cut, batch: int, residency: float, filling: bool) -> float:
    server = Server(trace.num_layers, trace.num_experts, round(residency * trace.num_experts), filling)
    waiting = [ids for ids in np.split(trace.ids, np.cumsum(trace.seq_len)[:-1]) if len(ids) > 1]
    warmup, steps, running = len(waiting) // 2, 0, list[Iterator[np.ndarray]]()
    begun = 0
    while begun < len(waiting) or running:
        prompts = []
        while len(running) < batch and begun < len(waiting):
            request = waiting[begun]
            prompts.append(request[: cut.prompt(len(request))])
            running.append(iter(request[len(prompts[-1]) :]))
            begun += 1
        if begun <= warmup:
            server.crossed, steps = 0, 0
        if prompts:
            server.prefill(prompts, cut.streams)
        following = [next(request, None) for request in running]
        running = [request for request, token in zip(running, following, strict=True) if token is not None]
        if tokens := [token for token in following if token is not None]:
            server.decode(np.stack(tokens))
            steps += 1
    return server.crossed / steps / trace.num_layers


def work(paths: Sequence[Path]) -> list[tuple[Source]]:
    return [(source,) for source in (*mixed(paths), *(each for each in sources(paths) if each.seed == SEED))]


def run(source: Source) -> list[Case]:
    trace, cases = source.trace(), []
    for cut, batch, residency in product(CUTS, BATCHES, RESIDENCIES):
        without, filling = (round(crossings(trace, cut, batch, residency, on), 5) for on in (False, True))
        cases.append(Case(source.name, source.skew, cut.name, batch, residency, without, filling))
    return cases


def judge(cases: Sequence[Case]) -> list[dict[str, Any]]:
    worst = max(cases, key=lambda case: case.relative)
    mean = float(np.mean([case.relative for case in cases]))
    return [
        goal("link time less with filling, on average", [mean < 1], f"mean {mean:.3f}"),
        goal(
            f"link time at most {GOAL:g} of that without, in every case",
            [case.relative <= GOAL for case in cases],
            f"{worst.relative:.3f} ({worst})",
        ),
    ]


def markdown(cases: Sequence[Case]) -> str:
    return "\n".join([
        "# Slots filled after a prefill\n",
        "Made by `python -m benchmarks.policy prompts`, whose module explains the terms. Link time relative to that of slots\n"
        "that only decode steps fill.\n",
        grid(["goal", "met", "worst case"], [[g["goal"], g["met"], g["worst"]] for g in judge(cases)]),
        "## By kind of routing\n",
        "Mean over traces, laws and residencies.\n",
        grid(["prompt", "routing", "batch", "cases", "mean", "least", "most"], kinds(cases)),
        "## By case\n",
        grid(["routing", "skew", "prompt", "batch", *(f"{r:.1%}" for r in RESIDENCIES)], rows(cases)),
    ])  # fmt: skip


def kinds(cases: Sequence[Case]) -> list[list[object]]:
    def of(case: Case) -> tuple[object, ...]:
        return case.cut, "measured" if case.skew is None else f"law, skew {case.skew:g}", case.batch

    return [
        [*kind, len(group), f"{np.mean(group):.3f}", f"{min(group):.3f}", f"{max(group):.3f}"]
        for kind, group in grouped(cases, of).items()
    ]


def rows(cases: Sequence[Case]) -> list[list[object]]:
    def of(case: Case) -> tuple[object, ...]:
        return case.trace, "" if case.skew is None else f"{case.skew:g}", case.cut, case.batch

    return [[*head, *(f"{one:.3f}" for one in group)] for head, group in grouped(cases, of).items()]


def grouped(cases: Sequence[Case], of: Callable[[Case], tuple[object, ...]]) -> dict[tuple[object, ...], list[float]]:
    groups: dict[tuple[object, ...], list[float]] = {}
    for case in sorted(cases, key=lambda case: CUT_NAMES.index(case.cut)):
        groups.setdefault(of(case), []).append(case.relative)
    return groups


CUT_NAMES = [cut.name for cut in CUTS]
