"""Parts that serve a model through SGLang: ``benchmarks/serve.py`` on a checkpoint that is written on the spot.

Each part has its own resident server beside its contenders. This plugin's servers stream steps with many tokens, as by default,
into slots or through two stream buffers; contenders without buffers get that much more VRAM. A part's rows ``run`` and ``cell``
hold the whole run, from which ``benchmarks/serve_report.py`` makes tables; its other rows are the figures that goals judge.
With ``--small`` nothing is a measurement: the servers run on the CPU, or over a stand-in driver that supports servers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import serve_log, serve_report, serve_run
from benchmarks.contenders import CONTENDERS, Budget, Contender, Flags
from benchmarks.gpu.environment import REHEARSED
from benchmarks.gpu.rows import Rows, run_part
from benchmarks.serve import prompts_for
from benchmarks.serve_client import Sizes
from scripts.make_checkpoint import make_checkpoint
from sglang_uvm_offload.plan.engine_shape import shape_of
from sglang_uvm_offload.residency.budget import MOST_BUFFERS

TRACE = Path(__file__).with_name("routing_trace.npz")
CHUNK_TOKENS = 8192
"""Prompt tokens per step."""
SERVER_ARGS = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--moe-runner-backend", "triton"),
    *("--fp8-gemm-backend", "triton", "--grammar-backend", "none", "--disable-prefill-cuda-graph"),
    *("--cuda-graph-max-bs-decode", "64", "--chunked-prefill-size", str(CHUNK_TOKENS)),
)
"""The same for every contender. They work without FlashInfer and DeepGEMM. Prefill graphs are off: they take long to capture,
and streaming steps cannot use them, so the resident server has none either."""
SUBSTITUTES = {
    "xgrammar": ("--grammar-backend", "none"),
    "sgl_kernel.flash_attn": ("--attention-backend", "triton"),
}
"""Flags for servers with SGLang's own backends, by the package that cannot be imported."""
SGLANG_SETTINGS = {"SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python", "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1"}
"""Needed with torch 2.11; no effect on results."""
BLOCKS_OF_EXPERTS: dict[str, Any] = {"expert_size": 2048}
"""With a hidden size of 256 or 512, a 2 MiB block then holds one expert's projection, or a few."""


@dataclass(frozen=True)
class Written:
    """A checkpoint of ``trace_checkpoint.py``."""

    shape: str
    layers: int
    family: str
    """The family of ``make_checkpoint.py`` for the small checkpoint that replaces it where nothing is measured."""
    quant: str | None = None
    """The experts' quantisation; None: bfloat16."""

    @property
    def name(self) -> str:
        return "-".join([self.shape, *([self.quant] if self.quant else []), f"{self.layers}-layers"])


QWEN = Written("qwen3-30b-a3b", 16, "qwen3_moe")
QWEN_FP8 = Written("qwen3-30b-a3b", 30, "qwen3_moe", "fp8")
"""About as many bytes in more layers, so that two stream buffers are a smaller share. The whole model has 48 layers."""
DEEPSEEK = Written("deepseek-v3", 12, "deepseek_v3")
"""One rank of 8. SGLang supports OffloaderV2 for this architecture only."""


@dataclass(frozen=True)
class Served:
    written: Written
    contenders: tuple[str, ...]
    residency: float = 0.5
    prompts: tuple[int, ...] = (4096,)
    """Lengths of the timed prompts."""
    tokens: int = 24
    """Tokens of a timed answer. The first four are not timed."""


PEERS = ("paged_experts", "cpu_offload_gb", "offloader_v2")
WITHOUT = (*PEERS, "slots_only")
"""Contenders without stream buffers."""


def with_stream_buffers(contender: Contender, **more: Any) -> Contender:
    """Gives the contender the VRAM that this plugin's residents and stream buffers take without slots."""

    def flags(budget: Budget) -> Flags:
        buffers = MOST_BUFFERS / len(budget.model.moe_layers)
        return {**contender.flags(replace(budget, residency=min(1.0, budget.residency + buffers))), **more}

    return replace(contender, flags=flags)


WITHOUT_BUFFERS = replace(
    with_stream_buffers(CONTENDERS["slots_only"], expert_offload_stream_buffer_gb="0"),
    name="without_buffers",
    what="this plugin, every row in VRAM a slot, and no step streams",
)


