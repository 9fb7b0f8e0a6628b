"""Serve a mixture-of-experts model with offloaded experts, watch residents follow the traffic, and compare the answers.

Serves the tiny model of this checkout, which knows English prose and Python code (or a local checkpoint, or one written with
random weights). A server with offloading answers prompts of one topic, chooses residents from their routing and answers more of
them; then the topic changes. The same server without offloading answers the same prompts.
Runs on the GPU if there is one. On a CPU it shows what is resident when, not how fast: unified memory is emulated, and the
harness's shims replace SGLang's GPU kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Installed packages are imported where they are used, so that --help works before the installation.
from scripts.harness.server import EngineFailed, Server, offload_state

TRAINED = "glm4_moe"
LEARNED = Path(__file__).parent / "tiny"
WRITTEN = ("deepseek_v3", "qwen3_moe")
HOT = [3, 6, 9, 10, 12, 15]  # the experts that get most tokens in a checkpoint with random weights, in every layer

ENGLISH = ("If the argument is", "When the object is", "This method is called when", "The following methods can", "Return the")
MORE_ENGLISH = ("The value of the", "If the file is", "This function is", "When the method is", "An iterator over")
CODE = ("def read(self", "class Error(", "def __init__(self, ", "for name in ", "    if not self.")
MORE_CODE = ("def write(self, data", "class Parser(", "    return [", "    with open(", "    for line in ")
NEW_TOKENS = 32
SHOWN = 2  # answers of each round
WARMUP_TOKENS = 96  # fewer than the first round has


def main() -> int:
    args = parse_arguments(sys.argv[1:])
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="quickstart-"))
    try:
        return show(args, folder)
    except EngineFailed as failure:
        print(f"\n{failure}\nThe logs are in {folder}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130


def parse_arguments(words: list[str]) -> argparse.Namespace:
    """``server`` holds the words after ``--``."""
    names = ", ".join((TRAINED, *WRITTEN))
    parser = argparse.ArgumentParser(
        prog="quickstart.sh",
        usage="%(prog)s [OPTIONS] [MODEL] [-- SERVER FLAGS]",
        description=__doc__,
        epilog="SERVER FLAGS are passed to both servers, such as -- --tp-size 2.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", default=TRAINED, help=f"{names}, or a checkpoint folder")
    parser.add_argument("--num-resident", type=int, metavar="N", help="experts per layer to keep in VRAM (default: 3 of 8)")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    parser.add_argument("--start-seconds", type=float, default=600, metavar="S", help="how long to wait for a server")
    end = words.index("--") if "--" in words else len(words)
    args = parser.parse_args(words[:end])
    args.server = words[end + 1 :]
    if args.model not in (TRAINED, *WRITTEN) and not (Path(args.model) / "config.json").is_file():
        parser.error(f"{args.model} is neither one of {names} nor a folder with a config.json")
    return args


def show(args: argparse.Namespace, folder: Path) -> int:
    """``folder`` keeps the checkpoint that is written, the logs and the report."""
    began = time.monotonic()
    on_cpu = (args.device or ("cuda" if has_gpu() else "cpu")) == "cpu"
    checkpoint = checkpoint_for(args.model, folder)
    experts = number_of_experts(checkpoint)
    resident = experts * 3 // 8 if args.num_resident is None else args.num_resident
    share = f"{resident} of {experts} experts of each layer resident"
    common = server_options(args, on_cpu)
    offload: dict[str, Any] = {
        "expert_offload_num_resident": resident,
        "expert_offload_config": json.dumps({"warmup_tokens": WARMUP_TOKENS}),
    }
    offloaded, plain = Rounds(), Rounds(aloud=False)

    heading(f"With {share}, on the {'CPU' if on_cpu else 'GPU'}")
    with Server(checkpoint, log_path=folder / "offloaded.log", **common, **offload) as server:
        ready(server)
        table = follow_traffic(server, offloaded)
        report = written_report(server, folder / "page.html")
    heading("The same server without offloading")
    with Server(checkpoint, log_path=folder / "plain.log", **common) as server:
        ready(server)
        plain.ask(server, "both topics", ENGLISH + MORE_ENGLISH + CODE + MORE_CODE)

    heading("Result")
    if code := compare(offloaded.answers, plain.answers, share):
        return code
    print_hit_rates(table)
    print(f"\n  Report  {report}\n  Logs    {folder / 'offloaded.log'}\n          {folder / 'plain.log'}")
    print(f"  Time    {time.monotonic() - began:.0f} s on {f'{len(os.sched_getaffinity(0))} CPU cores' if on_cpu else 'a GPU'}")
    print_next(machine=" --machine 4x4090" if on_cpu else "")
    return 0


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def checkpoint_for(model: str, folder: Path) -> Path:
    if model == TRAINED:
        print(f"Serves {LEARNED}, a tiny model of English prose and Python code; its README.md says how it was trained.")
        return LEARNED
    if model not in WRITTEN:
        return Path(model)
    from scripts.make_checkpoint import make_checkpoint

    print(f"Serves a {model} checkpoint with random weights: its answers are gibberish, but always the same gibberish.")
    return make_checkpoint(model, folder / "model", hot=HOT)


def number_of_experts(checkpoint: Path) -> int:
    config = json.loads((checkpoint / "config.json").read_text())
    config = config.get("text_config") or config
    for name in ("n_routed_experts", "num_experts", "num_local_experts"):
        if config.get(name):
            return int(config[name])
    raise SystemExit(f"{checkpoint} is not a mixture-of-experts model: its config.json has no number of experts")


def server_options(args: argparse.Namespace, on_cpu: bool) -> dict[str, Any]:
    """The options of both servers. Neither routes a token before the first prompt, so hit rates are of the prompts alone."""
    sizes, flags = parallel_sizes(args.server)
    options: dict[str, Any] = {
        **sizes,
        "command": [sys.executable, "-m", "sglang.launch_server", *flags],
        "on_cpu": on_cpu,
        "seconds": args.start_seconds,
        "waiting": progress,
        "env": {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"},
        "skip_server_warmup": True,
    }
    if args.model == "deepseek_v3" and not on_cpu:
        options["attention_backend"] = "triton"  # other backends support only the real model's attention sizes
    return options


def parallel_sizes(flags: list[str]) -> tuple[dict[str, int | None], list[str]]:
    """The numbers of ranks, which the harness must know on a CPU, and the other flags."""
    parser = argparse.ArgumentParser(add_help=False)
    for short, long in (("tp", "tensor"), ("pp", "pipeline"), ("dp", "data")):
        parser.add_argument(f"--{short}-size", f"--{long}-parallel-size", type=int)
    sizes, others = parser.parse_known_args(flags)
    return vars(sizes), others


# ---------------------------------------------------------------- traffic


@dataclass
class Rounds:
    """Rounds of prompts to one server, and all answers."""

    aloud: bool = True
    answers: dict[str, str] = field(default_factory=dict)

    def ask(self, server: Server, topic: str, prompts: tuple[str, ...]) -> None:
        print(f"  {len(prompts)} prompts of {topic}", flush=True)
        for prompt in prompts:
            body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS}}
            self.answers[prompt] = server.post("/generate", body)["text"]
        for prompt in prompts[:SHOWN] if self.aloud else ():
            print(f"    {prompt!r} -> {self.answers[prompt]!r}")


def follow_traffic(server: Server, rounds: Rounds) -> list[tuple[str, float | None]]:
    """Serve English, then code. Returns each part of the traffic with the hit rate of its residents."""
    first = status(server)
    resident, offloaded = (first[name] / 2**20 for name in ("resident_bytes", "offloaded_bytes"))
    print(f"  {resident:.1f} MiB of experts are resident, {offloaded:.1f} MiB offloaded")
    print_residents("Residents", first)
    rounds.ask(server, "English prose", ENGLISH)
    print_residents(f"Residents chosen from the routing of {chosen_from(server)} tokens", status(server))
    rounds.ask(server, "English prose", MORE_ENGLISH)
    english = status(server)
    rounds.ask(server, "Python code", CODE)
    code = status(server)
    server.post("/expert_offload", {"action": "readvise"})
    print_residents('Residents after POST /expert_offload {"action": "readvise"}', status(server))
    rounds.ask(server, "Python code", MORE_CODE)
    return [
        (f"English, the first {chosen_from(server)} tokens", english["hit_rate_before"]),
        ("English, since residents were chosen", english["hit_rate_since"]),
        ("code, with the same residents", hit_rate_between(english, code)),
        ("code, after readvise", status(server)["hit_rate_since"]),
    ]


def status(server: Server) -> dict[str, Any]:
    """The first rank's, once no expert is being moved."""
    while True:
        state = offload_state(server.get("/server_info"))
        if not state:
            raise EngineFailed("the server reports no offloading", server.log_path)
        if not state["moving"]:
            return state
        time.sleep(0.1)


