"""How rows of VRAM are divided between residents and slots: the number that is given, the profile's split, or the default."""

from __future__ import annotations

import pytest

from sglang_uvm_offload.residency.slot_split import COARSE_SHARE, FINE_EXPERTS, FINE_SHARE, NO_SLOTS, Slots

AUTO = Slots(None)
MEASURED = Slots(None, {0.25: 1.0, 0.5: 0.25})


def test_auto_takes_its_share_of_the_rows_by_the_number_of_experts():
    assert AUTO.of(100, 256) == int(100 * FINE_SHARE)
    assert AUTO.of(20, FINE_EXPERTS) == int(20 * FINE_SHARE)
    assert AUTO.of(20, FINE_EXPERTS - 1) == int(20 * COARSE_SHARE)


def test_a_profile_sets_the_share_by_its_nearest_residency():
    assert MEASURED.of(26, 256) == 26
    assert MEASURED.of(90, 256) == 90
    assert MEASURED.of(96, 256) == 96, "halfway between two, the lower"
    assert MEASURED.of(100, 256) == 25
    assert MEASURED.of(250, 256) == 62


def test_a_number_is_as_given_and_nothing_makes_slots_where_all_experts_are_resident():
    assert Slots(30, {0.5: 1.0}).of(100, 256) == 30
    assert Slots(30).of(20, 256) == 20
    assert [slots.of(256, 256) for slots in (AUTO, MEASURED, Slots(30))] == [0, 0, 0]
    assert [NO_SLOTS.of(rows, 256) for rows in (0, 100, 255)] == [0, 0, 0]


def test_auto_leaves_residents_for_experts_that_flags_name():
    named = Slots(None, {}, least_residents=12)
    assert [named.of(rows, 256) for rows in (0, 8, 12, 40)] == [0, 0, 0, 28]


@pytest.mark.parametrize("slots", [AUTO, Slots(30), Slots(None, {}, 12)])
def test_more_rows_never_mean_fewer_slots_or_residents(slots):
    found = [slots.of(rows, 256) for rows in range(256)]
    assert found == sorted(found)
    residents = [rows - number for rows, number in enumerate(found)]
    assert residents == sorted(residents)
