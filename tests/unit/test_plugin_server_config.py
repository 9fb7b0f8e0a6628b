"""The config that SGLang's arguments carry to every process."""

from __future__ import annotations

import pickle

import pytest
from builders.configs import served_config
from builders.launch import MODEL, arguments

from sglang_uvm_offload.flags import FlagError
from sglang_uvm_offload.plugin.server_args import OffloadServerArgs
from sglang_uvm_offload.plugin.server_config import attach, attach_requested, config_of, requested_of
from sglang_uvm_offload.requested_config import parse

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("values", [{}, {"num_resident": 4, "profile": "a.npz, b.npz", "trace": "t.npz"}])
def test_what_was_attached_arrives_as_it_is(values):
    args = OffloadServerArgs(model_path=MODEL, expert_offload_num_resident=values.get("num_resident"))
    requested = parse(values)
    attach_requested(args, requested)
    arrived = pickle.loads(pickle.dumps(args))
    assert requested_of(arrived) == requested
    if requested is None:
        assert config_of(arrived) is None
        return
    with pytest.raises(FlagError, match="before checking the launch"):
        config_of(arrived)
    attach(args, served_config(**values))
    assert config_of(pickle.loads(pickle.dumps(args))) == served_config(**values)


def test_arguments_that_ask_for_offloading_without_a_config_are_refused():
    with pytest.raises(FlagError, match="--expert-offload-num-resident"):
        config_of(OffloadServerArgs(model_path=MODEL, expert_offload_num_resident="4"))


OFF = OffloadServerArgs(model_path=MODEL, expert_offload_num_resident=-1, expert_offload_config="{")


@pytest.mark.parametrize("args", [arguments(), OffloadServerArgs(model_path=MODEL), OFF], ids=["plain", "ours", "-1"])
def test_plain_arguments_mean_off(args):
    assert config_of(args) is None