IN_A_SESSION = {each.name: each for each in (*(with_stream_buffers(CONTENDERS[name]) for name in WITHOUT), WITHOUT_BUFFERS)}


def add_contenders() -> None:
    """Adds the session's contenders to those of ``serve.py``, or replaces them."""
    CONTENDERS.update(IN_A_SESSION)


LONG_PROMPTS = (512, 4096, 16384, 32000)
PLAN = {
    "decode": Served(QWEN_FP8, ("frequency", "paged_experts", "slots_only", WITHOUT_BUFFERS.name), tokens=84),
    "most": Served(QWEN, ("frequency",), 0.78, LONG_PROMPTS),
    "no_resident": Served(QWEN, ("zero_copy",)),
    "cpu_offload_gb": Served(QWEN, ("frequency", "cpu_offload_gb")),
    "offloader_v2": Served(DEEPSEEK, ("frequency", "offloader_v2")),
}


def sizes(served: Served, small: bool) -> Sizes:
    """Returns the part's sizes. The compared answers include one to a prompt that is long enough to stream."""
    streaming = 128 if small else 4096
    return Sizes(
        batches=(1, 4) if small else (1, 4, 16, 64),
        prompts=(streaming,) if small else served.prompts,
        prompt_tokens=8 if small else 64,
        short=1 if small else 4,
        long=9 if small else served.tokens,
        samples=1 if small else 3,
        answers=2 if small else 4,
        answer_tokens=8 if small else 24,
        warmup_tokens=64 if small else 4096,
        long_answers=(streaming, streaming),
    )


def importable(package: str) -> bool:
    """Whether the package can be imported. Tries it in a separate process, so that this one does not load it."""
    return subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True, timeout=120).returncode == 0


def check_sglang() -> None:
    """Raises ``SystemExit`` if SGLang or the plugin's entry point is missing."""
    where = "put the folder that holds it in PYTHONPATH (benchmarks/gpu/README.md)"
    if find_spec("sglang") is None:
        raise SystemExit(f"SGLang is not installed here: {where}")
    if not any(each.name == "uvm_offload" for each in entry_points(group="sglang.srt.plugins")):
        raise SystemExit(f"SGLang would not load this plugin, because its entry point is not installed: {where}")


def ensure_checkpoint(written: Written, small: bool) -> Path:
    """Returns the checkpoint's folder. Writes it if it is missing or incomplete."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sglang-uvm-offload-benchmarks"
    kind = [written.family, *([written.quant] if written.quant else []), *(["blocks"] if REHEARSED else [])]
    folder = cache / ("-".join(["small", *kind]) if small else written.name)
    if not (folder / "config.json").is_file():
        part = folder.with_name(folder.name + ".part")
        for left in (folder, part):
            shutil.rmtree(left, ignore_errors=True)
        cache.mkdir(parents=True, exist_ok=True)
        write_checkpoint(written, part, small)
        part.rename(folder)
    return folder


def write_checkpoint(written: Written, folder: Path, small: bool) -> None:
    """Writes a checkpoint that replays the trace, or a small one with random routers and enough layers for OffloaderV2."""
    if small:
        make_checkpoint(written.family, folder, quant=written.quant, layers=6, **(BLOCKS_OF_EXPERTS if REHEARSED else {}))
        return
    from benchmarks.trace_checkpoint import MODELS, write
    from benchmarks.trace_walk import read

    write(MODELS[written.shape], read(TRACE), folder, quant=written.quant, layers=written.layers)


def checkpoint(rows: Rows, written: Written) -> None:
    """Writes the checkpoint once per machine. Later parts find it."""
    start = time.perf_counter()
    model = shape_of(ensure_checkpoint(written, rows.small))
    seconds = time.perf_counter() - start
    rows.put("checkpoint", "GB", [model.total_bytes / 1e9], seconds=seconds)
    rows.put("checkpoint_experts", "GB", [model.expert_bytes / 1e9], layers=len(model.moe_layers), experts=model.num_experts)


def serve_part(rows: Rows, served: Served) -> None:
    """Serves each of the part's contenders once. The part fails if this plugin's answers differ from the resident server's."""
    check_sglang()
    cpu = on_cpu(rows)
    if cpu:
        leave_the_stand_in()
    for name, value in SGLANG_SETTINGS.items():
        os.environ.setdefault(name, value)
    add_contenders()
    model = ensure_checkpoint(served.written, rows.small)
    with tempfile.TemporaryDirectory(prefix="serve-") as out:
        run = serve_run.Run(
            model=model,
            out=Path(out),
            device="cpu" if cpu else "cuda",
            contenders=list(served.contenders),
            residencies=[0.5 if rows.small else served.residency],  # with more of eight experts in VRAM, few would be read
            repeats=1,
            sizes=sizes(served, rows.small),
            prompts=prompts_for(model, 1),
            server_args=[] if cpu else list(SERVER_ARGS),
            ahead_seconds=0 if cpu else rows.pick(90, 400),
            start_seconds=rows.pick(150, 400),
            point_seconds=60,
            deadline=time.monotonic() + rows.left() - serve_run.GRACE_SECONDS / 2,
            served=partial(put_cell, rows, Path(out), shape_of(model).total_bytes / 2**30),
        )
        head = serve_run.describe(run, shape_of(model))
        rows.put("run", "", [], run={name: value for name, value in head.items() if name != "rows"})
        serve_run.run(run, head)
    rows.cut_short |= any(serve_run.NO_TIME in serve_run.reasons(row) for row in run.rows)
    check_answers(run.rows)
    check_moves(run.rows)
    check_streams(run.rows)
    check_slots(run.rows)


