"""One account of memory: ``auto``, a number, ``plan`` and ``doctor`` count the same needs against the same pools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import builders.judged
import pytest
from builders.judged import Launch
from builders.true_shape import checkpoint
from launches import launched
from nursery import Nurseries

from sglang_uvm_offload.sizing.machine import GIB

N = "--expert-offload-num-resident"
MODEL = "Qwen/Qwen3-30B-A3B"
"""54 GiB of experts, 128 a layer, 3 GiB of other weights."""
ON_CUDA = ["--device", "cuda", "--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
CACHE = ["--enable-hierarchical-cache", "--hicache-size"]
RATIO = ["--enable-hierarchical-cache", "--hicache-ratio"]
TOKENS = ["--max-total-tokens", "32768"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(MODEL, tmp_path_factory.mktemp("true") / "model")


def judged(
    cases: dict[str, tuple[list[str], int]], model: Path, python: Nurseries, vram: int, system: Path | None = None, **env: str
) -> dict[str, Any]:
    """What came of launches with so many GiB of host RAM available, on a GPU of ``vram`` GiB."""
    jobs: dict[str, dict[str, Any]] = {
        name: {"argv": ["--model-path", str(model), *ON_CUDA, *words], "resolve": True, "host_bytes": host * GIB}
        for name, (words, host) in cases.items()
    }
    for job in jobs.values() if system else []:
        job["system"] = str(system)
    return launched(jobs, python, STANDIN_VRAM=str(vram * GIB), **env)


@pytest.fixture(scope="module")
def launch(model: Path, sglang_on_standin: Nurseries) -> dict[str, Any]:
    cases = {
        "plain": ([N, "64"], 32),
        "plain, short": ([N, "64"], 27),
        "cache": ([N, "64", *CACHE, "20"], 64),
        "cache, short": ([N, "64", *CACHE, "20"], 56),
        "cache alone, short": ([N, "128", *CACHE, "20"], 29),
        "cache, auto": ([N, "auto", *CACHE, "20"], 32),
        "ratio": ([N, "64", *RATIO, "2", *TOKENS], 50),
        "ratio, short": ([N, "64", *RATIO, "2", *TOKENS], 41),
        "uncounted": ([N, "64", *CACHE, "20", "--moe-dense-tp-size", "1"], 64),
        "uncounted, short": ([N, "64", *CACHE, "20", "--moe-dense-tp-size", "1"], 56),
    }
    return judged(cases, model, sglang_on_standin, vram=80)


@pytest.mark.parametrize("case", ["plain", "cache", "ratio", "uncounted"])
def test_what_host_ram_holds_is_served(launch, case):
    assert launch[case]["exit"] is None, launch[case]["error"]
    assert "NUMA" not in launch[case]["error"]


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("plain, short", [f"{N} 64: the offloaded experts need 27.00 GiB of host RAM", "keep more resident"]),
        ("cache, short", ["18.63 GiB for hierarchical caches, 10.00 GiB for what SGLang keeps free", "--hicache-size"]),
        ("cache alone, short", ["18.63 GiB for hierarchical caches, 10.00 GiB for what SGLang keeps free"]),
        ("cache, auto", [f"{N} auto: host RAM: with ", "for the hierarchical cache"]),
        ("ratio, short", ["6.00 GiB for hierarchical caches, 10.00 GiB for what SGLang keeps free", "--hicache-ratio"]),
        ("uncounted, short", ["18.63 GiB for hierarchical caches, 10.00 GiB for what SGLang keeps free"]),
    ],
)
def test_what_host_ram_does_not_hold_is_refused_whoever_chose_the_number(launch, case, parts):
    assert launch[case]["exit"] == 2, launch[case]["error"]
    for part in parts:
        assert part in launch[case]["error"]


@pytest.fixture(scope="module")
def spark(model: Path, sglang_on_standin: Nurseries) -> dict[str, Any]:
    """A machine whose GPU has no memory but the host's."""
    cases = {
        "auto, it fits whole": ([N, "auto"], 106),
        "number, it fits": ([N, "64", *TOKENS], 106),
        "auto, too small": ([N, "auto"], 60),
        "number, too small": ([N, "64", *TOKENS], 60),
        "few residents, too small": ([N, "0", *TOKENS], 60),
        "number and cache, too small": ([N, "64", *TOKENS, *CACHE, "60"], 106),
    }
    return judged(cases, model, sglang_on_standin, vram=119, STANDIN_ATTRIBUTE_18="1")


@pytest.mark.parametrize("case", ["auto, it fits whole", "number, it fits"])
def test_one_memory_serves_what_fits_it_once(spark, case):
    assert spark[case]["exit"] is None, spark[case]["error"]


@pytest.mark.parametrize(
    "case", ["auto, too small", "number, too small", "few residents, too small", "number and cache, too small"]
)
def test_one_memory_of_gpu_and_host_is_counted_once(spark, case):
    assert spark[case]["exit"] == 2, spark[case]["error"]
    assert "share one memory: an offloaded expert takes as much of it as a resident one" in spark[case]["error"]


@pytest.mark.nightly
def test_doctor_counts_one_memory_once(model, sglang_on_standin):
    rooms = {106: 0, 60: 1}
    ours = ("--model-path", str(model), "--skip-tokenizer-init", *ON_CUDA, N, "64", *TOKENS)
    launches = {host: Launch(ours, gpu="integrated", host_gib=host) for host in rooms}
    said = builders.judged.judged(list(launches.values()), sglang_on_standin)
    for host, expected in rooms.items():
        code, out = said[launches[host]]
        assert code == expected, out
        assert ("share one memory" in out) == bool(expected)
    assert "for GPU and host together, which use the same memory" in said[launches[106]][1]


def test_a_numa_node_with_too_little_room_is_named_and_served(model, sglang_on_standin, tmp_path):
    """The driver puts on other nodes what its own does not hold: all nodes together have enough."""
    nodes = tmp_path / "devices/system/node"
    for node, free in enumerate((50, 14)):
        (nodes / f"node{node}").mkdir(parents=True)
        (nodes / f"node{node}" / "meminfo").write_text(f"Node {node} MemFree: {free << 20} kB\n")
    for name in ("online", "has_cpu", "has_memory"):
        (nodes / name).write_text("0-1\n")
    cases = {"a number": ([N, "64"], 64), "auto": ([N, "auto"], 64)}
    found = judged(cases, model, sglang_on_standin, vram=48, system=tmp_path, STANDIN_ATTRIBUTE_134="1", STANDIN_NODES="2")
    for case in found.values():
        assert case["exit"] is None, case["error"]
        assert "NUMA node 1 is nearest to GPU 0 and has 14.00 GiB available" in case["error"]
