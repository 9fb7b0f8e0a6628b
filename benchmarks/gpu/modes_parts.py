"""Parts that combine offloading with other SGLang modes: live updates, quantised experts, a hierarchical cache.

Each part serves one small checkpoint with two servers, one with offloading and one without, with SGLang's own backends and
decode graphs. Their answers must be equal. Nothing is timed, so both run at once: importing SGLang takes most of the time. With
``--small`` the servers run on the CPU, which not all modes can, or over a stand-in driver that supports servers.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

from benchmarks.gpu.rows import Rows, run_part
from benchmarks.gpu.server_parts import (
    BLOCKS_OF_EXPERTS,
    SGLANG_SETTINGS,
    SUBSTITUTES,
    check_sglang,
    importable,
    leave_the_stand_in,
    on_cpu,
)
from scripts.harness.server import Server, offload_state
from scripts.make_checkpoint import make_checkpoint

RESIDENT = 4
STREAM_TOKENS = 256
PROMPTS = ("hello world", "the quick brown fox jumps over 13 lazy dogs", "once upon a time there was a fox. " * 24)
"""The last prompt is long enough to stream."""
ANSWER_TOKENS = 32
Answers = list[list[int]]
Change = Callable[[Server, Path], None]


@dataclass(frozen=True)
class Mode:
    """``arguments`` go to both servers. ``change`` acts on a server between two rounds of prompts; it gets a checkpoint with
    other weights."""

    family: str = "qwen3_moe"
    quant: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    change: Change | None = None
    needs: str | None = None
    """A package that SGLang imports for this mode."""
    tma: bool = False
    """Whether both servers load experts by TMA, as a tile configuration of SGLang's tuner may request."""


def updated(server: Server, other: Path) -> None:
    server.wait_until_idle()
    if not server.post("/update_weights_from_disk", {"model_path": str(other)})["success"]:
        raise AssertionError("the weights were not updated")


def slept(server: Server, other: Path) -> None:
    """Puts SGLang to sleep and wakes it with other weights. Experts must not hold VRAM meanwhile."""
    server.wait_until_idle()
    server.post("/release_memory_occupation", {})
    state = offload_state(server.get("/server_info"))
    if state.get("resident_bytes"):
        raise AssertionError(f"{state['resident_bytes']} bytes of experts stay in VRAM while the server sleeps")
    server.post("/resume_memory_occupation", {})
    updated(server, other)


MODES = {
    "ngrams": Mode(arguments={"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}),
    "cache": Mode(arguments={"enable_hierarchical_cache": True, "hicache_size": 4}),
    # At batch 1, without offloading, SGLang compiles experts too, which rounds differently: pad batches of one.
    "compiled": Mode(
        family="glm4_moe",  # SGLang can compile its attention, but not Qwen3's
        arguments={"enable_torch_compile": True, "torch_compile_max_bs": 2, "cuda_graph_bs_decode": 2},
    ),
    "updates": Mode(change=updated),
    "sleep": Mode(arguments={"enable_memory_saver": True}, change=slept, needs="torch_memory_saver"),
    "fp8": Mode(quant="fp8", change=updated),
    # SGLang passes GPTQ scales to Marlin in half precision, and fails unless activations are too.
    "gptq": Mode(quant="gptq", arguments={"dtype": "float16"}),
    "tma": Mode(arguments={"moe_runner_backend": "triton"}, tma=True),
}
ON_GPU = {
    **{"max_running_requests": 8, "max_total_tokens": 16384, "cuda_graph_max_bs_decode": 8, "mem_fraction_static": 0.5},
    "disable_prefill_cuda_graph": True,
}
"""No prefill graphs: they pad tokens, which streaming steps do not, so answers would differ by rounding."""


def ask(server: Server) -> Answers:
    """Sends all prompts twice: the first answers complete the warm-up, the second use the moved experts."""
    sampling = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS, "ignore_eos": True}
    return [
        server.post("/generate", {"text": prompt, "sampling_params": sampling})["output_ids"] for prompt in (*PROMPTS, *PROMPTS)
    ]


TILES = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4, "num_stages": 2}
BY_TMA = ("Up MoE TMA is enabled", "Down MoE TMA is enabled")
"""What SGLang logs when it applies such tile configurations."""


