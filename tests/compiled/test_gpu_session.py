"""scripts/gpu_session.sh without a GPU: the dry run; every section that needs no SGLang to its end over the stand-in driver of
``standin/``, and of those that do one, with its servers on the CPU. None of it may be called a measurement."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from serving import FORKING
from standin.build import build, cuda_include, environment

from benchmarks import serve_log
from benchmarks.gpu import shown_code
from sglang_uvm_offload.memory.staging import VRAM_BLOCKS

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = ("ops", "stream", "slots", "probe", "runners", "miss", "layer", "eviction")
SERVING = (*("server", "default", "modes", "other_modes", "serving_slots", "cpu_offload", "bounds", "offloader", "peers"),)
FILE_BYTES = 16 << 20
CAPTURED: dict[str, Any] = {"stdout": subprocess.PIPE, "text": True}


class Session:
    """Starts gpu_session.sh. Runs share compiled programs and one folder of results."""

    def __init__(self, folder: Path):
        self.out = folder / "results"
        self.logs = folder / "logs of servers"
        self._caches = {"XDG_CACHE_HOME": str(folder / "cache"), "TRITON_CACHE_DIR": str(folder / "triton")}
        self._standin = environment(build(folder / "cuda").parent)

    def run(self, *arguments: str, over_standin: bool = True, **settings: object) -> subprocess.CompletedProcess[str]:
        variables = os.environ | FORKING | self._caches | {"PYTHON": sys.executable, "SERVER_LOGS": str(self.logs)}
        variables.pop("OUT", None)
        if over_standin:
            variables |= self._standin | {f"STANDIN_{name.upper()}": str(value) for name, value in settings.items()}
        command = ["bash", str(ROOT / "scripts" / "gpu_session.sh"), *arguments]
        return subprocess.run(command, env=variables, capture_output=True, text=True)

    def probe(self, part: str, rows: Path, preload: Path, **settings: object) -> None:
        """One measurement of the probe at toy sizes, with a library before the stand-in."""
        variables = os.environ | self._caches | {name: str(value) for name, value in settings.items()}
        command = [sys.executable, "-m", "benchmarks.gpu.probe_build"]
        program = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout.strip()
        variables |= self._standin | {"LD_PRELOAD": f"{preload}:{self._standin['LD_PRELOAD']}"}
        subprocess.run([program, part, str(rows), "3600", "--small"], env=variables, check=True)

    def python(self, program: str, *arguments: str) -> str:
        """What a program over the stand-in prints."""
        variables = os.environ | self._caches | self._standin | {"PYTHONPATH": str(ROOT), "STANDIN_LOG": os.devnull}
        return subprocess.run([sys.executable, "-c", program, *arguments], env=variables, check=True, **CAPTURED).stdout

    def record(self, section: str) -> dict:
        return json.loads((self.out / f"{section}.json").read_text())


@pytest.fixture(scope="module")
def session(tmp_path_factory) -> Session:
    return Session(tmp_path_factory.mktemp("gpu_session"))


@pytest.fixture(scope="module")
def ran(session) -> Session:
    """The sections that need no SGLang, run once to their ends."""
    done = session.run(*SECTIONS, "--out", str(session.out))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return session


@pytest.fixture(scope="module")
def modules() -> dict:
    """The modules of the session itself, which import no torch."""
    from benchmarks.gpu import child, figures, goals, rows, sections, session

    return {"child": child, "figures": figures, "goals": goals, "rows": rows, "sections": sections, "session": session}


# ---- what can be asked without a GPU ----


def test_list_names_every_section_in_order(session):
    said = session.run("--list", over_standin=False)
    assert said.returncode == 0
    heads = [line.split(":")[0] for line in said.stdout.splitlines() if not line.startswith(" ")]
    assert heads == [*SECTIONS[:3], *SERVING, *SECTIONS[3:]]


def test_an_unknown_section_is_a_usage_error(session):
    said = session.run("prboe", over_standin=False)
    assert said.returncode == 2
    assert "no section prboe: there are ops, stream, slots, server, default, modes, other_modes" in said.stderr


def test_an_unknown_part_is_a_usage_error(session):
    said = session.run("ops:contrakt", over_standin=False)
    assert said.returncode == 2
    assert "no part 'contrakt' of section ops: there are contract, counters, recording" in said.stderr


def test_a_part_runs_alone_and_the_section_goes_on_from_it(session, tmp_path):
    def states() -> dict[str, str]:
        return {name: part["status"] for name, part in json.loads((tmp_path / "miss.json").read_text())["parts"].items()}

    alone = session.run("miss:pages", "--out", str(tmp_path))
    assert alone.returncode == 0, alone.stdout[-3000:] + alone.stderr[-3000:]
    assert states() == {"pages": "done"}
    assert "NOT complete: pages done" in alone.stdout
    whole = session.run("miss", "--out", str(tmp_path))
    assert whole.returncode == 0
    assert states() == {"pages": "done", "link": "done"}
    assert "-- pages" not in whole.stdout


def test_dry_run_compiles_everything_and_starts_no_cuda(session):
    said = session.run("--dry-run", over_standin=False)
    assert said.returncode == 0, said.stdout + said.stderr
    for words in (
        "probe-sm_90-",
        "uvm_ops.so",
        "compile for sm_90 with bf16",
        "compile for sm_90 with FP8",
        "interpreted on the CPU, FP8 True",
        "deepseek-v3: 3 layers",
        "qwen3-30b-a3b-16-layers, 20.0 GB",
        "compile for sm_90 in blocks of 128x128x64, 4 stages",
        "the plugin's hooks are on SGLang's Triton MoE functions",
        "the plugin's hooks are on SGLang's Marlin and DeepGEMM MoE functions",
        "in_place --expert-offload-num-resident 64",
        "--expert-offload-stream-tokens inf",
        "paged_experts --enable-paged-experts --paged-experts-num-resident 72",
        "page_in_only will not be served",
        "--speculative-algorithm NEXTN",
    ):
        assert words in said.stdout


def test_a_dry_run_goes_on_after_a_failure_and_names_it(monkeypatch, capfd):
    from benchmarks.gpu import dry_run

    def refused() -> None:
        raise AssertionError("too much shared memory")

    monkeypatch.setattr(dry_run, "find_spec", lambda name: None)
    monkeypatch.setitem(dry_run.CHECKS, "table_parts", refused)
    monkeypatch.setitem(sys.modules, "benchmarks.gpu.miss_parts", SimpleNamespace(PARTS={}))
    assert dry_run.main(["table_parts", "miss_parts", "link_parts"]) == 1
    out, err = capfd.readouterr()
    assert "== link_parts: start_link\n" in out
    assert "too much shared memory" in err
    assert "miss_parts has no part {'pages'}" in err
    assert err.splitlines()[-1] == "dry run failed in table_parts, miss_parts"


def test_without_a_gpu_a_section_says_so(session, tmp_path):
    said = session.run("ops", "--out", str(tmp_path), over_standin=False)
    assert said.returncode == 1
    assert "gpu_session: section ops: not started" in said.stderr
    assert not list(tmp_path.iterdir())


# ---- over the stand-in ----


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_ends_complete_and_calls_nothing_a_measurement(ran, section, modules):
    record = ran.record(section)
    assert record["complete"] is True
    assert record["measured"] is False
    assert [*record["parts"]] == [part.name for part in modules["sections"].SECTIONS[section].parts]
    assert {part["status"] for part in record["parts"].values()} == {"done"}
    log = (ran.out / f"{section}.log").read_text()
    assert "NOT MEASUREMENTS" in log
    for goal in record["goals"]:
        assert goal["met"] is None
        assert goal["ratio"] is not None, f"{goal['goal']} was not computed"
        assert "not judged" in log
    assert ": met" not in log
    assert "MISSED" not in log


@pytest.mark.parametrize("section", SECTIONS)
def test_a_result_says_where_it_is_from_and_keeps_every_repeat(ran, section):
    record = ran.record(section)
    machine = record["environment"]
    assert machine["device"] == "NVIDIA H200"
    for name in ("driver", "cuda_of_torch", "nvcc", "torch", "triton", "python", "commit", "sources_sha256"):
        assert name in machine
    assert machine["code"] == shown_code.digests()
    assert f"slots {machine['code']['slots']}" in (ran.out / f"{section}.log").read_text().splitlines()[1]
    assert len(record["commands"]) == len(record["started"]) == 1
    for part in record["parts"].values():
        assert part["command"]
        assert part["seconds"] >= 0
        for row in part["rows"]:
            assert not row["values"] or row["low"] <= row["median"] <= row["high"]


def test_the_log_tells_the_figures_of_every_part(ran, modules):
    for name in SECTIONS:
        log = (ran.out / f"{name}.log").read_text().splitlines()
        for part in modules["sections"].SECTIONS[name].parts:
            assert f"{part.name}: {part.says}" in log
            figures = modules["figures"].lines_of(ran.record(name)["parts"][part.name]["rows"])
            assert {f"    {line}" for line in figures} <= {*log}, part.name
            # One part compares what kernels compute, and none runs here; one only compiles.
            assert (figures == modules["figures"].NOTHING) == (part.name in ("check", "compiled")), part.name


TENSOR_MAPS = """
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

