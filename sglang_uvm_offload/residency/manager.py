"""One rank's experts while it serves: adds layers at load, reads routing counts between steps, and changes residents."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, wait
from typing import Any

import numpy as np

from sglang_uvm_offload.config import UNRESOLVED, OffloadConfig
from sglang_uvm_offload.expert_location import ExpertLocation, by_expert, by_place
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.memory.protocol import Memory
from sglang_uvm_offload.policy.extents import Extents
from sglang_uvm_offload.residency.adaptation import INTERVAL_STEPS, Adaptation
from sglang_uvm_offload.residency.background import BackgroundAdaptation, ThisThread
from sglang_uvm_offload.residency.drafts import DraftMove, Drafts
from sglang_uvm_offload.residency.evictions import Evictions
from sglang_uvm_offload.residency.history import History
from sglang_uvm_offload.residency.ledger import Ledger
from sglang_uvm_offload.residency.logical_counts import LogicalCounts, RecentCounts, rederived
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.residency.mover import Mover, layer_bar
from sglang_uvm_offload.residency.observer import Observer
from sglang_uvm_offload.residency.placement import EVERYTHING, InitialPlacement, LayerPlacement
from sglang_uvm_offload.residency.selection import best_residents, hit_rate, rank_share
from sglang_uvm_offload.residency.sleep import Sleep
from sglang_uvm_offload.residency.status import ProfileVerdict
from sglang_uvm_offload.routing.counts import Phase, RoutingCounters, RoutingCounts
from sglang_uvm_offload.routing.profile import Profile
from sglang_uvm_offload.units import size

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""How often a busy rank polls the counts for its history."""
LOOK_SECONDS = 10.0
"""How often a busy rank looks whether residents were evicted."""
STUCK_SECONDS = 600.0
"""Background work that takes longer counts as hung."""
PROFILE_SLACK = 0.05
"""The lead in hit rate that the best set for the live warm-up may have over a profile's residents before they are chosen anew.
That set is chosen from the tokens that it is measured on, so a small lead means nothing."""

MakeCounters = Callable[[int, int], RoutingCounters]
"""(layers, experts a layer) -> counters on the device that computes."""
BroadcastDecision = Callable[[Callable[[], Any]], Any]
"""Calls its argument on the first of the ranks that hold shards of the same experts, and returns the result on all of them."""
GatherCounts = Callable[[np.ndarray], list[np.ndarray]]
"""Returns the argument of each of the ranks that share the experts of a layer between them."""


