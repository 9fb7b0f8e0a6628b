"""Which of a layer's misses could be predicted while its step runs: would prefetching experts inside a step pay?

When layer ``l`` has routed, a predictor knows the experts of this step's layers up to ``l``, and all earlier steps. It ranks
the experts of layer ``l + 1`` that are not resident there, and the best are brought, for this step only. Recall is the share of
misses among those brought. The first layer has no layer before it, so its misses are left out.

Pure: arrays in, arrays out. ``activated`` and ``resident`` are ``bool[layers, experts]``, predictions are of all layers but the
first, ``[layers - 1, experts]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np

VOLUMES = (1.0, 2.0)
"""Experts brought, in multiples of those missed."""
MEAN_STEPS = 256.0
"""The time constant, in steps, of the running mean of a layer's misses."""
PRIOR_STEPS = 16.0
"""The weight, in steps, of an expert's own frequency as a prior for its frequency beside another."""
RELEARN = 1 / 16
"""Weights are computed again when the steps have grown by this share, since all pairs of experts take long."""


class Predictor(Protocol):
    def scores(self, activated: np.ndarray) -> np.ndarray:
        """How likely each expert is to be activated in this step; those of layer ``l + 1`` by layers up to ``l`` alone."""

    def observe(self, activated: np.ndarray) -> None:
        """Learn from a step that is over."""


class Frequency:
    """Each expert by its own frequency so far."""

    def __init__(self, shape: tuple[int, int]):
        self._uses = np.zeros(shape, dtype=np.float32)

    def scores(self, activated: np.ndarray) -> np.ndarray:
        return self._uses[1:]

    def observe(self, activated: np.ndarray) -> None:
        self._uses += activated


class LayerBefore:
    """Each expert by which experts of the layer before this step activates, and which not: naive Bayes over counts of pairs."""

    def __init__(self, shape: tuple[int, int]):
        layers, experts = shape
        self._uses = np.zeros(shape, dtype=np.float32)
        self._pairs = np.zeros((max(layers - 1, 0), experts, experts), dtype=np.float32)
        """Steps that activated both: an expert of a layer, and one of the next."""
        self._steps = 0
        self._weights = np.zeros_like(self._pairs)
        self._base = np.zeros((len(self._pairs), experts), dtype=np.float32)
        self._pending: list[np.ndarray] = []

    def scores(self, activated: np.ndarray) -> np.ndarray:
        """The log odds of each expert."""
        if len(self._pending) > self._steps * RELEARN:
            self._learn()
        return self._base + np.matmul(activated[:-1, None].astype(np.float32), self._weights)[:, 0]

    def observe(self, activated: np.ndarray) -> None:
        self._pending.append(activated.copy())

    def _learn(self) -> None:
        steps = np.stack(self._pending, axis=1).astype(np.float32)  # [layers, steps, experts]
        self._pending.clear()
        self._steps += steps.shape[1]
        self._uses += steps.sum(axis=1)
        self._pairs += np.matmul(steps[:-1].transpose(0, 2, 1), steps[1:])
        share = (self._uses + 0.5) / (self._steps + 1)
        before, prior = self._uses[:-1, :, None], PRIOR_STEPS * share[:-1, :, None]
        after = self._uses[1:, None]
        beside = (self._pairs + prior) / (after + PRIOR_STEPS)
        without = (before - self._pairs + prior) / (self._steps - after + PRIOR_STEPS)
        absent = np.log((1 - beside) / (1 - without))
        self._weights = np.log(beside / without) - absent
        self._base = np.log(share[1:] / (1 - share[1:])) + absent.sum(axis=1)


PREDICTORS: dict[str, Callable[[tuple[int, int]], Predictor]] = {"frequency": Frequency, "layer before": LayerBefore}


class Prefetcher:
    """Brings the experts of a layer that ``predictor`` ranks highest: ``volume`` times the running mean of the layer's misses.
    Fractions are carried to the next step, so that totals match; no step brings more than are offloaded."""

    def __init__(self, shape: tuple[int, int], predictor: Predictor, volumes: Sequence[float] = VOLUMES):
        self._predictor = predictor
        self._volumes = np.array(volumes)[:, None]
        self._mean = np.zeros(shape[0] - 1)
        self._carried = np.zeros((len(volumes), shape[0] - 1))
        self._steps = 0

    def step(self, activated: np.ndarray, resident: np.ndarray) -> np.ndarray:
        """``bool[volumes, layers - 1, experts]``: the experts brought in this step."""
        offloaded = ~resident[1:]
        wanted = self._volumes * self._mean + self._carried
        brought = np.rint(wanted)
        self._carried = wanted - brought
        order = np.argsort(np.where(offloaded, -self._predictor.scores(activated), np.inf), axis=1, kind="stable")
        rank = np.empty_like(order)
        np.put_along_axis(rank, order, np.arange(order.shape[1])[None], axis=1)
        self._steps += 1
        missed = np.count_nonzero(activated[1:] & offloaded, axis=1)
        self._mean += max(1 / self._steps, 1 / MEAN_STEPS) * (missed - self._mean)
        self._predictor.observe(activated)
        return offloaded & (rank < brought[:, :, None])


@dataclass(frozen=True)
class Recall:
    """One predictor at one volume over the scored steps. Shares are 0 without any misses."""

    predictor: str
    volume: float
    recall: float
    chance: float
    """The expected recall of as many experts drawn at random from those offloaded."""
    missed_per_step: float
    brought_per_step: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def recalls(steps: Iterable[tuple[np.ndarray, np.ndarray]], shape: tuple[int, int], warmup: int) -> list[Recall]:
    """Every predictor at every volume over ``steps`` of ``(activated, resident)``. The first ``warmup`` steps teach and are not
    scored. Raises ``ValueError`` if there is no next layer."""
    if shape[0] < 2:
        raise ValueError("a trace of one MoE layer has no next layer to predict")
    prefetchers = [Prefetcher(shape, predictor(shape)) for predictor in PREDICTORS.values()]
    total = np.zeros((3, len(prefetchers), len(VOLUMES)))  # found, by chance, brought
    missed = scored = 0
    for index, (activated, resident) in enumerate(steps):
        brought = np.stack([prefetcher.step(activated, resident) for prefetcher in prefetchers])
        if index < warmup:
            continue
        scored += 1
        misses, offloaded = activated[1:] & ~resident[1:], np.count_nonzero(~resident[1:], axis=1)
        by_layer, brought_by_layer = np.count_nonzero(misses, axis=1), np.count_nonzero(brought, axis=-1)
        missed += int(by_layer.sum())
        chance = (brought_by_layer * by_layer / np.maximum(offloaded, 1)).sum(axis=-1)
        total += [np.count_nonzero(brought & misses, axis=(2, 3)), chance, brought_by_layer.sum(axis=-1)]
    found, chance, brought_total = total
    return [
        Recall(
            predictor=name,
            volume=volume,
            recall=float(found[row, column] / max(missed, 1)),
            chance=float(chance[row, column] / max(missed, 1)),
            missed_per_step=missed / max(scored, 1),
            brought_per_step=float(brought_total[row, column] / max(scored, 1)),
        )
        for row, name in enumerate(PREDICTORS)
        for column, volume in enumerate(VOLUMES)
    ]
