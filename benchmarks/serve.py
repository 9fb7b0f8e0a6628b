"""Measures this plugin's server against every other way to serve the same checkpoint in the same VRAM budget.

    python -m benchmarks.serve                                   # a tiny checkpoint on a CPU: equality and accounting only
    python -m benchmarks.serve --model FOLDER --device cuda --residency 0.78,0.5 --repeats 2

Starts a real server for each contender of ``contenders.py`` and each residency in turn, and all again for each repeat
(A B A B). All get the same requests in the same order. A contender that cannot serve gets a row with the reason. The result is
a folder with ``run.json``, the servers' logs and ``report.md``. See benchmarks/README.md.
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
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks import serve_client, serve_report
from benchmarks.contenders import CONTENDERS
from benchmarks.serve_client import PromptIds, Sizes
from benchmarks.serve_run import Run, environment, run
from scripts.config_tensors import text_config
from sglang_uvm_offload.plan.safetensors_header import CheckpointError

BENCHMARKS = Path(__file__).resolve().parent
SIZES = Sizes(
    batches=(1, 4, 16, 64),
    prompts=(512, 4096, 16384, 32768),
    prompt_tokens=32,
    short=4,
    long=36,
    samples=3,
    answers=8,
    answer_tokens=36,
    warmup_tokens=2048,
)
"""A size that a model cannot serve, such as a prompt that is too long, gets a row with the reason."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint folder (default on a CPU: writes a tiny checkpoint)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if torch sees a GPU")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help=f"of {', '.join(CONTENDERS)}; resident always runs")
    parser.add_argument("--residency", type=shares, default=[0.5], help="shares of experts in VRAM, such as 0.78,0.5")
    parser.add_argument("--repeats", type=int, default=2, help="servers per contender, in turns (A B A B)")
    parser.add_argument("--sizes", type=json.loads, default={}, metavar="JSON", help=f"sizes to change (default: {SIZES})")
    parser.add_argument("--server-args", default="", help="more arguments for all servers, as '--attention-backend triton'")
    parser.add_argument("--minutes", type=float, default=120, help="start nothing new after this time")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="default benchmarks/results/serve/DATE-DEVICE")
    wanted = parser.parse_args(arguments)
    wanted.contenders = [name for name in wanted.contenders.split(",") if name]
    if found := problems(wanted):
        parser.error("; ".join(found))
    return wanted


def shares(text: str) -> list[float]:
    """Parses shares such as "0.78,0.5"."""
    found = [float(word) for word in text.split(",")]
    if not all(0 <= each <= 1 for each in found):
        raise argparse.ArgumentTypeError(f"{text!r}: must be numbers from 0 to 1, separated by commas")
    return found


def problems(wanted: argparse.Namespace) -> list[str]:
    """Lists everything that is wrong with the arguments."""
    found = []
    if unknown := [name for name in wanted.contenders if name not in CONTENDERS]:
        found.append(f"--contenders {','.join(unknown)}: there are {', '.join(CONTENDERS)}")
    if unknown := [name for name in wanted.sizes if name not in asdict(SIZES)]:
        found.append(f"--sizes {','.join(unknown)}: there are {', '.join(asdict(SIZES))}")
    if wanted.repeats < 1:
        found.append(f"--repeats {wanted.repeats}: must be 1 or more")
    if wanted.device == "cuda" and wanted.model is None:
        found.append("--device cuda: needs --model FOLDER")
    if wanted.model is not None and not (wanted.model / "config.json").is_file():
        found.append(f"--model {wanted.model}: must be a checkpoint's folder, with a config.json")
    return found


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
    """Returns prompts that walk different parts of the trace if the checkpoint replays one, else random prompts."""
    if (model / "walk.npz").is_file():
        from benchmarks.trace_walk import Walk

        return Walk.load(model).prompt_ids
    vocabulary = text_config(json.loads((model / "config.json").read_text()))["vocab_size"]
    return serve_client.random_prompts(vocabulary, seed)


def main(arguments: Sequence[str]) -> int:
    wanted = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a running server is ended too
    device = wanted.device or device_here()
    with tempfile.TemporaryDirectory(prefix="serve-") as scratch:
        if device != "cpu" and wanted.model is None:
            print("serve.py: --model FOLDER is needed where there is a GPU", file=sys.stderr)
            return 2
        model = (wanted.model or tiny_checkpoint(Path(scratch) / "tiny-qwen3-moe")).absolute()
        out = wanted.out or default_out(device)
        if (out / "run.json").exists():
            print(f"serve.py: {out} already holds a run; choose another folder with --out", file=sys.stderr)
            return 2
        measured = Run(
            model=model,
            out=out,
            device=device,
            contenders=wanted.contenders,
            residencies=wanted.residency,
            repeats=wanted.repeats,
            sizes=replace(SIZES, **wanted.sizes),
            prompts=prompts_for(model, wanted.seed),
            server_args=shlex.split(wanted.server_args),
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
