"""Decides which experts the slots hold. The kernels in ``kernels/uvm_ops.cu`` follow these rules bit for bit.

A slot is a row in VRAM that holds a copy of one expert. Layers of one shape share a pool of slots. A step reads an offloaded
expert over the link once, whether in place or into a slot, so filling a slot costs only the expert that it held before.
The policy evicts the expert, of any layer, that is least likely to be used next, and only for a miss that is more likely to be
used, or that a kernel would read in place more than once because it computes the tokens in several blocks.

It estimates that likelihood by counting. After every step, the time since an expert's last use and its use rates over a short
and a long time put it into a *class*. The *value* of a class is the share of its experts that were used in the next
``WINDOW`` steps. So the policy acts like LRU on routing with strong locality and like LFU on routing with hot experts, without
a setting (ranking by measured hit density, after LHD, Beckmann et al., NSDI 2018). All layers share the counts, which learns
faster. All arithmetic is on integers in a fixed order, so ranks that see the same routing make the same decisions.

Eviction compares the *worth* of experts: their value on a logarithmic scale, in one byte, when their layer was last resolved.
So a layer reads one byte for each expert of the pool, and updates only its own experts. If several have the same worth, those
of the layer that was resolved last go first: that layer is used again after all others.

A prefill uses nearly all experts, which says little about decoding. But its last tokens use the experts that decoding is about
to use, so the tokens of each request's *tail* count as the most recent decode steps.

Arrays are ``[layers, experts]``. Pure: no clock, no device, no log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

WINDOW = 2
"""Steps in which a use counts. With 1, experts that every other token uses would seem worthless right after a use."""

AGES, LATELY, LONG = 24, 4, 16
"""The numbers of buckets for the time since the last use, and for the rates over the last steps and the last thousands."""
CLASSES = AGES * LATELY * LONG
RATE_BITS = 20
"""A rate of ``1 << RATE_BITS`` is one use per step."""
LATELY_SHIFT, LONG_SHIFT, LEAST_SHIFT = 4, 11, 2
"""Binary logarithms of the time constants, in steps: 16, and 2048 (which grows from 4 during the first 2048 steps)."""
USE = 16
"""The count of one use, so that half a use can be assumed before anything is known."""
MAX_EVENTS = 1 << 16
"""A class with this many events halves its counts."""
VALUE_BITS = 16
"""A value is ``uses << VALUE_BITS`` divided by events: below ``1 << 21``."""
WHOLE = 16
"""The offloaded share of an expert that is wholly offloaded."""
MAX_FILLS = 64
"""The most fills in one layer and step. A lower limit adapts more slowly to new traffic and saves nothing: an expert that is
not filled is read in place."""
ASSUMED_EVENTS = 4
WORTH_BITS = 3
"""The binary logarithm of the steps of worth in an octave of value (8). Finer steps save no link time."""
NOT_HELD = 255
"""The worth of an expert without a slot. The largest worth is 175."""
TAIL = 64
"""Tokens at the end of each request of a prefill that count: four time constants of the short rate."""

EMPTY = -1


def floor_log2(x: np.ndarray) -> np.ndarray:
    """The binary logarithm, rounded down, of integers from 1 to 2^52."""
    return np.frexp(x.astype(np.float64))[1] - 1


def half_octaves(x: np.ndarray) -> np.ndarray:
    """Twice the binary logarithm of ``x`` (1 or more), by the bit below the leading one."""
    octave = floor_log2(x)
    return 2 * octave + np.where(octave > 0, (x >> np.maximum(octave - 1, 0)) & 1, 0)


def assumed_counts() -> tuple[np.ndarray, np.ndarray]:
    """int64 ``[CLASSES]`` each: the initial events and uses. Experts used recently and often are likely to be used again."""
    age, lately, long = np.indices((AGES, LATELY, LONG)).reshape(3, CLASSES)
    share = 2.0 ** -(age / 4 + (LATELY - 1 - lately) / 4 + (LONG - 1 - long) / 8)
    return np.full(CLASSES, ASSUMED_EVENTS), np.rint(USE * ASSUMED_EVENTS * share).astype(np.int64)


@dataclass(frozen=True)
class Tails:
    """How the tails of a prefill's requests use each expert. The int arrays have equal shapes."""

    distance: np.ndarray
    """Tokens from the last use in a request to its end, the smallest over all requests; ``TAIL`` without a use."""
    rate: np.ndarray
    """The rate, as ``SlotPolicy.lately``, if each token were a decode step; the sum over all requests."""

    @classmethod
    def of(cls, ids: np.ndarray, requests: Sequence[tuple[int, int]], experts: int) -> Tails:
        """``[experts]`` arrays from int ``ids[rows, k]``; ids outside 0 to ``experts - 1`` do not count. ``requests``: the
        first row and the one behind the last of each; may exceed the rows of ``ids``."""
        distance, rate = np.full(experts, TAIL), np.zeros(experts, dtype=np.int64)
        for begin, behind in requests:
            end, weight = min(behind, len(ids)), 1 << (RATE_BITS - LATELY_SHIFT)
            for back, row in enumerate(ids[max(begin, end - TAIL) : max(begin, end)][::-1]):
                used = row[(row >= 0) & (row < experts)]
                distance[used] = np.minimum(distance[used], back)
                np.add.at(rate, used, weight)
                weight -= weight >> LATELY_SHIFT
        return cls(distance, np.minimum(rate, 1 << RATE_BITS))


