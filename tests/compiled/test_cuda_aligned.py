"""The lists that the slots' kernel makes of few ids are those of SGLang's own aligner, to the last bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.harness.patience import patience
from scripts.harness.server import environment

PROGRAM = Path(__file__).parents[1] / "interpreted" / "aligned.py"

OURS = """
    from sglang_uvm_offload.cuda.counters import CudaRoutingCounters
    from sglang_uvm_offload.cuda.slots import CudaSlots
    from sglang_uvm_offload.memory.slots import BlockLists, Rows, SlotLayer
    from sglang_uvm_offload.routing.counts import Phase
    tensor = torch.zeros(100 * 16, dtype=torch.uint8).cuda()
    counters = CudaRoutingCounters(1, 80)
    slots = CudaSlots(counters, [SlotLayer([Rows(tensor.data_ptr(), 16)], 80, 0, 80)], [20])
    slots.set_share(np.zeros((1, 80), dtype="uint8"))
    def made(case, valid):
        counters.begin_step(valid, Phase.DECODE)
        if valid:
            slots.begin_step()
        ids = torch.tensor(case["ids"], dtype=torch.int32)
        sizes = ids.numel() * case["block_size"], ids.numel(), 2
        order, blocks, padded = (torch.full((size,), 1 << 30, dtype=torch.int32).cuda() for size in sizes)
        slots.resolve(0, ids.cuda(), BlockLists(blocks, padded, case["block_size"], order=order))
        return [each.cpu().tolist() for each in (order, blocks, padded)]
    cases = json.loads(CASES)
    lists = [made(case, len(case["ids"])) for case in cases]
    slots.set_share(np.full((1, 80), 16, dtype="uint8"))
    redirected = made(cases[0], 1)
    # Outside of a step, as a graph's warm-up is, nothing is known of slots.
    print(json.dumps([lists, redirected, [made(case, 0) for case in cases]]))
"""


@pytest.mark.sglang
def test_lists_are_those_of_sglangs_aligner(standin):
    env = environment({"TRITON_INTERPRET": "1"})
    ended = subprocess.run([sys.executable, str(PROGRAM)], env=env, capture_output=True, text=True, timeout=patience(120))
    assert ended.returncode == 0, ended.stderr
    cases = [json.loads(line) for line in ended.stdout.splitlines()]
    assert any(case["lists"][2][1] for case in cases), "blocks of no expert"
    lists, redirected, outside = standin.run(OURS.replace("CASES", repr(json.dumps(cases)))).said
    expected = [case["lists"] for case in cases]
    assert lists == outside == expected
    assert (redirected[0], redirected[2]) == (expected[0][0], expected[0][2])
    assert {row for row in redirected[1] if row not in (-1, 1 << 30)} <= set(range(80, 100)), "in slots"
