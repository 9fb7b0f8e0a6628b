"""Where the two flows meet: holds every routed expert of a rank, counts its routing, and chooses who is resident."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from tqdm import tqdm

from sglang_uvm_offload import policy
from sglang_uvm_offload.adaptation import INTERVAL_STEPS, Adaptation
from sglang_uvm_offload.config import FlagError, OffloadConfig, ResidentIds
from sglang_uvm_offload.decisions import Decisions
from sglang_uvm_offload.expert_layer import ExpertLayer, check_host_ram
from sglang_uvm_offload.history import History, coverage_curve
from sglang_uvm_offload.ledger import Ledger, stack
from sglang_uvm_offload.observer import Observer
from sglang_uvm_offload.profile import Profile
from sglang_uvm_offload.report import size
from sglang_uvm_offload.routing import ROUTED, TOUCHES, Phase, RoutingCounters, RoutingCounts
from sglang_uvm_offload.uvm import Memory, MemoryFault

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""How often a busy rank's history looks at the counts."""

MakeCounters = Callable[[int, int], RoutingCounters]
"""(layers, experts a layer) -> counters on the device that computes."""
PROFILE_SLACK = 0.05
"""By how much of its coverage the best set for the live warm-up may beat a profile's residents before they are chosen anew.
That set is chosen by the very tokens that it is measured on, so some lead says nothing."""

Agree = Callable[[Callable[[], Any]], Any]
"""Calls its argument on the first of the ranks that hold shards of the same experts, and returns the result on all of them."""


@dataclass(eq=False)
class ModelExperts:
    """The MoE layers of one loaded model on this rank. A draft model's experts are all resident and only counted."""

    draft: bool
    layers: list[ExpertLayer] = field(default_factory=list)
    counters: RoutingCounters | None = None


