"""One rank's experts while it serves: adds layers at load, reads routing counts between steps, and changes residents."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor

from sglang_uvm_offload.config import Settings
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.flags import flag_name
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.memory.link import LinkStatus
from sglang_uvm_offload.memory.protocol import Memory
from sglang_uvm_offload.residency.adaptation import INTERVAL_STEPS, Adaptation
from sglang_uvm_offload.residency.choosing import Chooser
from sglang_uvm_offload.residency.drafts import Drafts
from sglang_uvm_offload.residency.evictions import Evictions
from sglang_uvm_offload.residency.history import History
from sglang_uvm_offload.residency.ledger import Ledger
from sglang_uvm_offload.residency.loading import Loading
from sglang_uvm_offload.residency.logical_counts import LogicalCounts
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.residency.mover import Mover
from sglang_uvm_offload.residency.observer import Observer
from sglang_uvm_offload.residency.placement import InitialPlacement
from sglang_uvm_offload.residency.residents import BroadcastDecision, Residents
from sglang_uvm_offload.residency.sleep import Sleep
from sglang_uvm_offload.residency.stage import Stage
from sglang_uvm_offload.residency.worker import STUCK_SECONDS, Worker
from sglang_uvm_offload.routing.counts import Phase, RoutingCounters, RoutingCounts

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""How often a busy rank polls the counts for its history."""
CHECK_SECONDS = 10.0
"""How often a busy rank checks whether residents were evicted."""

MakeCounters = Callable[[int, int], RoutingCounters]
"""(layers, experts a layer) -> counters on the device that computes."""


