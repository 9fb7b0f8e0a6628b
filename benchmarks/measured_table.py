"""The README's table of measured times, from a section of a GPU session.

Medians of every sample, in milliseconds; in brackets the ratio to the server with all experts in VRAM. Below, what each held.
"""

from __future__ import annotations

import statistics

from benchmarks import serve_report
from benchmarks.serve_report import Cell, Record

NAMES = {
    "resident": "all experts in VRAM",
    "frequency": "this plugin",
    "residents_and_slots": "this plugin with slots",
    "slots_only": "this plugin, slots alone",
    "paged_experts": "SGLang's paged experts",
    "cpu_offload_gb": "SGLang's `--cpu-offload-gb`",
    "offloader_v2": "SGLang's OffloaderV2",
}
UNITS = {"decode": "decode step, batch", "prefill": "prefill, tokens:"}
HELD = {"vram_bytes": "VRAM held, GiB", "host_available_lost_bytes": "host RAM held, GiB"}


def table(record: Record, *left_out: str) -> str:
    """Of all contenders that served, but for those of these names."""
    names = NAMES.keys() - {*left_out}
    cells = [cell for cell in serve_report.cells(record) if cell[0] in names and served(record, cell)]
    head = ["milliseconds", *(column(cell) for cell in cells)]
    lines = [head, ["---"] * len(head)]
    for kind, words in UNITS.items():
        for size in serve_report.sizes(record, kind):
            lines.append([f"{words} {size:,}", *(entry(record, cell, kind, size) for cell in cells)])
    lines += [[words, *(held(record, cell, name) for cell in cells)] for name, words in HELD.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def served(record: Record, cell: Cell) -> bool:
    """Whether it has a figure: a server that found no time left has none."""
    return any(not point["error"] for row in serve_report.rows_of(record, cell) for point in row["points"])


def column(cell: Cell) -> str:
    return NAMES[cell[0]] if cell == serve_report.RESIDENT else f"{NAMES[cell[0]]}, {cell[1]:.0%} in VRAM"


def entry(record: Record, cell: Cell, kind: str, size: int) -> str:
    samples = serve_report.samples(record, cell, kind, size)
    if not samples:
        return "-"
    text = f"{1e3 * statistics.median(samples):.1f}"
    ratio = serve_report.ratio(record, cell, kind, size)
    return text if cell == serve_report.RESIDENT or ratio is None else f"{text} ({ratio[0]:.1f}x)"


def held(record: Record, cell: Cell, name: str) -> str:
    found = [row["memory"][name] for row in serve_report.rows_of(record, cell) if row.get("memory", {}).get(name) is not None]
    return f"{statistics.median(found) / 2**30:.1f}" if found else "-"
