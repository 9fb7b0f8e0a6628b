"""Host RAM that is left, told from written files of /proc, /sys/fs/cgroup and /sys/devices/system/node."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_uvm_offload.memory.host_ram import host_available, host_margin, nodes_available

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path):
    """A function that writes the files of a machine with 64 GiB available (numbers: so many GiB), and answers what is left."""

    def write(files: dict[str, str | int], membership: str | None = None) -> int:
        proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
        (proc / "self").mkdir(parents=True)
        (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemFree: 1 kB\nMemAvailable: {64 * GIB // 1024} kB\n")
        if membership is not None:
            (proc / "self" / "cgroup").write_text(membership)
        for name, text in files.items():
            path = cgroup / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text if isinstance(text, str) else f"{text * GIB}\n")
        return host_available(proc, cgroup, tmp_path / "no nodes")

    return write


def node(number: int, free: int, file: int = 0, slabs: int = 0) -> str:
    """A node's meminfo, of GiB."""
    kib = {"MemTotal": 480, "MemFree": free, "Active(file)": file / 2, "Inactive(file)": file / 2, "Shmem": 7}
    kib |= {"KReclaimable": slabs, "SReclaimable": slabs / 2}
    return "".join(f"Node {number} {name}: {int(gib * GIB) // 1024:>15} kB\n" for name, gib in kib.items())