class OffloadManager:
    """All methods run on the thread that launches the model's forward steps, but for what moves, which runs on ``executor``."""

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
        """``progress``: whether this rank shows progress bars. ``executor`` runs moves, one after the other, and ``decider``
        decisions, so that the thread that launches steps waits for neither. None: moves run on the calling thread, and
        decisions where moves do."""
        self.config = config
        self.memory = memory
        self.clock = clock
        self.mover = Mover(memory, progress)
        self.worker = Worker(executor)
        self.progress = progress
        self.evictions = Evictions(memory, config.headroom_gb)
        self.drafts = Drafts()
        """The draft models with offloaded experts, once the server serves."""
        self.link: LinkStatus | None = None
        """As measured when the target model was loaded, before ``finish_model``; None where it was not."""
        self.tokens = 0
        self.steps = 0
        self.paused = False
        """Whether an operator has residents stay where they are."""
        self._make_counters = make_counters
        self._decider = decider
        self._broadcast_decision = broadcast_decision
        self._loading = Loading(config, memory, progress)
        self._sleep = Sleep(memory, self.mover)
        self._poll_at = self._check_at = 0.0
        # The following are set once the target model is loaded.
        self.observer: Observer
        """Accounts for its steps."""
        self.history: History
        """The ledger's totals over time."""
        self.logical: LogicalCounts
        """The counts by the checkpoint's expert."""
        self.residents: Residents
        self.chooser: Chooser

    @property
    def models(self) -> list[ModelExperts]:
        return self._loading.models

    @property
    def target(self) -> ModelExperts:
        return next(model for model in self.models if not model.draft)

    @property
    def placement(self) -> InitialPlacement:
        """Of the target model at load."""
        return self._loading.placement

    @property
    def ledger(self) -> Ledger:
        """Totals of the target model's steps."""
        return self.observer.ledger

    @property
    def fault(self) -> str | None:
        """Why residents no longer change on this rank, None while they may."""
        return self.worker.fault or self.mover.fault  # the mover's alone if it failed for ``sleep`` or ``wake``

    @property
    def stage(self) -> Stage:
        if self._sleep.asleep:
            return Stage.ASLEEP
        if self.paused:
            return Stage.PAUSED
        if not self.chooser.warm:
            return Stage.WARM_UP
        return Stage.FOLLOW if self.config.adapt == "continuous" else Stage.STAY

    # Loading

    def begin_model(self, draft: bool, placement: InitialPlacement | None = None) -> ModelExperts:
        """Call it before a model is built. ``placement`` chooses the target model's first residents; the default has no profile
        and is for the first pipeline stage."""
        return self._loading.begin(draft, placement)

    def reserve_model(self, draft: bool, most_slots: int | None = 0) -> ModelExperts:
        """In place of ``begin_model``: the experts of the layers that are added are address space, until ``place_model``.
        ``most_slots``: of a layer, over all ranks that share it; None for as many as experts."""
        return self._loading.reserve(draft, most_slots)

    def place_model(self, model: ModelExperts, placement: InitialPlacement | None = None) -> None:
        """The experts of a built model get their pages, before its first weight is read. ``placement``: of the target, None
        for a draft model."""
        self._loading.place(model, placement)

    def correct(self, num_resident: int) -> None:
        """Move to another number of residents, once the target is loaded and before any step runs."""
        self.mover.move(self._loading.replace(num_resident), show=True)
        self.residents.begin_anew()

    def add_layer(self, model: ModelExperts, shard: LayerShard) -> ExpertLayer:
        """Call it for each MoE layer of the model that is being built, in their order."""
        return self._loading.add_layer(model, shard)

    def finish_model(self, model: ModelExperts, may_be_empty: bool = False) -> None:
        """The model is loaded: make its counters. Raises ``FlagError`` if it has nothing to offload, unless it ``may_be_empty``
        (a pipeline stage can hold dense layers only)."""
        self._loading.end(model, may_be_empty)
        model.counters = self._make_counters(len(model.layers), model.width)
        if model.draft:
            return
        self.observer = Observer(model.counters, model)
        self.history = History(self.ledger, self.clock)
        self.logical = LogicalCounts(model)
        self.residents = Residents(model, self.mover, self.worker, self.ledger, self._broadcast_decision)
        self.chooser = Chooser(self.config, model, self.residents, self.worker, self.placement.profile)
        if self.config.adapt == "continuous":
            self.follow_traffic()

    def follow_traffic(self, *counted: RoutingCounts) -> None:
        """Continuous adaptation from here on, which has seen the profile and then ``counted``."""
        history = [past for past in (self.placement.profile_counts(self.target), *counted) if past is not None]
        self.residents.adaptation = Adaptation(
            self.target,
            self.ledger.counted,
            history,
            coactivation=self.config.coactivation,
            link=None if self.link is None else self.link.measured.together,
            clock=self.clock,
            executor=self._decider or self.worker.executor,
        )

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
            self._change_residents(tokens)
            self.tokens += tokens
            self.steps += tokens > 0
        model.counters.begin_step(valid_rows, Phase.PREFILL if streams else phase)

    def _change_residents(self, tokens: int) -> None:
        """What is due before a step of ``tokens``."""
        stage = self.stage
        if stage is Stage.WARM_UP and self.tokens - self.chooser.chosen_at[1] >= self.config.warmup_tokens:
            self.reselect()
        elif self.config.adapt == "continuous" and tokens and self.steps % INTERVAL_STEPS == 0:
            self.adapt()
        if stage is not Stage.PAUSED and self.drafts.due(self.tokens):
            self._choose_for_drafts()

    def end_step(self, model: ModelExperts) -> None:
        """The step is launched. What runs until the next one (graph capture, warm-up kernels) does not count."""
        if model.counters is not None:
            model.counters.begin_step(0, Phase.DECODE)

    def reselect(self) -> None:
        """The warm-up is over: choose the residents from its routing, and start to move what changed."""
        self.chooser.after_warmup(self.routing(wait=True), self.tokens)

    def adapt(self) -> None:
        """Poll the counts, and start the moves that were decided on the steps before the last poll. It waits for no step and no
        move: both go on together. Every rank that holds a shard of the same experts must call it before the same step."""
        polled = self.observer.poll()
        after = self.residents.adapt()
        if after is not None:
            if not polled:
                self.observer.catch_up()
            self.residents.move_to(after)
        self.residents.decide_next(self.observer.pending, may_move=self.stage is Stage.FOLLOW)

    def _choose_for_drafts(self) -> None:
        for move in self.drafts.choose(self.residents.broadcast_decision):
            self.worker.submit_move(functools.partial(move.make, self.mover))

    def weights_updated(self) -> None:
        """The weights are others from now on: residents that a warm-up chose are chosen anew after another one. Every rank that
        holds a shard of the same experts must call it before the same step."""
        if self.config.resident_selection == "frequency" and self.config.adapt == "warmup":
            self.chooser.warm_up_again(self.routing(wait=True), self.tokens)
        if self.config.residents_change:
            self.drafts.due_at = self.tokens + self.config.warmup_tokens

    def wait_for_moves(self) -> None:
        """Wait for the moves and checks under way, before code that may replace tensors. Raises ``TimeoutError`` if any
        hangs."""
        self.worker.wait()

    # Operating

    def readvise(self) -> None:
        """Choose the residents for an operator: now, from the routing since they were last chosen so. Without a token since,
        nothing changes."""
        if self.stage is Stage.ASLEEP:
            logger.info("Expert offload: the server has given up its memory; residents are not chosen now")
            return
        if self.tokens == self.chooser.chosen_at[1]:
            logger.info("Expert offload: no token since residents were last chosen; they stay")
            return
        self.chooser.on_demand(self.routing(wait=True), self.tokens)
        self._choose_for_drafts()

    def pause(self) -> None:
        """Residents stay where they are until ``resume``; counting and the forecast go on, and so does a move under way. Every
        rank that holds a shard of the same experts must call it before the same step."""
        self.paused = True
        self.residents.drop_decision()

    def resume(self) -> None:
        """Residents may change again."""
        self.paused = False

    def sleep(self) -> None:
        """All experts leave VRAM, draft models' too, until ``wake``. Call it while no step runs."""
        self.residents.drop_decision()
        self.wait_for_moves()
        self._sleep.begin(self._layers())

    def wake(self) -> None:
        """The experts come back to VRAM where they were. Call it before the next step."""
        self._sleep.end()

    # Accounting

    def poll(self) -> None:
        """Update the ledger with the counts that have arrived, without waiting. Continuous adaptation polls before every step,
        so no request is made here: it would still be in flight at the next of those polls."""
        if self.config.adapt != "continuous":
            self.observer.poll()
        self.history.add(self.tokens)

    def poll_if_due(self) -> None:
        """``poll`` every ``POLL_SECONDS``, and check for evicted residents every ``CHECK_SECONDS``, without waiting. Call it
        between steps."""
        now = self.clock()
        if now >= self._poll_at:
            self._poll_at = now + POLL_SECONDS
            self.poll()
        if now < self._check_at:
            return
        if not self.worker.checking:
            self.check_for_evictions()
        elif now >= self._check_at + STUCK_SECONDS and self.fault is None:
            self.worker.stop("moving experts", TimeoutError(f"a call to the driver has not returned in {STUCK_SECONDS:g} s"))

    def check_for_evictions(self) -> None:
        """Begin a check, alongside the steps."""
        self._check_at = self.clock() + CHECK_SECONDS
        self.worker.submit_check(self.evictions.check, self._layers())

    def _layers(self) -> list[ExpertLayer]:
        return [layer for model in self.models for layer in model.layers]

    def poll_when_idle(self) -> None:
        """``poll`` until the last step before the idle time is in the ledger."""
        if self.ledger.steps < self.steps:
            self.observer.poll()
            self.history.add(self.tokens)

    def routing(self, wait: bool) -> RoutingCounts:
        """The target model's routing counts, slightly stale; with ``wait``, up to the last step."""
        if wait:
            self.observer.catch_up()
        elif self.ledger.steps < self.steps:
            self.poll()
        return self.ledger.counted

    def logical_routing(self, wait: bool) -> RoutingCounts:
        """``routing`` by the checkpoint's expert: ``[layers, phase, kind, num_logical]``."""
        return self.logical.of(self.routing(wait))
