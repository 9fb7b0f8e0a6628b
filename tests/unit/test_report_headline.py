"""The headline of a server's report: the hit rate beside the best fixed choice, or why there is none."""

from __future__ import annotations

import msgspec
import pytest
from builders.reports import judged, slots

from sglang_uvm_offload.report.headline import FEW_STEPS, Comparison, comparison, headline

POOLED = [0.0, 0.6, 0.76, 0.92, 1.0]
CONTINUOUS = {"adapt": "continuous", "present": 0.3}


@pytest.mark.parametrize(
    ("figures", "expected", "gain"),
    [
        # Residents that follow count for what they served over all decode steps, whatever the current ones would have.
        (CONTINUOUS | {"served": (0.7, 0.9)}, Comparison(0.8, 0.7, 4, True, False), 10.0),
        (CONTINUOUS | {"served": (0.7, 0.7)}, Comparison(0.7, 0.7, 4, True, False), 0.0),
        (CONTINUOUS | {"served": (0.2, 0.7)}, Comparison(0.45, 0.7, 4, True, False), -25.0),
        # The best choice may then have more residents in one layer than in another.
        (CONTINUOUS | {"served": (0.7, 0.7), "pooled": POOLED}, Comparison(0.7, 0.76, 4, True, False), -6.0),
        # Fixed ones count for what they would have served over the same steps, with as many in each layer.
        ({"present": 0.64, "served": (0.1, 0.9), "pooled": POOLED}, Comparison(0.64, 0.7, 4, False, False), -6.0),
        ({"present": 0.7}, Comparison(0.7, 0.7, 4, False, False), 0.0),
        ({"present": 0.72}, Comparison(0.72, 0.7, 4, False, False), 2.0),
        # Slots hold experts too.
        ({"slots": slots(2), "served": (0.9, 0.96)}, Comparison(0.93, 0.9, 6, True, True), 3.0),
        # Those that no step can use hold VRAM, and follow nothing.
        ({"slots": slots(2, hits=0, fills=0), "served": (0.9, 0.96)}, Comparison(0.69, 0.9, 6, False, False), -21.0),
        # Two ranks.
        (CONTINUOUS | {"served": (0.7, 0.9), "ranks": 2}, Comparison(0.8, 0.7, 4, True, False), 10.0),
    ],
)
def test_the_hit_rate_is_held_against_the_best_fixed_choice(figures, expected, gain):
    found = comparison(judged(**figures))
    assert found == expected
    assert found.gain == gain


def test_a_reader_who_subtracts_gets_the_gain():
    found = Comparison(hit_rate=0.52649, best=0.44051, experts=4, follows=True, slots=False)
    assert str(found) == (
        "Hit rate 52.6 % in decode steps; the best fixed choice of as many experts in hindsight: 44.1 %, so following the "
        "traffic gained 8.5 points."
    )


@pytest.mark.parametrize(
    ("hit_rate", "follows", "outcome"),
    [
        (0.44, True, "44.0 %, so following the traffic gained nothing, warm-up included."),
        (0.4, True, "44.0 %, so following the traffic lost 4.0 points, warm-up included."),
        (0.4, False, "which are fixed; the best fixed choice of as many experts in hindsight: 44.0 %, 4.0 points more."),
        (0.44, False, "44.0 % as well."),
        (0.45, False, "44.0 %, 1.0 points less."),
    ],
)
def test_what_following_gained_or_lost_is_said(hit_rate, follows, outcome):
    assert str(Comparison(hit_rate, 0.44, 4, follows, False)).endswith(outcome)


def test_slots_are_named():
    assert str(Comparison(0.5, 0.4, 4, True, True)).startswith("Hit rate 50.0 % in decode steps, slots included; the best")


@pytest.mark.parametrize(
    ("figures", "reason"),
    [
        ({"offloaded_bytes": 0}, "Every expert is in VRAM: offloading does nothing here, and plain SGLang is simpler."),
        ({"routed": 0}, "No routing has been counted yet"),
        ({"warmup_done": False}, "Hit rate 50.0 % so far; too early to judge: the warm-up is not over"),
        ({"curve": None}, "Hit rate 50.0 % so far; too early to judge: 256 of 256 decode steps are missing"),
        ({"steps": FEW_STEPS - 1}, "Hit rate 50.0 % so far; too early to judge: 1 of 256 decode steps are missing"),
    ],
)
def test_what_cannot_be_judged_yet_says_why(figures, reason):
    assert comparison(judged(**figures)) is None
    assert headline(judged(**figures)).startswith(reason)
    assert comparison(judged(steps=FEW_STEPS)) is not None


def test_without_residents_no_warmup_is_awaited():
    layers = [msgspec.to_builtins(layer) | {"resident_bytes": 0} for layer in judged().ranks[0].layers]
    assert comparison(judged(layers=layers, warmup_done=False, slots=slots(4), served=(0.5, 0.5))) == Comparison(
        0.5, 0.7, 4, True, True
    )
