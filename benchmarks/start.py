"""Measures how long servers take to start, with and without this plugin, and how close loading gets to disk and memory rates.

    python -m benchmarks.start [--model FOLDER] [--ranks 1,2,4] [--repeats 2] [--device cuda] [--out results/start]

For each number of tensor-parallel ranks, each repeat and each state of the page cache (``cold``: without the checkpoint's
files; ``warm``: just read), plain SGLang starts, then the same server with half of its experts offloaded. With a warm cache, a
third server starts with the profile that an earlier server saved (*restarted*). All are timed alike. *load* is what SGLang logs
for the slowest rank ("Load weight end"): from building the model until all weights are post-processed. *ready* is what the
client sees: from starting the process until ``/health`` answers. The phases are the plugin's.

The same run measures three rates for comparison: threads that read the files in pieces of 16 MiB with a cold cache, and as many
threads as ranks that copy memory to existing pages, and to new pages, as a load must. The rate of a load is the checkpoint's
bytes over its time, so it includes everything besides reading.

Without ``--model``, it writes a checkpoint first and removes it at the end: 3 layers in the shape of Qwen3-30B-A3B, 3.7 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks import serve_log, trace_checkpoint
from benchmarks.trace_walk import read
from scripts.harness.server import Server, offload_state
from sglang_uvm_offload.files.page_cache import give_back
from sglang_uvm_offload.plan.engine_shape import shape_of

HERE = Path(__file__).parent
LAYERS, POSITIONS = 3, 64
PIECE = 16 << 20
READERS = 4
COPIED = 1 << 29
"""Bytes that each thread copies to measure the memory rate."""
COPIES = 4
CASES = (("cold", "plain"), ("cold", "offloaded"), ("warm", "plain"), ("warm", "offloaded"), ("warm", "restarted"))
"""(page cache, server) of one repeat."""


@dataclass(frozen=True)
class Start:
    """One server's start, in seconds."""

    ranks: int
    cache: str
    server: str
    load: float
    ready: float
    phases: list[list[dict[str, Any]]]
    """Phases of each rank that reports them, as in its status; empty without the plugin."""


@dataclass(frozen=True)
class Rates:
    """Rates in 1e9 bytes per second."""

    disk: float
    memory: dict[int, float]
    """Rate by number of threads."""
    new_pages: dict[int, float]


def shards(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors"))


def read_all(model: Path) -> float:
    """Reads the checkpoint with ``READERS`` threads in large pieces. Returns bytes per second."""

    def read_one(path: Path) -> int:
        piece, total = bytearray(PIECE), 0
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(piece):
                total += count
        return total

    began = time.perf_counter()
    with ThreadPoolExecutor(READERS) as pool:
        total = sum(pool.map(read_one, shards(model)))
    return total / (time.perf_counter() - began)


def copy_rate(threads: int, new_pages: bool = False) -> float:
    """Copies buffers with ``threads`` threads, to existing or to new pages. Returns bytes per second over all threads."""
    copies = 1 if new_pages else COPIES
    sources = [torch.ones(COPIED, dtype=torch.uint8) for _ in range(threads)]
    targets = [torch.empty(COPIED, dtype=torch.uint8) for _ in range(threads)]
    if not new_pages:
        for target in targets:
            target.zero_()

    def copy(source: torch.Tensor, target: torch.Tensor) -> None:
        for _ in range(copies):
            target.copy_(source)

    before, began = torch.get_num_threads(), time.perf_counter()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(copy, sources, targets))
    finally:
        torch.set_num_threads(before)
    return threads * copies * COPIED / (time.perf_counter() - began)


def rates(model: Path, ranks: Sequence[int], repeats: int) -> Rates:
    def disk() -> float:
        give_back(model)
        return read_all(model) / 1e9

    def best(measure: Callable[[], float]) -> float:
        return max(measure() for _ in range(max(2, repeats)))

    memory, fresh = (
        {threads: best(lambda threads=threads, new=new: copy_rate(threads, new) / 1e9) for threads in ranks}
        for new in (False, True)
    )
    return Rates(best(disk), memory, fresh)


def learn(model: Path, profile: Path, flags: dict[str, Any], on_cpu: bool) -> None:
    """Runs a server that saves its profile."""
    half = shape_of(model).num_experts // 2
    with Server(model, on_cpu=on_cpu, expert_offload_num_resident=half, expert_offload_profile=profile, **flags) as running:
        running.post("/generate", {"input_ids": list(range(1, 33)), "sampling_params": {"max_new_tokens": 32}})


def start(model: Path, profile: Path, ranks: int, cache: str, server: str, flags: dict[str, Any], on_cpu: bool) -> Start:
    if cache == "cold":
        give_back(model)
    else:
        read_all(model)
    offload: dict[str, Any] = {} if server == "plain" else {"expert_offload_num_resident": shape_of(model).num_experts // 2}
    if server == "restarted":
        offload["expert_offload_profile"] = profile
    # On a CPU SGLang binds each rank to one core, where more threads only wait for one another.
    env = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks))} if on_cpu else {}
    began = time.perf_counter()
    with Server(model, on_cpu=on_cpu, env=env, tp_size=ranks, **offload, **flags) as running:
        ready = time.perf_counter() - began
        states = running.get("/server_info")["internal_states"] if offload else []
        phases = [offload_state({"internal_states": states}, index)["start"] for index in range(len(states))]
        loaded = max(serve_log.loads(running.log))
    return Start(ranks, cache, server, loaded, ready, phases)


