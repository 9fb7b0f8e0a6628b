"""The planner's cost model against a run of ``serve.py``: predicted and measured time over the resident server's.

    python benchmarks/model.py RUN [--probe probe.json] [--layer layer.json] [--out FOLDER]

RUN is a run's folder or a section of a GPU session; the other files are of the session on the same machine. For each figure of
this plugin ``sizing.speed`` predicts what it costs on top of the resident server's measured time:

    time = resident + missed bytes / read rate + streamed bytes / copy rate + moved bytes / copy rate

Streamed bytes are taken as 0, as in runs from before prefill streamed (``streamed_prefill.py`` models that). Missed bytes come
from the model, with the hit rate of the routing that was timed: for decode that of batch 1, where each expert read is one use
(prompts route otherwise), else the one that the server counted over all its traffic. Moved bytes are those that it counted; the
rates are measured where a probe is given, else the planner's assumptions. Where terms differ from what was counted, the
difference is blamed on them, in seconds; what no term
explains is called *not in the model*. The table also goes to model.log, with model.json beside it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import serve_report
from serve_report import Record, Row

from sglang_uvm_offload.sizing.checkpoint import CheckpointShape, load
from sglang_uvm_offload.sizing.machine import GPUS, Machine
from sglang_uvm_offload.sizing.plan import Assumptions, Parallel, Reserve, Workload
from sglang_uvm_offload.sizing.rank_memory import Case
from sglang_uvm_offload.sizing.safetensors_header import CheckpointError
from sglang_uvm_offload.sizing.speed import predict

GIGA = 1e9
WITHIN = 0.10
"""How far a prediction may be off."""
CHUNK = 8192
"""SGLang's prefill chunk on a GPU of this size, where the run's server arguments give none."""


class NothingToCompare(Exception):
    """The run has no figures to compare with. The message has the reason."""


@dataclass(frozen=True)
class Rates:
    """GB/s over the link, and where each is from."""

    read: float
    copy: float
    source: str


@dataclass(frozen=True)
class Compared:
    """One figure of one contender. Seconds."""

    cell: serve_report.Cell
    kind: str
    size: int
    resident: float
    measured: float
    missed_seconds: float
    """That the model adds to the resident time."""
    missed_bytes: float
    counted_bytes: float | None
    """What the server counted, at least: an expert counts once a step."""
    moved_bytes: float
    rates: Rates

    @property
    def predicted(self) -> float:
        return self.resident + self.missed_seconds + self.moved_bytes / (self.rates.copy * GIGA)

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def terms(self) -> dict[str, float]:
        """Seconds by which each term is off: predicted less measured. Their sum is the whole difference."""
        found = {}
        if self.counted_bytes is not None and self.kind == "decode":
            found["missed bytes"] = (self.missed_bytes - self.counted_bytes) / (self.rates.read * GIGA)
        rest = self.predicted - self.measured - sum(found.values())
        read = "read rate" if "assumed" in self.rates.source else "not in the model"
        return {**found, read: rest}

    def worst(self) -> str:
        return max(self.terms().items(), key=lambda term: abs(term[1]))[0]


def rates_of(machine: Machine, assumed: Assumptions, probe: dict[str, Any] | None, layer: dict[str, Any] | None) -> Rates:
    """Measured by the session's ``probe`` (parts bandwidth, prefetch) or ``layer`` (part link), else assumed."""
    read, copy = [], []
    for section in (probe, layer):
        for part in (section or {}).get("parts", {}).values():
            for row in part.get("rows", ()):
                if row["row"] == "zero_copy" and row.get("memory") in ("managed", "pinned", "host_numa") and "median" in row:
                    read.append(row["median"])
                if row["row"] == "copy_engine" and row.get("direction") == "to_device" and "median" in row:
                    copy.append(row["median"])
    link = max(copy, default=machine.link_gbps)
    if read:
        return Rates(max(read), link, "measured by the session's probe")
    return Rates(link * assumed.read_efficiency, link, "assumed by the planner")


