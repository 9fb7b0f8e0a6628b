"""Continuous adaptation: the policy chooses residents from live counts on its own thread, while another one moves experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace

import numpy as np

from sglang_uvm_offload.memory.link import LinkRates
from sglang_uvm_offload.policy.adaptive import AdaptivePolicy
from sglang_uvm_offload.policy.extents import Budget
from sglang_uvm_offload.policy.forecast import TUNING
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.routing.counts import ACTIVATIONS, ROUTED, PendingCounts, Phase, RoutingCounts

MOVE_BYTES_PER_S = 4 << 30
"""The rate limit of promotions: a small share of a PCIe link, so that moves do not starve zero-copy reads."""
MOVE_SHARE = 0.08
"""The limit on slower links, as a share of the copy engine's measured rate. On PCIe 5 x16 both limits are equal."""
BURST_SECONDS = 0.02
"""How long an unused allowance accumulates. Longer bursts make moves that a later decision would not
(benchmarks/results/policy/moving.md)."""


class Adaptation:
    """Runs the policy over one model's layers, one decision at a time, on the rank that decides for its peers. A decision
    submitted at one poll is collected at the first later poll that finds it ready. Counts are polled before every step, because
    residents follow the traffic less well with fewer polls (benchmarks/results/policy/tunings.md)."""

    def __init__(
        self,
        model: ModelExperts,
        start: RoutingCounts,
        history: Sequence[RoutingCounts] = (),
        *,
        coactivation: bool = True,
        link: LinkRates | None = None,
        clock: Callable[[], float],
        executor: Executor,
    ):
        """Counts up to ``start`` are ignored. ``history`` holds earlier counts of these experts, oldest first, such as a
        profile: the forecast starts from it until live traffic outweighs it. The VRAM in use now becomes the budget.
        ``coactivation``: whether the forecast uses which experts are used together, in addition to each expert's own past.
        ``link``: the measured rates. ``executor`` runs one task at a time."""
        self._seen = start
        tuning = TUNING if coactivation else replace(TUNING, directions=0)
        self._policy = AdaptivePolicy(_budget_of(model), model.candidates(), tuning=tuning)
        for counts in history:
            self._policy.seed(*_policy_input(counts))
        self._clock, self._executor = clock, executor
        self._bytes_per_s = MOVE_BYTES_PER_S if link is None else min(MOVE_BYTES_PER_S, MOVE_SHARE * link.engine * 1e9)
        self._burst = max(BURST_SECONDS * self._bytes_per_s, int(self._policy.budget.extents.nbytes.max(initial=1)))
        self._allowance = 0.0
        """How many bytes may be promoted now."""
        self._refilled_at = clock()
        self._next: Future[np.ndarray | None] | None = None
        self._due = False
        """Whether the last decision was collected, so that the next one can be submitted."""
        self._dropped = False
        """Whether the residents have changed since ``_next`` was submitted, which makes it stale."""
        self._replaced: ModelExperts | None = None
        """The model, if its tensors have been replaced since ``_next`` was submitted."""

    def collect(self, resident: np.ndarray) -> np.ndarray | None:
        """The residents to move to from ``resident``, ``bool[extents]``. None for no change, or while the decision is not
        ready. Raises what the decision raised."""
        after = None
        if self._next is not None:
            if not self._next.done():
                return None
            after, self._next = self._next.result(), None
        if self._dropped:
            after, self._dropped = None, False
        if after is not None:
            self._allowance -= self._policy.budget.extents.total(after & ~resident)
        self._due = True
        return after

    def submit(self, pending: PendingCounts, resident: np.ndarray, may_move: bool, moving: bool) -> None:
        """Begin the next decision once the last one was collected, from the counts ``pending`` and the residents after the last
        move. Without ``may_move``, or while experts are ``moving``, it observes the counts but moves nothing: moves that queue
        behind others would come too late. The budget of replaced tensors is known only once no move is in progress."""
        if not self._due or (moving and self._replaced is not None):
            return
        self._due = False
        self._refill()
        if self._replaced is not None:
            # No decision runs and nothing moves now. The forecast is per expert, so it stays valid.
            self._policy.budget, self._replaced = _budget_of(self._replaced), None
        max_bytes = self._allowance if may_move and not moving else 0.0
        self._next = self._executor.submit(self._decide_on, pending, resident, max_bytes)

    def drop(self) -> None:
        """Discard the submitted decision, because residents change for another reason. ``collect`` still raises its error."""
        self._dropped = self._next is not None

    def follow(self, model: ModelExperts) -> None:
        """Decide on the current extents of ``model`` from now on, because its tensors were replaced."""
        self.drop()
        self._replaced = model

    def _decide_on(self, pending: PendingCounts, resident: np.ndarray, max_bytes: float) -> np.ndarray | None:
        return self.decide(pending.wait(), resident, max_bytes)

    def decide(self, counts: RoutingCounts, resident: np.ndarray, max_bytes: float) -> np.ndarray | None:
        """The residents to move to, given ``counts`` (totals since the start), as ``bool[extents]``. None to keep
        ``resident``. Promotes at most ``max_bytes``."""
        new = counts.since(self._seen)
        self._seen = counts
        self._policy.observe(*_policy_input(new))
        moves = self._policy.decide(resident, max_bytes)
        if not moves.promote.any() and not moves.demote.any():
            return None
        return (resident | moves.promote) & ~moves.demote

    def _refill(self) -> None:
        now = self._clock()
        self._allowance = min(self._allowance + (now - self._refilled_at) * self._bytes_per_s, self._burst)
        self._refilled_at = now


def _budget_of(model: ModelExperts) -> Budget:
    """The VRAM of the movable residents. Each layer keeps at least one expert's bytes, or all it has if that is less."""
    extents, movable = model.extents, model.movable()
    used = extents.bytes_by_layer(model.resident_extents() & movable)
    return Budget(extents, movable, int(used.sum()), np.minimum(np.maximum(model.expert_bytes, 1), used))


def _policy_input(counts: RoutingCounts) -> tuple[np.ndarray, int, np.ndarray]:
    """The policy's input: decode activations, the number of decode steps, and routed prefill tokens."""
    return counts.counts[:, Phase.DECODE, ACTIVATIONS], counts.steps[Phase.DECODE], counts.counts[:, Phase.PREFILL, ROUTED]