def table(starts: Sequence[Start], measured: Rates, nbytes: int, machine: str) -> str:
    def median(field: str, *key: object) -> float:
        return statistics.median(getattr(s, field) for s in starts if (s.ranks, s.cache, s.server) == key)

    cases = list(dict.fromkeys((s.ranks, s.cache, s.server) for s in starts))
    repeats = sum((s.ranks, s.cache, s.server) == cases[0] for s in starts)
    memory = ", ".join(
        f"{rate:.1f} GB/s by {threads} ({measured.new_pages[threads]:.1f} to new pages)"
        for threads, rate in measured.memory.items()
    )
    lines = [
        "# Start",
        "",
        f"Made by `benchmarks/start.py`, which explains the columns, on {machine}.",
        f"A checkpoint of {nbytes / 1e9:.2f} GB; half of the experts are offloaded. Seconds, medians of {repeats}.",
        "",
        f"The disk gives {measured.disk:.1f} GB/s; memory is copied at {memory} threads.",
        "*Reached*: the share of the disk's rate (cold) or of the memory's (warm, pages there) that a load reaches.",
        "",
        "| ranks | page cache | server | load | over plain | reached | ready |",
        "| --- " * 7 + "|",
    ]
    for ranks, cache, server in cases:
        rate = 1e9 * (measured.disk if cache == "cold" else measured.memory[ranks])
        seconds, plain = (median("load", ranks, cache, name) for name in (server, "plain"))
        ready = median("ready", ranks, cache, server)
        shares = f"{seconds / plain:.2f} | {nbytes / seconds / rate:.2f}"
        lines.append(f"| {ranks} | {cache} | {server} | {seconds:.2f} | {shares} | {ready:.1f} |")
    first = [
        ((s.ranks, s.cache, s.server), {phase["name"]: phase["seconds"] for phase in s.phases[0]}) for s in starts if s.phases
    ]
    names = list(dict.fromkeys(name for _, phases in first for name in phases))
    lines += ["", "Phases of the first rank with the plugin, seconds:", ""]
    lines += [f"| ranks | page cache | server | {' | '.join(names)} |", "| --- " * (3 + len(names)) + "|"]
    for case in dict.fromkeys(case for case, _ in first):
        each = [phases for of, phases in first if of == case]
        cells = [f"{statistics.median(phases.get(name, 0.0) for phases in each):.2f}" for name in names]
        lines.append(f"| {' | '.join(map(str, case))} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def machine(on_cpu: bool) -> str:
    what = f"{os.cpu_count()} cores of {platform.machine()}, PyTorch {torch.__version__}, SGLang {version('sglang')}"
    return f"{what}, unified memory emulated" if on_cpu else f"{torch.cuda.get_device_name()}, {what}"


def run(model: Path, args: argparse.Namespace) -> None:
    ranks = [int(number) for number in args.ranks.split(",")]
    on_cpu = args.device == "cpu"
    nbytes = sum(path.stat().st_size for path in shards(model))
    measured, flags = rates(model, ranks, args.repeats), json.loads(args.server_args)
    starts = []
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        profile = Path(folder) / "profile.npz"
        learn(model, profile, {"tp_size": ranks[0], **flags}, on_cpu)
        for number, _, (cache, server) in product(ranks, range(args.repeats), CASES):
            starts.append(start(model, profile, number, cache, server, flags, on_cpu))
            print(json.dumps(asdict(starts[-1])), flush=True)
    where = machine(on_cpu)
    args.out.mkdir(parents=True, exist_ok=True)
    record = {"machine": where, "bytes": nbytes, "rates": asdict(measured), "starts": [asdict(one) for one in starts]}
    (args.out / "start.json").write_text(json.dumps(record, indent=1) + "\n")
    (args.out / "start.md").write_text(table(starts, measured, nbytes, where))
    print((args.out / "start.md").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a checkpoint of safetensors (default: writes one)")
    parser.add_argument("--ranks", default="1,2,4", metavar="N,N", help="tensor-parallel ranks (default: 1,2,4)")
    parser.add_argument("--repeats", type=int, default=2, metavar="N")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--server-args", default="{}", metavar="JSON", help="more arguments for all servers, by field")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "start")
    args = parser.parse_args()
    if args.model is not None:
        run(args.model, args)
        return
    with tempfile.TemporaryDirectory(prefix="start-", dir=os.environ.get("XDG_CACHE_HOME")) as folder:
        trace = read(HERE / "gpu" / "routing_trace.npz")
        shape = trace_checkpoint.MODELS["qwen3-30b-a3b"]
        run(trace_checkpoint.write(shape, trace, Path(folder) / "model", layers=LAYERS, positions=POSITIONS), args)


if __name__ == "__main__":
    main()
