"""Prometheus metrics, on ``/metrics`` beside SGLang's own. Layers share a few groups, because a series per expert would be too
many."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from sglang_uvm_offload.files.autosave import Saver
from sglang_uvm_offload.memory.host_ram import host_available
from sglang_uvm_offload.residency.manager import OffloadManager

PREFIX = "sglang:expert_offload_"
PERIOD_SECONDS = 5.0
GROUPS = 4


class Metrics:
    """Publishes the metrics of one rank. A registry holds those of one rank only."""

    def __init__(
        self,
        manager: OffloadManager,
        labels: Mapping[str, str],
        faults: Callable[[], Mapping[str, bool]],
        savers: Sequence[Saver],
        registry: CollectorRegistry = REGISTRY,
        host_free: Callable[[], int] = host_available,
    ):
        """``labels`` identify the rank; every metric carries them. ``faults``: for each background task of this rank, whether a
        fault has ended it. ``savers`` may grow. ``host_free``: bytes of host RAM that are free now."""
        self.manager = manager
        self.labels = dict(labels)
        self.faults, self.savers, self.host_free = faults, savers, host_free
        layered = [*labels, "layers"]

        def gauge(name: str, meaning: str, names: Sequence[str] = tuple(labels)) -> Gauge:
            return Gauge(PREFIX + name, meaning, names, multiprocess_mode="mostrecent", registry=registry)

        def counter(name: str, meaning: str, names: Sequence[str] = tuple(labels)) -> Counter:
            return Counter(PREFIX + name, meaning, names, registry=registry)

        self.resident = gauge("resident_experts", "Experts that are wholly in VRAM.", layered)
        self.resident_bytes = gauge("resident_bytes", "Bytes of experts in VRAM.")
        self.reclaimable_bytes = gauge(
            "reclaimable_bytes",
            "Upper bound on the VRAM that the driver keeps for demoted experts until something needs it.",
        )
        self.offloaded_bytes = gauge("offloaded_bytes", "Bytes of experts in host RAM.")
        self.host_free_bytes = gauge(
            "host_free_bytes", "Bytes of host RAM that this rank may still take, within the limit of its cgroup."
        )
        self.hit_rate = gauge(
            "hit_rate", "Share of routed tokens that residents or slots served since the last report.", layered
        )
        self.byte_hit_rate = gauge(
            "byte_hit_rate",
            "Share of the expert bytes that steps read in place since the last report, each expert once a step, that were in "
            "VRAM.",
            layered,
        )
        self.zero_copy = counter(
            "zero_copy_bytes", "Bytes of offloaded experts that steps read in place over PCIe (lower bound).", layered
        )
        self.streamed = counter(
            "streamed_bytes", "Bytes of offloaded experts copied over PCIe into VRAM for steps with many tokens.", layered
        )
        self.filled = counter("filled_bytes", "Bytes of offloaded experts copied over PCIe into slots.", layered)
        self.slots = counter(
            "slot_activations",
            "Activations of offloaded experts in layers with slots: served by a slot (hit), copied into one (fill), read in "
            "place (bypass).",
            [*layered, "by"],
        )
        self.moves = counter("moves", "Promotions to VRAM, each of neighbouring blocks that hold the same experts.")
        self.moved = counter("moved_bytes", "Bytes promoted and demoted.")
        self.moving = counter("moving_seconds", "Seconds spent moving experts.")
        self.skipped = counter(
            "skipped_moves", "Moves skipped because host RAM had no room for the experts that would have left VRAM."
        )
        self.evicted = gauge(
            "evicted_bytes",
            "Bytes of resident experts that the driver has evicted, estimated from a sample; NaN once looking has failed.",
        )
        self.link = gauge(
            "link_bytes_per_second",
            "Rates of the link, measured with all GPUs at once when the model was loaded: reads in place (scattered, "
            "sequential), copies by a kernel (copied) and by the copy engine (engine).",
            [*labels, "by"],
        )
        self.link_expected = gauge(
            "link_expected_bytes_per_second",
            "Rate at which such a GPU should read scattered experts in place; absent where it is unknown.",
        )
        self.paused = gauge("paused", "1 while an operator has paused moves.")
        self.fault = gauge(
            "fault", "1 once a fault has ended moving, streaming or the trace; the server continues.", [*labels, "of"]
        )
        self.save_failures = counter(
            "save_failures", "Failed saves of the profile, the trace or the statistics.", [*labels, "of"]
        )
        layers = manager.target.layers
        self._groups = [g for g in np.array_split(np.arange(len(layers)), GROUPS) if g.size]
        self._names = [f"{layers[g[0]].layer_id}-{layers[g[-1]].layer_id}" for g in self._groups]
        self._last: list[np.ndarray] = [np.zeros(len(layers)) for _ in range(9)]
        self._last_moves = (0, 0, 0.0, 0)
        self._last_failures: dict[str, int] = {}
        self._evicted_shown = False
        self._next = 0.0
        self._published_steps = 0

    def publish_if_due(self) -> None:
        """``publish`` if ``PERIOD_SECONDS`` have passed since the last time. Call it between steps; it never waits for the
        device."""
        if time.monotonic() >= self._next:
            self.publish()

    def publish_when_idle(self) -> None:
        """``publish`` until the metrics include the last step. After that, every ``PERIOD_SECONDS``, only what changes without
        steps, such as free host RAM."""
        if self.manager.ledger.steps < self.manager.steps or self._published_steps < self.manager.steps:
            self.publish()
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + PERIOD_SECONDS
            self._publish_health()

    def publish(self) -> None:
        self._next = time.monotonic() + PERIOD_SECONDS
        self.manager.poll()
        steps = self.manager.ledger.steps
        ledger, layers = self.manager.ledger, self.manager.target.layers
        totals = (ledger.routed, ledger.routed_resident, ledger.activated_bytes, ledger.zero_copy_bytes, ledger.streamed_bytes)
        by_slots = (ledger.filled_bytes, ledger.slot_hits, ledger.slot_fills, ledger.slot_bypasses)
        now = [total.copy() for total in totals + by_slots]
        routed, hits, used, read, streamed, filled, *slots = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        for group, name in zip(self._groups, self._names, strict=True):
            labels = {**self.labels, "layers": name}
            self.resident.labels(**labels).set(sum(int(layers[i].resident.sum()) for i in group))
            if routed[group].sum():
                self.hit_rate.labels(**labels).set(hits[group].sum() / routed[group].sum())
            if used[group].sum():
                missed = read[group].sum() + filled[group].sum()
                self.byte_hit_rate.labels(**labels).set(1 - missed / used[group].sum())
            self.zero_copy.labels(**labels).inc(int(read[group].sum()))
            self.streamed.labels(**labels).inc(int(streamed[group].sum()))
            self.filled.labels(**labels).inc(int(filled[group].sum()))
            for by, activations in zip(("hit", "fill", "bypass"), slots, strict=True):
                self.slots.labels(**labels, by=by).inc(int(activations[group].sum()))
        moves = (ledger.moves, ledger.moved_bytes, ledger.moving_seconds, self.manager.mover.skipped_moves)
        counters = (self.moves, self.moved, self.moving, self.skipped)
        for counter, new, old in zip(counters, moves, self._last_moves, strict=True):
            counter.labels(**self.labels).inc(new - old)
        self._last_moves = moves
        self._publish_health()
        self._published_steps = steps

    def _publish_health(self) -> None:
        layers = self.manager.target.layers
        self.resident_bytes.labels(**self.labels).set(sum(layer.resident_bytes for layer in layers))
        self.reclaimable_bytes.labels(**self.labels).set(self.manager.reclaimable_bytes)
        self.offloaded_bytes.labels(**self.labels).set(sum(layer.offloaded_bytes for layer in layers))
        self.host_free_bytes.labels(**self.labels).set(self.host_free())
        self.paused.labels(**self.labels).set(self.manager.paused)
        if (link := self.manager.link) is not None:
            for by, rate in dataclasses.asdict(link.measured.together).items():
                self.link.labels(**self.labels, by=by).set(rate * 1e9)
            if link.expected:
                self.link_expected.labels(**self.labels).set(link.expected * 1e9)
        evicted = self.manager.evictions.evicted_bytes
        if evicted is not None or self._evicted_shown:
            self._evicted_shown = True
            self.evicted.labels(**self.labels).set(math.nan if evicted is None else evicted)
        for what, ended in self.faults().items():
            self.fault.labels(**self.labels, of=what).set(ended)
        for saver in self.savers:
            new = saver.failures - self._last_failures.get(saver.what, 0)
            self.save_failures.labels(**self.labels, of=saver.what).inc(new)
            self._last_failures[saver.what] = saver.failures
