"""Host RAM that is left, told from written files of /proc, /sys/fs/cgroup and /sys/devices/system/node."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_uvm_offload.memory.host_ram import host_available, host_margin, nodes_available

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path):
    """A function that writes the files of a machine with 64 GiB available, and answers what is left."""

    def write(files: dict[str, str], membership: str | None = None) -> int:
        proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
        (proc / "self").mkdir(parents=True)
        (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemFree: 1 kB\nMemAvailable: {64 * GIB // 1024} kB\n")
        if membership is not None:
            (proc / "self" / "cgroup").write_text(membership)
        for name, text in files.items():
            path = cgroup / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
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


def test_without_cgroups_the_kernel_decides(machine):
    assert machine({}) == 64 * GIB


def test_v2_leaves_limit_less_use_with_file_cache_as_free(machine):
    files = {
        "job/memory.max": f"{8 * GIB}\n",
        "job/memory.current": f"{5 * GIB}\n",
        "job/memory.stat": f"anon {2 * GIB}\nfile {3 * GIB}\ninactive_file {GIB}\nactive_file {GIB}\n",
    }
    assert machine(files, "0::/job\n") == 5 * GIB


def test_v2_without_a_limit_leaves_it_to_the_kernel(machine):
    files = {"job/memory.max": "max\n", "job/memory.current": f"{GIB}\n"}
    assert machine(files, "0::/job\n") == 64 * GIB


def test_v2_takes_the_tightest_of_the_parents(machine):
    files = {
        "pod/memory.max": f"{4 * GIB}\n",
        "pod/memory.current": f"{3 * GIB}\n",
        "pod/job/memory.max": f"{16 * GIB}\n",
        "pod/job/memory.current": f"{GIB}\n",
    }
    assert machine(files, "0::/pod/job\n") == GIB


def test_v2_inside_a_namespace_reads_the_mount(machine):
    files = {"memory.max": f"{2 * GIB}\n", "memory.current": f"{GIB}\n"}
    assert machine(files, "0::/../../other\n") == GIB


def test_v1_reads_its_own_files(machine):
    files = {
        "memory/docker/abc/memory.limit_in_bytes": f"{8 * GIB}\n",
        "memory/docker/abc/memory.usage_in_bytes": f"{6 * GIB}\n",
        "memory/docker/abc/memory.stat": f"total_inactive_file {GIB}\ntotal_active_file 0\ninactive_file {9 * GIB}\n",
    }
    assert machine(files, "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n") == 3 * GIB


def test_v1_inside_a_container_whose_path_is_the_hosts(machine):
    files = {"memory/memory.limit_in_bytes": f"{2 * GIB}\n", "memory/memory.usage_in_bytes": f"{GIB}\n"}
    assert machine(files, "4:memory:/docker/abc\n") == GIB


def test_v1_without_a_limit_leaves_it_to_the_kernel(machine):
    files = {"memory/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n", "memory/memory.usage_in_bytes": f"{GIB}\n"}
    assert machine(files, "4:memory:/\n") == 64 * GIB


def test_v2_stalls_above_high_and_kills_above_max(machine):
    """The tightest of both counts, in whichever cgroup it is."""
    files = {
        "pod/memory.max": f"{40 * GIB}\n",
        "pod/memory.high": f"{6 * GIB}\n",
        "pod/memory.current": f"{5 * GIB}\n",
        "pod/memory.stat": f"inactive_file {GIB}\nactive_file 0\n",
        "pod/job/memory.max": f"{16 * GIB}\n",
        "pod/job/memory.high": "max\n",
        "pod/job/memory.current": f"{GIB}\n",
    }
    assert machine(files, "0::/pod/job\n") == 2 * GIB


@pytest.mark.parametrize("version", ["memory.max", "memory.high"])
def test_v2_next_to_v1_is_read_where_systemd_mounts_it(machine, version):
    files = {f"unified/job/{version}": f"{3 * GIB}\n", "unified/job/memory.current": f"{GIB}\n"}
    assert machine(files, "4:cpu,cpuacct:/job\n0::/job\n") == 2 * GIB


@pytest.mark.parametrize(("kind", "left"), [("memsw.", 4 * GIB), ("kmem.", 3 * GIB)])
def test_v1_limits_memory_with_swap_and_that_of_the_kernel_too(machine, kind, left):
    """File cache is no kernel memory."""
    files = {
        "memory/job/memory.limit_in_bytes": f"{20 * GIB}\n",
        "memory/job/memory.usage_in_bytes": f"{6 * GIB}\n",
        f"memory/job/memory.{kind}limit_in_bytes": f"{8 * GIB}\n",
        f"memory/job/memory.{kind}usage_in_bytes": f"{5 * GIB}\n",
        "memory/job/memory.stat": f"total_inactive_file {GIB}\ntotal_active_file 0\n",
    }
    assert machine(files, "4:memory:/job\n") == left


@pytest.mark.parametrize("odd", ["", "\n", "-1\n", "max", "unlimited", "1 2", "\xb2"])
def test_a_limit_that_is_no_number_leaves_it_to_the_kernel(machine, odd):
    files = {"job/memory.max": odd, "job/memory.high": odd, "job/memory.current": f"{GIB}\n"}
    assert machine(files, "0::/job\n") == 64 * GIB


@pytest.mark.parametrize("odd", [{}, {"memory.current": ""}, {"memory.current": "none", "memory.stat": "inactive_file x\n\n1"}])
def test_a_limit_counts_whatever_its_other_files_show(machine, odd):
    assert machine({"memory.max": f"{2 * GIB}\n", **odd}, "0::/\n") == 2 * GIB


@pytest.mark.parametrize("membership", ["", "\n", "0", "0:", "nonsense\n0::/\n", "4:memory\n0::/\n"])
def test_memberships_that_are_none_are_left_out(machine, membership):
    left = 2 * GIB if "0::/" in membership else 64 * GIB
    assert machine({"memory.max": f"{2 * GIB}\n", "memory.current": "0\n"}, membership) == left


def test_a_group_over_its_limit_leaves_nothing(machine):
    files = {"memory.max": f"{GIB}\n", "memory.current": f"{2 * GIB}\n"}
    assert machine(files, "0::/\n") == 0


def test_hbm_that_the_driver_brings_online_is_no_host_ram(nodes):
    """A GH200: one node with the CPUs, and one of HBM, which MemAvailable counts too."""
    nodes.write(560, "0-1", "0", {0: node(0, 400, file=60, slabs=4), 1: node(1, 94)})
    assert nodes.available() == 464 * GIB
    assert nodes_available(nodes.proc, nodes.nodes) == {0: 464 * GIB}


def test_the_hbm_of_several_gpus_is_left_out_whatever_its_numbers(nodes):
    """A GB200 board: two CPUs, four GPUs, and nodes that MIG leaves without memory."""
    free = {0: node(0, 200), 1: node(1, 210), **{n: node(n, 180) for n in (2, 10, 18, 26)}, 3: node(3, 0)}
    nodes.write(1130, "0-2,10,18,26", "0-1", free)
    assert nodes.available() == 410 * GIB


@pytest.mark.parametrize(("memory", "cpu", "host"), [("0-2", "0,2", (0, 2)), ("0,2", "0-3", (0, 2)), ("1,5", "1,5", (1, 5))])
def test_nodes_are_listed_as_ranges_and_numbers(nodes, memory, cpu, host):
    nodes.write(64, memory, cpu, {n: node(n, 10 + n) for n in range(6)})
    assert nodes_available(nodes.proc, nodes.nodes) == {n: (10 + n) * GIB for n in host}


def test_on_host_ram_alone_the_kernels_own_estimate_counts(nodes):
    nodes.write(50, "0-1", "0-3", {0: node(0, 30, file=4), 1: node(1, 30)})
    assert nodes.available() == 50 * GIB


def test_one_node_is_what_the_kernel_says(nodes):
    assert nodes.write(50, "0", "0", {0: node(0, 20, file=10)}).available() == 50 * GIB


def test_no_more_than_the_kernel_says_is_available(nodes):
    assert nodes.write(300, "0-1", "0", {0: node(0, 280, file=60), 1: node(1, 90)}).available() == 300 * GIB


def test_nodes_that_a_cpuset_forbids_are_not_counted(nodes):
    nodes.write(400, "0-1", "0-1", {0: node(0, 150), 1: node(1, 250)}, allowed="1")
    assert nodes.available() == 250 * GIB


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