/* What cuda.h asks of a tiled map in two dimensions without interleaving. */
static CUresult encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* start, const cuuint64_t* sizes,
                       const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps,
                       CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                       CUtensorMapFloatOOBfill fill) {
    static int calls;
    if (calls++ >= atoi(getenv("MAPS_ACCEPTED"))) return CUDA_ERROR_NOT_SUPPORTED;
    int good = (size_t)map % 64 == 0 && (size_t)start % 16 == 0 && type == CU_TENSOR_MAP_DATA_TYPE_UINT8 && rank == 2;
    for (int i = 0; i < 2; i++) good &= sizes[i] > 0 && sizes[i] <= 1ULL << 32 && box[i] > 0 && box[i] <= 256 && steps[i] == 1;
    good &= strides[0] % 16 == 0 && strides[0] < 1ULL << 40 && strides[0] >= sizes[0] && box[0] % 16 == 0;
    good &= swizzle == CU_TENSOR_MAP_SWIZZLE_128B && box[0] <= 128;
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

int cudaGetDriverEntryPointByVersion(const char* name, void** found, unsigned version, unsigned long long flags, int* status) {
    int (*next)(const char*, void**, unsigned, unsigned long long, int*) = dlsym(RTLD_NEXT, __func__);
    int error = next(name, found, version, flags, status);
    if (!strcmp(name, "cuTensorMapEncodeTiled")) *found = encode;
    return error;
}
"""


@pytest.fixture(scope="module")
def tensor_maps(session, tmp_path_factory) -> Path:
    """A library that encodes no tensor map, and refuses what the documentation does."""
    folder = tmp_path_factory.mktemp("maps")
    (folder / "maps.c").write_text(TENSOR_MAPS)
    flags = ["-shared", "-fPIC", "-Wall", "-Werror", f"-I{cuda_include()}"]
    subprocess.run(["gcc", *flags, str(folder / "maps.c"), "-o", str(folder / "maps.so"), "-ldl"], check=True)
    return folder / "maps.so"


@pytest.mark.parametrize(("part", "accepted"), [("bandwidth", 1000), ("bandwidth", 2), ("bandwidth", 0), ("stall_tma", 0)])
def test_a_tensor_map_is_within_its_limits_and_a_refusal_is_a_row(session, modules, tensor_maps, tmp_path, part, accepted):
    """The first two maps of ``bandwidth`` are of plain memory."""
    session.probe(part, tmp_path / "rows", tensor_maps, MAPS_ACCEPTED=accepted)
    rows = modules["rows"].read_rows(tmp_path / "rows")
    assert rows[-1]["row"] == "finished"
    assert rows[-1]["values"] == [1]
    left_out = {(row["load"], row["memory"]): row["reason"] for row in rows if row["row"] == "load_left_out"}
    loads = ["TMA 4 x 8 KiB, L2 128 B", "TMA 4 x 8 KiB, L2 256 B"]
    everywhere = ["managed", "pinned", "host_numa", "managed_4k", "plain"]
    refused = ["managed"] if part == "stall_tma" else {1000: [], 2: everywhere, 0: ["plain"]}[accepted]
    assert left_out == {(load, memory): "cuTensorMapEncodeTiled returned 801" for load in loads for memory in refused}
    measured = {row["load"] for row in rows if row["row"] in ("zero_copy", "stall_tma")}
    assert measured >= {"plain x4", "bulk 4 x 8 KiB"}
    assert (set(loads) <= measured) == (accepted == 1000)


def test_every_way_to_copy_and_every_arm_of_a_step_is_run(ran):
    def values(section: str, part: str, row: str, label: str) -> set:
        return {each[label] for each in ran.record(section)["parts"][part]["rows"] if each["row"] == row and each["values"]}

    assert values("stream", "copies", "copies", "way") >= {f"kernel that claims chunks, {n} blocks" for n in (8, 16, 24, 32)}
    assert values("stream", "rates", "layer_copy", "resident") == {0, 0.5, 0.78, 0.9, 0.95}
    assert values("stream", "rates", "layer_copy", "vram_blocks") == {48, 96, 192}
    assert len(values("stream", "rates", "layer_copy_slows", "beside")) == 3
    assert values("stream", "steps", "step", "arm") == {"resident", "streamed, 2 buffers", "streamed, 1 buffer", "in place"}
    assert values("stream", "steps", "step", "tokens") >= {512, 2048, 8192}
    ways = {"with", "without", "layer by layer"}
    assert values("layer", "counters", "counted_step", "counters") == ways
    assert values("miss", "pages", "miss", "memory") == {"managed", "pinned"}
    assert values("ops", "copies", "copies_wrong", "what") >= {f"layers that stream, buffers: {n}" for n in (1, 2)}
    assert values("ops", "start_link", "start_link", "of") == {"sequential", "scattered", "copied", "engine"}
    assert values("ops", "start_link", "start_link_seconds", "of") == {"one rank alone", "all at once"}
    assert values("ops", "tables", "table_rows", "where") == values("ops", "tables", "table_rows_wrong", "where")
    assert values("ops", "tables", "table_rows", "where") == {"managed", "plain"}
    assert values("ops", "tables", "table_rows", "tokens") == {1, 64, 8192}
    assert values("slots", "empty", "resolved_step", "graph") == {"with", "without", "alone"}
    assert values("slots", "empty", "resolve_share", "slots") == {64, 192}
    ways = {"slots", "copy kernel", "copy engine, device to device", "a kernel of torch"}
    assert values("slots", "fill", "fill", "way") == ways
    assert values("slots", "fill", "fill_wrong", "expert_mib") == {48 / 1024, 64 / 1024}
    assert values("slots", "layer", "slot_step", "split") == {"residents only", "slots only", "half and half"}
    assert values("slots", "layer", "slot_step", "weights") == {"bf16", "fp8"}
    assert max(values("slots", "layer", "slot_stream", "from_slots")) > 0
    for part, names in (("marlin", {"Marlin"}), ("deep_gemm", {"DeepGEMM, compact", "DeepGEMM, masked"})):
        assert values("runners", part, "function_bits", "kernels") == {"no kernel: the rows that it would read"}
        assert values("runners", part, "function_step", "function") == names
        assert values("runners", part, "function_bits", "where") >= {"in place", "slots"}
        assert min(values("runners", part, "function_counts", "hits")) > 0
    assert max(values("runners", "deep_gemm", "function_step", "missed_gb")) > 0
    moving = [each for each in ran.record("ops")["parts"]["copies"]["rows"] if "moved_gb" in each]
    assert [each["moved_gb"] > 0 for each in moving] == [True]


ONE_BYTE_LESS = """
whole = CudaStaging.copy
def copy(self, buffer, parts, slots=None, in_vram=()):
    whole(self, buffer, [it._replace(nbytes=it.nbytes - (it.nbytes > 1 << 20)) for it in parts])
CudaStaging.copy = copy
"""
HALF = """
whole = CudaStaging.copy
CudaStaging.copy = lambda self, buffer, parts, slots=None, in_vram=(): whole(self, buffer, parts[:1])
"""
NO_MOVES = "ExpertTensor.demote = ExpertTensor.promote = lambda self, after: 0"
OLD_WEIGHTS = "BufferSchedule.forget = lambda self: None"
NOTHING_STREAMS = "Streamer.enter = lambda self, row: None"
COPYING = {
    ("odd_sizes(rows, CudaMemory())", ""): "passed",
    ("odd_sizes(rows, CudaMemory())", ONE_BYTE_LESS): "2 of 2 differ: copies of odd sizes",
    ("while_blocks_move(rows, CudaMemory())", ""): "passed",
    ("while_blocks_move(rows, CudaMemory())", ONE_BYTE_LESS): "6 of 6 differ: copies while blocks",
    ("while_blocks_move(rows, CudaMemory())", NO_MOVES): "no block moved",
    ("own_bytes(rows, CudaMemory(), 1)", HALF): "differ: layers that stream, buffers: 1",
    ("own_bytes(rows, CudaMemory(), 2)", OLD_WEIGHTS): "differ: layers that stream, buffers: 2",
    ("own_bytes(rows, CudaMemory(), 2)", NOTHING_STREAMS): "0 of 12 layers streamed",
    ("steps(rows)", NOTHING_STREAMS): "layer 0 does not stream",
}
"""A part, a change of what it uses, and how it must end."""
EACH_IN_A_PROCESS = """
import json, os, sys
from pathlib import Path
path, *cases = sys.argv[1:]
import torch._dynamo  # else each process would, to capture graphs
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.stream_parts import *
from sglang_uvm_offload.streaming.schedule import BufferSchedule
for number, case in enumerate(cases):
    part, change = json.loads(case)
    if os.fork() == 0:
        rows = Rows(Path(path), 3600, True)
        exec(change)
        try:
            eval(part)
            told = "passed"
        except AssertionError as failure:
            told = str(failure)
        print(json.dumps([number, told]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.fixture(scope="module")
def ends(session, tmp_path_factory) -> dict[tuple[str, str], str]:
    cases = [json.dumps(case) for case in COPYING]
    said = session.python(EACH_IN_A_PROCESS, str(tmp_path_factory.mktemp("copying") / "rows"), *cases)
    told = dict(json.loads(line) for line in said.splitlines())
    return {case: told[number] for number, case in enumerate(COPYING)}


@pytest.mark.parametrize("case", COPYING, ids=lambda case: f"{case[0]} {case[1][:24].strip()}")
def test_a_part_that_copies_fails_where_copies_do(ends, case):
    assert COPYING[case] in ends[case]


def test_steps_over_the_standin_hit_and_fill_slots_and_read_in_place(ran):
    rows = [each for each in ran.record("slots")["parts"]["layer"]["rows"] if each["row"] == "slot_use"]
    seen = {(each["split"], each["figure"]) for each in rows if each["median"] > 0}
    assert seen >= {("residents only", "resident"), ("residents only", "read in place"), ("half and half", "resident")}
    assert seen >= {(split, figure) for split in ("slots only", "half and half") for figure in ("hits", "fills")}
    assert ("residents only", "fills") not in seen


def test_nothing_takes_the_memory_of_a_captured_steps_input(session):
    """As happened on an H200: each replay read what other tensors had left there."""
    said = session.python("""
import torch
from benchmarks.gpu import slot_layers
from benchmarks.gpu.environment import zeros_by_copies
from benchmarks.gpu.shapes import DEEPSEEK_V3 as shape
inputs = []
class Moe:
    def __init__(self, shape, tokens, find): pass
    def route(self, ids): pass
    def run(self, layer, weights, x):
        inputs.append(x.data_ptr())
        return x
zeros_by_copies()
slot_layers.moe_here = lambda: Moe
step = slot_layers.SlotDecode(shape.toy, 4, [None], None)
others = [torch.empty(4, shape.toy.hidden, dtype=torch.bfloat16, device="cuda").data_ptr() for _ in range(8)]
print(len(set(inputs) & set(others)))
""")
    assert said.split()[-1] == "0"


ONE_TENSOR = """
whole = slots._slot_layer
slots._slot_layer = lambda layer: whole(layer)._replace(rows=whole(layer).rows[:1])
"""
OTHER_SLOTS = """
whole = CudaSlots.resolve
CudaSlots.resolve = lambda self, layer, ids, *rest: whole(self, layer, ids[:, :1].contiguous(), *rest)
"""
NOTHING_KEPT = "CudaSlots.keep = lambda self, *rest: None"
OTHER_COPIES = """
keep = CudaSlots.keep
CudaSlots.keep = lambda self, layer, ids, copies: keep(self, layer, ids, copies[:1] * len(copies))
"""
COPIES_WITHOUT_SLOTS = """
copy = CudaStaging.copy
CudaStaging.copy = lambda self, buffer, parts, slots=None, in_vram=(): copy(self, buffer, parts)
"""
NOT_COUNTED = """
counts, first = ServedLayer.counts, []
ServedLayer.counts = lambda self: first[0] if first else first.append(counts(self)) or first[0]
"""
NOTHING_RESOLVES = "CudaSlots.resolve = lambda self, *rest: None"
SERVING_SLOTS = {
    ("split()", ""): "passed",
    ("split()", ONE_TENSOR): "5 of 5 replays differ",
    ("split()", OTHER_SLOTS): "counts of hits and fills",
    ("split()", NOTHING_RESOLVES): "counts of hits and fills",
    ("split()", NOTHING_KEPT): "counts of hits and fills",
    ("split()", OTHER_COPIES): "replays differ",
    ("fill(rows)", NOTHING_RESOLVES): "15 of 15 filled slots hold other bytes",
    ("empty(rows)", "ResolvedStep._fill = lambda self, slots: None"): "fills in steps whose experts were all in slots",
    ("split()", COPIES_WITHOUT_SLOTS): "4 experts in stream buffers",
    ("deep_gemm(rows)", ""): "passed",
    ("deep_gemm(rows)", NOTHING_RESOLVES): "0 of 12 experts were filled",
    ("marlin(rows)", ""): "passed",
    ("marlin(rows)", NOTHING_RESOLVES): "0 of 12 experts were filled",
    ("marlin(rows)", ONE_TENSOR): "3 replays differ (0 over plain VRAM)",
    ("marlin(rows)", "ServedLayer.poison = lambda self, experts: None"): "does not notice that its experts were overwritten",
    ("marlin(rows)", NOT_COUNTED): "3 counts of hits and fills differ",
}
"""As ``COPYING``."""
SLOTS_EACH_IN_A_PROCESS = EACH_IN_A_PROCESS.replace("gpu.stream_parts import *", "gpu.slots_parts import *").replace(
    "from sglang_uvm_offload.streaming.schedule import BufferSchedule",
    """
from sglang_uvm_offload.streaming import slots
from benchmarks.gpu.runner_parts import *
zeros_by_copies()
def split():
    shape = DEEPSEEK_V3.toy
    one_split(rows, shape, routing_trace.for_shape(shape), [weights_of(shape, False, 0)], 0.25, "half and half")
""",
)


@pytest.fixture(scope="module")
def slot_ends(session, tmp_path_factory) -> dict[tuple[str, str], str]:
    cases = [json.dumps(case) for case in SERVING_SLOTS]
    said = session.python(SLOTS_EACH_IN_A_PROCESS, str(tmp_path_factory.mktemp("slots") / "rows"), *cases)
    told = dict(json.loads(line) for line in said.splitlines())
    return {case: told[number] for number, case in enumerate(SERVING_SLOTS)}


@pytest.mark.parametrize("case", SERVING_SLOTS, ids=lambda case: f"{case[0]} {case[1][:24].strip()}")
def test_a_part_of_slots_fails_where_slots_do(slot_ends, case):
    assert SERVING_SLOTS[case] in slot_ends[case]


def test_the_results_are_few_and_small(ran):
    files = list(ran.out.iterdir())
    assert sorted(file.name for file in files) == sorted(f"{s}.{kind}" for s in SECTIONS for kind in ("json", "log"))
    assert max(file.stat().st_size for file in files) < FILE_BYTES


def test_a_complete_section_is_not_run_again_and_a_failed_part_is(ran, tmp_path):
    earlier, out = tmp_path / "earlier", tmp_path / "out"
    earlier.mkdir()
    (earlier / "probe.json").write_text(json.dumps(ran.record("probe")))
    cut = ran.record("ops")
    cut["complete"] = False
    cut["parts"]["identity"] |= {"status": "failed", "rows": []}
    (earlier / "ops.json").write_text(json.dumps(cut))
    said = ran.run("probe", "ops", "--from", str(earlier), "--out", str(out))
    assert said.returncode == 0, said.stdout + said.stderr
    assert "section probe: complete in" in said.stdout
    assert "-- identity: done" in said.stdout
    assert "-- contract" not in said.stdout
    again = json.loads((out / "ops.json").read_text())
    assert again["complete"] is True
    assert again["parts"]["contract"] == cut["parts"]["contract"]
    assert len(again["started"]) == 2
    said = ran.run("ops", "--once", "--from", str(earlier), "--out", str(tmp_path / "once"))
    assert said.returncode == 1
    assert "-- identity" not in said.stdout
    assert "section ops: identity: failed" in said.stderr


def test_a_failing_section_is_named_with_its_parts(ran, tmp_path):
    said = ran.run("probe", "--out", str(tmp_path), fail="cudaMemPrefetchAsync:1:2")
    assert said.returncode == 1
    (message,) = said.stderr.strip().splitlines()[-1:]
    assert message.startswith("gpu_session: section probe: ")
    assert "prefetch: failed" in message
    assert str(tmp_path / "probe.log") in message
    record = json.loads((tmp_path / "probe.json").read_text())
    assert record["complete"] is False
    assert record["parts"]["prefetch"]["error"] == "ended with status 1"
    assert (
        "cudaMemPrefetchAsync(start, nbytes, where, 0, stream): cudaErrorMemoryAllocation"
        in (tmp_path / "probe.log").read_text()
    )
    assert {goal["ratio"] for goal in record["goals"]} == {None}


def test_a_card_too_small_for_the_plan_is_refused_before_anything_runs(ran, tmp_path):
    said = ran.run("layer", "--out", str(tmp_path), vram=150 << 20)
    assert said.returncode == 1
    assert "a third of the free VRAM" in said.stderr
    assert not (tmp_path / "layer.json").exists()


# ---- sections that serve ----


@pytest.fixture(scope="module")
def served(session) -> Session:
    """Parts of the server section, whose servers run on the CPU where kernels do not compute. That which is left out differs in
    how many experts are resident."""
    parts = (f"server:{part}" for part in ("checkpoint", "frequency", "link"))
    done = session.run(*parts, "--out", str(session.out.with_name("served")))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return session


def test_servers_are_run_and_nothing_is_called_a_measurement(served):
    folder = served.out.with_name("served")
    record = json.loads((folder / "server.json").read_text())
    assert record["measured"] is False
    assert {name: part["status"] for name, part in record["parts"].items()} == dict.fromkeys(
        ("checkpoint", "frequency", "link"), "done"
    )
    cells = [row["cell"] for row in record["parts"]["frequency"]["rows"] if row["row"] == "cell"]
    assert [(cell["contender"], cell["error"]) for cell in cells] == [("resident", None), ("frequency", None)]
    assert cells[1]["outputs"]["same"] is True
    assert cells[1]["offload"]["offloaded_bytes"] == cells[1]["expected_offloaded_bytes"]
    assert {goal["met"] for goal in record["goals"]} == {None}
    assert [goal["goal"] for goal in record["goals"] if goal["ratio"] is None] == [
        "a server's decode time, 78 % resident over all (worst batch)"
    ]
    assert "NOT MEASUREMENTS" in (folder / "server.log").read_text()
    kept = {path.name.partition(".log")[0]: serve_log.read(path) for path in served.logs.glob("[fm]*")}
    assert kept.keys() == {"frequency-1-resident-1", "frequency-1-frequency-0.5"}
    assert all("Load weight end" in log for log in kept.values())


def test_the_report_is_made_from_the_section_alone(served, tmp_path):
    section = served.out.with_name("served") / "server.json"
    command = [sys.executable, "-m", "benchmarks.serve_report", str(section), str(tmp_path)]
    assert subprocess.run(command).returncode == 0
    text = (tmp_path / "report.md").read_text()
    assert "speed means nothing here" in text
    what = "this plugin, the most used experts, chosen once after the warm-up"
    assert f"| frequency 50% | {what} | 1 of 1 | yes |" in text


@pytest.mark.nightly
def test_residents_follow_the_traffic_of_a_server_with_its_own_defaults(served, tmp_path):
    """The other parts of the section are taken as done: their servers are like those of the section before."""
    record = json.loads((served.out.with_name("served") / "server.json").read_text())
    done = {"status": "done", "error": None, "rows": []}
    parts = dict.fromkeys(("checkpoint", "fixed"), done) | {"link": record["parts"]["link"]}
    (tmp_path / "default.json").write_text(json.dumps(record | {"parts": parts, "complete": False}))
    said = served.run("default", "--out", str(tmp_path))
    assert said.returncode == 0, said.stdout[-3000:] + said.stderr[-3000:]
    record = json.loads((tmp_path / "default.json").read_text())
    cells = [each["cell"] for each in record["parts"]["continuous"]["rows"] if each["row"] == "cell"]
    assert [(cell["contender"], cell["error"]) for cell in cells] == [("resident", None), ("continuous", None)]
    ours = cells[1]
    assert ours["outputs"]["same"] is True
    assert len(ours["answers"]) == 2 * record["parts"]["continuous"]["rows"][0]["run"]["sizes"]["answers"]
    assert ours["offload"]["fault"] is None
    assert [each["topic"] for each in ours["traffic"]["rounds"]] == ["before", "before", "after", "after"]
    assert sum(each["moves"] for each in ours["traffic"]["rounds"]) > 0
    assert all(0 < each["routed_resident"] <= each["routed"] for each in ours["traffic"]["rounds"])
    for cell in cells:
        assert cell["engine"]["decode_graph_batches"] == [], "no graph is captured on a CPU"
        assert cell["engine"]["batches"]["prefill"]["eager"] > 0
    (promotions,) = [goal for goal in record["goals"] if goal["goal"].startswith("promotions")]
    assert promotions["ratio"] is not None


ENGINE = {"decode_graph_batches": [1, 2], "batches": {"decode": {"graph": 3, "eager": 0}}}


def test_a_part_fails_where_moves_stop_or_steps_run_without_graphs(modules):
    from benchmarks.gpu import server_parts

    cell = {"contender": "continuous", "offload": {"fault": None}, "engine": ENGINE}
    server_parts.check_moves([cell, {"contender": "resident"}])
    server_parts.check_graphs([cell, {"contender": "page_in_only"}])
    with pytest.raises(AssertionError, match="moving experts stopped in continuous: no VRAM"):
        server_parts.check_moves([cell | {"offload": {"fault": "no VRAM"}}])
    with pytest.raises(AssertionError, match="continuous: SGLang captured no decode graph"):
        server_parts.check_graphs([cell | {"engine": ENGINE | {"decode_graph_batches": []}}])


def test_a_part_fails_where_a_server_streams_against_its_name(modules):
    from benchmarks.gpu import server_parts

    def cell(contender: str, streamed: int, fault: str | None = None) -> dict:
        streaming = {"fault": fault} if contender != "in_place" else None
        return {"contender": contender, "error": None, "offload": {"streamed_bytes": streamed, "streaming": streaming}}

    resident = {"contender": "resident", "error": None}
    server_parts.check_streams([resident, cell("frequency", 5), cell("in_place", 0), cell("first_n", 0) | {"error": "no"}])
    with pytest.raises(AssertionError, match="streamed, against what was asked for: frequency: 0 bytes"):
        server_parts.check_streams([cell("frequency", 0)])
    with pytest.raises(AssertionError, match="in_place: 7 bytes"):
        server_parts.check_streams([cell("in_place", 7)])
    with pytest.raises(AssertionError, match="frequency: stopped: no room"):
        server_parts.check_streams([cell("frequency", 5, "no room")])


def test_a_part_fails_where_a_server_left_out_a_way_to_use_its_slots(modules):
    from benchmarks import serve_run
    from benchmarks.gpu import server_parts

    used = {"missing": None, "hits": 5, "fills": 4, "kept": 3}
    prompt = {"kind": "prefill", "size": 4096, "error": None, "read_bytes": 90}

    def check(slots: dict | None = used, **point: object) -> None:
        offload = {"slots": slots, "offloaded_bytes": 100}
        cell = {"contender": "slots_only", "error": None, "offload": offload, "points": [prompt | point]}
        server_parts.check_slots([cell, {"contender": "resident", "error": None}, cell | {"error": "no", "offload": {}}])

    check()
    for slots, told in (
        (None, "slots_only: the model has no slots, no hits, no fills, no kept"),
        (used | {"missing": "w2 of MoE layer 3"}, "w2 of MoE layer 3 has no slots"),
        (used | {"kept": 0}, "slots_only: no kept$"),
    ):
        with pytest.raises(AssertionError, match=told):
            check(slots)
    for other in ({"read_bytes": 100}, {"size": 16384}, {"kind": "decode"}, {"error": "no"}):
        with pytest.raises(AssertionError, match="no prompt whose copies were taken from slots"):
            check(**other)
    check(error=serve_run.NO_TIME)


def test_the_vram_of_residents_is_divided_between_them_and_slots(modules):
    from benchmarks.contenders import CONTENDERS, Budget, CannotServe

    model = SimpleNamespace(num_experts=128, expert_bytes=128)

    def flags(name: str, residency: float) -> tuple[int, int, str]:
        given = CONTENDERS[name].flags(Budget(model, residency, 64))
        return tuple(given[f"expert_offload_{each}"] for each in ("num_resident", "slots", "resident_selection"))

    assert flags("slots_only", 0.25) == (0, 32, "first_n")
    assert flags("residents_and_slots", 0.25) == (8, 24, "frequency")
    assert Budget(model, 0.25, 64).offloaded_bytes(8) == 120
    for name, residency in (("slots_only", 0.0), ("residents_and_slots", 1.0)):
        with pytest.raises(CannotServe, match="leave no row for slots"):
            flags(name, residency)


def test_peers_get_the_vram_of_the_stream_buffers_too(modules):
    from benchmarks.contenders import CONTENDERS, Budget
    from benchmarks.gpu import server_parts

    layers = {index: SimpleNamespace(expert_bytes=1 << 30) for index in range(16)}
    model = SimpleNamespace(num_experts=128, top_k=8, moe_layers=[*layers], layers=layers, num_layers=16, expert_bytes=16 << 30)

    def flags(name: str, residency: float) -> dict:
        return server_parts.with_stream_buffers(CONTENDERS[name]).flags(Budget(model, residency, 0))

    assert flags("paged_experts", 0.5)["paged_experts_num_resident"] == 64 + 2 * 128 // 16
    assert flags("paged_experts", 0.95)["paged_experts_num_resident"] == 128, "no more than all"
    assert flags("cpu_offload_gb", 0.5)["cpu_offload_gb"] == 8 + 1 - 2, "GiB: half, the layer that computes, the buffers"
    offloaded = flags("offloader_v2", 0.5)
    assert 16 * offloaded["offload_num_in_group"] / offloaded["offload_group_size"] == 8 + 2 - 2


def test_sglang_is_given_backends_only_where_it_cannot_have_its_own(modules, monkeypatch):
    from benchmarks.gpu import server_parts

    plan = server_parts.PLAN
    assert [name for name, served in plan.items() if served.own_defaults] == ["continuous", "fixed"]
    monkeypatch.setattr(server_parts, "importable", lambda package: True)
    assert server_parts.server_args(plan["continuous"]) == []
    assert "--disable-prefill-cuda-graph" in server_parts.server_args(plan["frequency"])
    monkeypatch.setattr(server_parts, "importable", lambda package: package != "xgrammar")
    assert server_parts.server_args(plan["fixed"]) == ["--grammar-backend", "none"]


@pytest.mark.parametrize(
    ("section", "part"),
    [
        ("peers", "paged_experts"),
        ("serving_slots", "split"),
        ("cpu_offload", "cpu_offload_gb"),
        ("offloader", "offloader_v2"),
    ],
)
def test_every_size_that_a_goal_over_a_peer_names_is_served(modules, section, part):
    from benchmarks.gpu import server_parts

    served = server_parts.PLAN[part]
    sizes = server_parts.sizes(False, served.judged_only, served.own_defaults, served.decoding)
    if part in server_parts.PEERS:
        assert (sizes.batches, sizes.prompts) == ((1, 4, 16, 64), (512, 4096, 16384, 32000))
    cases = [("decode", {"batch": size}) for size in sizes.batches] + [("prefill", {"tokens": size}) for size in sizes.prompts]
    (share,) = served.residencies
    found = [
        row(kind, [1.0], contender=contender, resident=share, **size) for contender in served.contenders for kind, size in cases
    ]
    goals = [goal.text for goal in modules["goals"].GOALS[section]]
    over = [number for number, text in enumerate(goals) if "over this plugin's" in text or "likewise" in text]
    assert over
    for number in over:
        assert judged(modules, section, number, {part: found})["ratio"] == 1.0, goals[number]


@pytest.mark.parametrize(("part", "goal"), [("frequency", 1), ("most", 2)])
def test_the_share_that_a_goal_of_a_server_names_is_served(modules, part, goal):
    from benchmarks.gpu import server_parts

    (share,) = server_parts.PLAN[part].residencies
    of = {"resident": 1.0, "frequency": share}
    found = [row("decode", [2.0], contender=name, resident=resident, batch=1) for name, resident in of.items()]
    assert judged(modules, "server", goal, {part: found})["ratio"] == 1.0
    assert judged(modules, "server", 3 - goal, {part: found})["ratio"] is None, "that of the other part"


@pytest.mark.parametrize(
    ("contender", "error", "same", "told"),
    [
        ("resident", "no", None, "resident: no"),
        ("frequency", "no", None, "frequency: no"),
        ("frequency", None, False, "frequency at 50%: other answers"),
        ("frequency", "no time left in this run", None, None),
        ("paged_experts", "no", None, None),
        ("paged_experts", None, False, None),
    ],
)
def test_a_part_fails_where_the_reference_or_the_plugin_does(modules, contender, error, same, told):
    from benchmarks.gpu import server_parts

    cell = {"contender": contender, "residency": 0.5, "error": error, "outputs": {"same": same, "first_difference": None}}
    if told is None:
        server_parts.check_answers([cell])
    else:
        with pytest.raises(AssertionError, match=told):
            server_parts.check_answers([cell])


ALIKE = {"fault": None, "offloaded_bytes": 1, "streamed_bytes": 1, "zero_copy_bytes": 1, "moves": 1, "draft_zero_copy_bytes": 1}


@pytest.mark.parametrize(
    ("mode", "same", "state", "told"),
    [
        ("drafts", [True, True], {}, []),
        ("updates", [True, True], {"draft_zero_copy_bytes": 0}, []),
        ("updates", [True, False], {}, ["1 of 2 answers differ"]),
        ("cache", [True], {"fault": "no VRAM"}, ["moving experts stopped: no VRAM"]),
        ("fp8", [True], {"streamed_bytes": 0, "moves": 0}, ["no streamed_bytes", "no moves"]),
        ("drafts", [True], {"draft_zero_copy_bytes": 0}, ["no expert of a draft layer was read in place"]),
    ],
)
def test_a_mode_fails_where_answers_differ_or_would_say_nothing(modules, mode, same, state, told):
    from benchmarks.gpu import modes_parts

    assert modes_parts.problems(modes_parts.MODES[mode], same, ALIKE | state) == told


def test_modes_are_judged_by_all_their_answers(modules):
    alike, other = ([row("same_answers", values, contender="offload")] for values in ([1.0, 1.0], [1.0, 0.0, 0.0]))
    assert judged(modules, "modes", 0, {"drafts": alike, "updates": alike})["met"] is True
    verdict = judged(modules, "modes", 0, {"drafts": alike, "updates": other})
    assert (verdict["ratio"], verdict["met"]) == (2, False)
    assert verdict["from"] == "5 answers in drafts, updates"
    assert judged(modules, "modes", 0, {})["ratio"] is None


def test_goals_of_servers_take_the_worst_of_the_plugin_and_the_best_of_a_peer(modules):
    def decode(contender: str, batch: int, ms: float, resident: float = 0.5) -> dict:
        return row("decode", [ms], contender=contender, resident=resident, batch=batch)

    base = [decode("resident", 1, 10.0, 1.0), decode("resident", 64, 20.0, 1.0)]
    fast = [*base, decode("frequency", 1, 11.0), decode("frequency", 64, 24.0)]
    assert judged(modules, "server", 1, {"frequency": fast, "most": fast})["ratio"] == pytest.approx(1.2)
    slow = [*base, decode("frequency", 1, 13.0), decode("frequency", 64, 20.0)]
    assert judged(modules, "server", 1, {"frequency": fast, "most": slow})["met"] is False
    peer = [*fast, decode("paged_experts", 1, 22.0), decode("paged_experts", 16, 90.0), decode("paged_experts", 64, 36.0)]
    assert judged(modules, "peers", 1, {"paged_experts": peer})["ratio"] == pytest.approx(2.0)
    assert judged(modules, "peers", 2, {"paged_experts": peer})["ratio"] is None, "this plugin has no figure at batch 16"
    peer.append(decode("frequency", 16, 30.0))
    assert judged(modules, "peers", 2, {"paged_experts": peer})["ratio"] == pytest.approx(1.5)
    with_slots = [decode("residents_and_slots", 1, 20.0), decode("residents_and_slots", 16, 60.0)]
    peer += [*with_slots, decode("residents_and_slots", 64, 30.0)]
    assert judged(modules, "peers", 4, {"paged_experts": peer})["ratio"] is None, "no figure at batch 4"
    peer += [decode("residents_and_slots", 4, 10.0), decode("paged_experts", 4, 13.0)]
    assert judged(modules, "peers", 4, {"paged_experts": peer})["ratio"] == pytest.approx(1.1)


def test_slots_are_judged_by_servers_in_the_same_vram(modules):
    def decode(contender: str, *ms: float) -> list[dict]:
        sizes = zip((1, 4, 16, 64), ms, strict=True)
        return [row("decode", [each], contender=contender, resident=0.25, batch=batch) for batch, each in sizes]

    ours = decode("residents_and_slots", 10, 20, 40, 80)
    verdict = judged(modules, "serving_slots", 1, {"split": [*ours, *decode("frequency", 20, 30, 44, 160)]})
    assert (verdict["ratio"], verdict["met"]) == (pytest.approx(1.1), True)
    paged = {"split": [*ours, *decode("paged_experts", 12, 20, 90, 240)]}
    assert judged(modules, "serving_slots", 2, paged)["ratio"] == pytest.approx(1.2)
    assert judged(modules, "serving_slots", 3, paged)["ratio"] == pytest.approx(2.25)
    other = [row("same_answers", [0], contender=name) for name in ("slots_only", "residents_and_slots")]
    assert judged(modules, "serving_slots", 0, {"split": other})["ratio"] == 2


def test_a_server_is_judged_by_what_the_link_allows(modules):
    def cell(contender: str, residency: float, seconds: dict[int, float], **more: float) -> dict:
        points = [{"kind": "decode", "size": size, "error": None, "seconds": took, **more} for size, took in seconds.items()]
        if contender == "resident":
            points.append({"kind": "decode", "size": 99, "error": "no time left in this run"})
        return row("cell", [], cell={"contender": contender, "residency": residency, "points": points})

    link = [row("zero_copy", [50.0], memory="pinned"), row("zero_copy", [4000.0], memory="plain")]
    resident = cell("resident", 1.0, {1: 0.010, 4: 0.020})
    fast = [resident, cell("frequency", 0.5, {1: 0.012, 4: 0.033, 99: 9.0}, read_bytes=0.5e9)]
    verdict = judged(modules, "server", 3, {"frequency": fast, "most": fast, "link": link})
    assert verdict["ratio"] == pytest.approx(1.1)
    assert verdict["met"] is True
    assert verdict["from"] == "decode 4, 50% resident: 33 ms; all resident 20 ms, 0.5 GB at 50 x 10 ms"
    slow = [resident, cell("frequency", 0.78, {1: 0.024}, read_bytes=0.5e9)]
    assert judged(modules, "server", 3, {"frequency": fast, "most": slow, "link": link})["met"] is False
    assert judged(modules, "server", 3, {"frequency": fast, "most": slow})["ratio"] is None, "no link was measured"
    assert judged(modules, "server", 4, {"frequency": fast, "link": link})["ratio"] is None, "no prefill was measured"


def test_streaming_is_judged_by_its_least_gain_in_a_server(modules):
    def prefill(contender: str, tokens: int, ms: float) -> dict:
        return row("prefill", [ms], contender=contender, resident=0.5, tokens=tokens)

    rows = [prefill("frequency", 512, 10), prefill("in_place", 512, 30), prefill("frequency", 4096, 20)]
    assert judged(modules, "bounds", 1, {"first_n": [*rows, prefill("in_place", 4096, 50)]})["ratio"] == pytest.approx(2.5)
    assert judged(modules, "bounds", 1, {"first_n": [*rows, prefill("in_place", 4096, 19)]})["met"] is False
    assert judged(modules, "bounds", 1, {"first_n": rows[:1]})["ratio"] is None


def test_promotions_are_counted_once_the_traffic_has_changed(modules):
    def promotions(topic: str, *values: float) -> dict:
        return row("promotions", list(values), contender="continuous", topic=topic)

    before = promotions("before", 9, 9)
    assert judged(modules, "default", 1, {"continuous": [before, promotions("after", 0, 0)]})["met"] is False
    assert judged(modules, "default", 1, {"continuous": [before, promotions("after", 0, 2)]})["ratio"] == 2


def test_one_server_with_other_answers_fails_the_goal(modules):
    same = [row("same_answers", [1], contender=name) for name in ("resident", "frequency")]
    assert judged(modules, "server", 0, {"frequency": same})["met"] is True
    other = [row("same_answers", [0], contender=name) for name in ("frequency", "paged_experts")]

    def loading(resident: float, ours: float) -> list[dict]:
        return [row("load", [seconds], contender=name) for name, seconds in (("resident", resident), ("frequency", ours))]

    assert judged(modules, "server", 5, {"frequency": loading(1.0, 1.05), "most": loading(1.0, 0.5)})["met"] is True
    assert judged(modules, "server", 5, {"frequency": loading(1.0, 1.05), "most": loading(1.0, 1.2)})["met"] is False
    assert judged(modules, "server", 5, {"frequency": same})["ratio"] is None, "no load was timed"

    verdict = judged(modules, "server", 0, {"frequency": same, "most": other})
    assert (verdict["ratio"], verdict["met"]) == (1, False)


# ---- the rules, without any CUDA ----


def test_no_plan_takes_a_third_of_a_card_of_80_gb(modules):
    """Of an H100, nvidia-smi shows 81,559 MiB; this is somewhat less than CUDA leaves free of them."""
    sections = modules["sections"]
    free, host = 78 << 30, 120 << 30
    for section in sections.SECTIONS.values():
        assert [sections.too_much(part, free, host, small=False) for part in section.parts] == [[]] * len(section.parts)
        assert section.expected < sections.SECTION_SECONDS < 8 * 60
    bandwidth = next(part for part in sections.PROBE.parts if part.name == "bandwidth")
    (reason,) = sections.too_much(bandwidth, 72 << 30, host, small=False)
    assert "bandwidth plans 24.0 GiB of managed memory" in reason
    (reason,) = sections.too_much(bandwidth, free, 30 << 30, small=False)
    assert "host RAM" in reason


def test_parts_too_large_for_the_machine_are_left_out_and_the_others_run(modules, tmp_path, monkeypatch):
    session, section = modules["session"], modules["sections"].PROBE
    here = dict.fromkeys(("device", "driver", "cuda_of_torch", "torch"), "some")
    here |= {"code": {}, "measured": True, "vram_free_bytes": 23 << 30, "host_available_bytes": 120 << 30}
    monkeypatch.setattr(session, "describe_machine", lambda call: here | {"compute_capability": [9, 0]})
    monkeypatch.setattr(session, "run_part", lambda *arguments: {"status": "done", "rows": []})
    by_size = sorted(section.parts, key=lambda part: part.managed_gib)  # the last ones are not recorded by those after them
    monkeypatch.setitem(section.__dict__, "parts", tuple(by_size))
    with pytest.raises(session.SectionFailure, match=r"^bandwidth: too large for this machine; reach: too large for"):
        session.run_section(
            section,
            {part.name for part in by_size},
            SimpleNamespace(out=tmp_path, again=True, once=False, earlier=None),
            session.Call(570),
        )
    record = json.loads((tmp_path / "probe.json").read_text())
    for name in ("bandwidth", "reach"):
        assert "a third of the free VRAM is 7.7 GiB" in record["parts"].pop(name)["error"]
    assert [part["status"] for part in record["parts"].values()] == ["done"] * (len(section.parts) - 2)


PART = """
import json, sys
open(sys.argv[2], "a").write(json.dumps({"row": "finished", "unit": "bool", "values": [%d]}) + "\\n")
%s
"""


class Runs:
    """In place of a part's program."""

    def __init__(self, *words: str):
        self.words = [*words]

    def command(self, part: object, left: float) -> list[str]:
        return self.words


@pytest.mark.parametrize(
    ("finished", "then", "status"),
    [(1, "", "done"), (0, "", "cut short"), (1, "sys.exit(3)", "failed"), (1, "import time; time.sleep(1000)", "failed")],
)
def test_how_a_part_ended_is_told_apart(modules, tmp_path, monkeypatch, finished, then, status):
    session, part = modules["session"], modules["sections"].OPS.parts[0]

    def until_it_sleeps(process: Any, seconds: float) -> int:
        while process.poll() is None:
            if "sleep" in then and Path(process.args[4]).exists() and Path(process.args[4]).read_text().endswith("\n"):
                raise subprocess.TimeoutExpired(process.args, seconds)
            time.sleep(0.01)
        return process.poll()

    monkeypatch.setattr(modules["child"].subprocess.Popen, "wait", until_it_sleeps)
    with (tmp_path / "log").open("w") as log:
        told = session.run_part(part, Runs(sys.executable, "-c", PART % (finished, then)), 1000, True, log)
    assert told["status"] == status
    assert len(told["rows"]) == 1


@pytest.mark.parametrize(
    ("status", "stuck", "error"),
    [
        (None, False, "killed after 40 s"),
        (None, True, "killed after 40 s, and did not end: it is stuck in the driver"),
        (0, True, "ended with status 0, and left processes that are stuck in the driver"),
        (1, False, "ended with status 1"),
        (0, False, None),
    ],
)
def test_what_a_part_left_is_told(modules, status, stuck, error):
    session = modules["session"]
    assert session.error_of(modules["child"].Ended(status, stuck), 40 - session.GRACE_SECONDS) == error


LEAVES_ONE = "setsid sleep 1000 & echo $! > %s.part; mv %s.part %s; %s"


@pytest.mark.parametrize("then", ["true", "sleep 1000"])
def test_nothing_that_a_part_started_outlives_it(modules, tmp_path, monkeypatch, then):
    child, told = modules["child"], tmp_path / "pid"

    def ended(process: Any, seconds: float) -> int:
        while not told.exists() or (then == "true" and process.poll() is None):
            time.sleep(0.01)
        if process.poll() is None:
            raise subprocess.TimeoutExpired(process.args, seconds)
        return process.poll()

    monkeypatch.setattr(child.subprocess.Popen, "wait", ended)
    found = child.run(["bash", "-c", LEAVES_ONE % (told, told, told, then)], 60)
    assert found == child.Ended(0 if then == "true" else None, stuck=False)
    assert not Path(f"/proc/{int(told.read_text())}").exists()


def test_a_process_that_does_not_end_is_left(modules, monkeypatch):
    child = modules["child"]
    monkeypatch.setattr(child, "KILL_SECONDS", 0)
    monkeypatch.setattr(child, "children", lambda: iter([1 << 30]) if started else [])
    started: list[int] = []
    monkeypatch.setattr(child.subprocess.Popen, "wait", lambda process, seconds: started.append(process.pid) or 0)
    assert child.run(["true"], 60).stuck


def test_parts_of_a_section_that_are_named_one_by_one_run_in_one_go(modules, monkeypatch):
    from benchmarks.gpu import session

    ran = []
    monkeypatch.setattr(session, "run_section", lambda section, names, *_: ran.append((section.name, names)))
    assert session.main(["ops:contract", "stream:rates", "ops:counters", "miss"]) == 0
    assert ran == [("ops", {"contract", "counters"}), ("stream", {"rates"}), ("miss", {"link", "pages"})]


def test_a_program_that_hangs_or_fails_is_named(modules):
    child = modules["child"]
    assert child.output(["echo", "told"], 60) == "told\n"
    with pytest.raises(child.ChildFailure, match=r"^ended with status 1$"):
        child.output(["false"], 60)
    with pytest.raises(child.ChildFailure, match=r"^was killed after 0 s$"):
        child.output(["sleep", "1000"], 0)


@pytest.mark.parametrize("seconds", [60, 200, 570])
@pytest.mark.parametrize("hangs", ["environment", "probe_build", "a part"])
def test_a_call_ends_in_time_whatever_hangs(modules, tmp_path, monkeypatch, seconds, hangs):
    session, sections, child = modules["session"], modules["sections"], modules["child"]
    now = [0.0]
    machine = dict.fromkeys(("device", "driver", "cuda_of_torch", "torch"), "some") | {"compute_capability": [9, 0]}
    machine |= {"code": {}, "measured": True, "vram_free_bytes": 138 << 30, "host_available_bytes": 120 << 30}

    def output(command: list[str], limit: float, stderr: object = None) -> str:
        if command[2].endswith(hangs):
            now[0] += limit + child.KILL_SECONDS
            raise child.ChildFailure("was killed")
        now[0] += 10
        return json.dumps(machine) if "environment" in command[2] else "probe"

    def run(command: list[str], limit: float, *streams: object) -> object:
        assert limit > 0
        now[0] += limit + child.KILL_SECONDS if hangs == "a part" else 5
        return child.Ended(None if hangs == "a part" else 0, stuck=hangs == "a part")

    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(child, "output", output)
    monkeypatch.setattr(child, "run", run)
    assert session.main([*sections.SECTIONS, "--seconds", str(seconds), "--out", str(tmp_path)]) == 1
    assert now[0] <= seconds
    if hangs == "a part":
        states = [part["status"] for file in tmp_path.glob("*.json") for part in json.loads(file.read_text())["parts"].values()]
        assert "no time left" in states


def test_a_call_without_time_starts_nothing(session, tmp_path):
    said = session.run("ops", "--seconds", "1", "--out", str(tmp_path))
    assert said.returncode == 1
    assert "section ops: not started: no time left in this call" in said.stderr
    assert not list(tmp_path.iterdir())


def test_a_whole_call_leaves_what_has_no_time_and_hands_over_its_results(tmp_path):
    results, out = tmp_path / "results", tmp_path / "out"
    out.mkdir()
    command = ["bash", str(ROOT / "scripts" / "gpu_call.sh"), str(results), "20"]
    said = subprocess.run(command, env=os.environ | {"OUT": str(out)}, capture_output=True, text=True)
    assert said.returncode == 1, "not everything was measured"
    assert "no time left for ops:contract ops:canary\n" in said.stdout
    assert "no time left for modes:gptq\n" in (results / "modes-gptq.txt").read_text(), "what runs beside others"
    with tarfile.open(out / "results.tar.gz") as packed:
        assert "./modes-gptq.txt" in packed.getnames()


def test_a_part_without_time_keeps_its_earlier_rows(modules, tmp_path, monkeypatch):
    session, section = modules["session"], modules["sections"].STREAM
    machine = dict.fromkeys(("device", "driver", "cuda_of_torch", "torch"), "some") | {"compute_capability": [9, 0]}
    machine |= {"code": {}, "measured": True, "vram_free_bytes": 138 << 30, "host_available_bytes": 120 << 30}
    cut = {"status": "cut short", "error": None, "rows": [row("note", [1]) | {"median": 1, "low": 1, "high": 1}]}
    (tmp_path / "stream.json").write_text(json.dumps({"environment": machine, "parts": {"copies": cut}, "complete": False}))
    monkeypatch.setattr(session, "describe_machine", lambda call: machine)
    wanted = SimpleNamespace(out=tmp_path, again=False, once=False, earlier=None)
    with pytest.raises(session.SectionFailure, match=r"^copies: cut short"):
        session.run_section(section, {"copies"}, wanted, session.Call(1))
    assert json.loads((tmp_path / "stream.json").read_text())["parts"]["copies"] == cut


def test_a_part_that_would_not_fit_is_left_for_the_next_run(modules, tmp_path):
    session, part = modules["session"], modules["sections"].OPS.parts[0]
    with (tmp_path / "log").open("w") as log:
        told = session.run_part(part, Runs("false"), part.expected - 1, True, log)
    assert told == {"status": "no time left", "rows": []}


@pytest.mark.parametrize("changed", ["device", "driver", "torch", "code", "measured"])
def test_results_of_another_machine_are_not_gone_on_from(modules, tmp_path, changed):
    session, section = modules["session"], modules["sections"].OPS
    here = {"device": "NVIDIA H200", "driver": "580.1", "cuda_of_torch": "13.0", "torch": "2.11"}
    here |= {"code": {"slots": "1"}, "measured": True}
    (tmp_path / "ops.json").write_text(json.dumps({"environment": here, "parts": {}, "complete": True}))
    assert session.earlier_record(section, here, [None, tmp_path])["complete"] is True
    assert session.earlier_record(section, here | {changed: "other"}, [tmp_path]) is None


def test_half_a_line_of_a_killed_part_is_dropped(modules, tmp_path):
    (tmp_path / "rows").write_text('{"row": "a", "unit": "s", "values": [3, 1, 2]}\n{"row": "b", "uni')
    (row,) = modules["rows"].read_rows(tmp_path / "rows")
    assert (row["median"], row["low"], row["high"]) == (2, 1, 3)


def judged(modules, section: str, goal: int, parts: dict[str, list[dict]], measured: bool = True) -> dict:
    rows = {part: [modules["rows"].summarise(row) for row in found] for part, found in parts.items()}
    return modules["goals"].GOALS[section][goal].judge(rows, measured)


def row(name: str, values: list[float], **labels: object) -> dict:
    return {"row": name, "unit": "x", "values": values, **labels}


def test_goals_are_judged_by_medians_of_one_run(modules):
    def promotion(rate: float) -> dict:
        up = {"direction": "to_device", "piece_mib": 16}
        moved = row("prefetch", [rate, rate, 90.0], gpu="idle", calls="single", **up)
        return {"prefetch": [moved, row("copy_engine", [50.0, 50.0, 1.0], **up)]}

    assert judged(modules, "probe", 0, promotion(40.0))["met"] is True
    assert judged(modules, "probe", 0, promotion(39.0))["met"] is False
    assert judged(modules, "probe", 0, promotion(40.0), measured=False)["met"] is None
    assert judged(modules, "probe", 0, {})["ratio"] is None

    def demotions(*rates: float) -> dict:
        found = []
        for size, rate in zip((8, 16), rates, strict=False):
            down = {"direction": "to_host", "piece_mib": size}
            calls = [row("prefetch", [each], gpu="idle", calls=how, **down) for how, each in (("single", rate), ("batch", 40))]
            found += [row("copy_engine", [50.0], **down), *calls]
        return {"prefetch": found}

    assert judged(modules, "probe", 1, demotions(8.0, 10.0))["met"] is True
    assert judged(modules, "probe", 1, demotions(8.0, 7.0))["met"] is False, "the worst size decides"
    assert judged(modules, "probe", 1, {})["ratio"] is None

    def moving(*wrong: float) -> dict:
        return {"stall_tma": [row("stall_tma", [each], figure="replays that read other bytes") for each in wrong]}

    assert judged(modules, "probe", 2, moving(0, 0))["met"] is True
    assert judged(modules, "probe", 2, moving(0, 1))["met"] is False
    assert judged(modules, "probe", 2, moving())["ratio"] is None
    sustained = {"sustained": [row("sustained", [2], figure="replays that read other bytes")]}
    assert judged(modules, "probe", 2, moving(0, 1) | sustained)["ratio"] == 3

    def with_room(*found: float) -> dict:
        return {"noticing": [row("noticing", list(found), figure="noticed with room")]}

    assert judged(modules, "eviction", 0, with_room(0, 0, 0))["met"] is True
    assert judged(modules, "eviction", 0, with_room(0, 0, 5))["met"] is False, "one false alarm is one too many"
    beside = row("noticing", [0, 7], figure="noticed with room, beside reads that fill the link")
    assert judged(modules, "eviction", 0, {"noticing": [*with_room(0)["noticing"], beside]})["ratio"] == 7
    assert judged(modules, "eviction", 0, {})["ratio"] is None

    moves = {"moves": 1000, "captures": 1, "moved_gb": 1.0}
    assert judged(modules, "ops", 0, {"moves": [row("moves", [0], **moves)]})["met"] is True
    assert judged(modules, "ops", 0, {"moves": [row("moves", [1], **moves)]})["met"] is False
    assert judged(modules, "ops", 0, {"moves": [row("moves", [0], **(moves | {"captures": 2}))]})["met"] is False

    def after_load(error: float) -> dict:
        loads = (0.01, error)
        return {"load": [row("load", [each], figure="error of VRAM used") for each in loads]}

    assert judged(modules, "ops", 1, after_load(0.12))["met"] is True
    assert judged(modules, "ops", 1, after_load(0.13))["met"] is False


def steps_of(tokens: int, resident: float, **ms: float) -> list[dict]:
    arms = {"computed": "resident", "streamed": "streamed, 2 buffers", "in_place": "in place"}
    return [row("step", [ms[name]], arm=arm, tokens=tokens, resident=resident, threshold=64) for name, arm in arms.items()]


def copied(resident: float, *rates: float, beside: str = "nothing", shape: str = "glm-4.5-air") -> dict:
    return row("layer_copy", [*rates], shape=shape, resident=resident, beside=beside, vram_blocks=VRAM_BLOCKS)


def test_a_streamed_step_is_judged_by_the_longer_of_computing_and_copying(modules):
    offloaded = [row("offloaded", [2.0], resident=0.5, shape="glm-4.5-air")]
    slow_link = copied(0.5, 1.0, beside="a memory-bound kernel")
    copies = [slow_link, copied(0.5, 50.0), copied(0.5, 9.0, shape="deepseek-v3")]

    def verdict(*steps: dict, rates: list[dict] = copies) -> dict:
        return judged(modules, "stream", 0, {"steps": [*offloaded, *steps], "rates": rates})

    copying = steps_of(2048, 0.5, computed=10.0, streamed=42.0, in_place=99.0)
    assert verdict(*copying)["ratio"] == pytest.approx(42 / 40), "2 GB at 50 GB/s are 40 ms"
    computing = steps_of(8192, 0.5, computed=80.0, streamed=90.0, in_place=99.0)
    assert verdict(*copying, *computing)["ratio"] == pytest.approx(90 / 80)
    assert verdict(*copying, *computing)["met"] is False
    short = steps_of(512, 0.5, computed=1.0, streamed=80.0, in_place=99.0)
    assert verdict(*copying, *short)["met"] is True, "steps of fewer than 2048 tokens are not judged"
    assert verdict(*copying, rates=copies[:1])["ratio"] is None, "no copy was timed alone"


def test_streaming_must_not_lose_above_the_threshold_and_gain_at_8k(modules):
    at_threshold = steps_of(64, 0.5, computed=1.0, streamed=10.0, in_place=5.0)
    long = steps_of(8192, 0.5, computed=1.0, streamed=10.0, in_place=31.0)
    other = steps_of(8192, 0.78, computed=1.0, streamed=10.0, in_place=12.0)
    parts = {"steps": [*at_threshold, *long, *other]}
    assert judged(modules, "stream", 1, parts)["ratio"] == pytest.approx(1.2), "the threshold itself is not above it"
    assert judged(modules, "stream", 2, parts)["ratio"] == pytest.approx(3.1)
    slower = steps_of(512, 0.5, computed=1.0, streamed=10.0, in_place=9.0)
    assert judged(modules, "stream", 1, {"steps": [*long, *slower]})["met"] is False
    assert judged(modules, "stream", 2, {"steps": other})["ratio"] is None, "it was not half resident"


def test_the_worst_of_host_time_copies_and_misses_decides(modules):
    held = [row("host_time", [ms], tokens=tokens, buffers=2) for tokens, ms in ((64, 0.4), (512, 1.2))]
    assert judged(modules, "stream", 3, {"steps": held})["met"] is False
    assert judged(modules, "stream", 3, {"steps": held[:1]})["met"] is True

    rates = [copied(0.0, 50.0), copied(0.5, 49.0), copied(0.78, 46.0), copied(0.95, 1.0)]
    assert judged(modules, "stream", 4, {"rates": rates})["ratio"] == pytest.approx(0.92)
    rates += [copied(share, rate, beside="the MoE at 2048 tokens") for share, rate in ((0.0, 40.0), (0.78, 20.0))]
    assert judged(modules, "stream", 4, {"rates": rates})["ratio"] == pytest.approx(0.5), "beside the same kernel"

    rates += [copied(0.9, 8.0, beside="the MoE at 2048 tokens")]
    assert judged(modules, "stream", 4, {"rates": rates})["ratio"] == pytest.approx(0.2)

    def near(rate: float, what: str = "the MoE at 2048 tokens", resident: float = 0.95, blocks: int = VRAM_BLOCKS) -> dict:
        labels = {"shape": "glm-4.5-air", "beside": what, "resident": resident, "vram_blocks": blocks}
        return row("layer_copy_vram", [rate], **labels)

    others = [near(1.0, "nothing"), near(1.0, resident=0.78), near(1.0, blocks=48)]
    assert judged(modules, "stream", 5, {"rates": others})["ratio"] is None
    assert judged(modules, "stream", 5, {"rates": [*others, near(1840.0), near(460.0)]})["ratio"] == pytest.approx(0.5)

    def short(what: str, ms: float) -> dict:
        return row("short_copy", [ms], shape="glm-4.5-air", beside=what)

    starts = [short("nothing", 7.0), short("a memory-bound kernel", 0.2), short("the MoE at 2048 tokens", 0.3)]
    assert judged(modules, "stream", 6, {"rates": starts})["ratio"] == 0.3
    assert judged(modules, "stream", 6, {"rates": starts[:1]})["ratio"] is None

    wrong = [row("copies_wrong", [count], what="", done=10) for count in (0, 2)]
    assert judged(modules, "ops", 2, {"copies": wrong})["met"] is False
    assert judged(modules, "ops", 2, {"copies": wrong[:1]})["met"] is True

    def start_link(engine: float, alone: float) -> dict:
        pinned, together = row("start_link_pinned", [50.0]), row("start_link_seconds", [0.2], of="all at once")
        took = row("start_link_seconds", [alone], of="one rank alone")
        return {"start_link": [row("start_link", [engine], of="engine"), pinned, took, together]}

    assert judged(modules, "ops", 3, start_link(46.0, 0.2))["met"] is True
    assert judged(modules, "ops", 3, start_link(44.0, 0.2))["met"] is False
    assert judged(modules, "ops", 4, start_link(46.0, 0.2))["ratio"] == pytest.approx(1.8)
    assert judged(modules, "ops", 4, start_link(46.0, 0.3))["met"] is False

    def tables(wrong: float, us: float) -> dict:
        of = {"where": "managed", "tokens": 64}
        plain = [row(name, [9e9], where="plain", tokens=64, read=1) for name in ("table_rows_wrong", "table_rows")]
        return {"tables": [*plain, row("table_rows_wrong", [wrong], **of, read=768), row("table_rows", [us], **of)]}

    assert [judged(modules, "ops", 5, tables(wrong, 1.0))["met"] for wrong in (0, 1)] == [True, False]
    assert [judged(modules, "ops", 6, tables(0, us))["met"] for us in (99.0, 101.0)] == [True, False]

    def miss(memory: str, way: str, rate: float) -> dict:
        return row("miss", [rate], shape="glm-4.5-air", memory=memory, way=way)

    large = [
        miss("managed", "MoE kernel, a", 30.0),
        miss("managed", "MoE kernel, b", 49.0),
        miss("managed", "copy kernel", 50.0),
    ]
    assert judged(modules, "miss", 0, {"pages": large})["ratio"] == pytest.approx(0.98), "the best block shape"
    small = [miss("pinned", "MoE kernel, a", 40.0), miss("pinned", "copy kernel", 30.0), miss("pinned", "copy engine", 50.0)]
    assert judged(modules, "miss", 0, {"pages": [*large, *small]})["ratio"] == pytest.approx(0.8)
    ceiling = [row("zero_copy", [50.0], memory="pinned"), row("zero_copy", [4000.0], memory="plain")]
    assert judged(modules, "miss", 1, {"pages": large, "link": ceiling})["ratio"] == pytest.approx(0.98)
    assert judged(modules, "miss", 1, {"pages": large})["ratio"] is None, "the link was not measured"


def test_slots_are_judged_by_equality_before_speed(modules):
    def layer(differ: float, wrong: float) -> dict:
        bits = [row("slot_bits", [each], done=10, kernels="SGLang's kernels") for each in (0, differ)]
        counts = [row("slot_counts", [each], hits=5, fills=4, kept=3) for each in (0, wrong)]
        return {"layer": [*bits, *counts]}

    assert judged(modules, "slots", 0, layer(0, 0))["met"] is True
    assert judged(modules, "slots", 0, layer(1, 0))["met"] is False, "one replay is one too many"
    assert judged(modules, "slots", 0, layer(0, 0))["from"] == "20 replays of SGLang's kernels"
    assert judged(modules, "slots", 1, layer(0, 0))["met"] is True
    assert judged(modules, "slots", 1, layer(0, 1))["met"] is False
    bytes_ = [row("fill_wrong", [each], done=7) for each in (0, 3)]
    assert judged(modules, "slots", 2, {"fill": bytes_})["met"] is False
    assert judged(modules, "slots", 2, {"fill": bytes_[:1]})["met"] is True
    assert judged(modules, "slots", 0, {})["ratio"] is None
    streams = [row("slot_stream", [each], done=9, from_slots=4) for each in (0, 2)]
    assert judged(modules, "slots", 6, {"layer": streams})["ratio"] == 2


def test_the_other_runners_are_judged_by_outputs_counts_and_the_links_rate(modules):
    replays = [row("function_bits", [each], done=5, function="Marlin", where="slots", kernels="Marlin's") for each in (0, 3)]
    varies = [row("function_varies", [1], done=5)]
    for part in ("marlin", "deep_gemm"):
        verdict = judged(modules, "runners", ("marlin", "deep_gemm").index(part), {part: [*replays, *varies]})
        assert (verdict["ratio"], verdict["met"]) == (3, False)
        assert verdict["from"] == "10 replays of Marlin's; 1 differ between two runs over plain VRAM"
    assert judged(modules, "runners", 0, {"marlin": replays[:1]})["met"] is True
    counts = [row("function_counts", [each], hits=4) for each in (0, 2)]
    assert judged(modules, "runners", 2, {"marlin": counts[:1], "deep_gemm": counts[1:]})["met"] is False
    assert judged(modules, "runners", 2, {"marlin": counts[:1], "deep_gemm": counts[:1]})["met"] is True


@pytest.mark.parametrize(("ms", "met"), [(2.2, True), (2.4, False)])
def test_a_step_in_place_is_judged_by_its_missed_bytes_and_the_links_rate(modules, ms, met):
    """0.05 GB at 50 GB/s take 1 ms, and the step from VRAM another: at most 2.3 are wanted."""
    link = {"link": [row("zero_copy", [50], memory="managed")]}
    steps = []
    for batch, slowest in ((1, 1), (4, ms)):
        for where, missed, took in (("plain", 0, 1), ("in place", 0.05, 9), ("in place, expert 0 in VRAM", 0.05, slowest)):
            same = {"function": "DeepGEMM, masked", "batch": batch}
            steps.append(row("function_step", [took], where=where, missed_gb=missed, **same))
    verdict = judged(modules, "runners", 4, {"deep_gemm": steps, **link})
    assert (verdict["met"], verdict["ratio"]) == (met, pytest.approx(ms / 2))
    assert verdict["from"].startswith("DeepGEMM, masked, batch 4: ")
    assert judged(modules, "runners", 4, {"deep_gemm": steps})["ratio"] is None, "the link was not measured"


def test_the_worst_of_the_slots_costs_and_rates_decides(modules):
    shares = [row("resolve_share", [share], slots=64, batch=batch) for batch, share in ((1, 0.02), (8, 0.004))]
    assert judged(modules, "slots", 3, {"empty": shares})["met"] is False
    assert judged(modules, "slots", 3, {"empty": shares[1:]})["met"] is True

    def fills(count: int, **rates: float) -> list[dict]:
        ways = {
            "slots": "slots",
            "kernel": "copy kernel",
            "engine": "copy engine, device to device",
            "torch": "a kernel of torch",
        }
        return [row("fill", [rate], way=ways[name], fills=count, expert_mib=3.0) for name, rate in rates.items()]

    found = [*fills(1, slots=10.0, kernel=50.0), *fills(8, slots=46.0, kernel=48.0, engine=50.0, torch=99.0)]
    assert judged(modules, "slots", 4, {"fill": found})["ratio"] == pytest.approx(0.92), "the faster copy, of several fills"
    assert judged(modules, "slots", 4, {"fill": found[:2]})["ratio"] is None
    reads = [row("slot_read", [rate], what=what, expert_mib=3.0) for what, rate in (("slots", 50.0), ("plain VRAM", 3000.0))]
    assert judged(modules, "slots", 5, {"fill": reads})["met"] is False, "such slots are in host RAM"


@pytest.mark.parametrize("number", [3, 4])
def test_ways_that_are_compared_take_every_place_in_turn(modules, number):
    from benchmarks.gpu.decode_step import in_turn

    names = [str(each) for each in range(number)]
    orders = [in_turn(names, turn) for turn in range(2 * number)]
    for place in range(number):
        assert sorted(order[place] for order in orders) == sorted(2 * names)
    before = [order[order.index("1") - 1] for order in orders if order[0] != "1"]
    assert before.count("0") == before.count("2"), "in either direction"


def test_the_worst_case_decides_for_a_layer(modules):
    def step(arm: str, batch: int, ms: float) -> dict:
        return row("decode", [ms], arm=arm, resident=1.0, shape="glm-5", weights="fp8", batch=batch)

    good = [step("plain", 1, 1.0), step("managed", 1, 1.005)]
    assert judged(modules, "layer", 0, {"glm-5": good})["met"] is True
    bad = [step("plain", 8, 1.0), step("managed", 8, 1.02)]
    verdict = judged(modules, "layer", 0, {"glm-5": [*good, *bad]})
    assert verdict["met"] is False
    assert verdict["from"].startswith("glm-5 fp8 8")
    shares = [row("counters_share", [0.002], batch=1), row("counters_share", [0.02], batch=32)]
    assert judged(modules, "layer", 1, {"counters": shares})["met"] is False
