"""How many of a replay's misses a trace's guesses foresee (recall), and how many of the fetched experts are used (precision).

A miss is an expert that a step uses and that the policy does not hold when its layer is served. A guess fetches only experts
that are not held then. Fetched experts are assumed to arrive in time and to evict nothing. Arrays are ``bool[layers,
experts]``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sglang_uvm_offload.replay.results import Foreseen
from sglang_uvm_offload.replay.simulator import Workload
from sglang_uvm_offload.routing.trace import Trace

CONTROL = "the experts themselves"
"""A predictor that is always right, as a check that misses and fetches are counted consistently."""
RECENT = "the token before"


@dataclass(frozen=True)
class Predictor:
    """Predicted experts, int ``[tokens, layers, n]``; -1 for none."""

    name: str
    distance: int | None
    experts: np.ndarray


def predictors(trace: Trace) -> list[Predictor]:
    """For each distance, the top-k guesses and all guesses; then the predictors to compare them with. Raises ``ValueError`` for
    a trace without guesses."""
    if trace.guesses is None:
        raise ValueError("the trace has no guesses")
    guessed, top_k = trace.guesses.experts, trace.ids.shape[2]
    found = [
        Predictor(f"{most} of its router's {guessed.shape[3]}", distance + 1, guessed[:, :, distance, :most])
        for distance in range(guessed.shape[2])
        for most in sorted({min(top_k, guessed.shape[3]), guessed.shape[3]})
    ]
    return [*found, Predictor(RECENT, None, _before(trace)), Predictor(CONTROL, None, trace.ids)]


def _before(trace: Trace) -> np.ndarray:
    """The experts of each token's predecessor in its request."""
    before = np.full_like(trace.ids, -1)
    before[1:] = trace.ids[:-1]
    ends = np.cumsum(trace.seq_len)
    before[(ends - trace.seq_len)[trace.seq_len > 0]] = -1
    return before


def foreseen(trace: Trace, policy: str, residency: float, batch: int = 1, warmup_fraction: float = 0.5) -> list[Foreseen]:
    """For each of ``predictors``, how it foresees the misses of ``replay`` with these arguments."""
    workload = Workload.of(trace, batch, warmup_fraction)
    held_by = workload.policy(policy, residency)
    for activated in workload.warmup:
        held_by.step(activated)
    every = predictors(trace)
    layers = slice(None) if workload.routing is None else workload.routing
    guessing = [(each.experts[:, layers] >= 0).any(axis=(0, 2)) for each in every]
    counts = np.zeros((len(every), 3), dtype=np.int64)
    steps = trace.steps(trace.split(warmup_fraction)[1], batch)
    for tokens, activated in zip(steps, workload.scored, strict=True):
        before = held_by.resident
        missed = activated & ~held_by.step(activated).hit
        # What the layer found: earlier layers of the step may have evicted experts, and a move may have preceded it.
        held = (before | activated) & ~missed
        for count, each, guessed in zip(counts, every, guessing, strict=True):
            brought = _used(each.experts[tokens[tokens >= 0]][:, layers], activated.shape) & ~held
            count += [np.count_nonzero(part[guessed]) for part in (missed, brought, missed & brought)]
    return [
        Foreseen(
            policy=policy,
            predictor=each.name,
            distance=each.distance,
            layers=int(guessed.sum()),
            misses_per_step=misses / len(steps),
            brought_per_step=brought / len(steps),
            recall=right / misses if misses else 0.0,
            precision=right / brought if brought else 0.0,
        )
        for each, guessed, (misses, brought, right) in zip(every, guessing, counts.tolist(), strict=True)
        if guessed.any()
    ]


def _used(ids: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """``ids[tokens, layers, n]`` as ``bool[layers, experts]``."""
    used = np.zeros((shape[0], shape[1] + 1), dtype=bool)  # -1 sets the last column
    used[np.arange(shape[0])[None, :, None], ids] = True
    return used[:, :-1]