def compare(record: Record, model: CheckpointShape, rates: Rates, machine: Machine) -> list[Compared]:
    """Every figure of this plugin's contenders that the run measured beside a resident server."""
    found = []
    for cell in serve_report.cells(record):
        states = [row["offload"] for row in serve_report.rows_of(record, cell) if row.get("offload")]
        if not states:
            continue
        for kind in ("decode", "prefill"):
            for size in serve_report.sizes(record, kind):
                resident = serve_report.samples(record, serve_report.RESIDENT, kind, size)
                measured = serve_report.samples(record, cell, kind, size)
                if resident and measured:
                    seconds = statistics.median(resident), statistics.median(measured)
                    found.append(one(record, cell, kind, size, seconds, states, model, rates, machine))
    return found


def one(
    record: Record,
    cell: serve_report.Cell,
    kind: str,
    size: int,
    seconds: tuple[float, float],
    states: Sequence[Row],
    model: CheckpointShape,
    rates: Rates,
    machine: Machine,
) -> Compared:
    sizes = record["sizes"]
    decoding = kind == "decode"
    context = sizes["prompt_tokens"] + sizes["long"] if decoding else size
    workload = Workload(context, size if decoding else 1, prompt_tokens=context if decoding else size)
    linked = dataclasses.replace(machine, link_gbps=rates.read)
    assumed = dataclasses.replace(Assumptions(), read_efficiency=1.0)
    residents = int(cell[1] * model.num_experts + 1e-9)
    hit_rate = [state["hit_rate"] for state in states if state["hit_rate"] is not None]
    served = statistics.median(hit_rate) if hit_rate else cell[1]
    single = counted(record, cell, "decode", 1, "read_bytes")
    if decoding and single is not None:
        uses = model.top_k * model.expert_bytes / model.num_experts
        served = 1 - single / uses
    case = Case(model, linked, workload, Parallel(), Reserve(), assumed)
    speed = predict(
        *("counted", served, residents, model.num_experts, model.top_k, [case.cost(0)], linked, workload, Parallel()),
        *(workload.requests, chunk_of(record), assumed),
    )
    if decoding:
        added, missed = speed.decode_step_s - speed.resident_step_s, speed.missed_bytes
    else:
        added = size / speed.prefill_tokens_s - size / speed.resident_prefill_tokens_s
        missed = added * rates.read * GIGA
    return Compared(
        cell=cell,
        kind=kind,
        size=size,
        resident=seconds[0],
        measured=seconds[1],
        missed_seconds=added,
        missed_bytes=missed,
        counted_bytes=counted(record, cell, kind, size, "read_bytes"),
        moved_bytes=counted(record, cell, kind, size, "moved_bytes") or 0.0,
        rates=rates,
    )


def counted(record: Record, cell: serve_report.Cell, kind: str, size: int, name: str) -> float | None:
    found = [
        point[name]
        for row in serve_report.rows_of(record, cell)
        for point in row["points"]
        if (point["kind"], point["size"]) == (kind, size) and name in point
    ]
    return statistics.median(found) if found else None


def chunk_of(record: Record) -> int:
    words = record["server_args"]
    return int(words[words.index("--chunked-prefill-size") + 1]) if "--chunked-prefill-size" in words else CHUNK


def machine_of(record: Record) -> Machine:
    """The GPU of a measured run, with the planner's figures for it. Raises ``NothingToCompare``."""
    if not record["measured"]:
        raise NothingToCompare(
            f"the run is of {record['device']}: no GPU took part, so there is no link, no read rate and no time that the cost "
            "model speaks of"
        )
    words = record["device"].split()
    known = next((gpu for name, gpu in GPUS.items() if name in words), None)
    if known is None:
        raise NothingToCompare(f"the planner has no figures for {record['device']}: it knows {', '.join(GPUS)}")
    host = record["environment"]["host_total_bytes"]
    vram = record["environment"]["vram_total_bytes"]
    return Machine(record["device"], 1, vram, host, known.link_gbps, known.hbm_gbps, known.tflops, known.source)


# ---- output ----


