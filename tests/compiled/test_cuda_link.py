"""Timing the link on the stand-in driver: which bytes are read and copied, at the rates that it plays."""

from __future__ import annotations

import pytest
from standin.run import Standin

PREPARE = """
import dataclasses
from sglang_uvm_offload.cuda.link import CudaLinkTimer
from sglang_uvm_offload.memory.link import Offloaded
memory, random = CudaMemory(), np.random.default_rng(0)
def tensor(blocks, offloaded, expert_bytes):
    made = memory.allocate(blocks * BLOCK, "w13")  # freed with `held`, so whoever reads it keeps what this returns
    held, values = memory.tensor(made), random.integers(0, 255, blocks * BLOCK, dtype=np.uint8)
    for block in range(blocks):
        memory.place(made, [Span(block * BLOCK, BLOCK)], HOST if block in offloaded else DEVICE)
    held.copy_(torch.from_numpy(values))
    return made, held, values, Offloaded(made.address + BLOCK * np.array(sorted(offloaded), dtype=np.int64), expert_bytes)
"""


@pytest.mark.parametrize("link", ["51,50,49,54", "35,35,33,52", "25,16.5,24,25.1", "375,340,330,420"])
@pytest.mark.parametrize("expert_bytes", [3 << 19, 3 << 20, (200 << 10) + 8])
def test_each_rate_is_the_links(standin: Standin, link: str, expert_bytes: int) -> None:
    ran = standin.run(
        PREPARE
        + f"""
made = [tensor(12, range(3, 12), {expert_bytes}), tensor(5, {{0, 2, 4}}, {expert_bytes})]
waits = []
rates = CudaLinkTimer(0, [one[3] for one in made]).rates(0.001, lambda: waits.append(1))
print(json.dumps([dataclasses.astuple(rates), len(waits)]))
""",
        link=link,
    )
    rates, waits = ran.said
    assert rates == pytest.approx([float(rate) for rate in link.split(",")], rel=1e-4)
    assert waits == 4


def test_no_byte_changes_and_only_offloaded_ones_are_used(standin: Standin) -> None:
    """The longest run of neighbours ends with its tensor: a copy of two ranges fails."""
    ran = standin.run(
        PREPARE
        + """
made = [tensor(6, {0, 4, 5}, 1 << 20), tensor(6, {0, 1, 2}, 1 << 20), tensor(2, set(), 1 << 20)]
timer = CudaLinkTimer(0, [one[3] for one in made])
timer.rates(0.001, lambda: None)
same = [bool((held.cpu().numpy() == values).all()) for _, held, values, _ in made]
used = {int(address) // BLOCK for address in timer._blocks}
target = timer._target.data_ptr()
timer.close()
print(json.dumps([same, len(used), timer._run.size, int(timer._run[0]) == made[1][0].address, target]))
"""
    )
    *said, target = ran.said
    assert said == [[True] * 3, 6, 3, True]
    assert [call for call in ran.named("cudaFree") if call["address"] == target], "its VRAM is given back to the driver"
    assert [call for call in ran.calls if call["result"] != 0] == []


def test_scattered_reads_are_of_everything_that_is_offloaded(standin: Standin) -> None:
    ran = standin.run(
        PREPARE
        + """
made = [tensor(40, range(40), 1 << 21), tensor(6, {1, 4}, 1 << 21)]
timer = CudaLinkTimer(0, [one[3] for one in made])
read = set()
timer._ops.read_pieces = lambda pieces, nbytes, word: read.update(int(at) // BLOCK for at in pieces.cpu())
for _ in range(60):
    timer._read_scattered(8 * BLOCK).make()
print(json.dumps([len(read), sorted(read) == sorted(int(at) // BLOCK for one in made for at in one[3].blocks)]))
"""
    )
    assert ran.said == [42, True]


def test_a_call_shorter_than_events_resolve_has_a_rate(standin: Standin) -> None:
    """Peers wait for a rank that measures, so it must not end."""
    ran = standin.run(
        PREPARE
        + """
made = tensor(2, {0, 1}, 1 << 20)
timer = CudaLinkTimer(0, [made[3]])
class AtOnce:
    def record(self): pass
    def elapsed_time(self, end): return 0.0
timer._began = AtOnce()
print(json.dumps(timer._once(timer._read_in_sequence(2 * BLOCK)) < 1e6))
"""
    )
    assert ran.said is True


def test_want_of_vram_is_an_error_of_the_timer(standin: Standin) -> None:
    ran = standin.run(
        PREPARE
        + """
made = tensor(4, range(4), 1 << 20)
try:
    CudaLinkTimer(0, [made[3]])
    print(json.dumps("measured"))
except RuntimeError:
    print(json.dumps("an error"))
""",
        fail="cudaMalloc:1:2!",
    )
    assert ran.said == "an error"