class OffloadManager:
    """One rank's experts. All methods run on the thread that launches the model's forward steps."""

    def __init__(
        self,
        config: OffloadConfig,
        memory: Memory,
        make_counters: MakeCounters,
        agree: Agree,
        progress: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        thinker: Executor | None = None,
    ):
        """``thinker``: where ``Decisions`` of continuous adaptation are made."""
        self.config = config
        self.memory = memory
        self.make_counters = make_counters
        self.agree = agree
        self.progress = progress
        self.clock = clock
        self.thinker = thinker
        self.models: list[ModelExperts] = []
        self.moe_layers: tuple[int, ...] = ()
        """The decoder layers of the target model that route, over all pipeline stages, in order."""
        self.profile: Profile | None = None
        """The routing that residents are chosen from at load."""
        self.profile_verdict: dict[str, object] | None = None
        """What live traffic showed of the profile: its coverage, that of the best residents, and whether it was kept."""
        self.tokens = 0
        self.steps = 0
        self.fault: str | None = None
        self.observer: Observer
        """Sees what the target model's steps were served from; there is one once the model is loaded."""
        self.history: History
        """How the ledger came to its totals."""
        self._poll_at = 0.0
        self.decisions: Decisions | None = None
        """Follow the traffic, where that was asked for."""
        self.warm = config.resident_selection != "frequency"
        """Whether the resident set is final: chosen from the routing, or given."""
        self._placing: tqdm | None = None
        self._ids = ResidentIds.parse(config.resident_ids) if config.resident_ids is not None else None

    # Loading

    def begin_model(self, draft: bool) -> ModelExperts:
        model = ModelExperts(draft)
        self.models.append(model)
        self._placing = self._bar("Placing experts", len(self.moe_layers) or None)
        return model

    def add_layer(
        self,
        model: ModelExperts,
        layer_id: int,
        num_experts: int,
        num_shared: int,
        ep_rank: int,
        ep_size: int,
    ) -> ExpertLayer:
        """Take decoder layer ``layer_id`` in, with ``num_experts`` local experts, ``num_shared`` of them fused shared ones."""
        routed = num_experts - num_shared
        resident = np.zeros(num_experts, dtype=bool)
        if model.draft:
            resident[:] = True
        elif self._ids is not None:
            first = ep_rank * routed
            resident[[i - first for i in self._ids_of(layer_id) if first <= i < first + routed]] = True
        else:
            resident[: rank_share(self.config.residents, ep_rank, ep_size)] = True
            if self.profile is not None and layer_id in self.moe_layers:
                past = self.profile.part([layer_id], [range(ep_rank * routed, (ep_rank + 1) * routed)], num_experts)
                slots = np.arange(num_experts)[None] < routed
                resident = _hottest(past, resident[None], ~slots, slots)[0]
        layer = ExpertLayer(self.memory, layer_id, num_experts, num_shared, ep_rank * routed, resident)
        model.layers.append(layer)
        if self._placing is not None:
            self._placing.update()
        return layer

    def _ids_of(self, layer_id: int) -> frozenset[int]:
        assert self._ids is not None
        if layer_id not in self.moe_layers:
            raise FlagError([f"--expert-offload-resident-ids: layer {layer_id} routes, which the model's config does not tell"])
        return self._ids.of_layer(self.moe_layers.index(layer_id))

    def finish_model(self, model: ModelExperts, may_be_empty: bool = False) -> None:
        """The model is loaded: make its counters. Raises ``FlagError`` if there is nothing to offload in it, unless it
        ``may_be_empty`` (a pipeline stage can hold dense layers only)."""
        self.memory.synchronize()
        if self._placing is not None:
            self._placing.close()
            self._placing = None
        layers = model.layers
        if not (model.draft or any(layer.tensors for layer in layers) or (may_be_empty and not layers)):
            found = "no MoE layer" if not layers else f"{len(layers)} MoE layers, none with experts large enough to place"
            raise FlagError([f"--expert-offload-num-resident {self.config.num_resident}: the model has {found}"])
        model.counters = self.make_counters(len(layers), max((layer.num_experts for layer in layers), default=1))
        if not model.draft:
            self.observer = Observer(model.counters, layers)
            self.history = History(self.ledger, self.clock)
            if self.config.adapt == "continuous":
                width, start = model.counters.num_experts, self.ledger.counted
                adaptation = Adaptation(layers, width, self.config.layers_share, start, self._past_of(layers, width))
                self.decisions = Decisions(adaptation, self.clock, self.thinker)

    def _past_of(self, layers: Sequence[ExpertLayer], width: int) -> RoutingCounts | None:
        """What the profile holds of these layers."""
        if self.profile is None or not {layer.layer_id for layer in layers} <= set(self.moe_layers):
            return None
        return self.profile.part([layer.layer_id for layer in layers], [layer.routed_ids for layer in layers], width)

    # Serving

    def begin_step(self, model: ModelExperts, rows: int, tokens: int, phase: Phase) -> None:
        """A forward step of ``model`` is about to be launched: ``rows`` of its rows are tokens (0: a dummy run), and all
        ranks together compute ``tokens``. Between steps of the target model is where residents change."""
        if model.counters is None:
            return
        if not model.draft:
            if not self.warm and self.tokens >= self.config.warmup_tokens:
                self.reselect()
            elif self.config.adapt == "continuous" and tokens and self.steps % INTERVAL_STEPS == 0:
                self.adapt()
            self.tokens += tokens
            self.steps += tokens > 0
        model.counters.begin_step(rows, phase)

    def end_step(self, model: ModelExperts) -> None:
        """The step is launched: whatever runs until the next one (graph capture, warm-up kernels) does not count."""
        if model.counters is not None:
            model.counters.begin_step(0, Phase.DECODE)

    def reselect(self) -> None:
        """Choose the resident set anew from all routing seen so far, and move what changed, unless the residents that a
        profile chose do about as well. Outputs do not change.

        Every rank that holds a shard of the same experts must call it before the same step. A ``MemoryFault`` ends
        the moving, not the serving.
        """
        started = time.perf_counter()
        seen = self.routing(wait=True)
        layers = self.target.layers
        before = self._residents()
        after = self.agree(lambda: self._after_warmup(seen, before))
        if self.decisions is not None:
            self.decisions.drop()  # it was made for the residents of before
        self.warm = True
        if self.profile is not None:
            self._judge_profile(seen, before, kept=not (after ^ before).any())
        if self.profile is not None and not (after ^ before).any():
            return
        moved = self._move(after, wait=True)
        seconds = time.perf_counter() - started
        now = self._residents()
        changed = int((now & ~before).sum())
        self.ledger.moves += changed
        self.ledger.moved_bytes += moved
        self.ledger.moving_seconds += seconds
        routed = seen.routed()
        logger.info(
            "Expert offload: residents chosen from the routing of %d tokens (%d prefill and %d decode steps): "
            "%d of %d residents changed in %d layers; coverage of these tokens %.1f %% before, %.1f %% after; "
            "%s moved in %.2f s",
            self.tokens,
            *seen.steps,
            changed,
            int(before.sum()),
            len(layers),
            100 * coverage(routed, before),
            100 * coverage(routed, now),
            size(moved),
            seconds,
        )

    def adapt(self) -> None:
        """Look at what was counted of late, and move what pays for itself. It waits for no step: what is decided on the steps
        up to now is taken up at the next look, and moves go on while steps run. Every rank that shares experts must call it
        before the same step."""
        looked = self.observer.look()
        before = self._residents()
        after = self.agree(lambda: self._decided(before))
        if after is None or self.fault is not None:  # a rank with a fault still agrees: its peers wait for it
            return
        started = time.perf_counter()
        if not looked:
            self.observer.catch_up()
        try:
            self.memory.synchronize()  # the last moves, queued steps ago: a fault that they met shows here
        except MemoryFault as fault:
            self._stop_moving(fault, self.target.layers)
            return
        self.ledger.moved_bytes += self._move(after, wait=False)
        self.ledger.moves += int((self._residents() & ~before).sum())
        self.ledger.moving_seconds += time.perf_counter() - started

    def _decided(self, resident: np.ndarray) -> np.ndarray | None:
        """What adaptation wants resident instead, None for no change. Called on the rank that decides."""
        if self.decisions is None or self.fault is not None:
            return None
        try:
            return self.decisions.take(self.observer.asked, resident, may_move=self.warm)
        except Exception as error:
            # Whatever it was, no step computes with a decision, and peers wait for this rank's answer. It is logged with its
            # trace and shown as the fault. An error of the GPU comes again with the next kernel, and ends the process there.
            self.decisions = None
            self.fault = f"choosing residents failed: {type(error).__name__}: {error}"
            logger.error(
                "Expert offload: adapting stopped: %s. Serving goes on with the residents of now; outputs are not affected.",
                self.fault,
                exc_info=error,
            )
            return None

    def _after_warmup(self, seen: RoutingCounts, resident: np.ndarray) -> np.ndarray:
        """``bool[layers, experts]``: who is to be resident after the warm-up. Called on the rank that decides."""
        best = self._best(seen, resident)
        if self.profile is None:
            return best
        lead = coverage(seen.routed(), best) - coverage(seen.routed(), resident)
        return resident if self.config.adapt == "off" or lead <= PROFILE_SLACK else best

    def _best(self, seen: RoutingCounts, resident: np.ndarray) -> np.ndarray:
        """As many residents of each layer as now, the ones with the most expected touches."""
        layers = self.target.layers
        pinned = stack([layer.pinned for layer in layers], resident.shape[1])
        slots = stack([np.ones(layer.num_experts, dtype=bool) for layer in layers], resident.shape[1])
        return _hottest(seen, resident, pinned, slots)

    def _judge_profile(self, seen: RoutingCounts, resident: np.ndarray, kept: bool) -> None:
        """Say how far the profile's residents covered live traffic."""
        routed = seen.routed()
        covered, best = coverage(routed, resident), coverage(routed, self._best(seen, resident))
        self.profile_verdict = {"coverage": covered, "best": best, "tokens": self.tokens, "kept": kept}
        logger.info(
            "Expert offload: profile %s: its residents covered %.1f %% of the routing of the first %d live tokens, and the "
            "best residents for these tokens %.1f %%: %s",
            self.config.profile,
            100 * covered,
            self.tokens,
            100 * best,
            "kept" if kept else "not trusted, residents are chosen again",
        )

    def _move(self, after: np.ndarray, wait: bool) -> int:
        """Demote before promoting, so that never more is resident than before: layer by layer where one layer's promotions take
        what its own demotions gave, else all demotions first. Without ``wait`` the moves are queued in that order, and a
        late fault shows in the next call. What host RAM has no room for is not demoted. Returns the bytes asked to move."""
        moved = 0
        pairs = [(la, wanted[: la.num_experts]) for la, wanted in zip(self.target.layers, after, strict=True)]
        pairs = [(la, wanted) for la, wanted in pairs if (la.resident != wanted).any()]
        balanced = all(la.resident.sum() >= wanted.sum() for la, wanted in pairs)
        rounds = [pairs] if balanced else [[(la, la.resident & wanted) for la, wanted in pairs], pairs]
        order = list(itertools.chain.from_iterable(rounds))
        bar = self._bar("Moving experts", len(order), show=wait)
        # Where each move is waited for, host RAM is looked at before each: other ranks take of it at the same time.
        for group in [[pair] for pair in order] if wait or not order else [order]:
            try:
                needed = sum(layer.host_bytes_to_demote(wanted) for layer, wanted in dict(group).items())
                check_host_ram(self.memory, "demote", _named([layer for layer, _ in group]), needed)
                for layer, wanted in group:
                    moved += layer.demote(wanted)
                    if wait:
                        self.memory.synchronize()
                    moved += layer.promote(wanted)
                    if wait:
                        self.memory.synchronize()
                    bar.update()
            except MemoryFault as fault:
                self._stop_moving(fault, [layer for layer, _ in group])
                break
        bar.close()
        return moved

    def _stop_moving(self, fault: MemoryFault, layers: Sequence[ExpertLayer]) -> None:
        """Serve on with the experts where they are; ``layers`` may have moved in part."""
        for layer in layers:
            layer.reread_residency()
        self.fault = str(fault)
        logger.error(
            "Expert offload: moving experts stopped: %s. Serving goes on with the experts where they are; outputs are not "
            "affected, decoding may be slower.",
            fault,
        )

    def _bar(self, what: str, total: int | None, show: bool = True) -> tqdm:
        return tqdm(desc=what, total=total, unit="layer", disable=not (show and self.progress()), leave=False)

    # Reporting

    def poll(self) -> None:
        """Bring the ledger up to what the device has reported by now, without waiting. Where every step looks, these looks do:
        what is asked for in between would still be on its way at the next of them."""
        if self.config.adapt != "continuous":
            self.observer.look()
        self.history.add(self.tokens)

    def poll_now_and_then(self) -> None:
        """``poll`` if the last time is ``POLL_SECONDS`` ago. Call it between steps."""
        now = self.clock()
        if now >= self._poll_at:
            self._poll_at = now + POLL_SECONDS
            self.poll()

    def poll_when_idle(self) -> None:
        """``poll`` until the last step before the idleness is in the ledger."""
        if self.ledger.steps < self.steps:
            self.observer.look()
            self.history.add(self.tokens)

    def routing(self, wait: bool) -> RoutingCounts:
        """What the target model's routing was, of some moments ago or, with ``wait``, of all steps so far."""
        if wait:
            self.observer.catch_up()
        elif self.ledger.steps < self.steps:
            self.poll()
        return self.ledger.counted

    def status(self) -> dict[str, object]:
        """What ``/server_info`` shows of this rank. Plain JSON values; bytes and seconds."""
        self.observer.catch_up()
        layers, ledger = self.target.layers, self.ledger
        return {
            "backend": self.memory.name,
            "num_layers": len(layers),
            "num_experts": sum(layer.num_experts for layer in layers),
            "resident_experts": int(sum(layer.resident.sum() for layer in layers)),
            "offloaded_experts": int(sum((~layer.resident).sum() for layer in layers)),
            "resident_bytes": sum(layer.resident_bytes for layer in layers),
            "offloaded_bytes": sum(layer.offloaded_bytes for layer in layers),
            "plain_bytes": sum(layer.plain_bytes for layer in layers),
            "stranded_bytes": sum(layer.stranded_bytes for layer in layers) if self._moves else 0,
            "draft_layers": sum(len(model.layers) for model in self.models if model.draft),
            "draft_bytes": sum(layer.resident_bytes for model in self.models if model.draft for layer in model.layers),
            "layers": [self._layer_status(row) for row in range(len(layers))],
            "resident_ids": [(np.flatnonzero(layer.resident) + layer.first_expert).tolist() for layer in layers],
            "tokens": self.tokens,
            "warmup_done": self.warm,
            "adapt": self.config.adapt,
            "per_layer": self.config.layers_share,
            "profile": self.profile_verdict,
            "routed": int(ledger.routed.sum()),
            "coverage": ledger.coverage,
            "read_through_bytes": int(ledger.read_through_bytes.sum()),
            "moves": ledger.moves,
            "moved_bytes": ledger.moved_bytes,
            "moving_seconds": ledger.moving_seconds,
            "fault": self.fault,
            "history": self.history.past(self.tokens),
            "curve": msgspec.to_builtins(coverage_curve(ledger.counted, layers)),
        }

    @property
    def _moves(self) -> bool:
        """Whether residents ever change."""
        adapt = self.config.adapt
        return adapt == "continuous" or (adapt == "warmup" and self.config.resident_selection == "frequency")

    def _layer_status(self, row: int) -> dict[str, int]:
        layer, ledger = self.target.layers[row], self.ledger
        shared = int(layer.pinned.sum())
        return {
            "layer": layer.layer_id,
            "first_expert": layer.first_expert,
            "experts": layer.num_experts - shared,
            "shared_experts": shared,
            "expert_bytes": layer.expert_bytes,
            "routed": int(ledger.routed[row]),
            "routed_resident": int(ledger.routed_resident[row]),
            "touches": int(ledger.touches[row]),
            "touches_resident": int(ledger.touches_resident[row]),
            "read_through_bytes": int(ledger.read_through_bytes[row]),
        }

    @property
    def target(self) -> ModelExperts:
        return next(model for model in self.models if not model.draft)

    @property
    def ledger(self) -> Ledger:
        """What the target model's steps were served from."""
        return self.observer.ledger

    def _residents(self) -> np.ndarray:
        """``bool[layers, experts]`` of the target model, as wide as its counters."""
        return stack([layer.resident for layer in self.target.layers], self.ledger.counted.counts.shape[-1])


