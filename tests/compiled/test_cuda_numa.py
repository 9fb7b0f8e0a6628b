"""The NUMA node of host pages, over the stand-in driver: how it is found, what is advised, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest
from standin.run import Ran, Standin

BLOCK = 2 << 20
MOVES = ("cudaMemAdvise", "cudaMemPrefetchAsync")


def machine(folder: Path, online: str, node: int) -> str:
    """Lines that show programs this machine's nodes and the node of the GPU's PCI device."""
    (folder / "devices/system/node").mkdir(parents=True)
    (folder / "devices/system/node/online").write_text(online)
    for name in ("0000:ab:00.0", "0000:ac:00.0"):
        (folder / "bus/pci/devices" / name).mkdir(parents=True)
        (folder / "bus/pci/devices" / name / "numa_node").write_text(f"{node}\n")
    return f"""
        from pathlib import Path
        from sglang_uvm_offload.cuda import numa
        numa.SYSTEM = numa.PROC = Path({str(folder)!r})
    """


@pytest.mark.parametrize(
    ("online", "pci", "attribute", "node"),
    [
        ("0-1", 1, 0, 0),
        ("0-1", 0, 1, 1),
        ("0-1", 1, 0xFFFFFFFF, 1),
        ("0,2", 2, 0xFFFFFFFF, 2),
        ("0-1", -1, 0xFFFFFFFF, None),
        ("0", 0, 0, None),
        ("", 0, 0, None),
    ],
)
def test_the_node_is_the_drivers_else_the_pci_devices_and_none_where_there_is_one(
    standin: Standin, tmp_path: Path, online, pci, attribute, node
):
    """The driver answers -1 where it does not know."""
    program = machine(tmp_path, online, pci) + "    print(json.dumps(numa.nearest_host_node(0)))"
    assert standin.run(program, attribute_134=attribute).said == node


def with_memory(folder: Path, gib: dict[int, float]) -> None:
    """Gives the nodes of the machine in ``folder`` CPUs, and so much free memory."""
    nodes = folder / "devices/system/node"
    for name in ("has_memory", "has_cpu"):
        (nodes / name).write_text(",".join(map(str, gib)))
    for node, free in gib.items():
        (nodes / f"node{node}").mkdir()
        (nodes / f"node{node}" / "meminfo").write_text(f"Node {node} MemFree: {int(free * (1 << 20))} kB\n")


@pytest.mark.parametrize(
    ("gib", "named"),
    [({0: 8, 1: 8}, None), ({0: 100, 1: 5}, "5.00 GiB"), ({1: 5, 0: 1}, "5.00 GiB"), ({0: 100}, "0.0 MiB"), ({}, None)],
)
def test_a_node_that_has_no_room_for_all_that_is_offloaded_to_it_is_named(standin: Standin, tmp_path: Path, gib, named):
    """Two GPUs of node 1, with 3 and 4 GiB of offloaded experts."""
    program = machine(tmp_path, "0-1", 1)
    with_memory(tmp_path, gib)
    program += "    print(json.dumps(numa.crowded({0: 3 << 30, 1: 4 << 30})))"
    lines = standin.run(program, attribute_134=1, gpus=2).said
    assert len(lines) == (named is not None)
    for line in lines:
        assert line.startswith(f"NUMA node 1, nearest to GPU 0, 1, has only {named} available for 7.00 GiB of offloaded")


PLACED = """
        memory = CudaMemory()
        it = memory.allocate(2 * BLOCK_BYTES, "w13")
        first, second = Span(0, BLOCK_BYTES), Span(BLOCK_BYTES, BLOCK_BYTES)
        memory.place(it, [first], DEVICE)
        memory.place(it, [second], HOST)
        print(json.dumps(memory.host_node))
"""


def moves(ran: Ran) -> list[str]:
    """From the last range on."""
    last = [index for index, call in enumerate(ran.calls) if call["call"] == "cudaMallocManaged"][-1]
    found = [call for call in ran.calls[last:] if call["call"] in MOVES]
    return [f"{call.get('advice', 'prefetch')} {call['location']}" for call in found]


def test_host_pages_go_to_the_node(standin: Standin, tmp_path: Path):
    ran = standin.run(machine(tmp_path, "0-1", 1) + PLACED, attribute_134=1, nodes=2)
    assert ran.said == 1
    on_gpu = ["SetAccessedBy device", "prefetch device", "SetPreferredLocation device"]
    assert moves(ran) == [*on_gpu, "SetPreferredLocation node 1", "prefetch node 1"]


@pytest.mark.parametrize("online", ["0-1", "0"])
def test_where_the_node_is_refused_or_alone_pages_go_to_the_host_as_before(standin: Standin, tmp_path: Path, online):
    ran = standin.run(machine(tmp_path, online, 1) + PLACED, attribute_134=1)
    assert ran.said is None
    assert moves(ran)[-2:] == ["SetPreferredLocation host", "prefetch host"]
    freed = [call for call in ran.named("cudaFree") if call["managed"]]
    assert len(freed) == (online == "0-1"), "the try was freed"


def test_every_promise_of_memory_is_kept_on_a_node(standin: Standin, tmp_path: Path):
    program = """
        from scripts.harness import memory_contract
        memory = CudaMemory()
        for check in memory_contract.CHECKS:
            check(memory)
        print(json.dumps(memory.host_node))
    """
    assert standin.run(machine(tmp_path, "0-1", 1) + program, attribute_134=1, nodes=2).said == 1
