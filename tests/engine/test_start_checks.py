"""What ends SGLang's start behind its resolved arguments: ``doctor`` and the launch name it before anything is spawned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import true_shape
from nursery import Nurseries

N = "--expert-offload-num-resident"
GIB = 1 << 30
PLACE = "physical_to_logical_map"
TRIED = """
import contextlib, io, json, os, sys
sys.path.insert(0, {tests!r})
from launches import run
from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.plugin.launch import expert_bytes, planned_launch
ends = {{}}
for name, case in json.loads({cases!r}).items():
    os.environ.update(case["env"])
    with contextlib.redirect_stdout(io.StringIO()) as said:
        expert_bytes.host_available = planned_launch.host_available = lambda: 1 << 40
        code = main(["doctor", "--", *case["argv"]])
    try:
        launch = run({{"argv": case["argv"], "resolve": True}})
    except Exception as error:
        launch = {{"exit": 1, "error": f"{{type(error).__name__}}: {{error}}"}}
    ends[name] = (code, said.getvalue(), launch)
    for key in case["env"]:
        del os.environ[key]
print("RESULT", json.dumps(ends))
"""
End = tuple[int, str, dict[str, Any]]


def tried(cases: dict[str, list[str]], envs: dict[str, dict[str, str]], python: Nurseries, **env: str) -> dict[str, End]:
    """What ``doctor`` and the launch made of each case."""
    jobs = {name: {"argv": argv, "env": envs.get(name, {})} for name, argv in cases.items()}
    ended = python.run(TRIED.format(tests=str(Path(__file__).parents[1]), cases=json.dumps(jobs)), **env)
    assert ended.code == 0, ended.err[-4000:]
    return {name: tuple(end) for name, end in json.loads(ended.out.rpartition("RESULT ")[2]).items()}


def at_night(*cases: str) -> list[Any]:
    return [pytest.param(case, marks=pytest.mark.nightly) for case in cases]


def written(folder: Path) -> dict[str, Path]:
    """Files that flags name, most of them wrong for a model of 48 layers and 128 experts."""
    rows = [list(range(128))] * 48
    files: dict[str, Any] = {
        "right.json": {PLACE: rows},
        "few layers.json": {PLACE: rows[:47]},
        "few places.json": {PLACE: [row[:64] for row in rows]},
        "no such expert.json": {PLACE: [[128, *row[1:]] for row in rows]},
        "ragged.json": {PLACE: [[0, 1], [0]]},
        "more.json": {PLACE: rows, "steps": 3},
        "neither.json": {"experts": rows},
        "counts.json": {"logical_count": [[1] * 127] * 48},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "cut.json").write_text("{")
    torch.save({PLACE: torch.tensor(rows)}, folder / "right.pt")
    (folder / "cut.pt").write_bytes((folder / "right.pt").read_bytes()[:100])
    (folder / "template.txt").write_text("x")
    (folder / "adapter").mkdir()
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{")
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def ends(
    request: pytest.FixtureRequest, sglang_on_standin: Nurseries, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, End]:
    """Of the cases that are asked for: each is two starts of SGLang."""
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    asked = {"equal", "no text", *(each["case"] for each in params if isinstance(each.get("case"), str))}
    folder = tmp_path_factory.mktemp("start")
    small = str(true_shape.checkpoint("Qwen/Qwen3-30B-A3B", folder / "Qwen3-30B-A3B"))
    large = str(true_shape.checkpoint("Qwen/Qwen3-235B-A22B-FP8", folder / "Qwen3-235B-A22B-FP8"))
    deepseek = str(true_shape.checkpoint("deepseek-ai/DeepSeek-V3", folder / "DeepSeek-V3"))
    (folder / "files").mkdir()
    file = written(folder / "files")
    plain = ["--model-path", small, N, "16", "--grammar-backend", "none", "--sampling-backend", "pytorch"]
    two, location = [*plain, "--tp-size", "2"], "--init-expert-location"
    eagle = ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", small, "--speculative-num-steps", "3"]
    eagle += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]
    maps = {name: [*plain, location, str(path)] for name, path in file.items() if path.suffix in (".json", ".pt")}
    storage = ["--enable-hierarchical-cache", "--hicache-storage-backend", "file"]
    balanced = ["--enable-eplb", "--ep-num-redundant-experts", "16"]
    nodes = ["--nnodes", "2", "--node-rank", "0", "--dist-init-addr", "127.0.0.1:5000"]
    cases = {
        **{f"map {name}": words for name, words in maps.items()},
        "equal": two,
        "a tenth": two,
        "unequal": two,
        "unequal, not checked": two,
        "unequal, beside": two,
        "unequal, one rank": plain,
        "unequal replicas": [*plain, "--dp-size", "2"],
        "unequal stages": [*two, "--pp-size", "2"],
        "map nowhere": [*plain, location, str(folder / "nowhere.json")],
        "map inline": [*plain, location, "[1]"],
        "map no file": [*plain, location, "somewhere"],
        "heads": [*plain, "--tp-size", "3"],
        "KV heads": [*plain, "--tp-size", "8"],
        "blocks": ["--model-path", large, *plain[2:], "--tp-size", "8"],
        "blocks, whole": ["--model-path", large, *plain[2:], "--tp-size", "8", "--ep-size", "8"],
        "experts": [*two, "--ep-size", "2", "--ep-num-redundant-experts", "1"],
        "chat template": [*plain, "--chat-template", "nowhere"],
        "chat template's kind": [*plain, "--chat-template", str(file["template.txt"])],
        "chat template of SGLang": [*plain, "--chat-template", "chatml"],
        "completion template": [*plain, "--completion-template", "nowhere"],
        "adapter": [*plain, "--enable-lora", "--lora-paths", "a=/nowhere", f"b={file['adapter']}"],
        "token map": [*plain, *eagle, "--speculative-token-map", "/nowhere/map.pt"],
        "adaptive": [*plain, *eagle, "--speculative-adaptive", "--speculative-adaptive-config", str(folder / "nowhere.json")],
        "storage": [*plain, *storage, "--hicache-storage-backend-extra-config", "@/nowhere.yaml"],
        "tokenizer": [*plain, "--tokenizer-path", str(file["tokenizer"])],
        "served name": [*plain, "--served-model-name", "a:b"],
        "no text": ["--model-path", deepseek, *plain[2:], "--tp-size", "16", *nodes, *balanced],
    }
    taken = {"STANDIN_TAKEN": f"0,{10 * GIB}"}
    envs = {
        "a tenth": {"STANDIN_TAKEN": f"0,{9 * GIB}"},
        "unequal": taken,
        "unequal, not checked": {**taken, "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"},
        "unequal, beside": {"STANDIN_TAKEN": f"0,0,{10 * GIB}"},
        "unequal, one rank": taken,
        "unequal replicas": taken,
        "unequal stages": {"STANDIN_TAKEN": f"0,0,0,{10 * GIB}"},
    }
    cases = {name: words for name, words in cases.items() if name in asked}
    return tried(cases, envs, sglang_on_standin, STANDIN_GPUS="8", STANDIN_VRAM=str(96 * GIB))


@pytest.mark.parametrize(
    "case",
    [
        *("equal", "a tenth", "map right.json"),
        *at_night(
            "unequal, not checked",
            "unequal, beside",
            "KV heads",
            "blocks, whole",
            "unequal, one rank",
            "unequal replicas",
            "map right.pt",
            "chat template of SGLang",
        ),
    ],
)
def test_what_sglang_starts_with_is_ready(ends, case):
    code, said, launch = ends[case]
    assert code == 0, said
    assert launch["exit"] is None, launch["error"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("unequal", "--tp-size 2: GPU 1 has 86.00 GiB of free VRAM and GPU 0 has 96.00 GiB"),
        pytest.param(
            "unequal stages", "--tp-size 2: GPU 3 has 86.00 GiB of free VRAM and GPU 0 has 96.00 GiB", marks=pytest.mark.nightly
        ),
        pytest.param("map nowhere", "nowhere.json: No such file or directory", marks=pytest.mark.nightly),
        pytest.param(
            "map inline", f"--init-expert-location [1]: must hold {PLACE} or logical_count", marks=pytest.mark.nightly
        ),
        pytest.param(
            "map no file", "--init-expert-location somewhere: is neither a .pt, a .json nor JSON", marks=pytest.mark.nightly
        ),
        pytest.param("map cut.json", "cut.json: Expecting property name", marks=pytest.mark.nightly),
        pytest.param("map cut.pt", "cut.pt: ", marks=pytest.mark.nightly),
        ("map few layers.json", f"{PLACE} has 47 rows, but the model has 48 layers"),
        pytest.param(
            "map few places.json",
            f"{PLACE} has 64 physical experts a layer, but the model has 128 experts a layer",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "map no such expert.json",
            f"{PLACE} names experts 1 to 128, but the model's are 0 to 127",
            marks=pytest.mark.nightly,
        ),
        pytest.param("map ragged.json", f"{PLACE} must be a table of whole numbers", marks=pytest.mark.nightly),
        pytest.param("map more.json", "and also holds steps", marks=pytest.mark.nightly),
        pytest.param("map neither.json", f"must hold {PLACE} or logical_count", marks=pytest.mark.nightly),
        pytest.param(
            "map counts.json", "logical_count has 127 experts a layer, but the model has 128", marks=pytest.mark.nightly
        ),
        ("heads", "--tp-size 3: its 3 attention ranks do not divide the model's 32 heads"),
        pytest.param(
            "blocks",
            "--tp-size 8 with --ep-size 1: 8 ranks do not divide an expert's 1536 hidden units into blocks of 128",
            marks=pytest.mark.nightly,
        ),
        ("experts", "--ep-size 2: does not divide the model's 128 experts and --ep-num-redundant-experts 1"),
        pytest.param(
            "chat template", "--chat-template nowhere: is neither a template of SGLang's nor a file", marks=pytest.mark.nightly
        ),
        pytest.param("chat template's kind", "template.txt: must end in .jinja or .json", marks=pytest.mark.nightly),
        pytest.param("completion template", "--completion-template nowhere: is neither", marks=pytest.mark.nightly),
        ("adapter", "--lora-paths /nowhere: no such folder"),
        ("adapter", "adapter: has no adapter_config.json"),
        pytest.param(
            "token map",
            "--speculative-token-map /nowhere/map.pt: is neither a file nor OWNER/NAME/FILE",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "storage",
            "--hicache-storage-backend-extra-config /nowhere.yaml: No such file or directory",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_what_ends_a_rank_is_refused_by_doctor_and_launch(ends, case, words):
    code, said, launch = ends[case]
    assert code == 1, said
    assert any(words in line for line in said.splitlines() if "PROBLEM" in line), said
    assert launch["exit"] == 2, launch["error"]
    assert words in launch["error"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("tokenizer", "--tokenizer-path "),
        pytest.param("adaptive", "FileNotFoundError: [Errno 2] No such file or directory: ", marks=pytest.mark.nightly),
        pytest.param("served name", "AssertionError: ", marks=pytest.mark.nightly),
    ],
)
def test_what_ends_the_launcher_is_a_problem(ends, case, words):
    code, said, _ = ends[case]
    assert code == 1, said
    assert any(words in line for line in said.splitlines() if "PROBLEM" in line), said


def test_an_exception_without_a_text_is_told_by_its_line_and_the_flags_it_reads(ends):
    code, said, _ = ends["no text"]
    assert code == 1
    (problem,) = [line for line in said.splitlines() if "PROBLEM" in line]
    assert "AssertionError at sglang/srt/" in problem
    assert "assert " in problem
    assert "ep_size > 1" in problem
    assert "(here: --ep-size 1, --enable-eplb)" in problem


def test_a_model_without_a_tokenizer_is_warned_of(ends):
    _, said, _ = ends["equal"]
    (warning,) = [line for line in said.splitlines() if "WARNING" in line and "tokenizer" in line]
    assert "Qwen3-30B-A3B has no tokenizer" in warning
