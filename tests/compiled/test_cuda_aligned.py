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
    made = []
    for case in json.loads(CASES):
        for valid in (0, len(case["ids"])):  # a graph's warm-up is computed too
            counters.begin_step(valid, Phase.DECODE)
            slots.begin_step()
            ids = torch.tensor(case["ids"], dtype=torch.int32)
            sizes = ids.numel() * case["block_size"], ids.numel(), 2
            order, blocks, padded = (torch.full((size,), 1 << 30, dtype=torch.int32).cuda() for size in sizes)
            slots.resolve(0, ids.cuda(), BlockLists(blocks, padded, case["block_size"], order=order))
            made.append([each.cpu().tolist() for each in (order, blocks, padded)])
    print(json.dumps(made))
"""


@pytest.mark.sglang
def test_lists_are_those_of_sglangs_aligner(standin):
    env = environment({"TRITON_INTERPRET": "1"})
    ended = subprocess.run([sys.executable, str(PROGRAM)], env=env, capture_output=True, text=True, timeout=patience(120))
    assert ended.returncode == 0, ended.stderr
    cases = [json.loads(line) for line in ended.stdout.splitlines()]
    assert any(case["lists"][2][1] for case in cases), "blocks of no expert"
    made = standin.run(OURS.replace("CASES", repr(json.dumps(cases)))).said
    assert made[::2] == made[1::2] == [case["lists"] for case in cases]
