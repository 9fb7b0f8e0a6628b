"""Makes the README's table of measured times from a section of a GPU session.

Each cell gives the lowest and highest sample in milliseconds, and in brackets the ratio of medians to the server with all
experts in VRAM. Rows below give the memory that each server held; a sentence says how all were started.
"""

from __future__ import annotations

import statistics
import textwrap

from benchmarks import serve_report
from benchmarks.serve_report import Cell, Record

NAMES = {
    "resident": "all experts in VRAM",
    "frequency": "this plugin",
    "residents_and_slots": "this plugin with slots",
    "slots_only": "this plugin, slots alone",
    "without_buffers": "this plugin, slots alone, no stream buffers",
    "paged_experts": "SGLang's paged experts",
    "cpu_offload_gb": "SGLang's `--cpu-offload-gb`",
    "offloader_v2": "SGLang's OffloaderV2",
}
UNITS = {"decode": "decode step, batch", "prefill": "prefill, tokens:"}
HELD = {"vram_bytes": "VRAM held, GiB", "host_available_lost_bytes": "host RAM held, GiB"}
SUBTRACTED = "difference"
"""Marks older logs, which timed decode as the difference between two answer lengths. That assumes that both prompts cost the
same, which is wrong while a cache fills."""
RESOLVED_BATCH = 16
"""From this batch on, the cost of prompts is small beside a step."""
COLUMNS = 140


def table(record: Record, *left_out: str) -> str:
    """Makes the table of all contenders that served, except those named in ``left_out``."""
    names = NAMES.keys() - {*left_out}
    cells = [cell for cell in serve_report.cells(record) if cell[0] in names and served(record, cell)]
    head = ["milliseconds", *(column(cell) for cell in cells)]
    lines = [head, ["---"] * len(head)]
    for kind, words in UNITS.items():
        for size in sizes(record, kind):
            lines.append([f"{words} {size:,}", *(entry(record, cell, kind, size) for cell in cells)])
    lines += [[words, *(held(record, cell, name) for cell in cells)] for name, words in HELD.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n\n" + started(record)


def started(record: Record) -> str:
    """Says how the servers were started, apart from their own flags."""
    starts, samples = (
        serve_report.count(each, noun) for each, noun in ((record["repeats"], "start"), (record["sizes"]["samples"], "sample"))
    )
    text = f"Each server: {starts}, {samples} of a figure, no prefix cache, and `{' '.join(record['server_args'])}`."
    return textwrap.fill(text, COLUMNS, break_on_hyphens=False, break_long_words=False)


def sizes(record: Record, kind: str) -> list[int]:
    """Returns the measured sizes, without batches that an older log could not time."""
    least = RESOLVED_BATCH if kind == "decode" and SUBTRACTED in record["methods"]["decode"] else 0
    return [size for size in serve_report.sizes(record, kind) if size >= least]


def served(record: Record, cell: Cell) -> bool:
    """Whether the cell has a figure. A server with no time left has none."""
    return any(not point["error"] for row in serve_report.rows_of(record, cell) for point in row["points"])


def column(cell: Cell) -> str:
    return NAMES[cell[0]] if cell == serve_report.RESIDENT else f"{NAMES[cell[0]]}, {cell[1]:.0%} in VRAM"


def entry(record: Record, cell: Cell, kind: str, size: int) -> str:
    samples = serve_report.samples(record, cell, kind, size)
    if not samples:
        return "-"
    text = f"{1e3 * min(samples):.1f} to {1e3 * max(samples):.1f}"
    ratio = serve_report.ratio(record, cell, kind, size)
    return text if cell == serve_report.RESIDENT or ratio is None else f"{text} ({ratio[0]:.1f}x)"


def held(record: Record, cell: Cell, name: str) -> str:
    found = [row["memory"][name] for row in serve_report.rows_of(record, cell) if row.get("memory", {}).get(name) is not None]
    return f"{statistics.median(found) / 2**30:.1f}" if found else "-"
