"""Which experts the slots of each layer hold: the rules, which the kernels of ``kernels/uvm_ops.cu`` follow to the last bit.

A slot is a row in VRAM beside a layer's experts that holds a copy of one of them. A step that uses an offloaded expert reads it
over the link once, whether it is read in place or copied into a slot, so filling a slot costs nothing but the expert that it
held before. The one to evict is the one that is least likely to be used next, and a miss takes its place only if it is more
likely to be.

How likely that is, is counted: after every step each expert is in a *class*, by the time since its last use and by how often it
was used lately and long ago; how many experts of a class were used in the next ``WINDOW`` steps is its *value*. So routing with
strong locality is served as by LRU, and routing with hot experts as by LFU, without a setting (ranking by measured hit density,
after LHD, Beckmann et al., NSDI 2018). All layers share the counts, which learns faster. All is integer arithmetic in a fixed
order, so ranks that see the same routing decide alike.

A prefill uses nearly all experts, which says little. But its last tokens use those that decoding is about to use: for the
experts of each request's *tail* they count as so many decode steps just past.

Arrays are ``[layers, experts]`` or ``[layers, slots]``. Pure: no clock, no device, no log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

WINDOW = 2
"""Steps in which a use counts. With one, experts that every other token uses would seem worthless right after a use."""

AGES, LATELY, LONG = 24, 4, 16
"""Buckets of the time since the last use, of the rate of the last steps, and of that of the last thousands."""
CLASSES = AGES * LATELY * LONG
RATE_BITS = 20
"""A rate of ``1 << RATE_BITS`` is one use in every step."""
LATELY_SHIFT, LONG_SHIFT, LEAST_SHIFT = 4, 11, 2
"""Binary logarithms of the time constants, in steps: 16, and 2048 (fewer, from 4 on, in the first 2048 steps)."""
USE = 16
"""A use counts as much, so that half a use can be assumed before anything is known."""
MAX_EVENTS = 1 << 16
"""A class with so many events forgets half of them."""
VALUE_BITS = 16
"""A value is ``uses << VALUE_BITS`` by events: below ``1 << 21``."""
WHOLE = 16
"""The share of an expert that is offloaded, when all of it is."""
MAX_FILLS = 64
"""Fills of a layer in one step. Fewer slow the change of traffic, and save nothing: what is not filled is read in place."""
ASSUMED_EVENTS = 4
TAIL = 64
"""Tokens at the end of each request of a prefill that count: four time constants of the rate that they enter."""

EMPTY = -1


def floor_log2(x: np.ndarray) -> np.ndarray:
    """Of integers from 1 to 2^52."""
    return np.frexp(x.astype(np.float64))[1] - 1


def half_octaves(x: np.ndarray) -> np.ndarray:
    """Twice the binary logarithm of ``x`` (1 or more), by the bit below the leading one."""
    octave = floor_log2(x)
    return 2 * octave + np.where(octave > 0, (x >> np.maximum(octave - 1, 0)) & 1, 0)


def assumed_counts() -> tuple[np.ndarray, np.ndarray]:
    """int64 ``[CLASSES]`` each: the events and uses to begin with. What was used lately and often is likely to be again."""
    age, lately, long = np.indices((AGES, LATELY, LONG)).reshape(3, CLASSES)
    share = 2.0 ** -(age / 4 + (LATELY - 1 - lately) / 4 + (LONG - 1 - long) / 8)
    return np.full(CLASSES, ASSUMED_EVENTS), np.rint(USE * ASSUMED_EVENTS * share).astype(np.int64)


@dataclass(frozen=True)
class Tails:
    """How the tails of a prefill's requests use each expert, int of equal shapes."""

    distance: np.ndarray
    """From the end of a request to the last use in it, in tokens, the smallest of all requests; ``TAIL`` without a use."""
    rate: np.ndarray
    """As if each token were a decode step (as ``SlotPolicy.lately``), the sum of all requests."""

    @classmethod
    def of(cls, ids: np.ndarray, ends: Sequence[int], experts: int) -> Tails:
        """``[experts]``, by int ``ids[rows, k]``, of which others than 0 to ``experts - 1`` do not count. ``ends``: behind the
        last row of each request, ascending; rows behind ``ids`` are none."""
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
    """What a step does in each layer. A fill copies expert ``expert`` of layer ``layer`` into slot ``slot``, and evicts what
    was there; all fills come before the layer computes."""

    hit: np.ndarray
    """``bool[layers, experts]``: read by the step, and in a slot before it."""
    fills: list[tuple[int, int, int]]
    """(layer, expert, slot)"""


class SlotPolicy:
    """The state of one model's slots on one rank. A step begins with ``begin_step``; then each layer is resolved."""

    def __init__(self, present: np.ndarray, slots: int, max_fills: int = MAX_FILLS):
        """``present``: ``bool[layers, experts]``, False behind the experts of a layer that has fewer than others."""
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
        """Those after the last step, and after the one before."""
        self.events, self.uses = assumed_counts()
        self._values = np.zeros(CLASSES, dtype=np.int64)

    def begin_step(self) -> None:
        """A step begins: its values are by the counts of the steps before."""
        full = self.events >= MAX_EVENTS
        self.events[full] >>= 1
        self.uses[full] >>= 1
        self._values = (self.uses << VALUE_BITS) // self.events
        self.now += 1

    def resolve(self, used: np.ndarray, share: np.ndarray, layers: slice = slice(None)) -> Resolved:
        """The decode step uses the experts ``used`` of ``layers``. ``share``: int, how much of each of their experts is
        offloaded, 0 (nothing) to ``WHOLE``. Both are ``[layers, experts]``."""
        self._observe(used, layers)
        return self._fill(used, used, share, layers)

    def resolve_prefill(self, read: np.ndarray, tails: Tails, share: np.ndarray, layers: slice = slice(None)) -> Resolved:
        """A prefill's ``tails`` use experts of ``layers``. ``read``: bool, those that it reads where they lie or in slots; none
        if it computes from copies. All are ``[layers, experts]``."""
        used = tails.distance < TAIL
        last, lately = self.last[layers], self.lately[layers]
        last[used] = np.maximum(last[used], np.maximum(self.now - tails.distance[used], 1))
        lately[:] = np.maximum(lately, tails.rate)
        self.classes[1:, layers] = EMPTY  # of those before, the tails would count as uses
        self.classes[0, layers] = self._classes(layers)
        return self._fill(used, read, share, layers)

    def reset(self) -> None:
        """The experts' bytes may have changed: the slots hold nothing. What was learned stays."""
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
        """Fill slots with those of ``wanted`` that are worth it. ``read`` ones stay where they are."""
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
    """(layer, expert, slot): the misses of the highest value, of equal ones the lower ids, each for the slot that is worth
    least, as long as it is worth more than that. Slots that the step reads stay. Of two that are worth the same, the one goes
    that was used longer ago, then the lower one."""
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
