"""Compares the planner's cost model with a run of ``serve.py``: predicted and measured time over the resident server's.

    python -m benchmarks.model RUN [--out FOLDER]

RUN is a run's folder, or the JSON of a section of a GPU session with the link rates that it measured. ``plan.speed`` predicts
each figure of this plugin (decode step or prefill) from the server's residents, slots and stream buffers, plus the time of the
moves it made meanwhile. Everything that does not cross the link is scaled until the prediction for the resident server equals
its measurement, so only the cost of offloading is judged.

Each figure uses the hit rate that its server counted meanwhile. Unmeasured rates are the planner's assumptions. The table also
goes to model.log, with model.json beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import serve_report
from benchmarks.link_rates import Rates, rates_of
from benchmarks.serve_report import Record, Row
from sglang_uvm_offload.plan.case import Case
from sglang_uvm_offload.plan.engine_shape import shape_of_config
from sglang_uvm_offload.plan.gpus import GPUS
from sglang_uvm_offload.plan.inputs import Assumptions, Parallel, Reserve, Workload
from sglang_uvm_offload.plan.machine import Machine
from sglang_uvm_offload.plan.model_shape import ModelShape
from sglang_uvm_offload.plan.outcome import Speed
from sglang_uvm_offload.plan.safetensors_header import CheckpointError
from sglang_uvm_offload.plan.stage_cost import IN_PLACE, Stream

GIGA = 1e9
WITHIN = 0.10
"""The largest acceptable relative error of a prediction."""
CHUNK = 8192
"""SGLang's prefill chunk on a GPU of this size, if the run does not state it."""
RANKS = ("--tp-size", "--tp", "--tensor-parallel-size", "--pp-size", "--pp", "--pipeline-parallel-size", "--dp-size", "--dp")
"""Arguments that put a server on several GPUs."""
OVERHEADS = ("layer_overhead_us", "latent_overhead_us", "prefill_layer_ms", "latent_prefill_layer_ms")
"""The planner's assumptions about steps other than reads and compute."""


class NothingToCompare(Exception):
    """The run has no figures to compare with. The message gives the reason."""


@dataclass(frozen=True)
class Served:
    """How one contender served."""

    rows: int
    """Residents plus slots per layer."""
    slots: int
    stream: Stream
    chunk: int
    """The most prompt tokens that one step prefills."""

    @classmethod
    def of(cls, record: Record, cell: serve_report.Cell, model: ModelShape) -> Served | None:
        """Reads the final status of the contender's servers. Returns None if none of them offloads."""
        rows = [row for row in serve_report.rows_of(record, cell) if row.get("offload")]
        if not rows:
            return None
        slots, stream = (rows[0]["offload"].get(name) for name in ("slots", "streaming"))
        return cls(
            rows=int(cell[1] * model.num_experts + 1e-9),
            slots=slots["a_layer"] if slots else 0,
            stream=Stream(stream["buffers"], stream["min_tokens"]) if stream else IN_PLACE,
            chunk=chunk_of(record, rows[0]),
        )


@dataclass(frozen=True)
class Figure:
    """One size of one contender, with the planner's prediction."""

    kind: str
    size: int
    context: int
    """Tokens per request."""
    served: Served
    hit_rate: float
    """The share of routed tokens that residents and slots serve."""
    model: ModelShape

    @property
    def decoding(self) -> bool:
        return self.kind == "decode"

    def predict(self, rates: Rates, machine: Machine, assumed: Assumptions) -> Speed:
        model, served = self.model, self.served
        workload = Workload(self.context, self.size if self.decoding else 1, prompt_tokens=self.context)
        machine = replace(machine, link_gbps=1.0)  # so that the efficiencies below are the rates themselves
        assumed = replace(assumed, read_efficiency=rates.read, copy_efficiency=rates.copy)
        of = Case(model, machine, workload, Parallel(), Reserve(), assumed).speed_model()
        residents = served.rows - served.slots
        return of.predict(
            *("counted", self.hit_rate, residents, workload, workload.requests, served.chunk, served.stream, served.slots)
        )

    def as_resident(self, seconds: float, rates: Rates, machine: Machine) -> tuple[Machine, Assumptions]:
        """Returns a machine and assumptions with which this figure takes ``seconds`` with every expert in VRAM: everything that
        does not cross the link is scaled by one factor."""
        assumed = Assumptions()
        speed = self.predict(rates, machine, assumed)
        times = (speed.resident_step_s if self.decoding else self.size / speed.resident_prefill_tokens_s) / seconds
        shorter = {name: getattr(assumed, name) / times for name in OVERHEADS}
        assumed = replace(assumed, hbm_efficiency=assumed.hbm_efficiency * times, **shorter)
        return replace(machine, tflops=machine.tflops * times), assumed

    def seconds(self, speed: Speed) -> float:
        return speed.decode_step_s if self.decoding else self.size / speed.prefill_tokens_s

    def way(self, speed: Speed) -> str:
        """How offloaded experts reach the kernels."""
        if self.decoding:
            return "slots" if self.served.slots else "in place"
        return "streamed" if speed.streamed else "in place"


