"""Host RAM that is left, told from written /proc and /sys/fs/cgroup files."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_uvm_offload.memory.host_ram import host_available, host_margin

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
        return host_available(proc, cgroup)

    return write


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


def test_a_group_over_its_limit_leaves_nothing(machine):
    files = {"memory.max": f"{GIB}\n", "memory.current": f"{2 * GIB}\n"}
    assert machine(files, "0::/\n") == 0


def test_this_machine_has_some():
    available = host_available()
    total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
    assert 0 < available <= total


def test_the_margin_grows_with_what_the_kernel_keeps_of_offloaded_pages():
    assert host_margin(0) == GIB
    assert host_margin(600 * GIB) == 4 * GIB
