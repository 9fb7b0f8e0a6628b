"""What a server of several replicas says of what each has decided."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_uvm_offload.plugin.operate import replicas

pytestmark = pytest.mark.sglang


def shown(*numbers: str) -> dict[str, Any]:
    infos = [{"status": "ready", "expert_offload_num_resident": number, "expert_offload_slots": "2"} for number in numbers]
    return replicas.after_init_info({"startup_time": 1.0}, SimpleNamespace(_scheduler_init_infos=infos))


def test_what_all_have_decided_is_shown_once():
    expected = {"startup_time": 1.0, "expert_offload_num_resident": "12", "expert_offload_slots": "2"}
    assert shown("12", "12", "12") == expected


def test_what_replicas_have_decided_apart_is_shown_in_order():
    assert shown("12", "8", "12")["expert_offload_num_resident"] == "8, 12"


def test_nothing_is_added_without_offloading():
    assert shown() == {"startup_time": 1.0}
