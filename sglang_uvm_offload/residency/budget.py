"""Divides the VRAM of a launch's ranks between residents, slots, stream buffers and the KV cache.

All functions are pure. Every rank calls them with the numbers that all ranks measured once the model was built, so all ranks
get the same result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from msgspec import Struct

from sglang_uvm_offload.config import AUTO
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.memory.layout import round_up
from sglang_uvm_offload.residency.expert_sizes import ExpertSizes
from sglang_uvm_offload.residency.host_need import HostNeed
from sglang_uvm_offload.residency.slot_split import NO_SLOTS, Slots, pays_in_groups
from sglang_uvm_offload.units import size

_N, _SLOTS, _STREAM_GB = flag_name("num_resident"), flag_name("slots"), flag_name("stream_buffer_gb")

ONE_MEMORY = "GPU and CPU share one memory: an offloaded expert takes as much of it as a resident one"

LEAST_RESIDENTS = 2
"""With fewer residents than this many times a token's experts, residents serve few activations: a study of 20 models finds that
an expert cache becomes useful at about twice the active experts (arXiv 2505.16056)."""

MOST_BUFFERS = 2
"""Two: one is filled for the next layer while a layer computes from the other."""

DRIVER_BYTES = 128 << 20
"""VRAM that the driver may hold beyond managed pages: it allocates VRAM in batches of this size (measured on an H200;
GPU_STATUS.md)."""


class RankBudget(Struct, frozen=True):
    """What one rank has and needs. Sizes are in bytes."""

    name: str
    """The rank's name in messages, such as "GPU 0 (rank 0)"."""
    free: int
    """VRAM for experts, stream buffers and the KV cache: --mem-fraction-static minus the headroom."""
    cache: int
    """The KV cache and per-request states that the launch asks for."""
    cache_of_requests: int
    """The part of ``cache`` that does not shrink with fewer tokens."""
    least_cache: int
    """The smallest KV cache and states with which SGLang starts."""
    experts: ExpertSizes
    buffer: int
    """The size of one stream buffer: that of the largest layer."""
    gpu: int
    """The index of its GPU on the machine."""
    node: int
    """The index of the machine."""
    host: int
    """Available host RAM on the machine."""
    host_held: int = 0
    """Host RAM that its offloaded experts already occupy."""
    host_cache: int = 0
    """Host RAM for its part of the hierarchical cache."""
    host_process: int = 0
    """Host RAM that its process has yet to allocate."""
    host_tables: int = 0
    """Host RAM for its part of lookup tables that are not allocated yet."""
    computes_from_slots: bool = True
    """Whether any of its layers can compute from slots."""
    buffer_beside_slots: int = 0
    """The size of one stream buffer for the layers that cannot, while the others stream into slots."""
    one_memory: bool = False
    """Whether GPU and host share one memory."""

    def buffer_with(self, slots: int) -> int:
        """The size of one stream buffer beside ``slots`` slots a layer; 0 if none is needed."""
        return self.buffer_beside_slots if self.experts.streams_into(slots) else self.buffer


@dataclass(frozen=True)
class Asked:
    """What the flags ask for."""

    num_resident: int | None
    """None for ``auto``."""
    slots: Slots
    stream_gb: float | None
    """None for ``auto``."""
    top_k: int
    streams: Callable[[int, int], bool]
    """Whether any step may stream, given the residents and slots of a layer."""
    demand: str
    """What the KV cache is sized for, in the words of the flags."""
    cache_tokens: int
    converts: bool = False
    """Whether experts shrink after loading. The launch then begins with as many residents as fit before that."""


@dataclass(frozen=True)
class Division:
    """How a layer's experts are divided, over all ranks that share the layer."""

    num_resident: int
    slots: int
    buffers: int


def divide(asked: Asked, ranks: Sequence[RankBudget]) -> Division:
    """The division to serve with, the same on all ranks. Raises ``FlagError`` with the numbers of the rank that lacks VRAM, or
    of the machine that lacks host RAM."""
    if asked.num_resident is not None:
        return _as_given(asked, asked.num_resident, ranks)
    return _most(asked, ranks)


def corrected(now: Division, asked: Asked, ranks: Sequence[RankBudget]) -> Division:
    """The division for ``ranks`` as measured again after loading, before slots and buffers are allocated. Raises ``FlagError``
    if none fits, or if a number that a flag gives does not fit."""
    if asked.num_resident is None:
        return _most(asked, ranks)
    if short := _short_of_vram(asked.num_resident, now.slots, now.buffers, ranks, ""):
        raise FlagError([short])
    return replace(now, num_resident=asked.num_resident)


def most_residents(slots: int, buffers: int, ranks: Sequence[RankBudget]) -> int | None:
    """The largest number of residents with which all ranks also hold the requested cache, these slots and these buffers. None
    if they do not fit even without residents."""
    return _largest(ranks[0].experts.num_places + 1, lambda n: _fits(n, slots, buffers, ranks))