def chosen_from(server: Server) -> str:
    """The number of tokens whose routing the first residents were chosen from, as the server logs it."""
    found = re.search(r"residents chosen from the routing of (\d+) tokens", server.log)
    return found.group(1) if found else "0"


def hit_rate_between(before: dict[str, Any], after: dict[str, Any]) -> float | None:
    routed, hits = (
        sum(layer[name] for layer in after["layers"]) - sum(layer[name] for layer in before["layers"])
        for name in ("routed", "routed_resident")
    )
    return hits / routed if routed else None


def written_report(server: Server, page: Path) -> str:
    """Where the report of the server is, or why there is none."""
    from sglang_uvm_offload.cli.main import main as command

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        command(["report", server.url, "--out", str(page)])
    return " ".join(said.getvalue().split())


def compare(answers: dict[str, str], plain: dict[str, str], share: str) -> int:
    """0 if all answers are the same, otherwise 1."""
    different = [prompt for prompt in answers if answers[prompt] != plain[prompt]]
    for prompt in different:
        print(f"  {prompt!r}\n    offloaded  {answers[prompt]!r}\n    plain      {plain[prompt]!r}")
    if different:
        print(f"  Failed: {len(different)} of {len(answers)} answers differ with and without offloading.")
        return 1
    print(f"  All {len(answers)} answers are the same with {share} and without offloading.")
    return 0


