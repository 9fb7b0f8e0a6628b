"""Measures a whole server beside every other way to serve the same checkpoint on the same budget of VRAM.

    python -m benchmarks.serve                                   # a tiny checkpoint on a CPU: equality and accounting only
    python -m benchmarks.serve --model FOLDER --device cuda --residency 0.78,0.5 --repeats 2

For each contender of ``contenders.py`` and each residency a real server in turn, and again for each repeat (A B A B), with
the same requests in the same order. A contender that cannot serve is a row with its reason. The result is a folder:
``run.json``, the servers' logs, and ``report.md``. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import serve_client, serve_report
from benchmarks.contenders import CONTENDERS
from benchmarks.serve_client import PromptIds, Sizes
from benchmarks.serve_run import Run, environment, run
from scripts.config_tensors import text_config
from sglang_uvm_offload.plan.safetensors_header import CheckpointError

BENCHMARKS = Path(__file__).resolve().parent
CPU_SIZES = {"batches": (1, 4, 16, 64), "prompts": (64, 512, 1024)}
GPU_SIZES = {"batches": (1, 4, 16, 64), "prompts": (512, 4096, 16384, 32768)}


def numbers(kind: Callable[[str], Any], low: float, high: float) -> Callable[[str], tuple[Any, ...]]:
    """A parser of such as "0.78,0.5"."""

    def parse(text: str) -> tuple[Any, ...]:
        try:
            found = tuple(kind(word) for word in text.split(",") if word.strip())
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r}: must be numbers, separated by commas") from None
        if not found or not all(low <= each <= high for each in found):
            raise argparse.ArgumentTypeError(f"{text!r}: must be numbers from {low:g} to {high:g}, separated by commas")
        return found

    return parse


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint's folder; on a CPU a tiny one is written if none is given")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where torch sees a GPU")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help=f"of {', '.join(CONTENDERS)}; resident always is")
    parser.add_argument(
        "--residency", type=numbers(float, 0, 1), default=(0.5,), help="shares of the experts in VRAM: 0.78,0.5"
    )
    parser.add_argument("--repeats", type=int, default=2, help="servers of each contender, in turns (A B A B)")
    parser.add_argument("--samples", type=int, default=3, help="measurements of each figure on one server")
    parser.add_argument("--batches", type=numbers(int, 1, 4096), help="default 1,4,16,64")
    parser.add_argument("--prompts", type=numbers(int, 1, 1 << 20), help="prompt lengths for prefill")
    parser.add_argument("--prompt-tokens", type=int, default=32, help="prompt of each request of a decoded batch")
    parser.add_argument("--tokens", type=numbers(int, 1, 1 << 16), default=(4, 36), help="of an answer, untimed and all: 4,36")
    parser.add_argument("--answers", type=int, default=8, help="single requests whose token ids are compared")
    parser.add_argument("--bench-requests", type=int, default=16, help="requests of sglang.bench_serving; 0: not run")
    parser.add_argument("--bench-lengths", type=numbers(int, 1, 1 << 20), default=(64, 16), help="its prompt and output: 64,16")
    parser.add_argument("--warmup-tokens", type=int, default=2048, help="after which the plugin has chosen its residents")
    parser.add_argument("--server-args", default="", help="further arguments for every server: '--attention-backend triton'")
    parser.add_argument("--minutes", type=float, default=120, help="begin nothing after this")
    parser.add_argument("--start-seconds", type=float, default=240, help="longest start of a server")
    parser.add_argument("--point-seconds", type=float, default=300, help="longest wait for an answer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="default benchmarks/results/serve/DATE-DEVICE")
    wanted = parser.parse_args(arguments)
    wanted.contenders = [name for name in wanted.contenders.split(",") if name]
    for problem in problems(wanted):
        parser.error(problem)
    return wanted


def problems(wanted: argparse.Namespace) -> list[str]:
    """All that is wrong with the arguments, in one entry."""
    found = []
    if unknown := [name for name in wanted.contenders if name not in CONTENDERS]:
        found.append(f"--contenders {','.join(unknown)}: there are {', '.join(CONTENDERS)}")
    if len(wanted.tokens) != 2 or wanted.tokens[0] >= wanted.tokens[-1]:
        found.append(f"--tokens {wanted.tokens}: must be two numbers, the smaller first")
    if len(wanted.bench_lengths) != 2:
        found.append(f"--bench-lengths {wanted.bench_lengths}: must be two numbers")
    for name, least in (
        ("repeats", 1),
        ("samples", 1),
        ("prompt_tokens", 1),
        ("answers", 1),
        ("bench_requests", 0),
        ("minutes", 0),
    ):
        if getattr(wanted, name) < least:
            found.append(f"--{name.replace('_', '-')} {getattr(wanted, name)}: must be {least} or more")
    if wanted.device == "cuda" and wanted.model is None:
        found.append("--device cuda: needs --model FOLDER")
    if wanted.model is not None and not (wanted.model / "config.json").is_file():
        found.append(f"--model {wanted.model}: must be a checkpoint's folder, with a config.json")
    if wanted.out is not None and (wanted.out / "run.json").exists():
        found.append(f"--out {wanted.out}: holds a run already; give another folder")
    return ["; ".join(found)] if found else []


def sizes_of(wanted: argparse.Namespace, device: str) -> Sizes:
    usual = CPU_SIZES if device == "cpu" else GPU_SIZES
    return Sizes(
        batches=wanted.batches or usual["batches"],
        prompts=wanted.prompts or usual["prompts"],
        prompt_tokens=wanted.prompt_tokens,
        short=wanted.tokens[0],
        long=wanted.tokens[1],
        samples=wanted.samples,
        answers=wanted.answers,
        answer_tokens=wanted.tokens[1],
        bench_requests=wanted.bench_requests,
        bench_input=wanted.bench_lengths[0],
        bench_output=wanted.bench_lengths[1],
        warmup_tokens=wanted.warmup_tokens,
    )


def device_here() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def default_out(device: str) -> Path:
    name = re.sub(r"[^a-z0-9]+", "-", environment(device)["device"].lower()).strip("-")
    return BENCHMARKS / "results" / "serve" / f"{datetime.date.today().isoformat()}-{name}"


def tiny_checkpoint(folder: Path) -> Path:
    from scripts.make_checkpoint import make_checkpoint

    return make_checkpoint("qwen3_moe", folder, layers=6)


def prompts_for(model: Path, seed: int) -> PromptIds:
    """Requests that walk different parts of the trace that a checkpoint of ``trace_checkpoint.py`` replays; else random."""
    if (model / "walk.npz").is_file():
        from benchmarks.trace_walk import Walk

        return Walk.load(model).prompt_ids
    vocabulary = text_config(json.loads((model / "config.json").read_text()))["vocab_size"]
    return serve_client.random_prompts(vocabulary, seed)


def main(arguments: Sequence[str]) -> int:
    wanted = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a server that runs is ended too
    device = wanted.device or device_here()
    with tempfile.TemporaryDirectory(prefix="serve-") as scratch:
        if device != "cpu" and wanted.model is None:
            print("serve.py: --model FOLDER is needed where there is a GPU", file=sys.stderr)
            return 2
        model = (wanted.model or tiny_checkpoint(Path(scratch) / "tiny-qwen3-moe")).absolute()
        out = wanted.out or default_out(device)
        if (out / "run.json").exists():
            print(f"serve.py: {out} holds a run already; give another folder with --out", file=sys.stderr)
            return 2
        measured = Run(
            model=model,
            out=out,
            device=device,
            contenders=wanted.contenders,
            residencies=list(wanted.residency),
            repeats=wanted.repeats,
            sizes=sizes_of(wanted, device),
            prompts=prompts_for(model, wanted.seed),
            server_args=shlex.split(wanted.server_args),
            start_seconds=wanted.start_seconds,
            point_seconds=wanted.point_seconds,
            deadline=time.monotonic() + 60 * wanted.minutes,
        )
        try:
            run(measured)
        except CheckpointError as error:
            print(f"serve.py: --model {model}: {error}", file=sys.stderr)
            return 2
    serve_report.write(out)
    print(f"{out / 'report.md'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