def with_tiles_for_tma(checkpoint: Path) -> dict[str, str]:
    """Returns an environment with one tile configuration, using TMA, for the checkpoint's experts on this GPU."""
    config = json.loads((checkpoint / "config.json").read_text())
    made = checkpoint.parent / "tiles"
    tiles = made / "configs" / f"triton_{triton.__version__.replace('.', '_')}"
    tiles.mkdir(parents=True, exist_ok=True)
    device = torch.cuda.get_device_name(0).replace(" ", "_")
    for which in ("", "_down"):
        name = f"E={config['num_experts']},N={config['moe_intermediate_size']},device_name={device}{which}.json"
        (tiles / name).write_text(json.dumps({"1": {**TILES, "USE_TMA": True}}))
    return {"SGLANG_MOE_CONFIG_DIR": str(made)}


def serve(rows: Rows, mode: Mode, checkpoints: list[Path], offload: Mapping[str, Any]) -> tuple[Answers, dict[str, Any]]:
    """Returns one server's answers before and after the change, and its statistics if it offloads."""
    env: dict[str, str] = {}
    own: dict[str, Any] = {}
    if not on_cpu(rows):
        words = [words for package, words in SUBSTITUTES.items() if not importable(package)]
        env = with_tiles_for_tma(checkpoints[0]) if mode.tma else {}
        own = ON_GPU | {flag.removeprefix("--").replace("-", "_"): value for flag, value in words}
    seconds = rows.pick(150, 400)
    with Server(checkpoints[0], on_cpu=on_cpu(rows), env=env, seconds=seconds, **own, **mode.arguments, **offload) as server:
        answers = ask(server)
        if mode.change is not None:
            mode.change(server, checkpoints[1])
            answers += ask(server)
        if mode.tma and (silent := [words for words in BY_TMA if words not in server.log]):
            raise AssertionError(f"a server did not load experts by TMA: its log has no {silent}")
        return answers, offload_state(server.get("/server_info"))


def mode_part(rows: Rows, mode: Mode) -> None:
    check_sglang()
    if on_cpu(rows):
        leave_the_stand_in()
    if mode.needs is not None and not importable(mode.needs):
        raise SystemExit(f"{mode.needs} is not installed here: SGLang does not start in this mode without it")
    for name, value in SGLANG_SETTINGS.items():
        os.environ.setdefault(name, value)
    size = {} if on_cpu(rows) else BLOCKS_OF_EXPERTS
    with tempfile.TemporaryDirectory(prefix="modes-") as folder:
        made = [Path(folder, str(seed)) for seed in (0, 7)]
        for seed, path in zip((0, 7), made, strict=True):
            make_checkpoint(mode.family, path, quant=mode.quant, seed=seed, **size)
        flags = {"expert_offload_num_resident": RESIDENT, "expert_offload_warmup_tokens": 64}
        flags["expert_offload_stream_tokens"] = STREAM_TOKENS
        with ThreadPoolExecutor(2) as pool:
            plain, offloading = (pool.submit(serve, rows, mode, made, each) for each in ({}, flags))
        (expected, _), (found, state) = plain.result(), offloading.result()
    report(rows, expected, found, state)


def report(rows: Rows, expected: Answers, found: Answers, state: dict[str, Any]) -> None:
    same = [mine == theirs for mine, theirs in zip(found, expected, strict=True)]
    print(f"{sum(same)} of {len(same)} answers are those of the server without offloading", flush=True)
    rows.put("same_answers", "bool", same, contender="offload")
    for name in ("offloaded_bytes", "streamed_bytes", "zero_copy_bytes", "moved_bytes"):
        rows.put(name, "MB", [state[name] / 1e6])
        print(f"{name}: {state[name] / 1e6:.1f} MB", flush=True)
    if wrong := problems(same, state):
        raise AssertionError("; ".join(wrong))


def problems(same: list[bool], state: dict[str, Any]) -> list[str]:
    """Lists answers that differ, and whatever would make equal answers meaningless."""
    wrong = [] if all(same) else [f"{same.count(False)} of {len(same)} answers differ"]
    wrong += [f"moving experts stopped: {state['fault']}"] if state["fault"] else []
    return wrong + [
        f"no {name}" for name in ("offloaded_bytes", "streamed_bytes", "zero_copy_bytes", "moves") if not state[name]
    ]


PARTS = {name: partial(mode_part, mode=mode) for name, mode in MODES.items()}

if __name__ == "__main__":
    run_part(PARTS)
