"""How much more host RAM this process may take: the kernel's estimate, lowered by memory cgroups and by NUMA nodes that are not
host RAM.

Host pages of managed memory are kernel pages. They cannot be swapped, and recent kernels charge them to the cgroup. A process
that ignores its container's limit is killed while loading, or stalls in each call if the limit is memory.high.

Not considered here:

- Address space limits, because populating takes no address space. Ranges are mapped earlier by each rank; if RLIMIT_AS or
  RLIMIT_DATA forbids that, ``Memory.allocate`` raises.
- vm.overcommit_memory 2. The driver's mappings are shared device mappings, which the kernel does not account
  (``accountable_mapping``, mm/mmap.c).
- Reservations of other cgroups (memory.min, memory.low), which this one cannot see.

On GH200 and GB200, the driver adds the GPU's HBM to the kernel as NUMA nodes without CPUs (``os_numa_add_gpu_memory``,
``os-interface.c`` of NVIDIA's open kernel modules, 580.95.05), and ``MemAvailable`` includes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
NODES = Path("/sys/devices/system/node")

HOST_MARGIN_BYTES = 1 << 30
"""Host RAM in bytes that offloading leaves free for everything else on the machine."""

HOST_LEFT_BYTES = HOST_MARGIN_BYTES // 2
"""Populating while a model loads always leaves at least this many bytes, whatever other ranks and the loader take meanwhile."""

BOOKKEEPING_SHARE = 0.005 + 96 / 4096
"""Host RAM for the kernel's and the driver's bookkeeping of offloaded pages, as a share of their bytes. CPU page tables take
0.2 % with 4 KiB pages, the driver's state per 2 MiB block 0.1 to 0.3 %, and its state per physical chunk 96 bytes. Chunks are
2 MiB if the kernel has such pages and 4 KiB at worst (``memory/host_pages``), which is unknown before they are allocated.
(Source: NVIDIA's open kernel modules, 580 and 595, ``uvm_cpu_physical_chunk_t``.)"""


def host_margin(offloaded_bytes: int) -> int:
    """Bytes of host RAM to keep free beyond ``offloaded_bytes`` of experts."""
    return HOST_MARGIN_BYTES + int(BOOKKEEPING_SHARE * offloaded_bytes)


def host_available(proc: Path = PROC, cgroup: Path = CGROUP, nodes: Path = NODES) -> int:
    """Available host RAM in bytes: the minimum of MemAvailable, the memory available on host NUMA nodes, and the room in this
    process's memory cgroups (v1, v2 or both, each up to the root). All three count droppable page cache as available."""
    return min([_mem_available(proc), *_node_rooms(proc, nodes), *_cgroup_rooms(proc, cgroup)])


def nodes_available(proc: Path = PROC, nodes: Path = NODES) -> dict[int, int]:
    """Bytes available on each host NUMA node that this process may use; empty if the kernel shows no nodes."""
    host = host_nodes(nodes) & (_allowed_nodes(proc) or host_nodes(nodes))
    found = {node: _node_available(nodes / f"node{node}" / "meminfo") for node in sorted(host)}
    return {node: nbytes for node, nbytes in found.items() if nbytes is not None}


def _mem_available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{proc / 'meminfo'} has no MemAvailable; offloading needs it (Linux 3.14 or newer)")


def _node_rooms(proc: Path, nodes: Path) -> list[int]:
    """The memory available on host nodes, if the machine has other nodes too or a cpuset excludes some. Otherwise empty,
    because the kernel's own estimate is better."""
    rooms = nodes_available(proc, nodes)
    return [] if not rooms or rooms.keys() >= _memory_nodes(nodes) else [sum(rooms.values())]


def host_nodes(nodes: Path = NODES) -> set[int]:
    """The NUMA nodes with both memory and CPUs."""
    return _memory_nodes(nodes) & _listed(nodes / "has_cpu")


def _memory_nodes(nodes: Path) -> set[int]:
    return _listed(nodes / "has_memory") or _listed(nodes / "has_normal_memory")


def _allowed_nodes(proc: Path) -> set[int]:
    """The nodes that this process's cpuset allows; empty if unknown."""
    lines = _text(proc / "self" / "status").splitlines()
    return next((_numbers(line.split(":")[1]) for line in lines if line.startswith("Mems_allowed_list:")), set())


def _node_available(meminfo: Path) -> int | None:
    """Free memory plus droppable page cache and slabs, as in MemAvailable (``si_mem_available`` of mm/show_mem.c), without the
    kernel's reserves, which it does not report per node. None if unreadable."""
    lines = [line.split() for line in _text(meminfo).splitlines()]
    kib = {words[2].rstrip(":"): int(words[3]) for words in lines if len(words) > 3}
    if "MemFree" not in kib:
        return None
    # KReclaimable (since Linux 4.20) includes reclaimable slabs.
    slabs = kib.get("KReclaimable", kib.get("SReclaimable", 0))
    return (kib["MemFree"] + kib.get("Active(file)", 0) + kib.get("Inactive(file)", 0) + slabs) * 1024


def _listed(file: Path) -> set[int]:
    """The node numbers in a sysfs list file, such as ``0-1,4``; empty without the file."""
    try:
        return _numbers(file.read_text())
    except (OSError, ValueError):
        return set()


def _numbers(text: str) -> set[int]:
    out: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        out |= set(range(int(first), int(last or first) + 1))
    return out


@dataclass(frozen=True)
class _Hierarchy:
    """The files of one memory cgroup version."""

    limits: tuple[tuple[str, str], ...]
    """Each limit and its usage file. Kernel pages count against every limit; page cache is dropped before one is reached."""
    cache: tuple[str, str]
    """The fields of memory.stat that count page cache."""


_V2 = _Hierarchy(
    (("memory.max", "memory.current"), ("memory.high", "memory.current")),
    ("inactive_file", "active_file"),
)
_V1 = _Hierarchy(
    (
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),
        ("memory.kmem.limit_in_bytes", "memory.kmem.usage_in_bytes"),
    ),
    ("total_inactive_file", "total_active_file"),
)
_KERNEL_ONLY = "memory.kmem.limit_in_bytes"
"""The limit that page cache does not count against."""


