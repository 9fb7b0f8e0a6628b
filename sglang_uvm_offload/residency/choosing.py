"""Choosing the target's residents at once: after the warm-up, or when an operator asks."""

from __future__ import annotations

import logging

import numpy as np

from sglang_uvm_offload.config import Settings
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.residency.residents import Residents
from sglang_uvm_offload.residency.selection import best_residents, hit_rate
from sglang_uvm_offload.residency.status import ProfileVerdict
from sglang_uvm_offload.residency.worker import Worker
from sglang_uvm_offload.routing.counts import RoutingCounts
from sglang_uvm_offload.routing.profile import Profile

logger = logging.getLogger(__name__)

PROFILE_SLACK = 0.05
"""The lead in hit rate that the best set for the live warm-up may have over a profile's residents before they are chosen anew.
That set is chosen from the tokens that it is measured on, so a small lead means nothing."""


class Chooser:
    """Every rank that holds a shard of the same experts must call it before the same step. Outputs do not change. A fault ends
    moving; serving goes on."""

    def __init__(self, config: Settings, target: ModelExperts, residents: Residents, worker: Worker, profile: Profile | None):
        """``profile``: the routing that residents were chosen from at load."""
        self._config = config
        self._target = target
        self._residents = residents
        self._worker = worker
        self._profile = profile
        self.warm = config.resident_selection != "frequency"
        """Whether the warm-up is over: residents were chosen from its routing, or are given."""
        self.chosen_at: tuple[RoutingCounts | None, int] = (None, 0)
        """The counts and the tokens when residents were last chosen at once, or weights became others; None at the start."""
        self.routed_before: tuple[int, float] | None = None
        """Routed tokens, and those on residents or slots, until residents were last chosen at once; None before that."""
        self.profile_verdict: ProfileVerdict | None = None
        """The profile's hit rate on live traffic, once the warm-up is over."""

    def after_warmup(self, total: RoutingCounts, tokens: int) -> None:
        """Choose from the routing of the warm-up, and start to move what changed; a profile's residents stay if their hit rate
        is about as high. ``total`` are the counts of all ``tokens`` so far."""
        seen = self._since_last(total)
        before, after = self._residents.decide(lambda resident: self._best_after_warmup(seen, resident))
        kept = not (after ^ before).any()
        if self._profile is not None:
            self._judge_profile(self._profile, seen, tokens, before, kept)
        if self._profile is None or not kept:
            self._residents.move_to(after, (seen, tokens - self.chosen_at[1]))
        self._chosen(total, tokens)

    def on_demand(self, total: RoutingCounts, tokens: int) -> None:
        """Choose now, from the routing since residents were last chosen at once, and whatever a profile says. It ends the
        warm-up."""
        seen = self._since_last(total)
        _, after = self._residents.decide(lambda resident: self._residents.best_for(seen, resident))
        if self._worker.fault is None:
            self._residents.move_to(after, (seen, tokens - self.chosen_at[1]))
        self._chosen(total, tokens)

    def warm_up_again(self, total: RoutingCounts, tokens: int) -> None:
        """The weights are others from now on."""
        self.chosen_at = total, tokens
        self.warm = False

    def chosen_from(self, live: RoutingCounts, profile: RoutingCounts | None) -> RoutingCounts | None:
        """The counts that residents are chosen from by now: the ``live`` ones, or a profile's; None where neither chose
        them."""
        warmed_up = self.chosen_at[0] is not None or (self._config.adapt == "continuous" and self.warm)
        return live if warmed_up and self._config.adapt != "off" else profile

    def _since_last(self, total: RoutingCounts) -> RoutingCounts:
        earlier, _ = self.chosen_at
        return total if earlier is None else total.since(earlier)

    def _chosen(self, total: RoutingCounts, tokens: int) -> None:
        self.chosen_at = total, tokens
        self.routed_before = self._residents.ledger.totals_routed
        self.warm = True

    def _best_after_warmup(self, seen: RoutingCounts, resident: np.ndarray) -> np.ndarray:
        """``bool[extents]``. Called on the rank that decides."""
        best = best_residents(self._target, seen, resident)
        if self._profile is None:
            return best
        share = self._target.resident_share
        lead = hit_rate(seen.routed(), share(best)) - hit_rate(seen.routed(), share(resident))
        return resident if self._config.adapt == "off" or lead <= PROFILE_SLACK else best

    def _judge_profile(self, profile: Profile, seen: RoutingCounts, tokens: int, resident: np.ndarray, kept: bool) -> None:
        """Log the hit rate of the profile's residents on live traffic."""
        sets = (resident, best_residents(self._target, seen, resident))
        reached, best = (hit_rate(seen.routed(), self._target.resident_share(each)) for each in sets)
        self.profile_verdict = ProfileVerdict(hit_rate=reached, best=best, tokens=tokens, kept=kept)
        logger.info(
            "Expert offload: profile %s: hit rate %.1f %% over the first %d live tokens; the best residents for these tokens "
            "would reach %.1f %%: %s",
            ", ".join(map(str, self._config.profiles)),
            100 * reached,
            tokens,
            100 * best,
            "residents kept" if kept else "residents are chosen again",
        )