def rank_share(num_resident: int, ep_rank: int, ep_size: int) -> int:
    """How many of a layer's N residents expert-parallel rank ``ep_rank`` keeps: N split as evenly as it goes."""
    return num_resident * (ep_rank + 1) // ep_size - num_resident * ep_rank // ep_size


def _named(layers: Sequence[ExpertLayer]) -> str:
    return f"the experts of MoE layer {layers[0].layer_id}" + (f" and {len(layers) - 1} others" if len(layers) > 1 else "")


def _hottest(seen: RoutingCounts, resident: np.ndarray, pinned: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """``bool[layers, experts]``: as many residents of each layer as now, the ones with the most expected touches; ``pinned``
    ones stay, and what is not in ``slots`` is no expert."""
    scores = policy.score(seen.counts[:, Phase.DECODE, TOUCHES], seen.steps[1], seen.counts[:, Phase.PREFILL, ROUTED])
    return policy.select(np.where(slots, scores, -1.0), (resident & ~pinned).sum(axis=1), resident, pinned)


def coverage(routed: np.ndarray, resident: np.ndarray) -> float:
    """The share of routed tokens (``[layers, experts]``) that residents served, 0 where nothing was routed."""
    total = routed.sum()
    return float((routed * resident).sum() / total) if total else 0.0
