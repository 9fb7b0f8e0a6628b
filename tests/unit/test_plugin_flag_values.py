"""Numbers that SGLang's parser accepts and no server starts with: each is a problem by its flag, before any other check."""

from typing import Any

import pytest
from builders.launch import arguments, resolved
from sglang.srt.arg_groups.overrides import declare_resolution

from sglang_uvm_offload.flags import FlagError
from sglang_uvm_offload.plugin import doctor
from sglang_uvm_offload.plugin.checks import flag_values, launch_checks
from sglang_uvm_offload.requested_config import parse

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"tp_size": 0}, "--tp-size 0: must be 1 or more"),
        ({"ep_size": 0}, "--ep-size 0: must be 1 or more"),
        ({"pp_size": 0}, "--pp-size 0: must be 1 or more"),
        ({"dp_size": -1}, "--dp-size -1: must be 1 or more"),
        ({"nnodes": 0}, "--nnodes 0: must be 1 or more"),
        ({"nnodes": 2, "node_rank": 2}, "--node-rank 2: must be below --nnodes 2"),
        ({"context_length": 0}, "--context-length 0: must be 1 or more"),
        ({"max_total_tokens": -5}, "--max-total-tokens -5: must be 1 or more"),
        ({"page_size": -1}, "--page-size -1: must be 1 or more"),
        ({"base_gpu_id": -1}, "--base-gpu-id -1: must be 0 or more"),
        ({"hicache_size": -1}, "--hicache-size -1: must be 0 or more"),
        ({"mem_fraction_static": 1.5}, "--mem-fraction-static 1.5: must be above 0 and at most 1"),
        ({"mem_fraction_static": 0.0}, "--mem-fraction-static 0.0: must be above 0 and at most 1"),
        ({"mem_fraction_static": float("nan")}, "--mem-fraction-static nan: must be above 0 and at most 1"),
    ],
)
def test_a_number_that_no_server_starts_with_is_the_launchs_only_problem(values: dict[str, Any], problem: str) -> None:
    requested = parse({"num_resident": "auto"})
    assert requested is not None
    with pytest.raises(FlagError) as refused:
        launch_checks.check(requested, arguments(**values))
    assert refused.value.problems == [problem]


def test_all_of_them_are_listed() -> None:
    assert len(flag_values.problems(arguments(tp_size=0, pp_size=0, mem_fraction_static=2.0))) == 3


def test_what_sglang_chooses_and_the_limits_are_accepted() -> None:
    assert flag_values.problems(resolved(device="cpu")) == []
    assert flag_values.problems(arguments(mem_fraction_static=1.0, context_length=1, max_running_requests=0)) == []


def test_a_share_that_sglang_itself_makes_negative_is_no_fault_of_the_headroom() -> None:
    args = arguments(chunked_prefill_size=-1)
    declare_resolution(args, "test", mem_fraction_static=-0.036)
    (problem,) = flag_values.problems(args)
    assert problem.startswith("--mem-fraction-static: not given, and what SGLang keeps for activations (--chunked-")
    assert "makes it -0.036, which leaves nothing for weights; give it, or --chunked-prefill-size 2048" in problem


@pytest.mark.parametrize("values", [{"pp_size": 0}, {"nnodes": 0}])
def test_doctor_looks_at_no_gpus_where_the_arguments_describe_no_ranks(values: dict[str, Any]) -> None:
    launch = doctor.Launch.__new__(doctor.Launch)
    launch.args = arguments(**values)
    assert launch.gpus() == []
