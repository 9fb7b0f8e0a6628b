"""A model's residents: one rank chooses them for all ranks that hold shards of the same experts, and each rank moves them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sglang_uvm_offload.config import Settings
from sglang_uvm_offload.policy.extents import Extents
from sglang_uvm_offload.residency.adaptation import Adaptation
from sglang_uvm_offload.residency.history import ProfileVerdict
from sglang_uvm_offload.residency.ledger import Ledger
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.residency.mover import Mover
from sglang_uvm_offload.routing.counts import RoutingCounts
from sglang_uvm_offload.routing.profile import Profile
from sglang_uvm_offload.units import size

logger = logging.getLogger(__name__)

PROFILE_SLACK = 0.05
"""How much higher the best hit rate in the warm-up may be than that of a profile's residents before they are replaced. The best
residents are chosen from the same tokens that they are measured on, so a small lead means nothing."""

BroadcastDecision = Callable[[Callable[[], Any]], Any]
"""Calls its argument on the first of the ranks that hold shards of the same experts, and returns the result on all of these."""


class Residents:
    """The residents of one model. All ranks that hold shards of the same experts must call each deciding method before the same
    step. A rank with a fault neither decides nor moves, but still takes part, because its peers wait for it."""

    def __init__(self, model: ModelExperts, ledger: Ledger, mover: Mover, broadcast_decision: BroadcastDecision):
        self.model, self.ledger, self.broadcast_decision = model, ledger, broadcast_decision
        self._mover = mover
        self._extents: Extents = model.extents
        self.next: np.ndarray = model.resident_extents()
        """``bool[extents]``: the residents after the last submitted move."""
        self.adaptation: Adaptation | None = None
        """Continuous adaptation of the target; None if it is off or has failed."""
        self.chosen_at: RoutingCounts | None = None
        self.tokens_at_choice = 0
        """The counts and the target's tokens when residents were last chosen at once, or when the weights were updated. None
        before that."""

    def seen(self) -> RoutingCounts:
        """The routing since ``chosen_at``. Waits for the device."""
        self.ledger.catch_up()
        total = self.ledger.counted
        return total if self.chosen_at is None else total.since(self.chosen_at)

    def choose(self, tokens: int) -> None:
        """Choose residents at once from what was ``seen``, and start the move. ``tokens``: the target's tokens so far."""
        seen = self.seen()
        _, after = self.decide(lambda resident: self.best_for(seen, resident))
        self.move_to(after, (self._title(seen, tokens), seen))
        self._chosen(tokens)

    def _chosen(self, tokens: int) -> None:
        self.chosen_at, self.tokens_at_choice = self.ledger.counted, tokens

    def _title(self, seen: RoutingCounts, tokens: int) -> str:
        return f"residents of the draft model chosen from {sum(seen.steps)} of its steps"

    def best_for(self, seen: RoutingCounts, resident: np.ndarray) -> np.ndarray:
        """``bool[extents]``: the best residents for ``seen``, or ``resident`` after a fault. Call on the deciding rank."""
        return resident if self._mover.fault is not None else self.model.best_residents(seen, resident)

    def decide(self, choose: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """The residents before, and those that ``choose`` returned on the deciding rank, as ``bool[extents]``."""
        self._follow_tensors()
        before = self.next
        after = self.broadcast_decision(lambda: choose(before))
        self.drop_decision()
        return before, after

    def drop_decision(self) -> None:
        """Discard the last decision of continuous adaptation, because something else determines the residents."""
        if self.adaptation is not None:
            self.adaptation.drop()

    def _follow_tensors(self) -> None:
        """Start over if a weight update has replaced tensors by others with different extents."""
        if self.model.extents is not self._extents:
            self.restart()

    def restart(self) -> None:
        """Start from the current residents, which were changed by other means than a decision made here."""
        self._extents, self.next = self.model.extents, self.model.resident_extents()
        if self.adaptation is not None:
            self.adaptation.follow(self.model)

    def move_to(self, after: np.ndarray, chosen: tuple[str, RoutingCounts] | None = None) -> None:
        """Start to make ``after`` resident (``bool[extents]``). ``chosen``: the title of the log line, and the routing that
        they were chosen from. None logs nothing."""
        if self._mover.fault is not None:
            return
        before, self.next = self.next, after
        self._mover.submit(lambda: self._move(before, after, chosen))

    def _move(self, before: np.ndarray, after: np.ndarray, chosen: tuple[str, RoutingCounts] | None) -> None:
        """Runs on the mover's thread."""
        model, ledger, started = self.model, self.ledger, time.perf_counter()
        present = model.resident_extents()
        moved = self._mover.move(model.by_layer(after), show=False)  # SGLang's log would land in the line of a bar
        now, seconds = model.resident_extents(), time.perf_counter() - started
        ledger.moved_bytes += moved
        ledger.moves += int((now & ~present).sum())
        ledger.moving_seconds += seconds
        if chosen is not None:
            title, seen = chosen
            logger.info(
                "Expert offload: %s: hit rate of these %.1f %% before, %.1f %% after; %s of %s of residents changed in %d "
                "layers, %s moved in %.2f s",
                title,
                100 * model.hit_rate(seen, before),
                100 * model.hit_rate(seen, now),
                size(model.extents.total(now & ~before)),
                size(model.extents.total(before)),
                len(model.layers),
                size(moved),
                seconds,
            )


class TargetResidents(Residents):
    """The residents of the target model, chosen after a warm-up, for an operator, or by continuous adaptation."""

    def __init__(
        self,
        model: ModelExperts,
        ledger: Ledger,
        mover: Mover,
        broadcast_decision: BroadcastDecision,
        config: Settings,
        profile: Profile | None,
    ):
        """``profile``: the routing from which residents were chosen at load; None without one."""
        super().__init__(model, ledger, mover, broadcast_decision)
        self._config, self._profile = config, profile
        self.warm = config.resident_selection != "frequency"
        """Whether the warm-up is over, because residents were chosen from its routing, or none is needed."""
        self.routed_before: tuple[int, float] | None = None
        """Routed tokens, and those served by residents or slots, when residents were last chosen at once. None before that."""
        self.chosen_from_tokens: int | None = None
        """The tokens that residents were last chosen from at once; None before that."""
        self.profile_verdict: ProfileVerdict | None = None
        """The profile's hit rate on live traffic, set after the warm-up."""

    def after_warmup(self, tokens: int) -> None:
        """Choose from the routing of the warm-up. A profile's residents stay if their hit rate is about as high. ``tokens``:
        the target's tokens so far."""
        seen = self.seen()
        before, after = self.decide(lambda resident: self._best_after_warmup(seen, resident))
        kept = not (after ^ before).any()
        if self._profile is not None:
            self._judge_profile(seen, tokens, before, kept)
        if self._profile is None or not kept:
            self.move_to(after, (self._title(seen, tokens), seen))
        self._chosen(tokens)

    def warm_up_again(self, tokens: int) -> None:
        """Start another warm-up, because the weights were updated."""
        self.ledger.catch_up()
        super()._chosen(tokens)
        self.warm = False

    def _chosen(self, tokens: int) -> None:
        self.chosen_from_tokens = tokens - self.tokens_at_choice
        super()._chosen(tokens)
        self.routed_before = self.ledger.totals_routed
        self.warm = True

    def _title(self, seen: RoutingCounts, tokens: int) -> str:
        prefill, decode = seen.steps
        of = f"{tokens - self.tokens_at_choice} tokens ({prefill} prefill and {decode} decode steps)"
        return f"residents chosen from the routing of {of}"

    def chosen_from(self, live: RoutingCounts, profile: RoutingCounts | None) -> RoutingCounts | None:
        """The counts from which residents are chosen by now: the ``live`` ones or the profile's. None if neither chose the
        residents."""
        warmed_up = self.chosen_at is not None or (self._config.adapt == "continuous" and self.warm)
        return live if warmed_up and self._config.adapt != "off" else profile

    def _best_after_warmup(self, seen: RoutingCounts, resident: np.ndarray) -> np.ndarray:
        """The residents after the warm-up, ``bool[extents]``. Called on the deciding rank."""
        best = self.best_for(seen, resident)
        if self._profile is None:
            return best
        lead = self.model.hit_rate(seen, best) - self.model.hit_rate(seen, resident)
        return resident if self._config.adapt == "off" or lead <= PROFILE_SLACK else best

    def _judge_profile(self, seen: RoutingCounts, tokens: int, resident: np.ndarray, kept: bool) -> None:
        """Log the hit rate of the profile's residents on live traffic."""
        reached = self.model.hit_rate(seen, resident)
        best = self.model.hit_rate(seen, self.model.best_residents(seen, resident))
        self.profile_verdict = ProfileVerdict(hit_rate=reached, best=best, tokens=tokens, kept=kept)
        logger.info(
            "Expert offload: profile %s: hit rate %.1f %% over the first %d live tokens; the best residents for these tokens "
            "would reach %.1f %%: %s",
            ", ".join(map(str, self._config.profiles)),
            100 * reached,
            tokens,
            100 * best,
            "residents kept" if kept else "residents are replaced",
        )

    # Continuous adaptation

    def adapt(self, may_move: bool) -> None:
        """Poll the counts, start the moves decided from the steps before the last poll, and begin the next decision. Waits for
        neither steps nor moves, which run side by side."""
        polled = self.ledger.poll()
        self._follow_tensors()
        before = self.next
        after = self.broadcast_decision(lambda: self._of_adaptation(lambda adaptation: adaptation.collect(before)))
        if after is not None:
            if not polled:
                self.ledger.catch_up()
            self.move_to(after)
        self._of_adaptation(lambda adaptation: adaptation.submit(self.ledger.pending, self.next, may_move, self._mover.moving))

    def _of_adaptation(self, ask: Callable[[Adaptation], np.ndarray | None]) -> np.ndarray | None:
        """The result of ``ask``; None if continuous adaptation is off or fails."""
        if self.adaptation is None or self._mover.fault is not None:
            return None
        try:
            return ask(self.adaptation)
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- logged with its traceback and shown as the fault
            # Steps do not depend on decisions, and peers wait for this rank's answer. A GPU error recurs at the next kernel and
            # ends the process there. A SystemExit raised on the deciding thread must not end this one.
            self.adaptation = None
            self._mover.stop("choosing residents", error)
            return None