class Nodes:
    """A machine by the files of its NUMA nodes."""

    def __init__(self, folder: Path):
        self.proc, self.nodes = folder / "proc", folder / "nodes"
        (self.proc / "self").mkdir(parents=True)
        self.nodes.mkdir()

    def write(self, available: float, memory: str, cpu: str, free: dict[int, str], allowed: str | None = None) -> Nodes:
        (self.proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {int(available * GIB) // 1024} kB\n")
        if allowed is not None:
            (self.proc / "self" / "status").write_text(f"Name:\tx\nMems_allowed:\tff\nMems_allowed_list:\t{allowed}\n")
        for name, text in {"has_memory": memory, "has_cpu": cpu, "online": memory}.items():
            (self.nodes / name).write_text(f"{text}\n")
        for number, text in free.items():
            (self.nodes / f"node{number}").mkdir()
            (self.nodes / f"node{number}" / "meminfo").write_text(text)
        return self

    def available(self, cgroup: Path | None = None) -> int:
        return host_available(self.proc, cgroup or self.nodes / "none", self.nodes)


@pytest.fixture
def nodes(tmp_path):
    return Nodes(tmp_path)


V2_JOB = {
    "job/memory.max": 8,
    "job/memory.current": 5,
    "job/memory.stat": f"anon {2 * GIB}\nfile {3 * GIB}\ninactive_file {GIB}\nactive_file {GIB}\n",
}
V2_PARENTS = {"pod/memory.max": 4, "pod/memory.current": 3, "pod/job/memory.max": 16, "pod/job/memory.current": 1}
V2_HIGH = {
    **{"pod/memory.max": 40, "pod/memory.high": 6, "pod/memory.current": 5},
    "pod/memory.stat": f"inactive_file {GIB}\nactive_file 0\n",
    **{"pod/job/memory.max": 16, "pod/job/memory.high": "max\n", "pod/job/memory.current": 1},
}
V1_DOCKER = {
    "memory/docker/abc/memory.limit_in_bytes": 8,
    "memory/docker/abc/memory.usage_in_bytes": 6,
    "memory/docker/abc/memory.stat": f"total_inactive_file {GIB}\ntotal_active_file 0\ninactive_file {9 * GIB}\n",
}
V1_CONTAINER = {"memory/memory.limit_in_bytes": 2, "memory/memory.usage_in_bytes": 1}


@pytest.mark.parametrize(
    ("files", "membership", "left"),
    [
        ({}, None, 64),
        (V2_JOB, "0::/job\n", 5),
        ({"job/memory.max": "max\n", "job/memory.current": 1}, "0::/job\n", 64),
        (V2_PARENTS, "0::/pod/job\n", 1),
        (V2_HIGH, "0::/pod/job\n", 2),
        ({"memory.max": 2, "memory.current": 1}, "0::/../../other\n", 1),
        ({"memory.max": 1, "memory.current": 2}, "0::/\n", 0),
        (V1_DOCKER, "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n", 3),
        (V1_CONTAINER, "4:memory:/docker/abc\n", 1),
        ({**V1_CONTAINER, "memory/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n"}, "4:memory:/\n", 64),
        ({"unified/job/memory.max": 3, "unified/job/memory.current": 1}, "4:cpu,cpuacct:/job\n0::/job\n", 2),
    ],
    ids=[
        "no cgroup",
        "v2 counts file cache as free",
        "v2 without a limit",
        "v2 tightest of the parents",
        "v2 stalls above high and kills above max",
        "v2 inside a namespace reads the mount",
        "over the limit",
        "v1 reads its own files",
        "v1 inside a container whose path is the host's",
        "v1 without a limit",
        "v2 next to v1, where systemd mounts it",
    ],
)
def test_a_cgroup_leaves_its_limit_less_its_use(machine, files, membership, left):
    """Numbers are GiB."""
    assert machine(files, membership) == left * GIB


@pytest.mark.parametrize(("kind", "left"), [("memsw.", 4), ("kmem.", 3)])
def test_v1_limits_memory_with_swap_and_that_of_the_kernel_too(machine, kind, left):
    """File cache is no kernel memory."""
    limits = {"limit_in_bytes": 20, "usage_in_bytes": 6, f"{kind}limit_in_bytes": 8, f"{kind}usage_in_bytes": 5}
    files = {f"memory/job/memory.{name}": number for name, number in limits.items()}
    files["memory/job/memory.stat"] = f"total_inactive_file {GIB}\ntotal_active_file 0\n"
    assert machine(files, "4:memory:/job\n") == left * GIB


@pytest.mark.parametrize("odd", ["", "\n", "-1\n", "max", "unlimited", "1 2", "\xb2"])
def test_a_limit_that_is_no_number_leaves_it_to_the_kernel(machine, odd):
    files = {"job/memory.max": odd, "job/memory.high": odd, "job/memory.current": 1}
    assert machine(files, "0::/job\n") == 64 * GIB


@pytest.mark.parametrize("odd", [{}, {"memory.current": ""}, {"memory.current": "none", "memory.stat": "inactive_file x\n\n1"}])
def test_a_limit_counts_whatever_its_other_files_show(machine, odd):
    assert machine({"memory.max": 2, **odd}, "0::/\n") == 2 * GIB


@pytest.mark.parametrize("membership", ["", "\n", "0", "0:", "nonsense\n0::/\n", "4:memory\n0::/\n"])
def test_memberships_that_are_none_are_left_out(machine, membership):
    left = 2 * GIB if "0::/" in membership else 64 * GIB
    assert machine({"memory.max": 2, "memory.current": 0}, membership) == left


def test_hbm_that_the_driver_brings_online_is_no_host_ram(nodes):
    """A GH200: one node with the CPUs, and one of HBM, which MemAvailable counts too."""
    nodes.write(560, "0-1", "0", {0: node(0, 400, file=60, slabs=4), 1: node(1, 94)})
    assert nodes.available() == 464 * GIB
    assert nodes_available(nodes.proc, nodes.nodes) == {0: 464 * GIB}


def on(*gib: float) -> dict[int, str]:
    """Nodes with so many GiB free."""
    return {number: node(number, free) for number, free in enumerate(gib)}


GB200 = {**on(200, 210, 180, 0), 10: node(10, 180), 18: node(18, 180), 26: node(26, 180)}


@pytest.mark.parametrize(
    ("available", "memory", "cpu", "free", "allowed", "left"),
    [
        (1130, "0-2,10,18,26", "0-1", GB200, None, 410),
        (50, "0-1", "0-3", {0: node(0, 30, file=4), 1: node(1, 30)}, None, 50),
        (300, "0-1", "0", {0: node(0, 280, file=60), 1: node(1, 90)}, None, 300),
        (400, "0-1", "0-1", on(150, 250), "1", 250),
    ],
    ids=[
        "several GPUs' HBM, and nodes that MIG leaves without memory",
        "host RAM alone: the kernel's own estimate",
        "no more than the kernel says",
        "nodes that a cpuset forbids",
    ],
)
def test_what_is_available_of_nodes_that_are_host_ram(nodes, available, memory, cpu, free, allowed, left):
    assert nodes.write(available, memory, cpu, free, allowed).available() == left * GIB


@pytest.mark.parametrize(("memory", "cpu", "host"), [("0-2", "0,2", (0, 2)), ("0,2", "0-3", (0, 2)), ("1,5", "1,5", (1, 5))])
def test_nodes_are_listed_as_ranges_and_numbers(nodes, memory, cpu, host):
    nodes.write(64, memory, cpu, {n: node(n, 10 + n) for n in range(6)})
    assert nodes_available(nodes.proc, nodes.nodes) == {n: (10 + n) * GIB for n in host}


def test_the_cgroup_limits_what_the_nodes_leave(nodes, tmp_path):
    nodes.write(560, "0-1", "0", {0: node(0, 400), 1: node(1, 94)})
    (nodes.proc / "self" / "cgroup").write_text("0::/\n")
    for name, nbytes in {"memory.max": 100 * GIB, "memory.current": 30 * GIB}.items():
        (tmp_path / name).write_text(str(nbytes))
    assert nodes.available(tmp_path) == 70 * GIB


@pytest.mark.parametrize("gone", ["has_cpu", "has_memory", "node0/meminfo"])
def test_where_the_kernel_shows_no_nodes_its_estimate_is_all_there_is(nodes, gone):
    nodes.write(560, "0-1", "0", {0: node(0, 400), 1: node(1, 94)})
    (nodes.nodes / gone).unlink()
    assert nodes.available() == 560 * GIB


def test_this_machine_has_some():
    available = host_available()
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < available <= total


def test_the_margin_grows_with_what_the_kernel_keeps_of_offloaded_pages():
    assert host_margin(0) == GIB
    chunks_of_4_kib = 600 * GIB // 4096
    assert host_margin(600 * GIB) == pytest.approx(4 * GIB + 96 * chunks_of_4_kib)
