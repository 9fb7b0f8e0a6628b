"""``--expert-offload-slots``: what a launch makes of it, before anything loads."""

from __future__ import annotations

import pytest
from builders.launch import launch

from sglang_uvm_offload.config import expert_problems
from sglang_uvm_offload.flags import FlagError
from sglang_uvm_offload.plugin.checks import slot_settings
from sglang_uvm_offload.requested_config import parse

pytestmark = pytest.mark.sglang


def possible(reason: str | None, monkeypatch: pytest.MonkeyPatch, **flags: object) -> int:
    monkeypatch.setattr(slot_settings, "no_slots", lambda cfg, model: reason)
    return slot_settings.possible(parse(flags), *launch()).slots  # type: ignore[return-value]


def test_a_launch_that_can_have_slots_keeps_what_was_asked_for(monkeypatch):
    assert possible(None, monkeypatch, num_resident=4, slots=3) == 3
    assert possible(None, monkeypatch, num_resident="auto", slots="auto") is None
    assert possible(None, monkeypatch, num_resident="auto") is None
    assert possible(None, monkeypatch, num_resident="auto", slots=0) == 0
    assert possible(None, monkeypatch, num_resident=4) == 0


def test_auto_has_none_where_none_are_possible_and_a_number_is_refused_with_the_reason(monkeypatch, caplog):
    caplog.set_level("INFO")
    reason = "--moe-runner-backend cutlass takes groups"
    assert possible(reason, monkeypatch, num_resident="auto", slots="auto") == 0
    assert f"--expert-offload-slots auto: no slots: {reason}" in caplog.text
    with pytest.raises(FlagError) as refused:
        possible(reason, monkeypatch, num_resident=4, slots=3)
    assert refused.value.problems == [f"--expert-offload-slots 3: {reason}; leave it out"]
    assert possible(reason, monkeypatch, num_resident=4) == 0


@pytest.mark.parametrize("reason", [None, "--moe-runner-backend cutlass takes groups"])
def test_auto_beside_a_number_of_residents_has_none(reason, monkeypatch):
    assert possible(reason, monkeypatch, num_resident=4, slots="auto") == 0


def test_more_slots_than_offloaded_experts_are_refused():
    (problem,) = expert_problems(None, 250, 7, 256)
    assert problem.startswith("--expert-offload-slots 7: 250 residents leave 6 of 256 experts a layer offloaded")
    assert expert_problems(None, 250, 6, 256) == []
    assert len(expert_problems(None, 257, 6, 256)) == 1
