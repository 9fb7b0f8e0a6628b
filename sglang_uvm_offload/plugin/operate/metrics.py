"""Prometheus metrics, on ``/metrics`` with SGLang's own, per group of layers rather than per expert."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge

from sglang_uvm_offload.files.autosave import Saver
from sglang_uvm_offload.residency.manager import OffloadManager

PREFIX = "sglang:expert_offload_"
PERIOD_SECONDS = 5.0
GROUPS = 4


class Metrics:
    """Publishes one rank's metrics. A registry holds one of them."""

    def __init__(
        self,
        manager: OffloadManager,
        labels: Mapping[str, str],
        faults: Callable[[], Mapping[str, bool]],
        savers: Sequence[Saver],
        registry: CollectorRegistry = REGISTRY,
    ):
        """``faults``: for each background task of this rank, whether a fault has ended it. ``savers`` may grow."""
        self.manager = manager
        self.labels = dict(labels)
        self.faults, self.savers = faults, savers
        layered = [*labels, "layers"]

        def gauge(name: str, meaning: str, names: Sequence[str] = tuple(labels)) -> Gauge:
            return Gauge(PREFIX + name, meaning, names, multiprocess_mode="mostrecent", registry=registry)

        def counter(name: str, meaning: str, names: Sequence[str] = tuple(labels)) -> Counter:
            return Counter(PREFIX + name, meaning, names, registry=registry)

        self.resident = gauge("resident_experts", "Experts wholly in VRAM.", layered)
        self.resident_bytes = gauge("resident_bytes", "Bytes of experts in VRAM.")
        self.reclaimable_bytes = gauge(
            "reclaimable_bytes",
            "Bytes of VRAM, at most, that the driver keeps for experts that left it, until something needs it.",
        )
        self.offloaded_bytes = gauge("offloaded_bytes", "Bytes of experts in host memory.")
        self.hit_rate = gauge("hit_rate", "Share of routed tokens on resident experts or slots since the last report.", layered)
        self.byte_hit_rate = gauge(
            "byte_hit_rate",
            "Share of expert bytes read in place, counted once per step, that came from VRAM since the last report.",
            layered,
        )
        self.zero_copy = counter(
            "zero_copy_bytes", "Bytes of offloaded experts read in place over PCIe (lower bound).", layered
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
        self.moves = counter("moves", "Promotions to VRAM; each moves the blocks that hold the same experts.")
        self.moved = counter("moved_bytes", "Bytes promoted and demoted.")
        self.moving = counter("moving_seconds", "Seconds spent moving experts.")
        self.evicted = gauge("evicted_bytes", "Bytes of resident experts that the driver has evicted, estimated from a sample.")
        self.link = gauge(
            "link_bytes_per_second",
            "Rates of the link when the model was loaded, while all GPUs used it: reads in place (scattered, sequential), "
            "copies (copied, engine).",
            [*labels, "by"],
        )
        self.paused = gauge("paused", "1 while an operator has paused moves.")
        self.fault = gauge(
            "fault", "1 once a fault has ended moving, streaming or the trace; serving continues.", [*labels, "of"]
        )
        self.save_failures = counter("save_failures", "Failed saves of the profile or the trace.", [*labels, "of"])
        layers = manager.target.layers
        self._groups = [g for g in np.array_split(np.arange(len(layers)), GROUPS) if g.size]
        self._names = [f"{layers[g[0]].layer_id}-{layers[g[-1]].layer_id}" for g in self._groups]
        self._last: list[np.ndarray] = [np.zeros(len(layers)) for _ in range(9)]
        self._last_moves = (0, 0, 0.0)
        self._last_failures: dict[str, int] = {}
        self._next = 0.0
        self._published_steps = 0

    def publish_if_due(self) -> None:
        """``publish`` if the last one is ``PERIOD_SECONDS`` ago. Call this between steps; it never waits for the device."""
        if time.monotonic() >= self._next:
            self.publish()

    def publish_when_idle(self) -> None:
        """``publish`` until the last step before the idle time is included, so that metrics do not go stale."""
        if self.manager.ledger.steps < self.manager.steps or self._published_steps < self.manager.steps:
            self.publish()

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
        moves = (ledger.moves, ledger.moved_bytes, ledger.moving_seconds)
        for counter, new, old in zip((self.moves, self.moved, self.moving), moves, self._last_moves, strict=True):
            counter.labels(**self.labels).inc(new - old)
        self._last_moves = moves
        self._publish_health()
        self._published_steps = steps

    def _publish_health(self) -> None:
        layers = self.manager.target.layers
        self.resident_bytes.labels(**self.labels).set(sum(layer.resident_bytes for layer in layers))
        self.reclaimable_bytes.labels(**self.labels).set(self.manager.reclaimable_bytes)
        self.offloaded_bytes.labels(**self.labels).set(sum(layer.offloaded_bytes for layer in layers))
        self.paused.labels(**self.labels).set(self.manager.paused)
        if (link := self.manager.link) is not None:
            for by, rate in dataclasses.asdict(link.measured.together).items():
                self.link.labels(**self.labels, by=by).set(rate * 1e9)
        if (evicted := self.manager.evictions.evicted_bytes) is not None:
            self.evicted.labels(**self.labels).set(evicted)
        for what, ended in self.faults().items():
            self.fault.labels(**self.labels, of=what).set(ended)
        for saver in self.savers:
            new = saver.failures - self._last_failures.get(saver.what, 0)
            self.save_failures.labels(**self.labels, of=saver.what).inc(new)
            self._last_failures[saver.what] = saver.failures
