"""What a soak compares and what it calls growth; the soak itself takes minutes (scripts/soak.sh)."""

from __future__ import annotations

import pytest
import reliability
from faults.soak import GROWTH, grown
from faults.traffic import DOMAINS, alike, requests


def test_answers_are_alike_but_for_the_last_bits_of_log_probabilities():
    assert alike([["text", [[-1.5, 7, None]]]], [["text", [[-1.5004, 7, None]]]])
    assert not alike([["text", [[-1.5, 7, None]]]], [["text", [[-1.6, 7, None]]]])
    assert not alike([["text", [[-1.5, 7, None]]]], [["text", [[-1.5, 8, None]]]])
    assert not alike(["a"], ["b"])
    assert not alike(["a", "b"], ["a"])
    assert not alike("a", None)


def test_every_domain_gets_every_kind_of_request():
    kinds = [request.kind for request in requests()]
    each = len(kinds) // len(DOMAINS)
    assert all(kinds[n * each : (n + 1) * each] == kinds[:each] for n in range(len(DOMAINS)))
    assert {"short", "long", "streamed", "aborted", "n", "logprobs", "regex", "json_schema", "chat", "completions"} == set(
        kinds
    )


def samples(rss):
    return [{"rss": each, "handles": 10, "threads": 5, "shm": 3} for each in rss]


def test_what_fills_at_the_start_is_no_growth_and_what_goes_on_is():
    filled = grown(samples([10, 50, 90, *[100] * 20]))
    assert all(filled[name] <= most for name, most in GROWTH.items())
    leaking = grown(samples(range(1000, 2000, 20)))
    assert leaking["rss"] > GROWTH["rss"]
    assert leaking["handles"] == leaking["threads"] == leaking["shm"] == 0


def test_the_page_says_what_was_asked_and_found():
    found = {"minutes": 2, "answers": {"chat": 1200, "short": 34}, "wrong": ["x"], "actions": {"pause": 2}, "moves": 7}
    found |= {"hit_rate": 0.5, "fault": None, "saves_failed": 0, "growth": {"rss": 0.012}}
    page = reliability.markdown([], found)
    assert "1,234 requests in 2 minutes: 1,200 chat, 34 short." in page
    assert "Wrong answers: 1. Failed saves: 0. Fault: none." in page
    assert "Told: pause 2." in page
    assert "rss +1.2%" in page


@pytest.mark.parametrize("few", [1, 2])
def test_too_short_a_soak_judges_nothing(few):
    assert set(grown(samples([10] * few)).values()) == {0.0}
