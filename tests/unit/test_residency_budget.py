"""One division of VRAM for all ranks of a launch, by what each of them has and needs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sglang_uvm_offload.flags import FlagError
from sglang_uvm_offload.residency.budget import (
    DRIVER_BYTES,
    Asked,
    Division,
    RankBudget,
    corrected,
    divide,
)
from sglang_uvm_offload.residency.expert_sizes import ExpertSizes
from sglang_uvm_offload.residency.host_need import HostNeed
from sglang_uvm_offload.residency.slot_split import Slots

MIB, GIB = 1 << 20, 1 << 30
PLACES = 64


def sizes(expert: int = 100 * MIB) -> ExpertSizes:
    """An expert of every layer takes ``expert`` bytes, a slot as much."""
    of = [expert * n for n in range(PLACES + 1)]
    return ExpertSizes(of, of, of[::-1])


def rank(room: int = 0, cache: int = 4 * GIB, **fields: Any) -> RankBudget:
    """``room``: of what is free, the bytes beside the cache that is asked for and what the driver holds."""
    usual: dict[str, Any] = {
        **{"name": "GPU 0 (rank 0)", "free": room + cache + DRIVER_BYTES},
        **{"cache": cache, "cache_of_requests": 0, "least_cache": 16 * MIB},
        **{"experts": sizes(), "buffer": 200 * MIB, "gpu": 0, "node": 0, "host": 1 << 40},
    }
    return RankBudget(**(usual | fields))


def asked(num_resident: int | None = None, slots: int | None = 0, streams: bool = True, **fields: Any) -> Asked:
    usual: dict[str, Any] = {"stream_gb": None, "top_k": 4, "demand": "for 1 request", "cache_tokens": 32768}
    return Asked(num_resident, Slots(slots), streams=lambda residents, slots: streams, **(usual | fields))


def refusal(wanted: Asked, *ranks: RankBudget) -> str:
    with pytest.raises(FlagError) as caught:
        divide(wanted, ranks)
    (problem,) = caught.value.problems
    return problem


# ---- auto ----


def test_auto_keeps_as_many_as_fit_beside_the_cache_and_two_stream_buffers():
    assert divide(asked(), [rank(20 * 100 * MIB + 2 * 200 * MIB)]) == Division(20, 0, 2)
    assert divide(asked(), [rank(20 * 100 * MIB + 2 * 200 * MIB - 1)]) == Division(19, 0, 2)


@pytest.mark.parametrize(("room", "division"), [(11, Division(9, 0, 1)), (9, Division(9, 0, 0)), (3, Division(3, 0, 0))])
def test_buffers_give_way_to_twice_the_experts_of_a_token(room, division):
    assert divide(asked(), [rank(room * 100 * MIB)]) == division


def test_where_no_step_streams_no_buffer_takes_room():
    assert divide(asked(streams=False), [rank(24 * 100 * MIB)]) == Division(24, 0, 0)


def test_no_room_is_kept_for_slots_from_which_no_layer_of_any_rank_computes():
    room, without = rank(24 * 100 * MIB), {"computes_from_slots": False}
    assert divide(asked(slots=None, streams=False), [room]).slots > 0
    none = msgspec.structs.replace(room, **without)
    assert divide(asked(slots=None, streams=False), [none, none]) == Division(24, 0, 0)
    assert divide(asked(slots=None, streams=False), [none, room]).slots > 0


def test_the_rank_with_least_room_decides_for_all():
    few, many = rank(12 * 100 * MIB, name="GPU 1 (rank 1)"), rank(40 * 100 * MIB)
    assert divide(asked(streams=False), [many, few]).num_resident == 12


def test_a_stage_without_experts_decides_nothing():
    nothing = ExpertSizes(*[[0] * (PLACES + 1)] * 3)
    dense = rank(0, experts=nothing, buffer=0)
    assert divide(asked(), [rank(24 * 100 * MIB), dense]) == Division(20, 0, 2)


def test_without_room_for_any_the_remedy_is_a_smaller_cache():
    problem = refusal(asked(), rank(-GIB))
    assert "with no expert resident GPU 0 (rank 0) needs 4.00 GiB of KV cache for 32768 tokens (for 1 request)" in problem
    assert "and 3.00 GiB are left of what --mem-fraction-static and --expert-offload-headroom-gb allow" in problem
    assert "give --max-total-tokens 24576 or fewer" in problem


def test_states_of_requests_that_do_not_fit_ask_for_fewer_requests():
    problem = refusal(asked(), rank(-2 * GIB, cache_of_requests=3 * GIB))
    assert "3.00 GiB of it is for requests of any length: give a smaller --max-running-requests" in problem
    assert "--max-total-tokens" not in problem
    assert "use more or larger GPUs" in refusal(asked(), rank(-4 * GIB))


def test_host_ram_must_hold_the_rest():
    room = rank(24 * 100 * MIB, host=GIB)
    problem = refusal(asked(), room)
    assert problem.startswith("--expert-offload-num-resident auto: the offloaded experts need 3.91 GiB of host RAM")
    assert "keep more resident, or add host RAM" in problem


def test_ranks_of_one_machine_share_its_host_ram():
    alone = [rank(24 * 100 * MIB, host=7 * GIB)]
    assert divide(asked(), alone).num_resident == 20
    assert "need 7.81 GiB" in refusal(asked(), *alone * 2)
    apart = [*alone, rank(24 * 100 * MIB, host=7 * GIB, node=1)]
    assert divide(asked(), apart).num_resident == 20


def test_buffers_give_way_to_residents_that_host_ram_has_no_room_for():
    """With two buffers 20 are resident, and 44 of 100 MiB are not."""
    held = rank(24 * 100 * MIB, host=HostNeed(4400 * MIB).total)
    assert divide(asked(), [held]) == Division(20, 0, 2)
    short = msgspec.structs.replace(held, host=HostNeed(4200 * MIB).total)
    assert divide(asked(), [short]) == Division(22, 0, 1)


def test_one_memory_holds_an_expert_wherever_it_is():
    whole = PLACES * 100 * MIB
    assert divide(asked(streams=False), [rank(whole, one_memory=True)]).num_resident == PLACES
    assert "share one memory" in refusal(asked(streams=False), rank(whole - 1, one_memory=True))
    assert divide(asked(10), [rank(whole, one_memory=True, host=0)]).num_resident == 10, "its host RAM is that memory"


# ---- slots ----


def test_auto_slots_take_their_share_of_the_rows():
    """All of them, with 64 experts a layer."""
    found = divide(asked(slots=None, streams=False), [rank(20 * 100 * MIB)])
    assert (found.num_resident, found.slots) == (0, 20)
    less = divide(asked(slots=None, streams=False), [rank(20 * 100 * MIB - 1)])
    assert less.num_resident + less.slots == 19


def test_auto_takes_a_number_of_slots_off_what_fits():
    found = divide(asked(slots=4, streams=False), [rank(20 * 100 * MIB)])
    assert (found.num_resident, found.slots) == (16, 4)
    problem = refusal(asked(slots=30, streams=False), rank(20 * 100 * MIB))
    assert problem == "--expert-offload-slots 30: 20 rows a layer fit in VRAM; give at most as many, or auto"


def test_auto_slots_become_residents_where_host_ram_holds_no_more():
    room = rank(20 * 100 * MIB, host=HostNeed(4900 * MIB).total)
    found = divide(asked(slots=None, streams=False), [room])
    assert (found.num_resident, found.slots) == (15, 5)


@pytest.mark.parametrize(
    ("missing", "groups", "residents"),
    [(8, (4,), 8), (9, (4,), 12), (9, (4, 1), 12), (9, (4, 6), 12), (15, (4,), 15), (9, (16,), 9), (9, (64,), 9)],
    ids=str,
)
def test_residents_that_host_ram_asks_for_are_whole_groups_where_these_pay(missing, groups, residents):
    """20 rows: with more than twice as many residents as slots, single blocks serve more."""
    host = HostNeed((PLACES - missing) * 100 * MIB * len(groups)).total
    each = [msgspec.structs.replace(sizes(), group=group) for group in groups]
    ranks = [rank(20 * 100 * MIB, experts=experts, host=host) for experts in each]
    assert divide(asked(slots=None, streams=False), ranks) == Division(residents, 20 - residents, 0)


# ---- a number ----


def test_a_number_is_served_if_it_fits_beside_the_smallest_cache():
    """The cache that is asked for is what SGLang makes of the rest."""
    least = rank(0, free=10 * 100 * MIB + 16 * MIB)
    assert divide(asked(10), [least]) == Division(10, 0, 0)
    problem = refusal(asked(11), least)
    assert problem.startswith("--expert-offload-num-resident 11: does not fit on GPU 0 (rank 0): 1.07 GiB for 11 of 64 experts")
    assert "16.0 MiB for the smallest KV cache are needed, and 1016.0 MiB are left" in problem
    assert problem.endswith("give at most 10, or auto")


def test_the_refusal_names_the_rank_that_is_shortest_and_what_fits_on_all():
    ranks = [rank(free=GIB, name="GPU 3 (rank 3)"), rank(free=2 * GIB), rank(free=GIB // 2, name="GPU 1 (rank 1)")]
    problem = refusal(asked(40), *ranks)
    assert "does not fit on GPU 1 (rank 1)" in problem
    assert problem.endswith("give at most 4, or auto")
    assert refusal(asked(40), rank(free=0)).endswith("no number fits: use more or larger GPUs")


def test_slots_of_a_number_take_as_much_as_residents():
    assert divide(asked(6, slots=4), [rank(free=GIB)]) == Division(6, 4, 0)
    assert "--expert-offload-num-resident 7 and --expert-offload-slots 4: does not fit" in refusal(
        asked(7, slots=4), rank(free=GIB)
    )


@pytest.mark.parametrize(("spare", "buffers"), [(400, 2), (399, 1), (199, 0)])
def test_a_number_leaves_buffers_the_room_beside_the_cache_that_is_asked_for(spare, buffers):
    assert divide(asked(10), [rank(10 * 100 * MIB + spare * MIB)]) == Division(10, 0, buffers)


@pytest.mark.parametrize(("given", "buffers"), [(0.0, 0), (0.2, 1), (0.39, 1), (0.4, 2), (9.0, 2)])
def test_a_given_size_makes_as_many_buffers_as_it_holds(given, buffers):
    assert divide(asked(10, stream_gb=given), [rank(PLACES * 100 * MIB)]) == Division(10, 0, buffers)
    if buffers:
        assert divide(asked(stream_gb=given), [rank(20 * 100 * MIB)]) == Division(20 - 2 * buffers, 0, buffers)


def test_a_size_below_one_buffer_or_without_room_is_refused():
    assert "--expert-offload-config stream_buffer_gb 0.1: one buffer takes 200.0 MiB" in refusal(
        asked(10, stream_gb=0.1), rank(9 * GIB)
    )
    problem = refusal(asked(10, stream_gb=0.4), rank(free=10 * 100 * MIB + 300 * MIB))
    assert "400.0 MiB for stream buffers (--expert-offload-config stream_buffer_gb 0.4)" in problem
    with pytest.raises(FlagError, match=r"200\.0 MiB for stream buffers and 16\.0 MiB for the smallest"):
        corrected(Division(10, 0, 1), asked(10), [rank(free=10 * 100 * MIB)])


@pytest.mark.parametrize("given", [asked(), asked(PLACES, stream_gb=0.4), asked(PLACES, slots=8)])
def test_all_experts_need_no_buffer_and_no_slots(given):
    assert divide(given, [rank(PLACES * 100 * MIB)]) == Division(PLACES, 0, 0)


def test_experts_that_shrink_once_they_are_loaded_begin_with_what_fits():
    begun = divide(asked(20, converts=True), [rank(12 * 100 * MIB)])
    assert begun.num_resident == 12
    half = rank(40 * 50 * MIB, experts=sizes(50 * MIB))
    assert corrected(begun, asked(20, converts=True), [half]) == Division(20, 0, 0)


# ---- the correction ----


@pytest.mark.parametrize("room", [8, 10, 14])
def test_auto_is_corrected_to_what_is_free_once_all_is_loaded(room):
    ranks = [rank(room * 100 * MIB + 400 * MIB), rank(30 * 100 * MIB)]
    assert corrected(Division(10, 0, 2), asked(), ranks) == Division(room, 0, 2)
    assert corrected(Division(0, 10, 2), asked(slots=None), ranks) == Division(0, room, 2)


def test_what_turns_out_to_have_no_slots_keeps_residents():
    without = rank(20 * 100 * MIB, computes_from_slots=False)
    for slots in (None, 8):
        assert corrected(Division(0, 20, 0), asked(slots=slots, streams=False), [without]) == Division(20, 0, 0)


def test_experts_that_host_ram_holds_by_now_are_not_short_of_it():
    """What else the process took while it loaded came from the same host RAM."""
    held = 5000 * MIB
    ranks = [rank(14 * 100 * MIB, host=0, host_held=held // 2), rank(14 * 100 * MIB, host=0, host_held=held // 2)]
    half = [msgspec.structs.replace(each, experts=sizes(50 * MIB)) for each in ranks]
    assert corrected(Division(10, 4, 0), asked(slots=None, streams=False), half) == Division(14, 14, 0)
    assert corrected(
        Division(0, 14, 0), asked(slots=None, streams=False), [rank(14 * 100 * MIB, host=0, host_held=6400 * MIB)]
    ) == (Division(0, 14, 0))


def test_what_no_longer_fits_ends_the_start():
    with pytest.raises(FlagError, match="does not fit on GPU 0"):
        corrected(Division(10, 0, 0), asked(10), [rank(free=900 * MIB)])
    with pytest.raises(FlagError, match="with no expert resident GPU 0"):
        corrected(Division(1, 0, 0), asked(), [rank(-1)])
    now = Division(10, 0, 0)
    assert corrected(now, asked(10), [rank(30 * 100 * MIB)]) == now, "a number stays"
