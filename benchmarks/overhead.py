"""What this plugin costs a server that runs on a CPU: ratios between variants in one run, written to results/overhead/.

usage: python benchmarks/overhead.py [--repeats N] [--start-only]

- step time: decode steps of a small GLM-4.5-architecture model, the variants taking turns, another one first in each repeat:
  SGLang without the plugin (it is installed, and SGLANG_PLUGINS keeps SGLang from loading it), the same once more (how far
  two equal ones are apart tells what a ratio means), with it but without its flags, and with offloading on.
- decision: choosing residents for 75 layers x 256 experts, and 10 times as many layers.
- import: what SGLang's plugin loading takes longer with the plugin.
- start: from the shell to the end of sglang-uvm-offload's subcommands that need no PyTorch; --start-only prints these alone.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from sglang_uvm_offload.policy import ranking
from sglang_uvm_offload.policy.extents import Extents

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "overhead"
VARIANTS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "not loaded": ({"SGLANG_PLUGINS": "cpu_shims"}, {}),
    "not loaded, again": ({"SGLANG_PLUGINS": "cpu_shims"}, {}),
    "off": ({}, {}),
    "on": ({}, {"expert_offload_num_resident": 8, "expert_offload_warmup_tokens": 64}),
}
STARTS = {
    "--help": ["--help"],
    "plan": ["plan", "MODEL", "--machine", "1xH200"],
    "profile --help": ["profile", "--help"],
    "report --help": ["report", "--help"],
    "replay --help": ["replay", "--help"],
}
GOALS = {
    **{"off / not loaded": 1.00, "on / off": 1.05, "decision, ms": 5.0, "import, ms": 30.0},
    **{f"start of {name}, s": 0.5 for name in STARTS},
}

STEP = """
import json, sys, time
import sglang
if __name__ == "__main__":
    engine = sglang.Engine(**json.loads(sys.argv[1]))
    def ask(tokens):
        engine.generate(["a quick brown fox"], {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True})
    ask(128)
    times = []
    for _ in range(int(sys.argv[2])):
        start = time.perf_counter(); ask(1); first = time.perf_counter(); ask(201); end = time.perf_counter()
        times.append((end - first - (first - start)) / 200)
    engine.shutdown()
    print("TIMES", json.dumps(times))
"""
IMPORT = """
import time
import sglang.launch_server
import sglang.srt.server_args
from sglang.srt.plugins import load_plugins
start = time.perf_counter(); load_plugins(); print("TIMES", [time.perf_counter() - start])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=6, help="engine starts a variant")
    parser.add_argument("--start-only", action="store_true", help="print how long the command takes to start, and end")
    args = parser.parse_args()
    repeats = args.repeats
    with tempfile.TemporaryDirectory() as folder:
        script = [sys.executable, str(ROOT / "scripts" / "make_checkpoint.py"), "glm4_moe", folder]
        subprocess.run(script, check=True, stdout=subprocess.DEVNULL)
        starts = start_seconds(Path(folder), repeats)
        if args.start_only:
            for name, seconds in starts.items():
                print(f"{name} {seconds:.2f}")
            return
        steps = step_times(Path(folder), repeats)
    imports = import_times(repeats)
    decision = decision_seconds(75, repeats)
    figures = {
        **step_ratios(steps),
        "decision, ms": 1e3 * decision,
        "decision at 10x layers / decision": decision_seconds(750, repeats) / decision,
        "import, ms": 1e3 * (statistics.median(imports["off"]) - statistics.median(imports["not loaded"])),
        **starts,
    }
    write({"step_seconds": steps, "import_seconds": imports, "figures": figures})


def step_times(checkpoint: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds a decode step of one request, every repeat of each variant, the variants in turn."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from harness.server import CPU, environment

    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for repeat in range(repeats):
        for name in rotated(list(VARIANTS), repeat):
            env, flags = VARIANTS[name]
            arguments = json.dumps({**CPU, "model_path": str(checkpoint), "log_level": "error", **flags})
            with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
                file.write(STEP)
                file.flush()
                times[name] += run([file.name, arguments, "5"], environment(env))
            print(
                f"step time, repeat {repeat + 1} of {repeats}, {name}: {1e3 * statistics.median(times[name]):.2f} ms",
                flush=True,
            )
    return times


def rotated(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def step_ratios(steps: dict[str, list[float]]) -> dict[str, float]:
    return {
        "not loaded, again / not loaded": ratio(steps["not loaded, again"], steps["not loaded"]),
        "off / not loaded": ratio(steps["off"], steps["not loaded"] + steps["not loaded, again"]),
        "on / off": ratio(steps["on"], steps["off"]),
    }


def import_times(repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"not loaded": [], "off": []}
    for _ in range(repeats):
        for name, env in (("not loaded", {"SGLANG_PLUGINS": "none"}), ("off", {"SGLANG_PLUGINS": "uvm_offload"})):
            times[name] += run(["-c", IMPORT], {**os.environ, **env})
    return times


def start_seconds(checkpoint: Path, repeats: int) -> dict[str, float]:
    """Median wall seconds of each of ``STARTS``, with ``checkpoint`` as ``MODEL``. The first run, which brings files to the
    page cache, does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in STARTS}
    for repeat in range(repeats + 1):
        for name, words in STARTS.items():
            begin = time.perf_counter()
            words = [str(checkpoint) if word == "MODEL" else word for word in words]
            command = [sys.executable, "-m", "sglang_uvm_offload.cli.main", *words]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
            if repeat:
                seconds[name].append(time.perf_counter() - begin)
    return {f"start of {name}, s": statistics.median(times) for name, times in seconds.items()}


def run(arguments: list[str], env: dict[str, str]) -> list[float]:
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return json.loads(done.stdout.split("TIMES ")[1])


def decision_seconds(layers: int, repeats: int) -> float:
    """Median seconds of one choice of residents from counts, for ``layers`` x 256 experts of which 200 are resident."""
    rng = np.random.default_rng(0)
    activations = rng.integers(0, 1000, (layers, 256))
    extents = Extents.whole(activations.shape, np.ones(layers))
    resident = np.arange(len(extents)) % 256 < 200
    seconds = []
    for _ in range(20 * repeats):
        start = time.perf_counter()
        scores = extents.density(ranking.score(activations, 1000, activations * 8))
        ranking.best(extents, scores, np.full(layers, 200), resident, np.ones_like(resident))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def ratio(mine: list[float], theirs: list[float]) -> float:
    """Of the lower quartiles: whatever else the machine does only adds."""
    return float(np.quantile(mine, 0.25) / np.quantile(theirs, 0.25))


def write(result: dict[str, Any]) -> None:
    import torch

    result["machine"] = {"processor": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    result["versions"] = {"sglang": version("sglang"), "torch": torch.__version__}
    spread = {name: [round(1e3 * t, 3) for t in sorted(times)] for name, times in result["step_seconds"].items()}
    lines = ["| figure | value | goal |", "| --- | --- | --- |"]
    lines += [f"| {name} | {value:.3f} | {GOALS.get(name, '')} |" for name, value in result["figures"].items()]
    lines += ["", "Ratios are of lower quartiles. Decode steps in ms, every repeat:", ""]
    lines += [f"- {name}: {', '.join(map(str, times))}" for name, times in spread.items()]
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / "overhead.json").write_text(json.dumps(result, indent=1) + "\n")
    (RESULTS / "overhead.md").write_text("# Overhead on a CPU\n\n" + "\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
