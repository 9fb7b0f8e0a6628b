"""What all ranks refuse is shown once, whichever of them has found it, and ends them all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_uvm_offload.flags import FlagError
from sglang_uvm_offload.plugin import enforce
from sglang_uvm_offload.plugin.rank import residency

pytestmark = pytest.mark.sglang


class Ended(Exception):
    pass


def refused(monkeypatch: pytest.MonkeyPatch, rank: int, *found: list[str]) -> list[str]:
    """What a rank does that is one of as many as have ``found`` problems, in order."""
    done: list[str] = []

    def end(message: str, before_exit: Any) -> None:
        done.append(message)
        before_exit()
        raise Ended

    def leave() -> None:
        done.append("leaves")
        raise Ended

    world = SimpleNamespace(
        world_size=len(found),
        rank_in_group=rank,
        all_gather_object=lambda own: list(found),
        barrier=lambda: done.append("waits for all"),
    )
    monkeypatch.setattr(residency, "get_parallel", lambda: SimpleNamespace(world_group=world))
    monkeypatch.setattr(enforce, "end", end)
    monkeypatch.setattr(enforce, "leave", leave)
    with pytest.raises(Ended):
        residency.refuse(found[rank])
    return done


def test_the_first_rank_says_what_any_has_found_and_the_others_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found: tuple[list[str], ...] = ([], ["the ids do not fit", "the profile is another one"], ["the ids do not fit"])
    message, waits = refused(monkeypatch, 0, *found)
    assert [message.count(text) for text in found[1]] == [1, 1]
    assert waits == "waits for all"
    assert refused(monkeypatch, 2, *found) == ["waits for all", "leaves"]


def test_a_rank_alone_raises_what_it_has_found_and_goes_on_with_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimpleNamespace(world_size=1, rank_in_group=0)
    monkeypatch.setattr(residency, "get_parallel", lambda: SimpleNamespace(world_group=world))
    residency.refuse([])
    with pytest.raises(FlagError, match="the ids do not fit"):
        residency.refuse(["the ids do not fit"])