def lines(compared: Sequence[Compared]) -> list[str]:
    """A line a figure, then the verdict: within 10 %, or the term that is off most."""
    head = f"{'contender':24}{'figure':16}{'measured':>10}{'predicted':>11}{'off':>8}  the term that is off most"
    found = [f"read rate {compared[0].rates.read:.4g} GB/s, {compared[0].rates.source}", head]
    for each in compared:
        ratios = f"{each.measured / each.resident:10.3f}{each.predicted / each.resident:11.3f}{each.error:8.1%}"
        found.append(f"{serve_report.cell_name(each.cell):24}{f'{each.kind} {each.size}':16}{ratios}  {each.worst()}")
    off = [each for each in compared if abs(each.error) > WITHIN]
    if not off:
        return [*found, f"every one of {len(compared)} figures is within {WITHIN:.0%}"]
    blamed: dict[str, float] = {}
    for each in off:
        for name, seconds in each.terms().items():
            blamed[name] = blamed.get(name, 0) + abs(seconds) / each.measured
    worst = max(blamed, key=lambda name: blamed[name])
    return [*found, f"{len(off)} of {len(compared)} figures are off by more than {WITHIN:.0%}; worst term: {worst}"]


def draw(compared: Sequence[Compared], record: Record, path: Path) -> None:
    """Measured ratios as points and predicted ones as lines, one panel for batches and one for prompts where there are any."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import ScalarFormatter

    labels = {"decode": "requests decoded at once", "prefill": "prompt, tokens"}
    kinds = [kind for kind in labels if any(each.kind == kind for each in compared)]
    figure, grid = pyplot.subplots(1, len(kinds), figsize=(6 * len(kinds), 4.5), layout="constrained", squeeze=False)
    for axes, kind in zip(grid[0], kinds, strict=True):
        for number, cell in enumerate(dict.fromkeys(each.cell for each in compared)):
            mine = [each for each in compared if (each.cell, each.kind) == (cell, kind)]
            x, color = [each.size for each in mine], f"C{number}"
            axes.plot(x, [each.predicted / each.resident for each in mine], color=color, label=serve_report.cell_name(cell))
            axes.plot(x, [each.measured / each.resident for each in mine], "o", color=color)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({each.size for each in compared if each.kind == kind}))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set(xlabel=labels[kind], ylabel=f"{kind} time / resident", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, title="lines: predicted; points: measured", title_fontsize=8)
    figure.suptitle(f"{record['model']['name']} on {record['device']}", fontsize=10)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def section(path: Path | None) -> dict[str, Any] | None:
    """The JSON of a section of a session; one that is no measurement is refused."""
    if path is None:
        return None
    try:
        if path.stat().st_size > serve_report.RUN_BYTES:
            raise serve_report.NotARun(f"{path}: larger than {serve_report.RUN_BYTES} bytes")
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise serve_report.NotARun(f"{path}: {error}") from None
    if found.get("measured") is not True:
        raise serve_report.NotARun(f"{path}: is no measurement of a GPU session")
    return found


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--model", type=Path, help="the checkpoint that was served: its folder, or its config.json")
    parser.add_argument("--probe", type=Path)
    parser.add_argument("--layer", type=Path)
    parser.add_argument("--out", type=Path, help="folder for model.log, .json and .png; default: beside the run")
    wanted = parser.parse_args(arguments)
    try:
        record = serve_report.load(wanted.run)
        machine = machine_of(record)
        if wanted.model is None:
            parser.error("--model: give the checkpoint that was served, its folder or its config.json")
        rates = rates_of(machine, Assumptions(), section(wanted.probe), section(wanted.layer))
        compared = compare(record, load(wanted.model), rates, machine)
        if not compared:
            raise NothingToCompare("no figure of this plugin stands beside one of the resident server")
    except NothingToCompare as reason:
        print(f"model.py: nothing to compare: {reason}")
        return 0
    except (serve_report.NotARun, CheckpointError) as error:
        print(f"model.py: {error}", file=sys.stderr)
        return 2
    out = wanted.out or (wanted.run if wanted.run.is_dir() else wanted.run.parent)
    text = "\n".join(lines(compared))
    print(text)
    (out / "model.log").write_text(text + "\n")
    figures = [{"cell": each.cell, "kind": each.kind, "size": each.size, "error": each.error} for each in compared]
    (out / "model.json").write_text(json.dumps({"measured": record["measured"], "figures": figures}, indent=1) + "\n")
    draw(compared, record, out / "model.png")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