def on_cpu(rows: Rows) -> bool:
    """Whether servers run on the CPU: no kernel computes here, and the stand-in driver does not support servers."""
    return rows.small and not REHEARSED


def leave_the_stand_in() -> None:
    """Hides the stand-in driver from servers on the CPU, so that they see no device."""
    for name in [*os.environ]:
        if name.startswith("STANDIN_") or name in ("LD_PRELOAD", "LD_LIBRARY_PATH", "TRITON_LIBCUDA_PATH"):
            del os.environ[name]
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def put_cell(rows: Rows, out: Path, gib: float, row: dict[str, Any]) -> None:
    """Records one server's figures on a checkpoint of ``gib`` GiB, or the end of its log if it failed."""
    print(serve_report.line(row), flush=True)
    if "log" in row:
        if row["error"]:
            print(serve_log.read(out / row["log"])[-6000:], flush=True)
        if folder := os.environ.get("SERVER_LOGS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            shutil.copy(out / row["log"], Path(folder) / f"{rows.part}-{Path(row['log']).name}")
    rows.put("cell", "", [], cell=row)
    labels = {"contender": row["contender"], "resident": row["residency"]}
    for point in row["points"]:
        size = {"batch" if point["kind"] == "decode" else "tokens": point["size"]}
        rows.put(point["kind"], "ms", [1e3 * sample for sample in point.get("samples", ())], **labels, **size)
    if "startup_seconds" in row:
        since = "s after it had imported SGLang" if row["imported_ahead"] else "s"
        rows.put("startup", since, [row["startup_seconds"]], **labels)
    if row.get("load_seconds") is not None:
        rows.put("load", "s a GiB", [row["load_seconds"] / gib], **labels)
    for name, nbytes in row.get("memory", {}).items():
        rows.put(name, "GiB", [] if nbytes is None else [nbytes / 2**30], **labels)
    if "offload" in row:
        for name in ("streamed_bytes", "zero_copy_bytes"):
            rows.put(name, "GB", [row["offload"][name] / 1e9], **labels)
        put_slots(rows, row, labels)
    same = row["outputs"]["same"]
    rows.put("same_answers", "bool", [] if same is None else [same], **labels)


def put_slots(rows: Rows, row: dict[str, Any], labels: dict[str, Any]) -> None:
    """Records where decode steps found their offloaded experts, by batch, and what slots did over the server's life."""
    slots = row["offload"]["slots"]
    if slots is None:
        return
    rows.put("slots_filled", "GB", [slots["filled_bytes"] / 1e9], **labels)
    for figure in ("hits", "fills", "bypasses", "brought"):
        rows.put("slots_all", "activations" if figure != "brought" else "experts", [slots[figure]], figure=figure, **labels)
    for point in row["points"]:
        if point["kind"] == "decode" and "slot_hits" in point:
            counts = {name: point[f"slot_{name}"] for name in ("hits", "fills", "bypasses")}
            for figure, count in counts.items():
                share = [count / sum(counts.values())] if sum(counts.values()) > 0 else []
                rows.put("slots_use", "of offloaded activations", share, figure=figure, batch=point["size"], **labels)


def check_answers(rows: Sequence[dict[str, Any]]) -> None:
    """Raises if the reference or this plugin was not served, or if its answers differ. A peer's failure is a result."""
    built = [row for row in rows if row["contender"] == "resident" or CONTENDERS[row["contender"]].offload]
    failed = [f"{row['contender']}: {row['error']}" for row in built if row["error"] not in (None, serve_run.NO_TIME)]
    failed += [
        f"{row['contender']} at {row['residency']:.0%}: other answers than the resident server's, "
        f"{row['outputs']['first_difference']}"
        for row in built
        if row["outputs"]["same"] is False
    ]
    if failed:
        raise AssertionError("; ".join(failed))


def check_moves(rows: Sequence[dict[str, Any]]) -> None:
    """Raises if moving experts failed: such a server keeps answering with the residents that it has."""
    faults = [f"{row['contender']}: {row['offload']['fault']}" for row in rows if row.get("offload", {}).get("fault")]
    if faults:
        raise AssertionError(f"moving experts stopped in {'; '.join(faults)}")


def check_streams(rows: Sequence[dict[str, Any]]) -> None:
    """Raises if a server streamed when it should not, did not when it should, or stopped streaming: its prompt times would not
    be what its name says."""
    served = [row for row in rows if "offload" in row and not row["error"]]
    stopped = {row["contender"]: (row["offload"]["streaming"] or {}).get("fault") for row in served}
    wrong = [f"{contender}: stopped: {fault}" for contender, fault in stopped.items() if fault]
    wrong += [
        f"{row['contender']}: {row['offload']['streamed_bytes']} bytes"
        for row in served
        if bool(row["offload"]["streamed_bytes"]) == (row["contender"] == WITHOUT_BUFFERS.name)
    ]
    if wrong:
        raise AssertionError(f"streamed, against what was asked for: {'; '.join(wrong)}")


def check_slots(rows: Sequence[dict[str, Any]]) -> None:
    """Raises unless a server used its slots in every way: its answers would prove nothing about the others. Prompts that do not
    stream leave no experts in slots."""
    wrong = []
    for row in rows:
        if not CONTENDERS[row["contender"]].slots or row["error"]:
            continue
        streams = row["contender"] != WITHOUT_BUFFERS.name
        slots = row["offload"]["slots"] or {"missing": "the model"}
        found = [f"{slots['missing']} has no slots"] if slots["missing"] else []
        found += [f"no {name}" for name in ("hits", "fills", *(["brought"] if streams else [])) if not slots.get(name)]
        late = any(point["error"] == serve_run.NO_TIME for point in row["points"])
        taken = any(took_from_slots(point, row["offload"]["offloaded_bytes"]) for point in row["points"])
        found += ["no prompt whose copies were taken from slots"] if streams and not late and not taken else []
        wrong += [f"{row['contender']}: {', '.join(found)}"] if found else []
    if wrong:
        raise AssertionError(f"slots were not used: {'; '.join(wrong)}")


def took_from_slots(point: dict[str, Any], offloaded_bytes: int) -> bool:
    """Whether this is a prompt of one chunk that streamed and took copies from slots: it then brings fewer bytes over the link
    than are offloaded."""
    streamed = point["kind"] == "prefill" and point["size"] <= CHUNK_TOKENS and not point["error"]
    return bool(streamed and 0 < point["read_bytes"] < offloaded_bytes)


PARTS = {
    "fp8": partial(checkpoint, written=QWEN_FP8),
    "bf16": partial(checkpoint, written=QWEN),
    "deepseek": partial(checkpoint, written=DEEPSEEK),
} | {name: partial(serve_part, served=served) for name, served in PLAN.items()}

if __name__ == "__main__":
    run_part(PARTS)
