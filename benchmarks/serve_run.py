"""Runs each contender's server in turn, from start to end, and records a row of results for each."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import serve_client, serve_engine, serve_log, serve_meter, serve_report
from benchmarks.contenders import CONTENDERS, RESIDENT, Budget, CannotServe, Contender, cells
from benchmarks.gpu.environment import installed
from benchmarks.serve_client import Client, PointFailed, PromptIds, Sizes
from scripts.harness.ahead import start_ahead
from scripts.harness.patience import patience
from scripts.harness.server import EngineFailed, Server, flags
from sglang_uvm_offload.plan.engine_shape import shape_of
from sglang_uvm_offload.plan.model_shape import ModelShape

ROOT = Path(__file__).resolve().parents[1]

Row = dict[str, Any]
NO_TIME = "no time left in this run"
GRACE_SECONDS = 60
"""After the deadline nothing new starts; what is running may finish within this time."""
OFFLOAD_FIGURES = (
    *("backend", "num_layers", "num_experts", "resident_experts", "offloaded_experts", "resident_bytes", "offloaded_bytes"),
    *("plain_bytes", "tokens", "warmup_done", "hit_rate", "zero_copy_bytes", "streamed_bytes"),
    *("moves", "moved_bytes", "moving_seconds", "fault", "evicted_bytes", "slots", "streaming"),
)


@dataclass
class Run:
    """What to measure, and the results so far."""

    model: Path
    out: Path
    device: str
    contenders: list[str]
    residencies: list[float]
    repeats: int
    sizes: Sizes
    prompts: PromptIds
    server_args: list[str] = field(default_factory=list)
    ahead_seconds: float = 0
    """Time for all servers of a repeat to import SGLang in parallel before the first turn; 0: each imports in its own turn."""
    start_seconds: float = patience(240)
    point_seconds: float = patience(300)
    deadline: float = float("inf")
    """By ``time.monotonic``."""
    served: Callable[[Row], None] = lambda row: print(serve_report.line(row), flush=True)
    """Called with each row once it is complete."""
    rows: list[Row] = field(default_factory=list)

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    def left(self) -> float:
        return self.deadline - time.monotonic()


def run(wanted: Run, record: dict[str, Any] | None = None) -> dict[str, Any]:
    """Serves all cells, repeat by repeat, and writes ``run.json`` after each cell. ``record`` is the result of ``describe``, if
    it exists already. Raises ``CheckpointError``."""
    model = shape_of(wanted.model)
    (wanted.out / "logs").mkdir(parents=True, exist_ok=True)
    record = record or describe(wanted, model)
    for repeat in range(1, wanted.repeats + 1):
        reference: list[list[int]] | None = None
        turns = [
            (contender, Budget(model, residency, wanted.sizes.warmup_tokens))
            for contender, residency in cells(wanted.contenders, wanted.residencies)
        ]
        with imported(wanted, turns) as servers:
            for turn, (contender, budget) in enumerate(turns):
                row = serve_cell(wanted, contender, budget, repeat, servers.pop(turn, None))
                if contender is RESIDENT:
                    reference = row.get("answers")
                row["outputs"] = compare(row.get("answers"), reference)
                record["rows"].append(row)
                write_record(wanted.out, record)
                wanted.served(row)
    return record


def describe(wanted: Run, model: ModelShape) -> dict[str, Any]:
    """Returns the run's record without its rows."""
    machine = environment(wanted.device)
    config = json.loads((wanted.model / "config.json").read_text())
    return {
        "format": serve_report.FORMAT,
        "started": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": machine["device"],
        "measured": machine["measured"],
        "environment": machine,
        "model": {
            "name": wanted.model.name,
            "architecture": ", ".join(config.get("architectures") or ["unknown"]),
            "config": config,
            "quantization": model.quantization,
            "experts": model.num_experts,
            "top_k": model.top_k,
            "layers": model.num_layers,
            "moe_layers": len(model.moe_layers),
            "expert_bytes": model.expert_bytes,
            "total_bytes": model.total_bytes,
        },
        "contenders": {name: {"what": CONTENDERS[name].what, "on_cpu": CONTENDERS[name].on_cpu} for name in CONTENDERS},
        "methods": serve_client.METHODS,
        "sizes": asdict(wanted.sizes),
        "residencies": wanted.residencies,
        "repeats": wanted.repeats,
        "server_args": wanted.server_args,
        "rows": wanted.rows,
    }