def _most(asked: Asked, ranks: Sequence[RankBudget]) -> Division:
    places = ranks[0].experts.num_places
    slots, given = asked.slots, asked.stream_gb
    if not any(rank.computes_from_slots for rank in ranks):
        slots = NO_SLOTS

    def split(rows: int) -> tuple[int, int]:
        behind = slots.of(rows, places)
        return rows - behind, behind

    def most(buffers: int) -> int | None:
        return _largest(places + 1, lambda rows: _fits(*split(rows), 0 if rows == places else buffers, ranks))

    counts = list(range(MOST_BUFFERS, -1, -1)) if given is None else [_buffers_in(given, slots.asked or 0, ranks)]
    for count in counts:
        rows, last = most(count), count == counts[-1]
        if rows is None:
            continue
        residents, behind = split(rows)
        if behind < min(slots.asked or 0, places - residents):
            if not last:
                continue
            raise FlagError([f"{_SLOTS} {slots.asked}: {rows} rows a layer fit in VRAM; give at most as many, or {AUTO}"])
        useful = rows >= LEAST_RESIDENTS * asked.top_k and asked.streams(residents, behind)
        if rows == places or last or (useful and not _short_of_host(residents, behind, ranks)):
            if slots.asked is None:
                residents, behind = _that_host_ram_holds(residents, behind, rows, ranks)
            if short := _short_of_host(residents, behind, ranks):
                raise FlagError([f"{_N} {AUTO}: {short}"])
            return Division(residents, behind, 0 if rows == places else _needed_buffers(count, behind, ranks))
    host = _short_of_host(0, 0, ranks)
    raise FlagError(
        [_no_room(asked, ranks, 0, counts[-1]), *([f"{_N} {AUTO}: with no expert resident {host}"] if host else [])]
    )


def _that_host_ram_holds(residents: int, slots: int, rows: int, ranks: Sequence[RankBudget]) -> tuple[int, int]:
    """Replace slots with residents until host RAM holds the offloaded experts: it also keeps what slots hold. Round the
    residents up to whole groups, if they fit."""
    while slots and _short_of_host(residents, slots, ranks):
        residents, slots = rows - slots + 1, slots - 1
    in_groups = round_up(residents, math.lcm(*(rank.experts.group for rank in ranks)))
    if in_groups <= rows and pays_in_groups(in_groups, rows - in_groups):
        residents = in_groups
    return residents, rows - residents


def _as_given(asked: Asked, n: int, ranks: Sequence[RankBudget]) -> Division:
    places, given = ranks[0].experts.num_places, asked.stream_gb
    slots = 0 if n >= places else asked.slots.asked or 0
    if asked.converts:
        n = min(n, most_residents(slots, 0, ranks) or 0)
    offloads = n < places
    fits = partial(_fits, n, slots, ranks=ranks)
    buffers = 0
    if offloads and given is not None:
        buffers = _buffers_in(given, slots, ranks)
        largest = max(rank.buffer_with(slots) for rank in ranks)
        if given and largest and not buffers:
            raise FlagError([f"{_STREAM_GB} {given:g}: one buffer takes {size(largest)}; give that, {AUTO}, or 0"])
    elif offloads and asked.streams(n, slots):
        buffers = next((count for count in range(_needed_buffers(MOST_BUFFERS, slots, ranks), 0, -1) if fits(count)), 0)
    short = [_short_of_vram(n, slots, buffers if given is not None else 0, ranks, "" if given is None else f"{given:g}")]
    if host := _short_of_host(n, slots, ranks):
        least = next((more for more in range(n, places) if not _short_of_host(more, slots, ranks)), places)
        short.append(f"{_N} {n}: {host}; {least} residents would do")
    if problems := list(filter(None, short)):
        raise FlagError(problems)
    return Division(n, slots, buffers)


