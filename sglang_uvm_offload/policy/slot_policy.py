"""Which experts the slots of each layer hold. The kernels in ``kernels/uvm_ops.cu`` follow these rules bit for bit.

A slot is a row in VRAM, next to a layer's experts, that holds a copy of one of them. A step reads an offloaded expert over the
link once, whether in place or into a slot, so filling a slot costs nothing but the expert that it held before. The policy
evicts the expert that is least likely to be used next, and only for a miss that is more likely to be used.

It estimates that likelihood by counting. After every step each expert is in a *class*, by the time since its last use and by
its use rates over a short and a long time. The *value* of a class is the share of its experts that were used in the next
``WINDOW`` steps. So the policy acts like LRU on routing with strong locality and like LFU on routing with hot experts, without
a setting (ranking by measured hit density, after LHD, Beckmann et al., NSDI 2018). All layers share the counts, which learns
faster. All arithmetic is on integers in a fixed order, so ranks that see the same routing make the same decisions.

A prefill uses nearly all experts, which says little about decoding. But its last tokens use the experts that decoding is about
to use, so the tokens of each request's *tail* count as the most recent decode steps.

Arrays are ``[layers, experts]`` or ``[layers, slots]``. Pure: no clock, no device, no log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

WINDOW = 2
"""Steps in which a use counts. With 1, experts that every other token uses would seem worthless right after a use."""

AGES, LATELY, LONG = 24, 4, 16
"""Buckets of the time since the last use, of the rate over the last steps, and of the rate over the last thousands."""
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
"""The most fills of a layer in one step. A lower limit adapts more slowly to new traffic and saves nothing: an expert that is
not filled is read in place."""
ASSUMED_EVENTS = 4
TAIL = 64
"""Tokens at the end of each request of a prefill that count: four time constants of the short rate."""

EMPTY = -1


def floor_log2(x: np.ndarray) -> np.ndarray:
    """For integers from 1 to 2^52."""
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
    """How the tails of a prefill's requests use each expert: int arrays of equal shapes."""

    distance: np.ndarray
    """Tokens from the last use in a request to its end, the smallest over all requests; ``TAIL`` without a use."""
    rate: np.ndarray
    """The rate, as ``SlotPolicy.lately``, if each token were a decode step; the sum over all requests."""

    @classmethod
    def of(cls, ids: np.ndarray, ends: Sequence[int], experts: int) -> Tails:
        """``[experts]`` arrays from int ``ids[rows, k]``; ids outside 0 to ``experts - 1`` do not count. ``ends``: the index
        after the last row of each request, ascending; may exceed the rows of ``ids``."""
        distance, rate = np.full(experts, TAIL), np.zeros(experts, dtype=np.int64)
        for begin, end in pairwise([0, *(min(end, len(ids)) for end in ends)]):
            weight = 1 << (RATE_BITS - LATELY_SHIFT)
            for back, row in enumerate(ids[max(begin, end - TAIL) : end][::-1]):
                used = row[(row >= 0) & (row < experts)]
                distance[used] = np.minimum(distance[used], back)
                np.add.at(rate, used, weight)
                weight -= weight >> LATELY_SHIFT
        return cls(distance, np.minimum(rate, 1 << RATE_BITS))


@dataclass(frozen=True)
class Resolved:
    """What a step does in each layer. A fill copies expert ``expert`` of layer ``layer`` into slot ``slot`` and evicts the
    expert there. All fills come before the layer computes."""

    hit: np.ndarray
    """``bool[layers, experts]``: the experts that the step reads and that were in a slot before it."""
    fills: list[tuple[int, int, int]]
    """(layer, expert, slot)"""


