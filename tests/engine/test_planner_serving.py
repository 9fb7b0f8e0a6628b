"""Plans against engines: the bytes of experts that a plan promises are those that an engine takes."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import Checkpoints
from serving import Engines

from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.plan.case import Case
from sglang_uvm_offload.plan.engine_shape import shape_of
from sglang_uvm_offload.plan.inputs import Assumptions, Parallel, Reserve, Workload
from sglang_uvm_offload.plan.machine import GIB, Machine
from sglang_uvm_offload.residency.budget import Division

RESIDENT = 3


@pytest.mark.parametrize(
    ("family", "options", "engine", "parallel"),
    [
        ("qwen3_moe", {"quant": "fp8"}, {}, Parallel()),
        pytest.param("qwen3_moe", {"quant": "gptq"}, {"quantization": "moe_wna16"}, Parallel(), marks=pytest.mark.nightly),
        ("glm4_moe", {"expert_size": 256}, {"tp_size": 2}, Parallel(tp=2)),
    ],
    ids=["fp8", "gptq", "two ranks"],
)
def test_an_engine_takes_the_bytes_that_are_planned(
    checkpoints: Checkpoints,
    engines: Engines,
    family: str,
    options: dict[str, Any],
    engine: dict[str, Any],
    parallel: Parallel,
) -> None:
    folder = checkpoints(family, **options)
    served = engines.run(
        folder,
        ["hello"],
        max_new_tokens=2,
        expert_offload_num_resident=RESIDENT,
        expert_offload_resident_selection="first_n",
        **engine,
    ).offload
    machine = Machine("a CPU", parallel.ranks, 8 * GIB, 8 * GIB, 1, 1, 1, "")
    case = Case(
        shape_of(folder), machine, Workload(1024), parallel, Reserve(), Assumptions(), block_bytes=EmulatedMemory().block_bytes
    )
    rank = case.rank(0, Division(RESIDENT, 0, 0))
    assert served["resident_bytes"] == rank.resident_bytes
    # The plan counts a tensor's last block whole.
    tensors = sum(placed for layer in case.decoder_layers(0) for _, placed in case.expert_tensors(layer))
    assert 0 <= rank.host_bytes - served["offloaded_bytes"] < tensors * case.block_bytes
    assert served["num_layers"] == rank.moe_layers
