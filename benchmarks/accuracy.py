"""Scores a model with and without offloading by EleutherAI's lm_eval: scores and all answers must be the same.

    python -m benchmarks.accuracy                        # scripts/tiny; on a CPU if there is no GPU
    python -m benchmarks.accuracy --model FOLDER --num-resident 40 -- --tp-size 2

One real server after the other, asked by lm_eval's ``local-completions`` and ``local-chat-completions``, one request at a time:
what a batch holds would depend on the time. The tasks of ``accuracy_tasks`` need no network; ``accuracy_texts.py`` writes their
documents. ``lm_eval_results.py`` compares. docs/gpu-runs.md has the commands for GSM8K.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import accuracy_texts, lm_eval_results
from scripts.harness.patience import patience
from scripts.harness.server import EngineFailed, Server, offload_state
from sglang_uvm_offload.plan.engine_shape import shape_of
from sglang_uvm_offload.plan.safetensors_header import CheckpointError

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "scripts" / "tiny"
TASKS = Path(__file__).resolve().parent / "accuracy_tasks"
MISSING = "lm_eval is not installed: pip install '.[accuracy]'"
APIS = {
    "local-completions": ("/v1/completions", ["held_out_choice", "held_out_perplexity", "held_out_continuation"]),
    "local-chat-completions": ("/v1/chat/completions", ["held_out_chat"]),
}
"""By lm_eval's name of the API: its path, and the tasks that are asked by it."""
WARMUP_TOKENS = 64
"""Few, so that experts move while the tasks are answered."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
PIPED: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


class EvaluationFailed(RuntimeError):
    """lm_eval ended with an error, or took too long."""


def installed() -> bool:
    return find_spec("lm_eval") is not None


def evaluate(url: str, checkpoint: Path, out: Path, seconds: float) -> None:
    """Run all tasks against the server at ``url``, and keep lm_eval's results and samples in ``out``."""
    out.mkdir(parents=True, exist_ok=True)
    accuracy_texts.write(out)
    # Of each run its own: the data sets library keeps what it once read of a file by that name.
    env = {**os.environ, **OFFLINE, "HF_DATASETS_CACHE": str(out / "datasets")}
    for api in APIS:
        began = time.monotonic()
        try:
            ended = subprocess.run(command(api, url, checkpoint), cwd=out, env=env, **PIPED, timeout=seconds)
        except subprocess.TimeoutExpired:
            raise EvaluationFailed(f"lm_eval --model {api} took longer than {seconds} s") from None
        (out / f"{api}.log").write_text(ended.stdout)
        if ended.returncode:
            raise EvaluationFailed(f"lm_eval --model {api} ended with exit code {ended.returncode}:\n{ended.stdout[-3000:]}")
        print(f"{out.name}: {time.monotonic() - began:.0f} s for {', '.join(APIS[api][1])} by {api}", flush=True)


def command(api: str, url: str, checkpoint: Path) -> list[str]:
    path, tasks = APIS[api]
    model = [f"model={checkpoint.name}", f"base_url={url}{path}", "num_concurrent=1"]
    words = [sys.executable, "-m", "lm_eval", "run", "--model", api, "--tasks", ",".join(tasks)]
    if api == "local-chat-completions":
        words.append("--apply_chat_template")
    else:
        model += [f"tokenizer={checkpoint}", "tokenizer_backend=huggingface"]
    return [*words, "--model_args", ",".join(model), "--include_path", str(TASKS), "--output_path", ".", "--log_samples"]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY, help="a checkpoint's folder (default: scripts/tiny)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where torch sees a GPU")
    parser.add_argument("--num-resident", type=int, metavar="N", help="experts per layer in VRAM (default: 3 of 8)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep lm_eval's results here (default: they are not kept)")
    parser.add_argument("--start-seconds", type=float, default=patience(600), metavar="S", help="wait for a server this long")
    parser.add_argument("--task-seconds", type=float, default=patience(1800), metavar="S", help="limit of a run of lm_eval")
    parser.add_argument("server", nargs="*", metavar="-- SERVER FLAGS", help="more flags for both servers: -- --tp-size 2")
    args = parser.parse_args(arguments)
    if not installed():
        parser.error(MISSING)
    try:
        experts = shape_of(args.model).num_experts
    except CheckpointError as reason:
        parser.error(str(reason))
    if not experts:
        parser.error(f"--model {args.model}: has no experts")
    args.model = args.model.resolve()
    args.num_resident = experts * 3 // 8 if args.num_resident is None else args.num_resident
    if not 0 <= args.num_resident < experts:
        parser.error(f"--num-resident {args.num_resident}: must be from 0 to {experts - 1}, or nothing is offloaded")
    return args


def score(args: argparse.Namespace, out: Path, offload: dict[str, Any]) -> dict[str, Any]:
    """Serve, and evaluate into ``out``. The plugin's status at the end."""
    began = time.monotonic()
    on_cpu = (args.device or ("cuda" if has_gpu() else "cpu")) == "cpu"
    server = Server(args.model, on_cpu=on_cpu, seconds=args.start_seconds, **offload)
    server.command += args.server
    with server:
        print(f"{out.name}: {time.monotonic() - began:.0f} s to start the server", flush=True)
        evaluate(server.url, args.model, out, args.task_seconds)
        return offload_state(server.get("/server_info"))


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def run(args: argparse.Namespace, out: Path) -> int:
    score(args, out / "off", {})
    wanted = {
        "expert_offload_num_resident": args.num_resident,
        "expert_offload_config": json.dumps({"warmup_tokens": WARMUP_TOKENS}),
        "expert_offload_adapt": "continuous",
    }
    state = score(args, out / "on", wanted)
    if not state.get("offloaded_bytes"):
        print("Failed: the second server offloaded nothing; is the plugin installed?")
        return 1
    print(f"{state['offloaded_bytes'] / 2**20:.1f} MiB of experts were offloaded, {state['moves']} promotions")
    same = lm_eval_results.compare(lm_eval_results.read(out / "off"), lm_eval_results.read(out / "on"))
    print("All scores and answers are the same." if same else "Failed: the results differ.")
    return 0 if same else 1


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    try:
        if args.out is not None:
            return run(args, args.out.resolve())
        with tempfile.TemporaryDirectory(prefix="accuracy-") as folder:
            return run(args, Path(folder))
    except (EngineFailed, EvaluationFailed) as failure:
        print(f"accuracy.py: {failure}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