# ---- one server ----


@contextlib.contextmanager
def imported(wanted: Run, turns: Sequence[tuple[Contender, Budget]]) -> Iterator[dict[int, Server]]:
    """Yields the servers that imported SGLang ahead, by turn. Those left in the dict at the end never served."""
    servers: dict[int, Server] = {}
    if wanted.ahead_seconds:
        for turn, (contender, budget) in enumerate(turns):
            with contextlib.suppress(CannotServe):
                servers[turn] = start_of(wanted, contender.flags(budget))
    try:
        start_ahead(servers.values(), wanted.ahead_seconds)
        yield servers
    finally:
        for server in servers.values():
            server.give_up()
            shutil.rmtree(server.folder, ignore_errors=True)


def serve_cell(wanted: Run, contender: Contender, budget: Budget, repeat: int, ahead: Server | None = None) -> Row:
    """Serves one contender at one budget, from the start of its server (or of its turn, if it started ahead) to its end. Any
    failure is recorded in the row."""
    row: Row = {"contender": contender.name, "residency": budget.residency, "repeat": repeat, "error": None, "points": []}
    row["note"] = contender.on_cpu if wanted.on_cpu else ""
    try:
        own: dict[str, Any] = contender.flags(budget)
    except CannotServe as reason:
        return row | {"error": str(reason)}
    row["flags"] = flags(own)
    server = ahead or start_of(wanted, own)
    if wanted.left() <= 0:
        server.give_up()
        shutil.rmtree(server.folder, ignore_errors=True)
        return row | {"error": NO_TIME}
    row["imported_ahead"] = server.process is not None
    bill = serve_meter.Bill()
    server.seconds = longest_start(wanted)
    log_name = f"{repeat}-{contender.name}-{budget.residency:g}.log"
    try:
        with server:
            try:
                row["startup_seconds"] = bill.startup_seconds()
                row["load_seconds"] = serve_log.load_seconds(server.log)
                measure(wanted, contender, budget, server, bill, row)
            except PointFailed as failure:
                row["error"] = str(failure)
            finally:
                row["log"] = keep_log(wanted, server, log_name)
    except EngineFailed as failure:
        row["error"] = f"{str(failure).split('; its log ends', 1)[0]}: {serve_log.last_meaningful_line(failure.log)}"
        row["log"] = keep_log(wanted, server, log_name)
    finally:
        shutil.rmtree(server.folder, ignore_errors=True)
    return row


def start_of(wanted: Run, own: dict[str, Any]) -> Server:
    """Returns the server of one cell, not yet started. All contenders get the same arguments besides their own."""
    common: dict[str, Any] = {
        "max_total_tokens": wanted.sizes.most_tokens + 256,
        "max_running_requests": max(wanted.sizes.batches),
        "disable_radix_cache": True,
        "skip_server_warmup": True,
        "random_seed": 1,
    }
    # On a CPU speed means nothing, and threads that wait for each other starve on a busy machine.
    place: dict[str, Any] = {"env": {"OMP_NUM_THREADS": "1"}} if wanted.on_cpu else {"device": wanted.device}
    if wanted.on_cpu and any(CONTENDERS[name].slots for name in wanted.contenders):
        place["env"]["SHIM_EXPERTS"] = "triton"  # for all servers alike: slots work with no other kernel
    server = Server(wanted.model, on_cpu=wanted.on_cpu, seconds=longest_start(wanted), **place, **common, **own)
    server.command += wanted.server_args
    return server


def longest_start(wanted: Run) -> float:
    return min(wanted.start_seconds, wanted.left() + GRACE_SECONDS)