def buffers_in(gib: float, layer_bytes: int) -> int:
    """How many buffers of ``layer_bytes`` fit in ``gib`` GiB; 0 if no layer streams."""
    return min(MOST_BUFFERS, int(gib * (1 << 30)) // layer_bytes) if layer_bytes else 0


def _buffers_in(gib: float, slots: int, ranks: Sequence[RankBudget]) -> int:
    return min((buffers_in(gib, nbytes) for rank in ranks if (nbytes := rank.buffer_with(slots))), default=0)


def _needed_buffers(count: int, slots: int, ranks: Sequence[RankBudget]) -> int:
    """``count``, or 0 if all layers stream into slots."""
    return count if any(rank.buffer_with(slots) for rank in ranks) else 0


def _fits(residents: int, slots: int, buffers: int, ranks: Sequence[RankBudget]) -> bool:
    """Whether they fit on every rank next to the requested cache."""
    return all(_needed(residents, slots, buffers, rank) + DRIVER_BYTES + rank.cache <= rank.free for rank in ranks)


def _needed(residents: int, slots: int, buffers: int, rank: RankBudget) -> int:
    sizes = rank.experts
    shared = sizes.offloaded[residents] if rank.one_memory else 0
    return sizes.in_vram(residents, slots) + buffers * rank.buffer_with(slots) + shared


def _short_of_vram(n: int, slots: int, buffers: int, ranks: Sequence[RankBudget], stream_gb: str) -> str:
    """Why N residents do not fit on the rank with the least VRAM to spare; "" if they may fit."""

    def spare(residents: int, rank: RankBudget) -> int:
        return rank.free - rank.least_cache - _needed(residents, slots, buffers, rank)

    rank = min(ranks, key=partial(spare, n))
    if spare(n, rank) >= 0:
        return ""
    most = _largest(n, lambda residents: all(spare(residents, each) >= 0 for each in ranks))
    given = f"{_N} {n}" + (f" and {_SLOTS} {slots}" if slots else "")
    stream = f", {size(buffers * rank.buffer_with(slots))} for stream buffers" if buffers else ""
    stream += f" ({_STREAM_GB} {stream_gb})" if buffers and stream_gb else ""
    if rank.one_memory:
        remedy = ONE_MEMORY
    else:
        remedy = "no number fits: use more or larger GPUs" if most is None else f"give at most {most}, or {AUTO}"
    return (
        f"{given}: does not fit on {rank.name}: {size(_needed(n, slots, 0, rank))} for {n + slots} of "
        f"{rank.experts.num_places} experts a layer{stream} and {size(rank.least_cache)} for the smallest KV cache are "
        f"needed, and {size(max(0, rank.free))} are left of what --mem-fraction-static and {flag_name('headroom_gb')} "
        f"allow; {remedy}"
    )


def _no_room(asked: Asked, ranks: Sequence[RankBudget], slots: int, buffers: int) -> str:
    """Why ``auto`` finds no number that fits."""
    rank = min(ranks, key=lambda each: each.free - each.cache - _needed(0, slots, buffers, each))
    room = rank.free - DRIVER_BYTES - _needed(0, slots, buffers, rank)
    text = (
        f"{_N} {AUTO}: with no expert resident {rank.name} needs {size(rank.cache)} of KV cache for {asked.cache_tokens} "
        f"tokens ({asked.demand}), and {size(max(0, room))} are left of what --mem-fraction-static and "
        f"{flag_name('headroom_gb')} allow"
    )
    if rank.one_memory:
        return f"{text}; {ONE_MEMORY}"
    if room <= rank.least_cache:
        return f"{text}; use more or larger GPUs"
    tokens = min(_tokens(asked, each, slots, buffers) for each in ranks)
    if tokens < 1:
        return (
            f"{text}; {size(rank.cache_of_requests)} of it is for requests of any length: give a smaller --max-running-requests"
        )
    return f"{text}; give --max-total-tokens {tokens} or fewer, fewer requests, or a shorter --context-length"


def _tokens(asked: Asked, rank: RankBudget, slots: int, buffers: int) -> int:
    """How many tokens of KV cache fit on the rank without residents."""
    room = rank.free - DRIVER_BYTES - _needed(0, slots, buffers, rank) - rank.cache_of_requests
    growing = rank.cache - rank.cache_of_requests
    return int(asked.cache_tokens * max(0, min(room, growing)) / growing) if growing > 0 else 0


def _short_of_host(residents: int, slots: int, ranks: Sequence[RankBudget]) -> str:
    """Why a machine's host RAM cannot hold the offloaded experts; "" if all machines can."""
    for node in sorted({rank.node for rank in ranks}):
        local = [rank for rank in ranks if rank.node == node]
        if local[0].one_memory:
            continue  # counted as VRAM
        need = HostNeed(
            *(sum(rank.experts.offloaded[residents] for rank in local), sum(rank.host_cache for rank in local)),
            *(sum(rank.host_process for rank in local), sum(rank.host_tables for rank in local)),
        )
        held = sum(rank.host_held for rank in local)
        available = min(rank.host for rank in local) + held
        if need.experts <= held or need.total <= available:
            continue
        left = size(max(0, available - need.total + need.experts))
        where = f" of node {node}" if len({rank.node for rank in ranks}) > 1 else ""
        more = "give a smaller --hicache-size or --hicache-ratio, " if need.cache else ""
        return (
            f"the offloaded experts need {size(need.experts)} of host RAM{where}, and {left} is left of {size(available)} "
            f"after {need.beside_experts()}; {more}keep more resident, or add host RAM"
        )
    return ""


def _largest(stop: int, holds: Callable[[int], bool]) -> int | None:
    """The largest number below ``stop`` for which ``holds`` returns True; None if there is none."""
    return next((number for number in range(stop - 1, -1, -1) if holds(number)), None)