def _cgroup_rooms(proc: Path, cgroup: Path) -> list[int]:
    rooms = []
    for line in _text(proc / "self" / "cgroup").splitlines():
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # v2; beside v1 it is mounted elsewhere (systemd's "hybrid")
            rooms += _rooms(cgroup, path, _V2) + _rooms(cgroup / "unified", path, _V2)
        elif "memory" in controllers.split(","):
            rooms += _rooms(cgroup / "memory", path, _V1)
    return rooms


def _rooms(mount: Path, path: str, files: _Hierarchy) -> list[int]:
    """The room in each cgroup from ``path`` up to the mount. Inside a container, ``path`` may exist only on the host; the mount
    itself is then the container's cgroup."""
    # The kernel shows a path outside the cgroup namespace as "/../..".
    parts = [part for part in path.split("/") if part not in ("", "..")]
    groups = [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [room for group in groups for limit in files.limits if (room := _room(group, *limit, files.cache)) is not None]


def _room(group: Path, limit_file: str, usage_file: str, cache: tuple[str, str]) -> int | None:
    """The bytes left under a limit, None without the limit. Cgroup files may vanish or be hidden at any time."""
    limit, used = _number(_text(group / limit_file)), _number(_text(group / usage_file))
    if limit is None:
        return None
    lines = _text(group / "memory.stat").splitlines() if limit_file != _KERNEL_ONLY else []
    fields = dict(line.split() for line in lines if len(line.split()) == 2)
    droppable = sum(_number(fields.get(key, "")) or 0 for key in cache)
    return max(0, limit - max(0, (used or 0) - droppable))


def _number(text: str) -> int | None:
    """None for "max" and anything else that is not a number."""
    return int(text) if text.strip().isdecimal() else None


def _text(file: Path) -> str:
    """The file's text, empty if it cannot be read."""
    try:
        return file.read_text()
    except (OSError, ValueError):
        return ""