# ---------------------------------------------------------------- output


def heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


def progress(seconds: float) -> None:
    if sys.stdout.isatty():
        print(f"\r  waiting for the server ... {seconds:3.0f} s ", end="", flush=True)


def ready(server: Server) -> None:
    end = "\r" if sys.stdout.isatty() else ""
    print(f"{end}  Ready at {server.url}; its log is {server.log_path}", flush=True)


def print_residents(when: str, state: dict[str, Any]) -> None:
    """The resident experts of the first layers."""
    print(f"  {when}:")
    for layer, ids in list(zip(state["layers"], state["resident_ids"], strict=True))[:4]:
        print(f"    layer {layer['layer']}: experts {ranges(ids)}")
    if len(state["resident_ids"]) > 4:
        print(f"    ... and those of {len(state['resident_ids']) - 4} more layers")


def ranges(ids: list[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``."""
    runs: list[list[int]] = []
    for expert in sorted(ids):
        if runs and expert == runs[-1][1] + 1:
            runs[-1][1] = expert
        else:
            runs.append([expert, expert])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def print_hit_rates(table: list[tuple[str, float | None]]) -> None:
    print("\n  Hit rate: the share of routed tokens whose expert was resident")
    for traffic, rate in table:
        shown = "      -" if rate is None else f"{rate:7.1%}  {'#' * round(40 * rate)}"
        print(f"    {traffic:38}{shown}")


def print_next(machine: str) -> None:
    print("\nNext, with a model of your own (a Hugging Face id or a folder):")
    if os.environ.get("VIRTUAL_ENV") != sys.prefix != sys.base_prefix:
        print(f"  source {sys.prefix}/bin/activate")
    print(f"  sglang-uvm-offload plan MODEL{machine}    # does it fit, and how fast?")
    print("  sglang-uvm-offload doctor -- --model-path MODEL --expert-offload-num-resident auto    # is this machine ready?")
    print("If it is, `sglang serve` takes the same arguments.")


if __name__ == "__main__":
    sys.exit(main())
