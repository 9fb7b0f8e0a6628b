"""How much more host RAM this process may take: the kernel's estimate, or less if a memory cgroup limits it, or if a part of it
is on NUMA nodes that are no host RAM.

Host pages of managed memory are kernel pages. They cannot be swapped, and recent kernels charge them to the cgroup, so a
process that ignores its container's limit is killed while it loads, or stalls in each call if the limit is memory.high.

Limits of address space do not count: a page that is populated takes none. Ranges are mapped before, in each rank for itself,
and where RLIMIT_AS or RLIMIT_DATA refuses that, ``Memory.allocate`` says so. Nor does vm.overcommit_memory 2: the driver's
mappings are shared ones of a device, for which the kernel commits nothing (``accountable_mapping``, mm/mmap.c). What other
cgroups may keep (memory.min, memory.low) is not shown to this one.

On GH200 and GB200 the driver gives the GPU's HBM to the kernel as NUMA nodes without CPUs (``os_numa_add_gpu_memory``,
``os-interface.c`` of NVIDIA's open kernel modules, 580.95.05), and ``MemAvailable`` counts them too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
NODES = Path("/sys/devices/system/node")

HOST_MARGIN_BYTES = 1 << 30
"""Host RAM that offloading leaves free for everything else on the machine."""

HOST_LEFT_BYTES = HOST_MARGIN_BYTES // 2
"""Less is never left by what is populated while a model loads, whatever other ranks and the loader take meanwhile."""

BOOKKEEPING_SHARE = 0.005 + 96 / 4096
"""Host RAM for what the kernel and the driver keep of offloaded pages, as a share of their bytes: page tables of the CPU take
0.2 % with pages of 4 KiB, the driver's state of each 2 MiB block 0.1 to 0.3 %, and its state of each physical stretch 96 bytes.
Stretches are of 2 MiB where the kernel has them, and of 4 KiB at worst (``memory/host_pages``); how long they will be is not
known before they are taken. (Read in NVIDIA's open kernel modules, 580, and 595: ``uvm_cpu_physical_chunk_t``.)"""


def host_margin(offloaded_bytes: int) -> int:
    """Bytes of host RAM to leave in addition to ``offloaded_bytes`` of experts."""
    return HOST_MARGIN_BYTES + int(BOOKKEEPING_SHARE * offloaded_bytes)


def host_available(proc: Path = PROC, cgroup: Path = CGROUP, nodes: Path = NODES) -> int:
    """Bytes: the smallest of MemAvailable, what is available on the NUMA nodes that are host RAM, and the room that this
    process's memory cgroups (v1, v2 or both, each up to the root) leave. Droppable file cache counts as available in all."""
    return min([_mem_available(proc), *_node_rooms(proc, nodes), *_cgroup_rooms(proc, cgroup)])


def nodes_available(proc: Path = PROC, nodes: Path = NODES) -> dict[int, int]:
    """Bytes available on each NUMA node that is host RAM and that this process may use; empty where the kernel shows no
    nodes."""
    host = host_nodes(nodes) & (_allowed_nodes(proc) or host_nodes(nodes))
    found = {node: _node_available(nodes / f"node{node}" / "meminfo") for node in sorted(host)}
    return {node: nbytes for node, nbytes in found.items() if nbytes is not None}


def _mem_available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{proc / 'meminfo'} has no MemAvailable (Linux before 3.14?)")


def _node_rooms(proc: Path, nodes: Path) -> list[int]:
    """What is available on host RAM's nodes, where the machine has other memory too or this process may not use all of them.
    Where all memory is host RAM, the kernel's own estimate says more."""
    rooms = nodes_available(proc, nodes)
    return [] if not rooms or rooms.keys() >= _memory_nodes(nodes) else [sum(rooms.values())]


def host_nodes(nodes: Path = NODES) -> set[int]:
    """The nodes that have both memory and CPUs."""
    return _memory_nodes(nodes) & _listed(nodes / "has_cpu")


def _memory_nodes(nodes: Path) -> set[int]:
    return _listed(nodes / "has_memory") or _listed(nodes / "has_normal_memory")


def _allowed_nodes(proc: Path) -> set[int]:
    """The nodes to which a cpuset confines this process; empty if unknown."""
    lines = _text(proc / "self" / "status").splitlines()
    return next((_numbers(line.split(":")[1]) for line in lines if line.startswith("Mems_allowed_list:")), set())


def _node_available(meminfo: Path) -> int | None:
    """Free memory and what the kernel can drop, file cache and slabs, as it counts them for MemAvailable (``si_mem_available``
    of mm/show_mem.c) but for its reserves, of which there is no figure by node. None where it is not shown."""
    lines = [line.split() for line in _text(meminfo).splitlines()]
    kib = {words[2].rstrip(":"): int(words[3]) for words in lines if len(words) > 3}
    if "MemFree" not in kib:
        return None
    # Since Linux 4.20 KReclaimable counts reclaimable slabs and more.
    slabs = kib.get("KReclaimable", kib.get("SReclaimable", 0))
    return (kib["MemFree"] + kib.get("Active(file)", 0) + kib.get("Inactive(file)", 0) + slabs) * 1024


def _listed(file: Path) -> set[int]:
    """The nodes that a file of the kernel lists, such as ``0-1,4``; empty without the file."""
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
    """Memory cgroups of one version, by the files of each."""

    limits: tuple[tuple[str, str], ...]
    """Each limit, and what counts against it. Kernel pages count against each; file cache is dropped before one is reached."""
    cache: tuple[str, str]
    """The fields of memory.stat that are file cache."""


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
"""No file cache counts against it."""


def _cgroup_rooms(proc: Path, cgroup: Path) -> list[int]:
    rooms = []
    for line in _text(proc / "self" / "cgroup").splitlines():
        if line.count(":") < 2:
            continue
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # next to v1, its mount is another one (systemd's "hybrid")
            rooms += _rooms(cgroup, path, _V2) + _rooms(cgroup / "unified", path, _V2)
        elif "memory" in controllers.split(","):
            rooms += _rooms(cgroup / "memory", path, _V1)
    return rooms


def _rooms(mount: Path, path: str, files: _Hierarchy) -> list[int]:
    """The room that each cgroup from ``path`` up to the mount leaves. Inside a container the path may name a directory that
    exists only on the host; the mount itself is then the container's own cgroup."""
    # The kernel shows a path outside the cgroup namespace as "/../..".
    parts = [part for part in path.split("/") if part not in ("", "..")]
    groups = [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return [room for group in groups for limit in files.limits if (room := _room(group, *limit, files.cache)) is not None]


def _room(group: Path, limit_file: str, usage_file: str, cache: tuple[str, str]) -> int | None:
    """Bytes, None without such a limit. The files of a cgroup may vanish or be hidden at any time."""
    limit, used = _number(_text(group / limit_file)), _number(_text(group / usage_file))
    if limit is None:
        return None
    lines = _text(group / "memory.stat").splitlines() if limit_file != _KERNEL_ONLY else []
    fields = dict(line.split() for line in lines if len(line.split()) == 2)
    droppable = sum(_number(fields.get(key, "")) or 0 for key in cache)
    return max(0, limit - max(0, (used or 0) - droppable))


def _number(text: str) -> int | None:
    """None for "max", and for what is no number."""
    return int(text) if text.strip().isdecimal() else None


def _text(file: Path) -> str:
    """Empty where the file cannot be read."""
    try:
        return file.read_text()
    except (OSError, ValueError):
        return ""