@dataclass(frozen=True)
class Resolved:
    """What a step does in each layer. A fill copies expert ``expert`` of layer ``layer`` into slot ``slot`` of the layer's pool
    and evicts the expert there. All fills of a layer come before it computes."""

    hit: np.ndarray
    """``bool[layers, experts]``: the experts that the step reads and that were in a slot when their layer was resolved."""
    fills: list[tuple[int, int, int]]
    """(layer, expert, slot)"""


class SlotPool(NamedTuple):
    """Slots that layers share."""

    layers: Sequence[int]
    """Indices of layers, in the order in which a step resolves them."""
    slots: int


class SlotPolicy:
    """The state of one model's slots on one rank. Each step calls ``begin_step``, then resolves each layer."""

    def __init__(self, present: np.ndarray, pools: Sequence[SlotPool], max_fills: int = MAX_FILLS):
        """``present``: ``bool[layers, experts]``, False past the experts of a layer that has fewer than others. A layer is in
        one of the ``pools`` at most; only these may be resolved."""
        self.present = present
        self.max_fills = max_fills
        self.pools = pools
        self.now = 0
        """Steps so far."""
        self.slot_of = np.full(present.shape, EMPTY)
        """Each expert's slot in its layer's pool, or ``EMPTY``."""
        self.worth = [np.full((len(pool.layers), present.shape[1]), NOT_HELD, dtype=np.uint8) for pool in pools]
        """Each pool's ``[layers of the pool, experts]``: what experts in slots were worth when their layer was resolved."""
        self.taken = [0] * len(pools)
        """How many of each pool's slots, from the first on, were filled since they were last empty."""
        self._at = {layer: (index, at) for index, pool in enumerate(pools) for at, layer in enumerate(pool.layers)}
        self.last = np.zeros(present.shape, dtype=np.int64)
        """The step of the last use, from 1; 0: none yet."""
        self.lately = np.zeros(present.shape, dtype=np.int64)
        self.long = np.zeros(present.shape, dtype=np.int64)
        self.classes = np.full((WINDOW, *present.shape), EMPTY)
        """Each expert's class after the last step, and after the one before."""
        self.events, self.uses = assumed_counts()
        self._values = np.zeros(CLASSES, dtype=np.int64)

    def begin_step(self) -> None:
        """Begin a step. Its values come from the counts of earlier steps."""
        full = self.events >= MAX_EVENTS
        self.events[full] >>= 1
        self.uses[full] >>= 1
        self._values = (self.uses << VALUE_BITS) // self.events
        self.now += 1

    def resolve(
        self,
        used: np.ndarray,
        share: np.ndarray,
        layers: slice = slice(None),
        *,
        again: np.ndarray | bool = False,
        fill: bool = True,
    ) -> Resolved:
        """Resolve ``layers`` of a decode step that uses the experts ``used``. ``share``: int, how much of each expert is
        offloaded, 0 (nothing) to ``WHOLE``. ``again``: bool, which of them would be read more than once in place. All are
        ``[layers, experts]``. ``fill``: not in a step for which experts are brought."""
        self._observe(used, layers)
        return self._fill(used & fill, used, share, layers, again)

    def resolve_prefill(
        self,
        read: np.ndarray,
        tails: Tails,
        share: np.ndarray,
        layers: slice = slice(None),
        *,
        again: np.ndarray | bool = False,
        fill: bool = True,
    ) -> Resolved:
        """Resolve ``layers`` of a prefill with ``tails``. ``read``: bool, the experts that it reads. All are ``[layers,
        experts]``. ``again`` and ``fill``: as for ``resolve``."""
        used = tails.distance < TAIL
        last, lately = self.last[layers], self.lately[layers]
        last[used] = np.maximum(last[used], np.maximum(self.now - tails.distance[used], 1))
        lately[:] = np.maximum(lately, tails.rate)
        self.classes[1:, layers] = EMPTY  # the tails would count as uses of the earlier classes
        self.classes[0, layers] = self._classes(layers)
        return self._fill((used | again) & fill, read, share, layers, again)

    def bring(self, layer: int, share: np.ndarray, beside: int | None = None) -> list[tuple[int, int]]:
        """(expert, slot): bring all offloaded experts of a layer into slots, ahead of a step that is taken to use all of them.
        ``share``: ``[experts]``, as for ``resolve``. They get free slots, then those of the experts of the lowest worth of any
        layer but this one and ``beside``, which may be computed meanwhile. Where these are too few, the experts of the highest
        value come."""
        pool, at = self._at[layer]
        value = self._values[self._classes(slice(layer, layer + 1))[0]] * share // WHOLE
        missing = np.flatnonzero(self.present[layer] & (share > 0) & (self.slot_of[layer] == EMPTY))
        missing = missing[np.argsort(-value[missing], kind="stable")].tolist()
        kept = [row for row, index in enumerate(self.pools[pool].layers) if index in (layer, beside)]
        free = self._take_free(pool, len(missing))
        victims = self._victims(pool, at, dict.fromkeys(kept, slice(None)), len(missing) - len(free))
        slots = free + [self._evict(pool, *victim) for victim in victims]
        fills = list(zip(missing, slots, strict=False))
        for expert, slot in fills:
            self.slot_of[layer, expert], self.worth[pool][at, expert] = slot, worth_of(value[expert])
        return fills

    def reset(self) -> None:
        """Empty the slots, because the experts' bytes may have changed. The learned counts stay."""
        self.slot_of[:], self.taken = EMPTY, [0] * len(self.pools)
        for worth in self.worth:
            worth[:] = NOT_HELD

    def _observe(self, used: np.ndarray, layers: slice) -> None:
        """Count the uses in a decode step."""
        last, lately, long = self.last[layers], self.lately[layers], self.long[layers]
        before = self.classes[WINDOW - 1, layers]
        recent = used | (last > self.now - WINDOW)
        self.events += np.bincount(before[before >= 0], minlength=CLASSES)
        self.uses += USE * np.bincount(before[recent & (before >= 0)], minlength=CLASSES)
        last[used] = self.now
        lately += (used << (RATE_BITS - LATELY_SHIFT)) - (lately >> LATELY_SHIFT)
        shift = min(max((self.now + 1).bit_length() - 1, LEAST_SHIFT), LONG_SHIFT)
        long += (used << (RATE_BITS - shift)) - (long >> shift)
        self.classes[1:, layers] = self.classes[:-1, layers]
        self.classes[0, layers] = self._classes(layers)

    def _classes(self, layers: slice) -> np.ndarray:
        last = self.last[layers]
        classes = _classes(self.now - last, last > 0, self.lately[layers], self.long[layers])
        return np.where(self.present[layers], classes, EMPTY)

    def _fill(
        self, wanted: np.ndarray, read: np.ndarray, share: np.ndarray, layers: slice, again: np.ndarray | bool
    ) -> Resolved:
        """Fill slots with those of ``wanted`` that are worth it or read ``again``. Slots of ``read`` experts stay."""
        again = np.broadcast_to(again, read.shape)
        value = self._values[self.classes[0, layers]] * share // WHOLE
        hit, fills = np.zeros_like(read), list[tuple[int, int, int]]()
        for index, layer in enumerate(range(len(self.present))[layers]):
            hit[index] = read[index] & (self.slot_of[layer] != EMPTY)  # an earlier layer may have evicted some in this step
            if layer in self._at:
                new = self._fill_layer(layer, wanted[index] & (share[index] > 0), read[index], value[index], again[index])
                fills += [(index, expert, slot) for expert, slot in new]
        return Resolved(hit, fills)

    def _fill_layer(
        self, layer: int, wanted: np.ndarray, read: np.ndarray, value: np.ndarray, again: np.ndarray
    ) -> list[tuple[int, int]]:
        """(expert, slot): the misses that are read ``again``, then those of the highest value (ties: lower ids) get free slots,
        then those of the experts of the lowest worth, as long as they are worth more or read again. Arrays are
        ``[experts]``."""
        pool, at = self._at[layer]
        held, worth, slot_of = self.slot_of[layer] != EMPTY, worth_of(value), self.slot_of[layer]
        mine: np.ndarray = self.worth[pool][at]
        mine[:] = np.where(held, worth, NOT_HELD)
        misses = np.flatnonzero(wanted & ~held)
        misses = misses[np.lexsort((-value[misses], ~again[misses]))][: self.max_fills].tolist()
        free = self._take_free(pool, len(misses))
        fills = list(zip(misses, free, strict=False))
        misses = misses[len(free) :]
        for expert, (away, victim) in zip(misses, self._victims(pool, at, {at: read}, len(misses)), strict=False):
            if not again[expert] and worth[expert] <= self.worth[pool][away, victim]:
                break
            fills.append((expert, self._evict(pool, away, victim)))
        for expert, slot in fills:
            slot_of[expert], mine[expert] = slot, worth[expert]
        return fills

    def _take_free(self, pool: int, most: int) -> list[int]:
        first = self.taken[pool]
        self.taken[pool] = min(first + most, self.pools[pool].slots)
        return list(range(first, self.taken[pool]))

    def _evict(self, pool: int, at: int, expert: int) -> int:
        """Take the expert's slot away, and return it."""
        layer = self.pools[pool].layers[at]
        slot = int(self.slot_of[layer, expert])
        self.slot_of[layer, expert], self.worth[pool][at, expert] = EMPTY, NOT_HELD
        return slot

    def _victims(self, pool: int, at: int, kept: Mapping[int, np.ndarray | slice], most: int) -> list[tuple[int, int]]:
        """(layer of the pool, expert): the first ``most`` to evict when the pool's layer ``at`` is resolved, without those that
        are ``kept``, by layer of the pool. Of equal worth the layer itself comes first, then the one resolved before it, and so
        on; in a layer the lower ids."""
        if most <= 0:
            return []
        layers = (at - np.arange(len(self.worth[pool]))) % len(self.worth[pool])
        worth = self.worth[pool][layers]
        for layer, experts in kept.items():
            worth[(at - layer) % len(layers), experts] = NOT_HELD
        flat = worth.ravel()
        enough = int(np.searchsorted(np.cumsum(np.bincount(flat, minlength=NOT_HELD)[:NOT_HELD]), most))
        found = np.flatnonzero(flat <= min(enough, NOT_HELD - 1))
        found = found[np.argsort(flat[found], kind="stable")][:most]
        return [(int(layers[row]), int(expert)) for row, expert in zip(*np.divmod(found, worth.shape[1]), strict=True)]


def worth_of(value: np.ndarray) -> np.ndarray:
    """uint8: values below ``1 << 21`` on a logarithmic scale, up to ``(21 << WORTH_BITS) + 7``."""
    octave = floor_log2(value + 1)
    return ((octave << WORTH_BITS) + ((value + 1 << WORTH_BITS >> octave) & ((1 << WORTH_BITS) - 1))).astype(np.uint8)


def _classes(since: np.ndarray, ever: np.ndarray, lately: np.ndarray, long: np.ndarray) -> np.ndarray:
    """``since``: steps since the last use, if there was one (``ever``); ``lately`` and ``long``: rates."""
    age = np.where(ever, half_octaves(since + 1), AGES - 1)
    octave = floor_log2(np.maximum(lately, 1)) - (RATE_BITS - LATELY)
    half = half_octaves(np.maximum(long, 1)) - (2 * RATE_BITS - LONG)
    return (np.minimum(age, AGES - 1) * LATELY + octave.clip(0, LATELY - 1)) * LONG + half.clip(0, LONG - 1)