def measure(wanted: Run, contender: Contender, budget: Budget, server: Server, bill: serve_meter.Bill, row: Row) -> None:
    """Measures the row's figures. Raises ``PointFailed`` if this contender has none."""
    assert server.process is not None
    pid, sizes = server.process.pid, wanted.sizes
    client = Client(server.url, min(wanted.point_seconds, wanted.left() + GRACE_SECONDS))
    row["warmup_tokens"] = serve_client.warm(client, wanted.prompts, sizes)
    if contender.offload:
        check_offload(client, contender, budget, row)
    row["answers"] = serve_client.answers(client, wanted.prompts, sizes)
    counters = (lambda: counted(client)) if contender.offload else None

    def point(kind: str, size: int, figure: Callable[[], serve_client.Timed]) -> None:
        entry: Row = {"kind": kind, "size": size, "error": None}
        row["points"].append(entry)
        if wanted.left() <= 0:
            entry["error"] = NO_TIME
            return
        try:
            timed = figure()
        except PointFailed as failure:
            entry["error"] = str(failure)
            return
        entry |= {"samples": timed.samples, "seconds": statistics.median(timed.samples), **timed.extra}

    for batch in sizes.batches:
        point("decode", batch, lambda batch=batch: serve_client.decode(client, wanted.prompts, batch, sizes, counters))
    for length in sizes.prompts:
        point("prefill", length, lambda length=length: serve_client.prefill(client, wanted.prompts, length, sizes, counters))
    row["memory"] = bill.memory(pid)
    row["engine"] = serve_engine.describe(client.state(), server.log)
    if contender.offload:
        row["offload"] = offload_figures(client)


def check_offload(client: Client, contender: Contender, budget: Budget, row: Row) -> None:
    """Checks that the plugin offloads, and that it selected residents if the contender has it do so."""
    state = client.offload()
    if not state.get("num_layers"):
        raise PointFailed("the server answers, but nothing is offloaded: the plugin is not active in it")
    if "warmup_tokens" in " ".join(row["flags"]) and not state["warmup_done"]:
        raise PointFailed(
            f"residents were not chosen after {row['warmup_tokens']} tokens (warmup_tokens {budget.warmup_tokens})"
        )
    row["expected_offloaded_bytes"] = budget.offloaded_bytes(contender.flags(budget)["expert_offload_num_resident"])


def counted(client: Client) -> dict[str, float]:
    """Returns totals: steps, bytes of offloaded experts that crossed the link (read in place, streamed or filled into slots),
    routed tokens, those that residents and slots served, moves, and slot activity."""
    state = client.offload()
    slots = state.get("slots") or {}
    return {
        "steps": state["history"]["steps"][-1],
        "read_bytes": int(state["zero_copy_bytes"]) + int(state["streamed_bytes"]) + int(slots.get("filled_bytes", 0)),
        "routed": state["routed"],
        "routed_resident": sum(layer["routed_resident"] for layer in state["layers"]),
        "moves": state["moves"],
        "moved_bytes": int(state["moved_bytes"]),
        **{f"slot_{name}": int(slots[name]) for name in ("hits", "fills", "bypasses") if slots},
    }


def offload_figures(client: Client) -> dict[str, Any]:
    state = client.offload()
    return {name: state.get(name) for name in OFFLOAD_FIGURES}


def compare(mine: list[list[int]] | None, reference: list[list[int]] | None) -> Row:
    """Returns whether the token ids equal the reference's, and the first difference: request, position, both tokens."""
    if mine is None or reference is None:
        return {"same": None, "requests": 0, "first_difference": None}
    for request, (ours, theirs) in enumerate(zip(mine, reference, strict=True)):
        for position, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if a != b:
                difference = {"request": request, "position": position, "token": a, "reference": b}
                return {"same": False, "requests": len(mine), "first_difference": difference}
    return {"same": True, "requests": len(mine), "first_difference": None}


# ---- files, machine ----


def keep_log(wanted: Run, server: Server, name: str) -> str:
    """Stores the server's log in the result. Returns its name there."""
    text = server.log if server.log_path.exists() else ""
    return f"logs/{serve_log.keep(text, wanted.out / 'logs' / name, wanted.model, server.folder)}"


def reasons(row: Row) -> list[str]:
    """Lists every error of the row."""
    points = [point["error"] for point in row["points"]]
    return [reason for reason in [row["error"], *points] if reason]


def write_record(out: Path, record: dict[str, Any]) -> None:
    """Replaces the old file only once the new one is complete."""
    part = out / "run.json.part"
    part.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(part, out / "run.json")


def environment(device: str) -> dict[str, Any]:
    if device != "cpu":
        answer = subprocess.run(
            [sys.executable, "-m", "benchmarks.gpu.environment"], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        if answer.returncode:
            raise SystemExit("serve.py: --device cuda: no GPU information; use --device cpu on a machine without a GPU")
        described: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
        return described
    return {
        "device": "CPU",
        "processor": platform.machine(),
        "cpus": os.cpu_count(),
        "host_total_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "python": platform.python_version(),
        **{package: installed(package) for package in ("torch", "sglang", "sglang-uvm-offload")},
        "measured": False,
    }
