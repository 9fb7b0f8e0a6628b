"""Manages one rank's experts: places layers at load, reads routing counts between steps, and changes residents."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor

from sglang_uvm_offload.config import OffloadConfig, Settings
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.memory.link import LinkStatus
from sglang_uvm_offload.memory.protocol import Memory
from sglang_uvm_offload.residency.adaptation import Adaptation
from sglang_uvm_offload.residency.evictions import Evictions
from sglang_uvm_offload.residency.history import History
from sglang_uvm_offload.residency.ledger import Ledger
from sglang_uvm_offload.residency.minutes import Minutes
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.residency.mover import STUCK_SECONDS, Mover, layer_bar
from sglang_uvm_offload.residency.placement import EVERYTHING, InitialPlacement
from sglang_uvm_offload.residency.residents import BroadcastDecision, Residents, TargetResidents
from sglang_uvm_offload.routing.counts import Phase, RoutingCounters, RoutingCounts

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""How often a busy rank polls the counts for its history."""
CHECK_SECONDS = 10.0
"""How often a busy rank checks whether residents were evicted."""

MakeCounters = Callable[[int, int], RoutingCounters]
"""(layers, experts per layer) -> counters on the compute device."""


class OffloadManager:
    """All methods run on the thread that launches the model's forward steps. Moves run on ``executor``. Ranks that hold shards
    of the same experts must all call a method that may change residents before the same step."""

    def __init__(
        self,
        config: Settings,
        memory: Memory,
        make_counters: MakeCounters,
        broadcast_decision: BroadcastDecision,
        progress: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        executor: Executor | None = None,
        decider: Executor | None = None,
    ):
        """``progress``: whether this rank shows progress bars. ``executor`` runs moves one at a time, and ``decider`` runs
        decisions, so that the thread that launches steps waits for neither. Without ``executor``, moves run on the calling
        thread; without ``decider``, decisions run where moves do."""
        self.config = config
        self.memory = memory
        self.clock = clock
        self.mover = Mover(memory, progress, executor)
        self.progress = progress
        self.evictions = Evictions(memory, config.headroom_gb)
        self.models: list[ModelExperts] = []
        self.drafts: list[Residents] = []
        """The residents of draft models with offloaded experts, set when serving begins. Multi-layer speculation loads one
        draft model per layer."""
        self.link: LinkStatus | None = None
        """The link as measured when the target was loaded, before ``finish_model``; None if it was not measured."""
        self.minutes: Minutes | None = None
        """The target's log lines, set when serving begins. None unless residents follow the traffic."""
        self.tokens = 0
        self.steps = 0
        self.paused = False
        """Whether an operator has paused changes of residents."""
        self.fewest_tokens = 1
        """``readvise`` chooses from no fewer."""
        self._make_counters = make_counters
        self._decider = decider or self.mover.executor
        self._broadcast_decision = broadcast_decision
        self._drafts_due_at: int | None = None
        """The number of tokens at which the drafts' residents are chosen next; None for never."""
        self._poll_at = self._check_at = 0.0
        self.placement: InitialPlacement
        """The target's placement, set once it is placed."""
        # The following are set once the target is loaded.
        self.ledger: Ledger
        """Totals of the target's steps."""
        self.history: History
        """These totals over time."""
        self.residents: TargetResidents

    @property
    def target(self) -> ModelExperts:
        return next(model for model in self.models if not model.draft)

    @property
    def fault(self) -> str | None:
        """Why residents can no longer change on this rank; None while they can."""
        return self.mover.fault

    @property
    def tokens_since_choice(self) -> int:
        """Tokens since residents were last chosen at once, or the weights changed."""
        return self.tokens - self.residents.tokens_at_choice

    @property
    def may_change(self) -> bool:
        """Whether the target's residents may change. Unlike ``fault``, it is the same on all ranks that share experts."""
        return not (self.paused or self.mover.asleep)

    # Loading

    def begin_model(self, draft: bool) -> ModelExperts:
        """Register a model. Call before it is built."""
        self.models.append(ModelExperts(draft))
        return self.models[-1]

    def place_model(self, model: ModelExperts, placement: InitialPlacement | None = None) -> None:
        """Allocate the pages of a built model's experts, before its first weight is read. ``placement`` is the target's; None
        for a draft model."""
        if placement is not None:
            self.placement = placement
        elif (number := self.config.draft_num_resident) is not None:
            placement = self.placement.of_draft(number)
        shards = [layer.shard for layer in model.layers]
        chosen = [EVERYTHING] * len(shards) if placement is None else placement.of_layers(shards)
        with layer_bar("Placing experts", len(shards), self.progress()) as bar:
            for layer, of_layer in zip(model.layers, chosen, strict=True):
                if of_layer.slots and placement is not None and not placement.converted_later:
                    layer.join_pool(functools.partial(model.pool_for, layer))
                layer.place(of_layer.choose, of_layer.kept, of_layer.slots, grouped=of_layer.grouped)
                bar.update()

    def finish_model(self, model: ModelExperts, may_be_empty: bool = False) -> None:
        """Create the counters of a loaded model. Raises ``FlagError`` if it has nothing to offload, unless it ``may_be_empty``
        (a pipeline stage may have only dense layers)."""
        layers = model.layers
        if not (model.draft or any(layer.tensors for layer in layers) or (may_be_empty and not layers)):
            found = "no MoE layer" if not layers else f"{len(layers)} MoE layers, none with experts large enough to place"
            raise FlagError([f"{flag_name('num_resident')} {self.placement.config.num_resident}: the model has {found}"])
        model.counters = self._make_counters(len(layers), model.width)
        if model.draft:
            return
        self.ledger = Ledger(model.counters, model)
        self.history = History(self.ledger, self.clock)
        self.residents = TargetResidents(
            model, self.ledger, self.mover, self._broadcast_decision, self.config, self.placement.profile
        )
        if self.config.adapt == "continuous":
            self.follow_traffic()

    def correct(self, config: OffloadConfig) -> None:
        """Change the numbers of residents and slots, after the target is loaded and before its slots are allocated."""
        self.placement, layers = dataclasses.replace(self.placement, config=config), self.target.layers
        chosen = self.placement.of_layers([layer.shard for layer in layers])
        wanted = [
            (layer, layer.replace(of_layer.choose, of_layer.slots)) for layer, of_layer in zip(layers, chosen, strict=True)
        ]
        self.mover.move(wanted, show=True)
        self.residents.restart()

    def follow_traffic(self, *counted: RoutingCounts) -> None:
        """Start continuous adaptation, seeded with the profile and then with ``counted``."""
        history = [past for past in (self.placement.profile_counts(self.target), *counted) if past is not None]
        self.residents.adaptation = Adaptation(
            self.target,
            self.ledger.counted,
            history,
            coactivation=self.config.coactivation,
            link=None if self.link is None else self.link.measured.together,
            clock=self.clock,
            executor=self._decider,
        )

    # Serving

    def begin_serving(self) -> None:
        """Start serving: all models are loaded and their graphs captured, and steps count from now on."""
        for model in self.models:
            if model.draft and model.counters is not None and model.offloaded_bytes().any():
                ledger = Ledger(model.counters, model)
                self.drafts.append(Residents(model, ledger, self.mover, self._broadcast_decision))
                self.drafts[-1].chosen_at = ledger.counted
        number = self.config.draft_num_resident
        if number is not None and any(model.draft for model in self.models) and not self.drafts:
            logger.warning(
                "Expert offload: %s %d: the draft model has nothing to offload", flag_name("draft_num_resident"), number
            )
        self._drafts_due_at = self.config.warmup_tokens if self.config.residents_change else None
        if self.config.adapt == "continuous":
            self.minutes = Minutes(self.ledger, self.clock)

    def begin_step(self, model: ModelExperts, valid_rows: int, tokens: int, phase: Phase, *, streams: bool = False) -> None:
        """Call before each forward step of ``model`` is launched. The first ``valid_rows`` rows of its batch are tokens (0 for
        a dummy run), and all ranks together compute ``tokens``. ``streams``: whether any layer computes from a copy of its
        experts, in which case the step counts as prefill. Changes of residents start here, between steps of the target."""
        if model.counters is None:
            return
        if not model.draft:
            self._change_residents(tokens)
            self.tokens += tokens
            self.steps += tokens > 0
        model.counters.begin_step(valid_rows, Phase.PREFILL if streams else phase)

    def _change_residents(self, tokens: int) -> None:
        """Start the changes of residents that are due before a step of ``tokens``."""
        residents = self.residents
        warmed_up = self.tokens_since_choice >= self.config.warmup_tokens
        if self.may_change and not residents.warm and warmed_up:
            residents.after_warmup(self.tokens)
        elif self.config.adapt == "continuous" and tokens:
            residents.adapt(may_move=self.may_change and residents.warm)
        if self.may_change and self._drafts_due_at is not None and self.tokens >= self._drafts_due_at:
            self._choose_for_drafts()

    def end_step(self, model: ModelExperts) -> None:
        """Call after the step is launched. What runs before the next step, such as graph capture, does not count."""
        if model.counters is not None:
            model.counters.begin_step(0, Phase.DECODE)

    def _choose_for_drafts(self) -> None:
        self._drafts_due_at = None
        for residents in self.drafts:
            residents.choose(self.tokens)

    def weights_updated(self) -> None:
        """The weights were updated. Residents that a warm-up chose are chosen again after another warm-up."""
        if self.config.resident_selection == "frequency" and self.config.adapt == "warmup":
            self.residents.warm_up_again(self.tokens)
        if self.config.residents_change:
            self._drafts_due_at = self.tokens + self.config.warmup_tokens

    def wait_for_moves(self) -> None:
        """Wait for moves and checks in progress. Call before code that may replace tensors. Raises ``TimeoutError`` if one
        hangs."""
        self.mover.wait()

    # Operating

    def readvise(self) -> None:
        """Choose residents now, at an operator's request, from the routing since the last such choice and regardless of the
        profile. Ends the warm-up. With fewer than ``fewest_tokens`` since, nothing changes."""
        if self.mover.asleep:
            logger.info("Expert offload: residents cannot be chosen while the server has released its memory")
        elif self.tokens_since_choice < self.fewest_tokens:
            logger.info(
                "Expert offload: residents stay: %d tokens since they were last chosen, and choosing them needs %d",
                self.tokens_since_choice,
                self.fewest_tokens,
            )
        else:
            self.residents.choose(self.tokens)
            self._choose_for_drafts()

    def pause(self) -> None:
        """Keep the residents where they are until ``resume``. Counting, the forecast and a move in progress continue."""
        self.paused = True
        self.residents.drop_decision()

    def resume(self) -> None:
        """Allow residents to change again."""
        self.paused = False

    def sleep(self) -> None:
        """Move all experts, including those of draft models, out of VRAM until ``wake``. Call while no step runs."""
        self.residents.drop_decision()
        self.wait_for_moves()
        self.mover.sleep(self._layers())

    def wake(self) -> None:
        """Move back to VRAM what was there before ``sleep``. Call before the next step."""
        self.mover.wake()

    # Accounting

    def poll(self) -> None:
        """Update the ledger with the counts that have arrived, without waiting. With continuous adaptation, which polls before
        every step, it requests no counts: the request would still be in flight at the next step's poll."""
        if self.config.adapt != "continuous":
            self.ledger.poll()
        self._poll_drafts()
        self.history.add(self.tokens)

    def poll_if_due(self) -> None:
        """``poll`` every ``POLL_SECONDS``, and check for evicted residents every ``CHECK_SECONDS``, without waiting. Call
        between steps."""
        now = self.clock()
        if now >= self._poll_at:
            self._poll_at = now + POLL_SECONDS
            self.poll()
        if now < self._check_at:
            return
        if not self.mover.checking:
            self.check_for_evictions()
        elif now >= self._check_at + STUCK_SECONDS and self.fault is None:
            self.mover.stop("moving experts", TimeoutError(f"a driver call did not return within {STUCK_SECONDS:g} s"))

    def check_for_evictions(self) -> None:
        """Start a check that runs alongside the steps."""
        self._check_at = self.clock() + CHECK_SECONDS
        self.mover.submit_check(self.evictions.check, self._layers())

    @property
    def reclaimable_bytes(self) -> int:
        """Upper bound of the VRAM that the driver still holds for experts that left it, over all models."""
        return sum(layer.reclaimable_bytes for layer in self._layers())

    def _layers(self) -> list[ExpertLayer]:
        return [layer for model in self.models for layer in model.layers]

    def poll_when_idle(self) -> None:
        """``poll`` until the ledger includes the last step before the idle period."""
        if self.ledger.steps < self.steps:
            self.ledger.poll()
            self._poll_drafts()
            self.history.add(self.tokens)

    def _poll_drafts(self) -> None:
        for residents in self.drafts:
            residents.ledger.poll()

    def routing_by_expert(self, wait: bool) -> RoutingCounts:
        """The target's counts by the checkpoint's expert: slightly stale, or with ``wait`` up to the last step."""
        if wait:
            self.ledger.catch_up()
        elif self.ledger.steps < self.steps:
            self.poll()
        return self.ledger.counted_by_expert()
