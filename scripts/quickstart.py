"""Serve a mixture-of-experts model with offloaded experts, and show that its answers match those without offloading.

Takes the tiny model of this checkout, trained on English prose and Python code (or a local model, or writes one with random
weights). Starts the real server with offloading, sends it prompts over HTTP, shows where the experts are before and after
warm-up and the metrics, then sends the same prompts to the same server without offloading.
Runs on the GPU if there is one; otherwise on the CPU, with emulated unified memory and the harness's hooks for SGLang on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from scripts.harness.server import EngineFailed, Server, offload_state
from scripts.make_checkpoint import make_checkpoint

TRAINED = "glm4_moe"
LEARNED = Path(__file__).parent / "tiny"
WRITTEN = ("deepseek_v3", "qwen3_moe")
HOT = [3, 6, 9, 10, 12, 15]  # the experts that get most tokens in a checkpoint with random weights, in every layer
# The two topics of the trained model alternate.
PROMPTS = (
    "If the argument is",
    "def read(self",
    "When the object is",
    "class Error(",
    "This method is called when",
    "def __init__(self, ",
)
NEW_TOKENS = 32


def main() -> int:
    args = parse_arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))
    try:
        with tempfile.TemporaryDirectory(prefix="quickstart-") as folder:
            return show(args, Path(folder))
    except EngineFailed as failure:
        print(f"\n{failure}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="quickstart.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", default=TRAINED, help=f"{', '.join((TRAINED, *WRITTEN))}, or a checkpoint folder")
    parser.add_argument("--num-resident", metavar="N", help="experts per layer to keep in VRAM (default: 3 of 8)")
    parser.add_argument("--warmup-tokens", type=int, default=128, metavar="N", help="default: 128")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    parser.add_argument("--start-seconds", type=float, default=600, metavar="S", help="how long to wait for a server")
    parser.add_argument("server", nargs="*", metavar="-- SERVER FLAGS", help="more flags for both servers: -- --tp-size 2")
    args = parser.parse_args()
    if args.model not in (TRAINED, *WRITTEN) and not (Path(args.model) / "config.json").is_file():
        parser.error(f"{args.model} is neither one of {', '.join((TRAINED, *WRITTEN))} nor a folder with a config.json")
    return args


def show(args: argparse.Namespace, folder: Path) -> int:
    began = time.monotonic()
    on_cpu = (args.device or ("cuda" if has_gpu() else "cpu")) == "cpu"
    checkpoint = LEARNED if args.model == TRAINED else Path(args.model)
    if args.model == TRAINED:
        print(f"Serves {LEARNED}, a tiny model of English prose and Python code; its README.md says how it was trained.")
    elif args.model in WRITTEN:
        checkpoint = make_checkpoint(args.model, folder / "model", hot=HOT)
        print(f"Wrote a {args.model} checkpoint with random weights: its answers are gibberish, and always the same.")
    experts = number_of_experts(checkpoint)
    resident = args.num_resident or str(experts * 3 // 8)
    common = server_options(args, on_cpu, checkpoint)
    offload: dict[str, Any] = {
        "expert_offload_num_resident": resident,
        "expert_offload_config": json.dumps({"warmup_tokens": args.warmup_tokens}),
        "enable_metrics": True,
    }

    heading(f"With {resident} of {experts} experts of each layer resident, on the {'CPU' if on_cpu else 'GPU'}")
    with Server(checkpoint, **common, **offload) as server:
        ready(server)
        before = offload_state(server.get("/server_info"))
        residency("before warm-up", before)
        answers = ask(server, aloud=True)
        answered = time.monotonic()
        after = offload_state(server.get("/server_info"))
        residency("after warm-up" if after["warmup_done"] else "after the requests (warm-up is not over)", after)
        metrics(server.get_text("/metrics"))

    heading("The same server without offloading")
    with Server(checkpoint, **common) as server:
        ready(server)
        plain = ask(server, aloud=False)
    code = conclude(answers, plain, after, resident, experts)
    if code == 0:
        seconds = time.monotonic() - began
        where = f"{len(os.sched_getaffinity(0))} CPU cores" if on_cpu else "a GPU"
        print(f"It took {seconds:.0f} s, and {answered - began:.0f} s to the answers with offloading, on {where}.")
    return code


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def number_of_experts(checkpoint: Path) -> int:
    config = json.loads((checkpoint / "config.json").read_text())
    config = config.get("text_config") or config
    for name in ("n_routed_experts", "num_experts", "num_local_experts"):
        if config.get(name):
            return int(config[name])
    raise SystemExit(f"{checkpoint} is not a mixture-of-experts model: its config.json has no number of experts")


def server_options(args: argparse.Namespace, on_cpu: bool, checkpoint: Path) -> dict[str, Any]:
    """The options of both servers."""
    command = [sys.executable, "-m", "sglang.launch_server", *args.server]
    options: dict[str, Any] = {"command": command, "on_cpu": on_cpu, "seconds": args.start_seconds, "waiting": progress}
    if args.model == "deepseek_v3" and not on_cpu:
        options["attention_backend"] = "triton"  # other backends support only the real model's attention sizes
    return options


def ask(server: Server, aloud: bool) -> list[str]:
    answers = []
    for prompt in PROMPTS:
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
        answers.append(server.post("/generate", {"text": prompt, "sampling_params": sampling})["text"])
        if aloud:
            print(f"  {prompt!r}\n    -> {answers[-1]!r}")
    return answers


def conclude(answers: list[str], plain: list[str], state: dict[str, Any], resident: str, experts: int) -> int:
    different = [number for number, pair in enumerate(zip(answers, plain, strict=True)) if pair[0] != pair[1]]
    for number in different:
        print(f"  {PROMPTS[number]!r}\n    offloaded  {answers[number]!r}\n    plain      {plain[number]!r}")
    if different:
        print(f"\nFailed: {len(different)} of {len(answers)} answers differ with and without offloading.")
        return 1
    print(
        f"\nShown: {len(answers)} answers are the same with {resident} of {experts} experts a layer resident and without "
        f"offloading; {state['offloaded_bytes'] / 2**20:.1f} MiB of experts were offloaded, and {state['moves']} promotions "
        "followed the warm-up."
    )
    return 0


# ---------------------------------------------------------------- what is printed


def heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


def progress(seconds: float) -> None:
    if sys.stdout.isatty():
        print(f"\r  waiting for the server ... {seconds:3.0f} s ", end="", flush=True)


def ready(server: Server) -> None:
    end = "\r" if sys.stdout.isatty() else ""
    print(f"{end}  ready at {server.url}; its log is {server.log_path}", flush=True)


def residency(when: str, state: dict[str, Any]) -> None:
    """The residency table of ``/server_info``: totals, and the resident experts of the first layers."""
    if not state:
        raise EngineFailed("the server reports no offloading", Path("/dev/null"))
    hit_rate = "-" if state["hit_rate"] is None else f"{state['hit_rate']:.0%}"
    print(f"  Residency {when}: {state['num_layers']} MoE layers")
    print(f"    resident   {state['resident_experts']:6} experts  {state['resident_bytes'] / 2**20:10.1f} MiB")
    print(f"    offloaded  {state['offloaded_experts']:6} experts  {state['offloaded_bytes'] / 2**20:10.1f} MiB")
    print(f"    routed tokens served by residents so far: {hit_rate}")
    for layer, ids in list(zip(state["layers"], state["resident_ids"], strict=True))[:4]:
        print(f"    layer {layer['layer']}: {ranges(ids)}")
    if len(state["resident_ids"]) > 4:
        print(f"    ... and {len(state['resident_ids']) - 4} more layers")


def ranges(ids: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``."""
    runs: list[list[int]] = []
    for expert in sorted(ids):
        if runs and expert == runs[-1][1] + 1:
            runs[-1][1] = expert
        else:
            runs.append([expert, expert])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def metrics(text: str) -> None:
    print("  The plugin's metrics above zero, in addition to SGLang's own:")
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "expert_offload" in sample.name and sample.value and not sample.name.endswith("_created"):
                own = {name: value for name, value in sample.labels.items() if name in ("layers", "by", "of")}
                print(f"    {sample.name}{own or ''} {sample.value:g}")


if __name__ == "__main__":
    sys.exit(main())