class SlotPolicy:
    """The state of one model's slots on one rank. Each step calls ``begin_step``, then resolves each layer."""

    def __init__(self, present: np.ndarray, slots: int, max_fills: int = MAX_FILLS):
        """``present``: ``bool[layers, experts]``, False past the experts of a layer that has fewer than others."""
        self.present = present
        self.max_fills = max_fills
        self.now = 0
        """Steps so far."""
        self.slot_of = np.full(present.shape, EMPTY)
        self.owner = np.full((len(present), slots), EMPTY)
        self.last = np.zeros(present.shape, dtype=np.int64)
        """The step of the last use, from 1; 0: none yet."""
        self.lately = np.zeros(present.shape, dtype=np.int64)
        self.long = np.zeros(present.shape, dtype=np.int64)
        self.classes = np.full((WINDOW, *present.shape), EMPTY)
        """The class of each expert after the last step, and after the one before."""
        self.events, self.uses = assumed_counts()
        self._values = np.zeros(CLASSES, dtype=np.int64)

    def begin_step(self) -> None:
        """Begin a step. Its values come from the counts of earlier steps."""
        full = self.events >= MAX_EVENTS
        self.events[full] >>= 1
        self.uses[full] >>= 1
        self._values = (self.uses << VALUE_BITS) // self.events
        self.now += 1

    def resolve(self, used: np.ndarray, share: np.ndarray, layers: slice = slice(None)) -> Resolved:
        """Resolve ``layers`` of a decode step that uses the experts ``used``. ``share``: int, how much of each expert is
        offloaded, 0 (nothing) to ``WHOLE``. Both are ``[layers, experts]``."""
        self._observe(used, layers)
        return self._fill(used, used, share, layers)

    def resolve_prefill(self, read: np.ndarray, tails: Tails, share: np.ndarray, layers: slice = slice(None)) -> Resolved:
        """Resolve ``layers`` of a prefill with ``tails``. ``read``: bool, the experts that it reads in place or from slots;
        none if it computes from stream buffers. All are ``[layers, experts]``."""
        used = tails.distance < TAIL
        last, lately = self.last[layers], self.lately[layers]
        last[used] = np.maximum(last[used], np.maximum(self.now - tails.distance[used], 1))
        lately[:] = np.maximum(lately, tails.rate)
        self.classes[1:, layers] = EMPTY  # the tails would count as uses of the earlier classes
        self.classes[0, layers] = self._classes(layers)
        return self._fill(used, read, share, layers)

    def reset(self) -> None:
        """Empty the slots, because the experts' bytes may have changed. The learned counts stay."""
        self.slot_of[:], self.owner[:] = EMPTY, EMPTY

    def _observe(self, used: np.ndarray, layers: slice) -> None:
        """Count a decode step."""
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

    def _fill(self, wanted: np.ndarray, read: np.ndarray, share: np.ndarray, layers: slice) -> Resolved:
        """Fill slots with those of ``wanted`` that are worth it. Slots of ``read`` experts stay."""
        slot_of, owner = self.slot_of[layers], self.owner[layers]
        value = self._values[self.classes[0, layers]] * share // WHOLE
        hit = read & (slot_of != EMPTY)
        miss = wanted & (slot_of == EMPTY) & (share > 0)
        fills = _fills(miss, read, value, self.last[layers], owner, self.max_fills) if miss.any() else []
        for layer, expert, slot in fills:
            if (evicted := owner[layer, slot]) != EMPTY:
                slot_of[layer, evicted] = EMPTY
            owner[layer, slot], slot_of[layer, expert] = expert, slot
        return Resolved(hit, fills)


def _classes(since: np.ndarray, ever: np.ndarray, lately: np.ndarray, long: np.ndarray) -> np.ndarray:
    """``since``: steps since the last use, if there was one (``ever``); ``lately`` and ``long``: rates."""
    age = np.where(ever, half_octaves(since + 1), AGES - 1)
    octave = floor_log2(np.maximum(lately, 1)) - (RATE_BITS - LATELY)
    half = half_octaves(np.maximum(long, 1)) - (2 * RATE_BITS - LONG)
    return (np.minimum(age, AGES - 1) * LATELY + octave.clip(0, LATELY - 1)) * LONG + half.clip(0, LONG - 1)


def _fills(
    miss: np.ndarray, read: np.ndarray, value: np.ndarray, last: np.ndarray, owner: np.ndarray, most: int
) -> list[tuple[int, int, int]]:
    """(layer, expert, slot): pairs the misses of the highest value (ties: lower ids) with the slots of the lowest value, as
    long as the miss is worth more. Slots that the step reads stay. Between slots of equal value, the one used longer ago goes
    first, then the lower one."""
    if not owner.shape[1]:
        return []
    held, free = np.maximum(owner, 0), owner == EMPTY
    worth = np.where(free, -1, np.take_along_axis(value, held, axis=1))
    age = np.where(free, 0, np.take_along_axis(last, held, axis=1))
    in_use = ~free & np.take_along_axis(read, held, axis=1)
    out: list[tuple[int, int, int]] = []
    for layer in np.flatnonzero(miss.any(axis=1)).tolist():
        experts = np.flatnonzero(miss[layer])
        experts = experts[np.argsort(-value[layer, experts], kind="stable")][:most]
        slots = np.flatnonzero(~in_use[layer])
        slots = slots[np.lexsort((age[layer, slots], worth[layer, slots]))][:most]
        pairs = zip(experts.tolist(), slots.tolist(), strict=False)
        out += [(layer, e, s) for e, s in pairs if value[layer, e] > worth[layer, s]]
    return out