@dataclass(frozen=True)
class Compared:
    """One figure of one contender, in seconds."""

    cell: serve_report.Cell
    kind: str
    size: int
    way: str
    resident: float
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def compare(record: Record, model: ModelShape, rates: Rates, machine: Machine) -> list[Compared]:
    """Compares every figure of this plugin that the run measured beside a resident server."""
    found = []
    for cell in serve_report.cells(record):
        served = Served.of(record, cell, model)
        for kind in ("decode", "prefill") if served else ():
            for size in serve_report.sizes(record, kind):
                context = record["sizes"]["prompt_tokens"] + record["sizes"]["long"] if kind == "decode" else size
                resident = serve_report.samples(record, serve_report.RESIDENT, kind, size)
                measured = serve_report.samples(record, cell, kind, size)
                if served and resident and measured:
                    hit_rate = hit_rate_of(record, cell, kind, size)
                    figure, median = Figure(kind, size, context, served, hit_rate, model), statistics.median
                    found.append(one(record, cell, figure, median(resident), median(measured), rates, machine))
    return found


def one(
    record: Record,
    cell: serve_report.Cell,
    figure: Figure,
    resident: float,
    measured: float,
    rates: Rates,
    machine: Machine,
) -> Compared:
    machine, assumed = figure.as_resident(resident, rates, machine)
    speed = figure.predict(rates, machine, assumed)
    moving = (counted(record, cell, figure.kind, figure.size, "moved_bytes") or 0.0) / (rates.link * GIGA)
    predicted = figure.seconds(speed) + moving
    return Compared(cell, figure.kind, figure.size, figure.way(speed), resident, measured, predicted)


def hit_rate_of(record: Record, cell: serve_report.Cell, kind: str, size: int) -> float:
    """Returns the share of a figure's routed tokens that residents and slots served, else that of all traffic."""
    routed, resident = (counted(record, cell, kind, size, name) for name in ("routed", "routed_resident"))
    if routed and resident is not None:
        return resident / routed
    overall = serve_report.middle(
        row["offload"]["hit_rate"] for row in serve_report.rows_of(record, cell) if row.get("offload")
    )
    return cell[1] if overall is None else overall


def counted(record: Record, cell: serve_report.Cell, kind: str, size: int, name: str) -> float | None:
    return serve_report.middle(
        point.get(name)
        for row in serve_report.rows_of(record, cell)
        for point in row["points"]
        if (point["kind"], point["size"]) == (kind, size)
    )


def chunk_of(record: Record, row: Row) -> int:
    """Returns the prefill chunk that SGLang reports, else the one in the server's arguments."""
    words = [*record["server_args"], "--chunked-prefill-size", CHUNK]
    return int(row.get("engine", {}).get("chunked_prefill_size") or words[words.index("--chunked-prefill-size") + 1])


def machine_of(record: Record) -> Machine:
    """Returns the GPU of a measured run with the planner's figures for it. Raises ``NothingToCompare``."""
    if not record["measured"]:
        raise NothingToCompare(
            f"the run is of {record['device']}: no GPU took part, so it has no link, read rate or time that the model predicts"
        )
    if ranks := [word for word in record["server_args"] if word.split("=")[0] in RANKS]:
        raise NothingToCompare(f"its servers were given {' '.join(ranks)}: servers of one GPU are compared with the cost model")
    words = record["device"].split()
    known = next((gpu for name, gpu in GPUS.items() if name in words), None)
    if known is None:
        raise NothingToCompare(f"the planner has no figures for {record['device']}: it knows {', '.join(GPUS)}")
    host = record["environment"]["host_total_bytes"]
    vram = record["environment"]["vram_total_bytes"]
    return Machine(record["device"], 1, vram, host, known.link_gbps, known.hbm_gbps, known.tflops, known.source)


# ---- output ----


def lines(compared: Sequence[Compared], rates: Rates) -> list[str]:
    """Returns one line per figure, then how many are off by more than 10 %."""
    head = f"{'contender':24}{'figure':16}{'':10}{'measured':>10}{'predicted':>11}{'off':>8}"
    found = [str(rates), head]
    for each in compared:
        ratios = f"{each.measured / each.resident:10.3f}{each.predicted / each.resident:11.3f}{each.error:8.1%}"
        found.append(f"{serve_report.cell_name(each.cell):24}{f'{each.kind} {each.size}':16}{each.way:10}{ratios}")
    off = sum(abs(each.error) > WITHIN for each in compared)
    return [*found, f"{off} of {len(compared)} figures are off by more than {WITHIN:.0%}"]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, help="folder for model.log and model.json (default: beside the run)")
    wanted = parser.parse_args(arguments)
    try:
        record = serve_report.load(wanted.run)
        machine = machine_of(record)
        model = shape_of_config(record["model"]["name"], record["model"]["config"])
        rates = rates_of(record.get("link", ()), machine.link_gbps, Assumptions())
        compared = compare(record, model, rates, machine)
        if not compared:
            raise NothingToCompare("no figure of this plugin has one of the resident server to compare with")
    except NothingToCompare as reason:
        print(f"model.py: nothing to compare: {reason}")
        return 0
    except (serve_report.NotARun, CheckpointError) as error:
        print(f"model.py: {error}", file=sys.stderr)
        return 2
    out = wanted.out or (wanted.run if wanted.run.is_dir() else wanted.run.parent)
    out.mkdir(parents=True, exist_ok=True)
    text = "\n".join(lines(compared, rates))
    print(text)
    (out / "model.log").write_text(text + "\n")
    figures = [{"cell": each.cell, "kind": each.kind, "size": each.size, "error": each.error} for each in compared]
    (out / "model.json").write_text(json.dumps({"measured": record["measured"], "figures": figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
