"""How much more host RAM this process may take: the kernel's estimate, or less if a memory cgroup limits it.

Host pages of managed memory are kernel pages. They cannot be swapped, and recent kernels charge them to the cgroup, so a
process that ignores its container's limit is killed while it loads.
"""

from __future__ import annotations

from pathlib import Path

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")

HOST_MARGIN_BYTES = 1 << 30
"""Host RAM that offloading leaves free for everything else on the machine."""

BOOKKEEPING_SHARE = 0.005
"""Host RAM for what the kernel and the driver keep of offloaded pages, as a share of their bytes: page tables of the CPU take
0.2 % with pages of 4 KiB, the driver's state of each 2 MiB block 0.1 to 0.3 % (read in NVIDIA's open kernel modules, 580)."""


def host_margin(offloaded_bytes: int) -> int:
    """Bytes of host RAM to leave beside ``offloaded_bytes`` of experts."""
    return HOST_MARGIN_BYTES + int(BOOKKEEPING_SHARE * offloaded_bytes)


def host_available(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes: the smaller of MemAvailable and the room that this process's memory cgroups (v1 or v2, each up to the root)
    leave. Droppable file cache counts as available in both."""
    return min([_mem_available(proc), *_cgroup_rooms(proc, cgroup)])


def _mem_available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{proc / 'meminfo'} has no MemAvailable (Linux before 3.14?)")


def _cgroup_rooms(proc: Path, cgroup: Path) -> list[int]:
    memberships = proc / "self" / "cgroup"
    if not memberships.is_file():
        return []
    rooms = []
    for line in memberships.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            rooms += _rooms(cgroup, path, "memory.max", "memory.current", ("inactive_file", "active_file"))
        elif "memory" in controllers.split(","):
            v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
            rooms += _rooms(cgroup / "memory", path, *v1)
    return rooms


def _rooms(mount: Path, path: str, limit_file: str, usage_file: str, cache_keys: tuple[str, str]) -> list[int]:
    """The room that each cgroup from ``path`` up to the mount leaves. Inside a container the path may name a directory that
    exists only on the host; the mount itself is then the container's own cgroup."""
    # The kernel shows a path outside the cgroup namespace as "/../..".
    parts = [part for part in path.split("/") if part not in ("", "..")]
    rooms = []
    for depth in range(len(parts), -1, -1):
        group = mount.joinpath(*parts[:depth])
        if not (group / limit_file).is_file() or not (group / usage_file).is_file():
            continue
        limit = (group / limit_file).read_text().strip()
        if limit == "max":
            continue
        used = int((group / usage_file).read_text()) - _file_cache(group / "memory.stat", cache_keys)
        rooms.append(max(0, int(limit) - used))
    return rooms


def _file_cache(stat: Path, keys: tuple[str, str]) -> int:
    if not stat.is_file():
        return 0
    fields = dict(line.split() for line in stat.read_text().splitlines() if len(line.split()) == 2)
    return sum(int(fields.get(key, 0)) for key in keys)