class OffloadManager:
    """All methods run on the thread that launches the model's forward steps, but for what moves, which runs on ``executor``."""

    def __init__(
        self,
        config: OffloadConfig,
        memory: Memory,
        make_counters: MakeCounters,
        broadcast_decision: BroadcastDecision,
        progress: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        executor: Executor | None = None,
    ):
        """``progress``: whether this rank shows progress bars. ``executor`` runs decisions and moves, one after the other, so
        that the thread that launches steps waits for neither; None: they run on the calling thread."""
        self.config = config
        self.memory = memory
        self.make_counters = make_counters
        self.broadcast_decision = broadcast_decision
        self.mover = Mover(memory, progress)
        self._sleep = Sleep(memory, self.mover)
        self.clock = clock
        self.executor = executor or ThisThread()
        self._moving: Future[None] | None = None
        """The last move, which may be under way."""
        self.evictions = Evictions(memory, config.headroom_gb)
        self._looking: Future[None] | None = None
        self._look_at = 0.0
        self.models: list[ModelExperts] = []
        self.placement = InitialPlacement(config, None)
        self._place: Callable[..., LayerPlacement] = self.placement.of_layer
        """Of the model that is being built."""
        self.drafts = Drafts()
        """The draft models of which experts are offloaded, once the server serves."""
        self.profile_verdict: ProfileVerdict | None = None
        """The profile's hit rate on live traffic, once the warm-up is over."""
        self.tokens = 0
        self.steps = 0
        self.fault: str | None = None
        """Why residents no longer change, None while they may."""
        self.observer: Observer
        """Accounts for the target model's steps. Set once the model is loaded."""
        self.logical: LogicalCounts
        """The counts by the checkpoint's expert. Set with the observer."""
        self._recent = RecentCounts()
        self.history: History
        """The ledger's totals over time. Set with the observer."""
        self._extents: Extents
        self._next_resident: np.ndarray
        """``bool[extents]`` of ``_extents``: the residents that the last move makes. Set with the observer."""
        self._poll_at = 0.0
        self.background: BackgroundAdaptation | None = None
        """Continuous adaptation, None where it is off or has failed."""
        self.warm = config.resident_selection != "frequency"
        """Whether the resident set is final: chosen from the routing, or given."""
        self.paused = False
        """Whether an operator has residents stay where they are."""
        self._chosen_at: tuple[RoutingCounts | None, int] = (None, 0)
        """The counts and the tokens when residents were last chosen at once, or weights became others; None at the start."""

    # Loading

    def begin_model(self, draft: bool, placement: InitialPlacement | None = None) -> ModelExperts:
        """Call it before a model is built. ``placement`` chooses the target model's first residents; the default has no profile
        and is for the first pipeline stage."""
        model = ModelExperts(draft)
        self.models.append(model)
        if draft:
            self._place = self._placement_of_draft()
        else:
            self.placement = placement or InitialPlacement(self.config, None)
            self._place = self.placement.of_layer
        self._bar = layer_bar("Placing experts", None, self.mover.progress())
        return model

    def _placement_of_draft(self) -> Callable[..., LayerPlacement]:
        """The first experts, as many as the flag for drafts says."""
        number = self.config.draft_num_resident
        if number is None:
            return lambda *_: EVERYTHING
        return InitialPlacement(dataclasses.replace(self.config, num_resident=number, resident_ids=None), None).of_layer

    def add_layer(
        self,
        model: ModelExperts,
        layer_id: int,
        num_experts: int,
        num_shared: int,
        ep_rank: int,
        ep_size: int,
        location: ExpertLocation | None = None,
    ) -> ExpertLayer:
        """Add decoder layer ``layer_id`` with ``num_experts`` local experts, ``num_shared`` of them fused shared experts, the
        others those of ``location`` (None: each at the place of its own number)."""
        routed = num_experts - num_shared
        first = ep_rank * routed
        location = location or ExpertLocation.trivial(routed * ep_size, range(first, first + routed))
        where = (layer_id, num_experts, num_shared, ep_rank, ep_size, location)
        placement = self._place(*where)
        slots = 0 if model.draft else self._slots_of_rank(routed, ep_rank, ep_size)
        chosen = placement.choose, placement.kept
        layer = ExpertLayer(self.memory, layer_id, num_experts, num_shared, first, *chosen, num_slots=slots, location=location)
        model.layers.append(layer)
        model.num_experts = max(model.num_experts, routed * ep_size)
        self._bar.update()
        return layer

    def _slots_of_rank(self, routed: int, ep_rank: int, ep_size: int) -> int:
        """Of a layer with ``routed`` local experts: none where nothing is offloaded, or where ``auto`` found no number."""
        if self.config.slots == UNRESOLVED or self.config.num_resident >= routed * ep_size:
            return 0
        return rank_share(self.config.slots, ep_rank, ep_size)

    def finish_model(self, model: ModelExperts, may_be_empty: bool = False) -> None:
        """The model is loaded: make its counters. Raises ``FlagError`` if it has nothing to offload, unless it ``may_be_empty``
        (a pipeline stage can hold dense layers only)."""
        self._bar.close()
        layers = model.layers
        if not (model.draft or any(layer.tensors for layer in layers) or (may_be_empty and not layers)):
            found = "no MoE layer" if not layers else f"{len(layers)} MoE layers, none with experts large enough to place"
            raise FlagError([f"{flag_name('num_resident')} {self.config.num_resident}: the model has {found}"])
        model.counters = self.make_counters(len(layers), model.width)
        if not model.draft:
            self.observer = Observer(model.counters, model)
            self.history = History(self.ledger, self.clock)
            self.logical = LogicalCounts(model)
            self._extents, self._next_resident = model.extents, model.resident_extents()
            if self.config.adapt == "continuous":
                self.background = self._follow_traffic(())

    def _follow_traffic(self, counted: Sequence[RoutingCounts]) -> BackgroundAdaptation:
        """Continuous adaptation from here on, which has seen the profile and then ``counted``."""
        history = [past for past in (self._past(), *counted) if past is not None]
        adaptation = Adaptation(self.target, self.ledger.counted, history, self.config.coactivation)
        return BackgroundAdaptation(adaptation, self.clock, self.executor)

    def _past(self) -> RoutingCounts | None:
        """The profile's counts for the target's layers, None without a profile."""
        profile, target = self.profile, self.target
        if profile is None:
            return None
        rows = profile.model.rows([layer.layer_id for layer in target.layers])
        return profile.part(rows, target.locations, target.width)

    @property
    def profile(self) -> Profile | None:
        """The routing that residents were chosen from at load."""
        return self.placement.profile

    # Serving

    def begin_serving(self) -> None:
        """All models are loaded, and their graphs captured: what a step uses counts from here on."""
        self.drafts.begin(self.models)
        number = self.config.draft_num_resident
        if number is not None and any(model.draft for model in self.models) and not self.drafts.any:
            logger.warning(
                "Expert offload: %s %d: the draft model has nothing to offload", flag_name("draft_num_resident"), number
            )
        self.drafts.due_at = self.config.warmup_tokens if self.config.residents_change else None

    def begin_step(self, model: ModelExperts, valid_rows: int, tokens: int, phase: Phase, *, streams: bool = False) -> None:
        """Call it before each forward step of ``model`` is launched. The first ``valid_rows`` rows of its batch are tokens (0:
        a dummy run); all ranks together compute ``tokens``. ``streams``: whether any layer computes from a copy of its experts;
        such a step counts as prefill. Residents begin to change here, between steps of the target."""
        if model.counters is None:
            return
        if not model.draft:
            if not self.warm and not self.paused and self.tokens - self._chosen_at[1] >= self.config.warmup_tokens:
                self.reselect()
            elif self.config.adapt == "continuous" and tokens and self.steps % INTERVAL_STEPS == 0:
                self.adapt()
            if not self.paused and self.drafts.due(self.tokens):
                self._choose_for_drafts()
            self.tokens += tokens
            self.steps += tokens > 0
        model.counters.begin_step(valid_rows, Phase.PREFILL if streams else phase)

    def end_step(self, model: ModelExperts) -> None:
        """The step is launched. What runs until the next one (graph capture, warm-up kernels) does not count."""
        if model.counters is not None:
            model.counters.begin_step(0, Phase.DECODE)

    def reselect(self) -> None:
        """Choose the residents anew from the routing of the warm-up, and start to move what changed; a profile's residents stay
        if their hit rate is about as high. Outputs do not change.

        Every rank that holds a shard of the same experts must call it before the same step. A fault ends moving; serving goes
        on.
        """
        earlier, tokens = self._chosen_at
        total = self.routing(wait=True)
        seen = total if earlier is None else total.since(earlier)
        before, after = self._agree(lambda resident: self._after_warmup(seen, resident))
        kept = not (after ^ before).any()
        if self.profile is not None:
            self._judge_profile(seen, before, kept)
        if self.profile is None or not kept:
            self._move_to(seen, self.tokens - tokens, before, after)
        self._chosen_at = total, self.tokens

    def weights_updated(self) -> None:
        """The weights are others from now on: residents that a warm-up chose are chosen anew after another one. Every rank that
        holds a shard of the same experts must call it before the same step."""
        if self.config.resident_selection == "frequency" and self.config.adapt == "warmup":
            self._chosen_at = self.routing(wait=True), self.tokens
            self.warm = False
        if self.config.residents_change:
            self.drafts.due_at = self.tokens + self.config.warmup_tokens

    def readvise(self) -> None:
        """``reselect`` for an operator: now, from the routing since residents were last chosen so, and whatever a profile
        says. It ends the warm-up. Without a token since, nothing changes."""
        earlier, tokens = self._chosen_at
        if self._sleep.asleep:
            logger.info("Expert offload: the server has given up its memory; residents are not chosen now")
            return
        if self.tokens == tokens:
            logger.info("Expert offload: no token since residents were last chosen; they stay")
            return
        total = self.routing(wait=True)
        seen = total if earlier is None else total.since(earlier)
        before, after = self._agree(lambda resident: self._best_without_fault(seen, resident))
        if self.fault is None:
            self._move_to(seen, self.tokens - tokens, before, after)
        self._chosen_at = total, self.tokens
        self._choose_for_drafts()

    def _choose_for_drafts(self) -> None:
        for move in self.drafts.choose(self.broadcast_decision):
            self._submit(functools.partial(self._move_draft, move))

    def _move_draft(self, move: DraftMove) -> None:
        move.make(self.mover)
        self.fault = self.fault or self.mover.fault

    def _agree(self, choose: Callable[[np.ndarray], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """``bool[extents]``: the residents before, and those that the rank that decides chooses. The warm-up is over."""
        self._follow_tensors()
        before = self._next_resident
        after = self.broadcast_decision(lambda: choose(before))
        if self.background is not None:
            self.background.drop()  # it was made for the old residents
        self.warm = True
        return before, after

    def _move_to(self, seen: RoutingCounts, tokens: int, before: np.ndarray, after: np.ndarray) -> None:
        self._next_resident = after
        self._submit(lambda: self._move_and_log(seen, tokens, before, after))

    def settle(self) -> None:
        """Call it before SGLang rearranges experts: account for all steps so far, and wait for the moves under way."""
        self.wait_for_moves()
        self.observer.catch_up()

    def rearranged(self, locations: Sequence[ExpertLocation], gather: GatherCounts) -> None:
        """SGLang has rearranged experts since ``settle``: those of the target's layers are at ``locations`` now. Counts follow
        them, and so do residents, in the VRAM of each layer, where traffic or a profile chose them.

        Every rank that shares the layers must call it before the same step."""
        target, counted = self.target, self.ledger.counted
        own = self.logical.of(counted)
        changed = np.array([bool((a.experts != b.experts).any()) for a, b in zip(target.locations, locations, strict=True)])
        earlier, tokens = self._chosen_at
        since = counted if earlier is None else counted.since(earlier)
        own_since = by_expert(since.counts, target.locations, target.num_logical)
        every, every_since = np.sum(gather(np.stack([own.counts, own_since])), axis=0)
        recent = self._recent.fade_and_add(RoutingCounts(every, own.steps))
        for layer, location in zip(target.layers, locations, strict=True):
            layer.location = location
        seen = rederived(counted, by_place(every, locations, target.width), target, changed)
        recent = RoutingCounts(by_place(recent.counts, locations, target.width), recent.steps)
        self.logical.rearranged(own, seen)
        self.observer.go_on_from(seen)
        if self.background is not None:
            self.background = self._follow_traffic([recent])
        chosen_from = self._chosen_from(recent)
        if chosen_from is not None and not self.paused:
            self._follow_experts(chosen_from, changed)
        if earlier is not None:
            since = rederived(since, by_place(every_since, locations, target.width), target, changed)
            self._chosen_at = seen.since(since), tokens

    def _chosen_from(self, live: RoutingCounts) -> RoutingCounts | None:
        """The counts that residents are chosen from by now: the ``live`` ones, or a profile's; None where neither chose
        them."""
        warmed_up = self._chosen_at[0] is not None or (self.config.adapt == "continuous" and self.warm)
        return live if warmed_up and self.config.adapt != "off" else self._past()

    def _follow_experts(self, seen: RoutingCounts, changed: np.ndarray) -> None:
        """Move to the residents that are best for ``seen`` in the layers ``changed`` (``bool[layers]``)."""
        self._follow_tensors()
        before, layer = self._next_resident, self.target.extents.layer
        after = self.broadcast_decision(lambda: np.where(changed[layer], self._best_without_fault(seen, before), before))
        self._next_resident = after
        self._submit(lambda: self._move(after, show=False))

    def pause(self) -> None:
        """Residents stay where they are until ``resume``; counting and the forecast go on, and so does a move under way. Every
        rank that holds a shard of the same experts must call it before the same step."""
        self.paused = True
        if self.background is not None:
            self.background.drop()

    def resume(self) -> None:
        """Residents may change again."""
        self.paused = False

    def sleep(self) -> None:
        """All experts leave VRAM, those of draft models too, until ``wake``. Call it while no step runs."""
        if self.background is not None:
            self.background.drop()
        self.wait_for_moves()
        self._sleep.begin([layer for model in self.models for layer in model.layers])

    def wake(self) -> None:
        """The experts come back to VRAM where they were. Call it before the next step."""
        self._sleep.end()

    def _move_and_log(self, seen: RoutingCounts, tokens: int, before: np.ndarray, after: np.ndarray) -> None:
        started, earlier = time.perf_counter(), self.ledger.moved_bytes
        routed, share = seen.routed(), self.target.resident_share
        reached = hit_rate(routed, share(before))
        self._move(after, show=True)
        extents, now = self.target.extents, self.target.resident_extents()
        logger.info(
            "Expert offload: residents chosen from the routing of %d tokens (%d prefill and %d decode steps): "
            "%s of %s of residents changed in %d layers; hit rate of these tokens %.1f %% before, %.1f %% after; "
            "%s moved in %.2f s",
            tokens,
            *seen.steps,
            size(extents.total(now & ~before)),
            size(extents.total(before)),
            len(self.target.layers),
            100 * reached,
            100 * hit_rate(routed, share(now)),
            size(self.ledger.moved_bytes - earlier),
            time.perf_counter() - started,
        )

    def adapt(self) -> None:
        """Poll the counts, and start the moves that were decided on the steps before the last poll. It waits for no step and no
        move: both go on together. Every rank that holds a shard of the same experts must call it before the same step."""
        polled = self.observer.poll()
        self._follow_tensors()
        before = self._next_resident
        after = self.broadcast_decision(lambda: self._background_decision(before))
        if after is None or self.fault is not None:  # a rank with a fault joins the broadcast too: its peers wait for it
            return
        if not polled:
            self.observer.catch_up()
        self._next_resident = after
        self._submit(lambda: self._move(after, show=False))

    def _follow_tensors(self) -> None:
        """An update of the weights may have replaced tensors by some with other extents."""
        if self.target.extents is self._extents:
            return
        self._extents, self._next_resident = self.target.extents, self.target.resident_extents()
        if self.background is not None:
            self.background.follow(self.target)

    def _background_decision(self, resident: np.ndarray) -> np.ndarray | None:
        """The residents to move to, None for no change. Called on the rank that decides."""
        if self.background is None or self.fault is not None:
            return None
        try:
            return self.background.collect_and_submit(self.observer.pending, resident, may_move=self.warm and not self.paused)
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- logged with its trace and shown as the fault
            # Steps do not depend on decisions, and peers wait for this rank's answer. A GPU error recurs at the next kernel and
            # ends the process there. The exit of another thread is none of this one's.
            self.background = None
            self._stopped("choosing residents", error)
            return None

    def _submit(self, move: Callable[[], None]) -> None:
        """Run ``move`` after what was submitted before. It changes where steps read the experts' bytes, not the bytes."""

        def guarded() -> None:
            try:
                move()
            except (Exception, SystemExit) as error:  # noqa: BLE001 -- logged with its trace and shown as the fault
                # Nobody reads a move's result, so an error would be lost here. Steps are right wherever the bytes are; a GPU
                # error recurs at the next kernel and ends the process there.
                self._stopped("moving experts", error)

        self._moving = self.executor.submit(guarded)

    def _stopped(self, what: str, error: BaseException) -> None:
        self.fault = f"{what} failed: {type(error).__name__}: {error}"
        logger.error(
            "Expert offload: adapting stopped: %s. Serving goes on with the current residents; outputs are not affected.",
            self.fault,
            exc_info=error,
        )

    @property
    def moving(self) -> bool:
        """Whether a move is under way."""
        return self._moving is not None and not self._moving.done()

    def wait_for_moves(self) -> None:
        """Wait for the moves and looks under way, before code that may replace tensors. Raises ``TimeoutError`` if any
        hangs."""
        tasks = [task for task in (self._moving, self._looking) if task is not None]
        if wait(tasks, STUCK_SECONDS).not_done:
            raise TimeoutError(f"moves of experts have not ended in {STUCK_SECONDS:g} s; start the server anew")

    def _move(self, after: np.ndarray, show: bool) -> None:
        """Make the extents ``after`` resident, and add to the ledger. Runs on the executor."""
        started = time.perf_counter()
        before = self.target.resident_extents()
        self.ledger.moved_bytes += self.mover.move(self.target.by_layer(after), show)
        self.fault = self.fault or self.mover.fault
        self.ledger.moves += int((self.target.resident_extents() & ~before).sum())
        self.ledger.moving_seconds += time.perf_counter() - started

    def _after_warmup(self, seen: RoutingCounts, resident: np.ndarray) -> np.ndarray:
        """``bool[extents]``: the residents after the warm-up. Called on the rank that decides."""
        best = best_residents(self.target, seen, resident)
        if self.profile is None:
            return best
        share = self.target.resident_share
        lead = hit_rate(seen.routed(), share(best)) - hit_rate(seen.routed(), share(resident))
        return resident if self.config.adapt == "off" or lead <= PROFILE_SLACK else best

    def _best_without_fault(self, seen: RoutingCounts, resident: np.ndarray) -> np.ndarray:
        """``bool[extents]``: the best residents for ``seen``; after a fault they stay. Called on the rank that decides."""
        return resident if self.fault is not None else best_residents(self.target, seen, resident)

    def _judge_profile(self, seen: RoutingCounts, resident: np.ndarray, kept: bool) -> None:
        """Log the hit rate of the profile's residents on live traffic."""
        sets = (resident, best_residents(self.target, seen, resident))
        reached, best = (hit_rate(seen.routed(), self.target.resident_share(each)) for each in sets)
        self.profile_verdict = ProfileVerdict(hit_rate=reached, best=best, tokens=self.tokens, kept=kept)
        logger.info(
            "Expert offload: profile %s: hit rate %.1f %% over the first %d live tokens; the best residents for these tokens "
            "would reach %.1f %%: %s",
            ", ".join(map(str, self.config.profiles)),
            100 * reached,
            self.tokens,
            100 * best,
            "residents kept" if kept else "residents are chosen again",
        )

    # Accounting

    def poll(self) -> None:
        """Update the ledger with the counts that have arrived, without waiting. Continuous adaptation polls before every step,
        so no request is made here: it would still be in flight at the next of those polls."""
        if self.config.adapt != "continuous":
            self.observer.poll()
        self.history.add(self.tokens)

    def poll_if_due(self) -> None:
        """``poll`` every ``POLL_SECONDS``, and look for evicted residents every ``LOOK_SECONDS``, without waiting. Call it
        between steps."""
        now = self.clock()
        if now >= self._poll_at:
            self._poll_at = now + POLL_SECONDS
            self.poll()
        if now < self._look_at:
            return
        if self._looking is None or self._looking.done():
            self.look_for_evictions()
        elif now >= self._look_at + STUCK_SECONDS and self.fault is None:
            self._stopped("moving experts", TimeoutError(f"a call to the driver has not returned in {STUCK_SECONDS:g} s"))

    def look_for_evictions(self) -> None:
        """Begin a look, beside the steps."""
        self._look_at = self.clock() + LOOK_SECONDS
        layers = [layer for model in self.models for layer in model.layers]
        self._looking = self.executor.submit(self.evictions.look, layers)

    def poll_when_idle(self) -> None:
        """``poll`` until the last step before the idle time is in the ledger."""
        if self.ledger.steps < self.steps:
            self.observer.poll()
            self.history.add(self.tokens)

    def routing(self, wait: bool) -> RoutingCounts:
        """The target model's routing counts, slightly stale; with ``wait``, those of all steps so far."""
        if wait:
            self.observer.catch_up()
        elif self.ledger.steps < self.steps:
            self.poll()
        return self.ledger.counted

    def logical_routing(self, wait: bool) -> RoutingCounts:
        """``routing`` by the checkpoint's expert: ``[layers, phase, kind, num_logical]``."""
        return self.logical.of(self.routing(wait))

    @property
    def target(self) -> ModelExperts:
        return next(model for model in self.models if not model.draft)

    @property
    def ledger(self) -> Ledger:
        """Totals of the target model's steps."""
        return self.observer.ledger
