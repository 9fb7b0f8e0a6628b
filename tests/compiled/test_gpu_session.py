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
from standin.build import build, environment

from benchmarks import serve_log
from benchmarks.gpu import shown_code

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = ("ops", "slots", "runners", "eviction")
SERVING = ("server", "modes")
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
    assert "whether every promise of Memory holds" in said.stdout


def test_an_unknown_section_is_a_usage_error(session):
    said = session.run("oops", over_standin=False)
    assert said.returncode == 2
    assert "no section oops: there are ops, slots, runners, server, modes, eviction" in said.stderr


def test_an_unknown_part_is_a_usage_error(session):
    said = session.run("ops:contrakt", over_standin=False)
    assert said.returncode == 2
    assert "no part 'contrakt' of section ops: there are contract, moves, load" in said.stderr


def test_a_part_runs_alone_and_the_section_goes_on_from_it(session, tmp_path):
    def states() -> dict[str, str]:
        return {name: part["status"] for name, part in json.loads((tmp_path / "slots.json").read_text())["parts"].items()}

    alone = session.run("slots:resolve", "--out", str(tmp_path))
    assert alone.returncode == 0, alone.stdout[-3000:] + alone.stderr[-3000:]
    assert states() == {"resolve": "done"}
    assert "NOT complete: resolve done" in alone.stdout
    whole = session.run("slots", "--out", str(tmp_path))
    assert whole.returncode == 0
    assert states() == {"resolve": "done", "fill": "done", "overlap": "done", "ahead": "done", "bring": "done"}
    assert "-- resolve" not in whole.stdout


def test_dry_run_compiles_everything_and_starts_no_cuda(session):
    said = session.run("--dry-run", over_standin=False)
    assert said.returncode == 0, said.stdout + said.stderr
    for words in (
        "uvm_ops.so",
        "qwen3-30b-a3b-16-layers, 20.0 GB",
        "the plugin's hooks are on SGLang's Triton, Marlin and DeepGEMM MoE functions",
        "paged_experts --enable-paged-experts --paged-experts-num-resident 72",
        "without_buffers --expert-offload-num-resident 0 --expert-offload-slots 72",
        '--expert-offload-config {"stream_buffer_gb": "0"}',
        "--speculative-algorithm NGRAM",
    ):
        assert words in said.stdout


def test_a_dry_run_goes_on_after_a_failure_and_names_it(monkeypatch, capfd):
    from benchmarks.gpu import dry_run

    def refused() -> None:
        raise AssertionError("no such kernel")

    monkeypatch.setattr(dry_run, "find_spec", lambda name: None)
    monkeypatch.setitem(dry_run.CHECKS, "slots_parts", refused)
    monkeypatch.setitem(sys.modules, "benchmarks.gpu.canary_parts", SimpleNamespace(PARTS={}))
    assert dry_run.main(["slots_parts", "canary_parts", "host_parts"]) == 1
    out, err = capfd.readouterr()
    assert "== host_parts: link, reach, populate, writes\n" in out
    assert "no such kernel" in err
    assert "canary_parts has no part {'canary'}" in err
    assert err.splitlines()[-1] == "dry run failed in slots_parts, canary_parts"


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
    for name in ("driver", "cuda_of_torch", "nvcc", "torch", "triton", "python", "commit"):
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
            assert f"{part.name}: {part.decides}" in log
            figures = modules["figures"].lines_of(ran.record(name)["parts"][part.name]["rows"])
            assert {f"    {line}" for line in figures} <= {*log}, part.name
            assert (figures == modules["figures"].NOTHING) == (part.name == "compiled"), part.name  # not at toy sizes


def test_every_way_and_every_arm_is_run(ran):
    def values(section: str, part: str, row: str, label: str) -> set:
        return {each[label] for each in ran.record(section)["parts"][part]["rows"] if each["row"] == row and each["values"]}

    assert values("ops", "link", "link", "of") == {"sequential", "scattered", "copied", "engine"}
    assert values("ops", "link", "link_seconds", "of") == {"one rank alone", "all at once"}
    assert values("ops", "reach", "reach", "gib") == {8 / 1024, 32 / 1024}
    assert values("ops", "populate", "populate", "readers") == {0, 1, 2, 4, 8}
    assert values("ops", "writes", "writes", "of") == {"copy_ into device", "copy_ into host", "the CPU into host"}
    assert values("ops", "sustained", "sustained", "moves") == {"none", *(f"{mib} MiB a call" for mib in (2, 4, 8))}
    assert values("slots", "resolve", "resolve", "slots") == {64, 192}
    assert values("slots", "fill", "fill", "way") == {"slots", "copy kernel"}
    assert values("slots", "fill", "fill_wrong", "expert_mib") == {48 / 1024, 64 / 1024}
    functions = {"triton": {"Triton, bf16", "Triton, FP8"}, "marlin": {"Marlin"}}
    for part, names in (functions | {"deep_gemm": {"DeepGEMM, compact", "DeepGEMM, masked"}}).items():
        assert values("runners", part, "function_bits", "kernels") == {"no kernel: the rows that it would read"}
        assert values("runners", part, "function_step", "function") == names
        assert values("runners", part, "function_bits", "where") >= {"in place", "slots"}
        assert min(values("runners", part, "function_counts", "hits")) > 0
    assert max(values("runners", "deep_gemm", "function_step", "missed_gb")) > 0


EACH_IN_A_PROCESS = """
import json, os, sys
from pathlib import Path
path, *cases = sys.argv[1:]
import torch._dynamo  # else each process would, to capture graphs
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.runner_parts import *
from benchmarks.gpu.slots_parts import *
from sglang_uvm_offload.streaming.model_slots import ModelSlots
zeros_by_copies()
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


ONE_TENSOR = """
whole = ModelSlots._slot_layer
ModelSlots._slot_layer = lambda self, layer: whole(self, layer)._replace(rows=whole(self, layer).rows[:1])
"""
NOT_COUNTED = """
counts, first = ServedLayer.counts, []
ServedLayer.counts = lambda self: first[0] if first else first.append(counts(self)) or first[0]
"""
NOTHING_RESOLVES = "CudaSlots.resolve = lambda self, *rest: None"
BROKEN = {
    ("fill(rows)", NOTHING_RESOLVES): "15 of 15 filled slots hold other bytes",
    ("resolve(rows)", "Resolved._fill = lambda self, slots: None"): "fills in steps whose experts were all in slots",
    ("deep_gemm(rows)", ""): "passed",
    ("deep_gemm(rows)", NOTHING_RESOLVES): "0 of 12 experts were filled",
    ("triton(rows)", ""): "passed",
    ("triton(rows)", ONE_TENSOR): "3 replays differ (0 over plain VRAM)",
    ("marlin(rows)", ""): "passed",
    ("marlin(rows)", NOTHING_RESOLVES): "0 of 12 experts were filled",
    ("marlin(rows)", ONE_TENSOR): "3 replays differ (0 over plain VRAM)",
    ("marlin(rows)", "ServedLayer.poison = lambda self, experts: None"): "does not notice that its experts were overwritten",
    ("marlin(rows)", NOT_COUNTED): "3 counts of hits and fills differ",
}
"""A part, a change of what it uses, and how it must end."""


@pytest.fixture(scope="module")
def ends(session, tmp_path_factory) -> dict[tuple[str, str], str]:
    cases = [json.dumps(case) for case in BROKEN]
    said = session.python(EACH_IN_A_PROCESS, str(tmp_path_factory.mktemp("broken") / "rows"), *cases)
    told = dict(json.loads(line) for line in said.splitlines())
    return {case: told[number] for number, case in enumerate(BROKEN)}


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: f"{case[0]} {case[1][:24].strip()}")
def test_a_part_fails_where_what_it_runs_does(ends, case):
    assert BROKEN[case] in ends[case]


def test_the_results_are_few_and_small(ran):
    files = list(ran.out.iterdir())
    assert sorted(file.name for file in files) == sorted(f"{s}.{kind}" for s in SECTIONS for kind in ("json", "log"))
    assert max(file.stat().st_size for file in files) < FILE_BYTES


def test_a_complete_section_is_not_run_again_and_a_failed_part_is(ran, tmp_path):
    def record(name: str) -> dict[str, Any]:
        return json.loads((tmp_path / f"{name}.json").read_text())

    cut = ran.record("ops")
    cut["complete"] = False
    cut["parts"]["moves"] |= {"status": "failed", "rows": []}
    for name, each in (("slots", ran.record("slots")), ("ops", cut)):
        (tmp_path / f"{name}.json").write_text(json.dumps(each))
    said = ran.run("ops", "--once", "--out", str(tmp_path))
    assert said.returncode == 1
    assert "-- moves" not in said.stdout
    assert "section ops: moves: failed" in said.stderr
    said = ran.run("slots", "ops", "--out", str(tmp_path))
    assert said.returncode == 0, said.stdout + said.stderr
    assert "section slots: complete in" in said.stdout
    assert "-- moves: done" in said.stdout
    assert "-- contract" not in said.stdout
    assert record("ops")["complete"] is True
    assert record("ops")["parts"]["contract"] == cut["parts"]["contract"]
    assert len(record("ops")["started"]) == 2


def test_a_failing_section_is_named_with_its_parts(ran, tmp_path):
    said = ran.run("ops:load", "ops:sustained", "--out", str(tmp_path), fail="cudaMemPrefetchAsync:1:2")
    assert said.returncode == 1
    (message,) = said.stderr.strip().splitlines()[-1:]
    assert message.startswith("gpu_session: section ops: load: failed; sustained: failed")
    assert str(tmp_path / "ops.log") in message
    record = json.loads((tmp_path / "ops.json").read_text())
    assert record["complete"] is False
    assert record["parts"]["load"]["error"] == "ended with status 1"
    assert "cudaErrorMemoryAllocation" in (tmp_path / "ops.log").read_text()
    assert {goal["ratio"] for goal in record["goals"]} == {None}


def test_a_card_too_small_for_the_plan_is_refused_before_anything_runs(ran, tmp_path):
    said = ran.run("slots", "--out", str(tmp_path), vram=150 << 20)
    assert said.returncode == 1
    assert "a third of the free VRAM" in said.stderr
    assert not (tmp_path / "slots.json").exists()


# ---- sections that serve ----


@pytest.fixture(scope="module")
def served(session) -> Session:
    """Parts of the server section, whose servers run on the CPU where kernels do not compute. Those that are left out differ in
    how many experts are resident, and in peers."""
    parts = (f"server:{part}" for part in ("bf16", "most", "link"))
    done = session.run(*parts, "--out", str(session.out.with_name("served")))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return session


def test_servers_are_run_and_nothing_is_called_a_measurement(served):
    folder = served.out.with_name("served")
    record = json.loads((folder / "server.json").read_text())
    assert record["measured"] is False
    assert {name: part["status"] for name, part in record["parts"].items()} == dict.fromkeys(("bf16", "most", "link"), "done")
    cells = [row["cell"] for row in record["parts"]["most"]["rows"] if row["row"] == "cell"]
    assert [(cell["contender"], cell["error"]) for cell in cells] == [("resident", None), ("frequency", None)]
    assert cells[1]["outputs"]["same"] is True
    assert cells[1]["offload"]["offloaded_bytes"] == cells[1]["expected_offloaded_bytes"]
    assert {goal["met"] for goal in record["goals"]} == {None}
    judged = [goal["goal"] for goal in record["goals"] if goal["ratio"] is not None]
    assert len(judged) == 4, "the others are of other parts"
    assert "a server's seconds of loading a GiB, with offloading over without (worst)" in judged
    assert "NOT MEASUREMENTS" in (folder / "server.log").read_text()
    kept = {path.name.partition(".log")[0]: serve_log.read(path) for path in served.logs.glob("m*")}
    assert kept.keys() == {"most-1-resident-1", "most-1-frequency-0.5"}
    assert all("Load weight end" in log for log in kept.values())


def test_the_report_is_made_from_the_section_alone(served, tmp_path):
    section = served.out.with_name("served") / "server.json"
    command = [sys.executable, "-m", "benchmarks.serve_report", str(section), str(tmp_path)]
    assert subprocess.run(command).returncode == 0
    text = (tmp_path / "report.md").read_text()
    assert "speed means nothing here" in text
    what = "this plugin, the most used experts, chosen once after the warm-up"
    assert f"| frequency 50% | {what} | 1 of 1 | yes |" in text


def test_a_part_fails_where_moves_stop(modules):
    from benchmarks.gpu import server_parts

    cell = {"contender": "frequency", "offload": {"fault": None}}
    server_parts.check_moves([cell, {"contender": "resident"}])
    with pytest.raises(AssertionError, match="moving experts stopped in frequency: no VRAM"):
        server_parts.check_moves([cell | {"offload": {"fault": "no VRAM"}}])


def test_a_part_fails_where_a_server_streams_against_its_name(modules):
    from benchmarks.gpu import server_parts

    def cell(contender: str, streamed: int, fault: str | None = None) -> dict:
        streaming = {"fault": fault} if contender != "without_buffers" else None
        return {"contender": contender, "error": None, "offload": {"streamed_bytes": streamed, "streaming": streaming}}

    resident = {"contender": "resident", "error": None}
    failed = cell("slots_only", 0) | {"error": "no"}
    server_parts.check_streams([resident, cell("frequency", 5), cell("without_buffers", 0), failed])
    with pytest.raises(AssertionError, match="streamed, against what was asked for: frequency: 0 bytes"):
        server_parts.check_streams([cell("frequency", 0)])
    with pytest.raises(AssertionError, match="without_buffers: 7 bytes"):
        server_parts.check_streams([cell("without_buffers", 7)])
    with pytest.raises(AssertionError, match="frequency: stopped: no room"):
        server_parts.check_streams([cell("frequency", 5, "no room")])


def test_a_part_fails_where_a_server_left_out_a_way_to_use_its_slots(modules, monkeypatch):
    from benchmarks import serve_run
    from benchmarks.gpu import server_parts

    used = {"missing": None, "hits": 5, "fills": 4, "brought": 3}
    prompt = {"kind": "prefill", "size": 4096, "error": None, "read_bytes": 90}

    for name, each in server_parts.IN_A_SESSION.items():
        monkeypatch.setitem(server_parts.CONTENDERS, name, each)

    def check(slots: dict | None = used, contender: str = "slots_only", **point: object) -> None:
        offload = {"slots": slots, "offloaded_bytes": 100}
        cell = {"contender": contender, "error": None, "offload": offload, "points": [prompt | point]}
        server_parts.check_slots([cell, {"contender": "resident", "error": None}, cell | {"error": "no", "offload": {}}])

    check()
    for slots, told in (
        (None, "slots_only: the model has no slots, no hits, no fills, no brought"),
        (used | {"missing": "w2 of MoE layer 3"}, "w2 of MoE layer 3 has no slots"),
        (used | {"brought": 0}, "slots_only: no brought$"),
    ):
        with pytest.raises(AssertionError, match=told):
            check(slots)
    for other in ({"read_bytes": 100}, {"size": 16384}, {"kind": "decode"}, {"error": "no"}):
        with pytest.raises(AssertionError, match="no prompt whose copies were taken from slots"):
            check(**other)
    check(error=serve_run.NO_TIME)
    check(used | {"brought": 0}, "without_buffers", read_bytes=100)
    with pytest.raises(AssertionError, match="without_buffers: no fills"):
        check(used | {"fills": 0}, "without_buffers")


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
    from benchmarks.contenders import Budget
    from benchmarks.gpu import server_parts

    layers = {index: SimpleNamespace(expert_bytes=1 << 30) for index in range(16)}
    model = SimpleNamespace(num_experts=128, top_k=8, moe_layers=[*layers], layers=layers, num_layers=16, expert_bytes=16 << 30)

    def flags(name: str, residency: float) -> dict:
        return server_parts.IN_A_SESSION[name].flags(Budget(model, residency, 0))

    assert flags("paged_experts", 0.5)["paged_experts_num_resident"] == 64 + 2 * 128 // 16
    assert flags("paged_experts", 0.95)["paged_experts_num_resident"] == 128, "no more than all"
    assert flags("slots_only", 0.5)["expert_offload_slots"] == 80, "it streams into slots"
    assert flags("cpu_offload_gb", 0.5)["cpu_offload_gb"] == 8 + 1 - 2, "GiB: half, the layer that computes, the buffers"
    without = server_parts.WITHOUT_BUFFERS.flags(Budget(model, 0.5, 0))
    assert (without["expert_offload_slots"], without["expert_offload_stream_buffer_gb"]) == (80, "0")
    offloaded = flags("offloader_v2", 0.5)
    assert 16 * offloaded["offload_num_in_group"] / offloaded["offload_group_size"] == 8 + 2 - 2


def goal(modules, words: str) -> int:
    """The number of the one goal of servers that is about this."""
    (found,) = [number for number, each in enumerate(modules["goals"].GOALS["server"]) if words in each.text]
    return found


def test_every_batch_that_a_goal_of_servers_names_is_served(modules):
    from benchmarks.gpu import server_parts

    found: dict[str, list[dict]] = {}
    for part, served in server_parts.PLAN.items():
        batches, names = server_parts.sizes(served, False).batches, ("resident", *served.contenders)
        found[part] = [row("decode", [1.0], contender=name, batch=batch) for name in names for batch in batches]
    over = [each for each in modules["goals"].GOALS["server"] if "decode time" in each.text and "all resident" not in each.text]
    assert len(over) == 4
    assert [each.ratio(with_medians(modules, found))[0] for each in over] == [1.0] * 4


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


ALIKE = {"fault": None, "offloaded_bytes": 1, "streamed_bytes": 1, "zero_copy_bytes": 1, "moves": 1}


@pytest.mark.parametrize(
    ("same", "state", "told"),
    [
        ([True, True], {}, []),
        ([True, False], {}, ["1 of 2 answers differ"]),
        ([True], {"fault": "no VRAM"}, ["moving experts stopped: no VRAM"]),
        ([True], {"streamed_bytes": 0, "moves": 0}, ["no streamed_bytes", "no moves"]),
    ],
)
def test_a_mode_fails_where_answers_differ_or_would_say_nothing(modules, same, state, told):
    from benchmarks.gpu import modes_parts

    assert modes_parts.problems(same, ALIKE | state) == told


def test_a_peer_is_judged_by_the_batch_at_which_it_is_best(modules):
    def decode(contender: str, *ms: float) -> list[dict]:
        sizes = zip((1, 4, 16, 64), ms, strict=False)
        return [row("decode", [each], contender=contender, batch=batch) for batch, each in sizes]

    def verdict(words: str, *rows: list[dict]) -> dict:
        return judged(modules, "server", goal(modules, words), {"decode": [each for found in rows for each in found]})

    paged, slots = decode("paged_experts", 22, 13, 90, 36), decode("slots_only", 20, 10, 60, 30)
    assert verdict("by slots alone (least gain)", paged, slots)["ratio"] == pytest.approx(1.1)
    assert verdict("by slots alone (least gain)", paged, slots[:3])["ratio"] is None, "this plugin has no figure at batch 64"
    found = verdict("with the buffers' VRAM", slots, decode("without_buffers", 10, 20, 30, 30))
    assert (found["ratio"], found["met"]) == (0.5, False)
    assert verdict("with the buffers' VRAM", slots)["ratio"] is None


def test_a_server_is_judged_by_what_the_link_allows(modules):
    def cell(contender: str, residency: float, seconds: dict[int, float], **more: float) -> dict:
        points = [{"kind": "decode", "size": size, "error": None, "seconds": took, **more} for size, took in seconds.items()]
        if contender == "resident":
            points.append({"kind": "decode", "size": 99, "error": "no time left in this run"})
        return row("cell", [], cell={"contender": contender, "residency": residency, "points": points})

    link = [row("link", [50.0], of="sequential"), row("link", [4000.0], of="engine")]
    resident = cell("resident", 1.0, {1: 0.010, 4: 0.020})
    number = goal(modules, "decode time over all resident plus")
    fast = [resident, cell("frequency", 0.5, {1: 0.012, 4: 0.033, 99: 9.0}, read_bytes=0.5e9)]
    verdict = judged(modules, "server", number, {"decode": fast, "most": fast, "link": link})
    assert verdict["ratio"] == pytest.approx(1.1)
    assert verdict["met"] is True
    assert verdict["from"] == "decode 4, 50% resident: 33 ms; all resident 20 ms, 0.5 GB at 50 x 10 ms"
    slow = [resident, cell("frequency", 0.78, {1: 0.024}, read_bytes=0.5e9)]
    assert judged(modules, "server", number, {"decode": fast, "most": slow, "link": link})["met"] is False
    assert judged(modules, "server", number, {"decode": fast, "most": slow})["ratio"] is None, "no link was measured"
    assert judged(modules, "server", number + 1, {"decode": fast, "link": link})["ratio"] is None, "no prefill was measured"
    prompts = [each | {"cell": json.loads(json.dumps(each["cell"]).replace('"decode"', '"prefill"'))} for each in fast]
    verdict = judged(modules, "server", goal(modules, "the longer of"), {"most": prompts, "link": link})
    assert verdict["ratio"] == pytest.approx(33 / 20), "the resident server takes longer than the link"


def test_loading_is_judged_by_the_worst_part(modules):
    def loading(resident: float, ours: float) -> list[dict]:
        return [row("load", [seconds], contender=name) for name, seconds in (("resident", resident), ("frequency", ours))]

    number = goal(modules, "loading")
    assert judged(modules, "server", number, {"decode": loading(1.0, 1.05), "most": loading(1.0, 0.5)})["met"] is True
    assert judged(modules, "server", number, {"decode": loading(1.0, 1.05), "most": loading(1.0, 1.2)})["met"] is False
    assert judged(modules, "server", number, {"decode": []})["ratio"] is None, "no load was timed"


# ---- the rules, without any CUDA ----


def test_no_plan_takes_a_third_of_a_card_of_80_gb(modules):
    """nvidia-smi shows 81,559 MiB for an H100; this is somewhat less than CUDA leaves free."""
    sections = modules["sections"]
    free, host = 78 << 30, 120 << 30
    for section in sections.SECTIONS.values():
        assert [sections.too_much(part, free, host, small=False) for part in section.parts] == [[]] * len(section.parts)
        assert max(part.expected for part in section.parts) < modules["session"].CALL_SECONDS - 120
    reach = next(part for part in sections.OPS.parts if part.name == "reach")
    (reason,) = sections.too_much(reach, 72 << 30, host, small=False)
    assert "reach plans 24.0 GiB of managed memory" in reason
    (reason,) = sections.too_much(reach, free, 30 << 30, small=False)
    assert "host RAM" in reason


def test_parts_too_large_for_the_machine_are_left_out_and_the_others_run(modules, tmp_path, monkeypatch):
    session, section = modules["session"], modules["sections"].OPS
    here = dict.fromkeys(("device", "driver", "cuda_of_torch", "torch"), "some")
    here |= {"code": {}, "measured": True, "vram_free_bytes": 23 << 30, "host_available_bytes": 120 << 30}
    monkeypatch.setattr(session, "describe_machine", lambda call: here)
    monkeypatch.setattr(session, "run_part", lambda *arguments: {"status": "done", "rows": []})
    with pytest.raises(session.SectionFailure, match=r"^load: too large for this machine; link: too large for"):
        session.run_section(
            section,
            {part.name for part in section.parts},
            SimpleNamespace(out=tmp_path, again=True, once=False),
            session.Call(570),
        )
    record = json.loads((tmp_path / "ops.json").read_text())
    for name in ("load", "link", "reach"):
        assert "a third of the free VRAM is 7.7 GiB" in record["parts"].pop(name)["error"]
    assert [part["status"] for part in record["parts"].values()] == ["done"] * (len(section.parts) - 3)


PART = """
import json, sys
open(sys.argv[2], "a").write(json.dumps({"row": "finished", "unit": "bool", "values": [%d]}) + "\\n")
%s
"""


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
    monkeypatch.setattr(session, "program", lambda name: [sys.executable, "-c", PART % (finished, then)])
    with (tmp_path / "log").open("w") as log:
        told = session.run_part(part, 1000, True, log)
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
    assert session.main(["ops:contract", "runners:marlin", "ops:moves", "slots"]) == 0
    assert ran == [
        ("ops", {"contract", "moves"}),
        ("runners", {"marlin"}),
        ("slots", {"resolve", "fill", "overlap", "ahead", "bring"}),
    ]


def test_a_program_that_hangs_or_fails_is_named(modules):
    child = modules["child"]
    assert child.output(["echo", "told"], 60) == "told\n"
    with pytest.raises(child.ChildFailure, match=r"^ended with status 1$"):
        child.output(["false"], 60)
    with pytest.raises(child.ChildFailure, match=r"^was killed after 0 s$"):
        child.output(["sleep", "1000"], 0)


@pytest.mark.parametrize("seconds", [60, 200, 570])
@pytest.mark.parametrize("hangs", ["environment", "a part"])
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
        return json.dumps(machine)

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
    assert "no time left for ops:contract ops:canary ops:load\n" in said.stdout
    assert "no time left for modes:gptq\n" in (results / "modes-gptq.txt").read_text(), "what runs beside others"
    with tarfile.open(out / "results.tar.gz") as packed:
        assert "./modes-gptq.txt" in packed.getnames()


def test_a_part_without_time_keeps_its_earlier_rows(modules, tmp_path, monkeypatch):
    session, section = modules["session"], modules["sections"].SLOTS
    machine = dict.fromkeys(("device", "driver", "cuda_of_torch", "torch"), "some") | {"compute_capability": [9, 0]}
    machine |= {"code": {}, "measured": True, "vram_free_bytes": 138 << 30, "host_available_bytes": 120 << 30}
    cut = {"status": "cut short", "error": None, "rows": [row("note", [1]) | {"median": 1, "low": 1, "high": 1}]}
    (tmp_path / "slots.json").write_text(json.dumps({"environment": machine, "parts": {"fill": cut}, "complete": False}))
    monkeypatch.setattr(session, "describe_machine", lambda call: machine)
    wanted = SimpleNamespace(out=tmp_path, again=False, once=False)
    with pytest.raises(session.SectionFailure, match=r"^fill: cut short"):
        session.run_section(section, {"fill"}, wanted, session.Call(1))
    assert json.loads((tmp_path / "slots.json").read_text())["parts"]["fill"] == cut


def test_a_part_that_would_not_fit_is_left_for_the_next_run(modules, tmp_path):
    session, part = modules["session"], modules["sections"].OPS.parts[0]
    with (tmp_path / "log").open("w") as log:
        told = session.run_part(part, part.expected - 1, True, log)
    assert told == {"status": "no time left", "rows": []}


@pytest.mark.parametrize("changed", ["device", "driver", "torch", "code", "measured"])
def test_results_of_another_machine_are_not_gone_on_from(modules, tmp_path, changed):
    earlier, path = modules["session"].earlier_record, tmp_path / "ops.json"
    here = {"device": "NVIDIA H200", "driver": "580.1", "cuda_of_torch": "13.0", "torch": "2.11"}
    here |= {"code": {"slots": "1"}, "measured": True}
    assert earlier(path, here) is None
    path.write_text(json.dumps({"environment": here, "parts": {}, "complete": True}))
    assert earlier(path, here)["complete"] is True
    assert earlier(path, here | {changed: "other"}) is None


def test_half_a_line_of_a_killed_part_is_dropped(modules, tmp_path):
    (tmp_path / "rows").write_text('{"row": "a", "unit": "s", "values": [3, 1, 2]}\n{"row": "b", "uni')
    (row,) = modules["rows"].read_rows(tmp_path / "rows")
    assert (row["median"], row["low"], row["high"]) == (2, 1, 3)


def judged(modules, section: str, goal: int, parts: dict[str, list[dict]], measured: bool = True) -> dict:
    return modules["goals"].GOALS[section][goal].judge(with_medians(modules, parts), measured)


def with_medians(modules, parts: dict[str, list[dict]]) -> dict[str, list[dict]]:
    return {part: [modules["rows"].summarise(row) for row in found] for part, found in parts.items()}


def row(name: str, values: list[float], **labels: object) -> dict:
    return {"row": name, "unit": "x", "values": values, **labels}


def test_goals_are_judged_by_medians_of_one_run(modules):
    def with_room(*found: float) -> dict:
        return {"noticing": [row("noticing", list(found), figure="noticed with room")]}

    assert judged(modules, "eviction", 0, with_room(0, 0, 0))["met"] is True
    assert judged(modules, "eviction", 0, with_room(0, 0, 5))["met"] is False, "one false alarm is one too many"
    assert judged(modules, "eviction", 0, with_room(0, 0, 0), measured=False)["met"] is None
    beside = row("noticing", [0, 7], figure="noticed with room, beside reads that fill the link")
    assert judged(modules, "eviction", 0, {"noticing": [*with_room(0)["noticing"], beside]})["ratio"] == 7
    assert judged(modules, "eviction", 0, {})["ratio"] is None

    def after_load(error: float) -> dict:
        loads = (0.01, error)
        return {"load": [row("load", [each], figure="error of VRAM used") for each in loads]}

    assert judged(modules, "ops", 0, after_load(0.12))["met"] is True
    assert judged(modules, "ops", 0, after_load(0.13))["met"] is False


def test_the_link_is_judged_by_what_pinned_memory_and_neighbours_reach(modules):
    def link(engine: float, alone: float) -> dict:
        pinned, together = row("link_pinned", [50.0]), row("link_seconds", [0.2], of="all at once")
        return {
            "link": [row("link", [engine], of="engine"), pinned, row("link_seconds", [alone], of="one rank alone"), together]
        }

    assert judged(modules, "ops", 1, link(46.0, 0.2))["met"] is True
    assert judged(modules, "ops", 1, link(44.0, 0.2))["met"] is False
    assert judged(modules, "ops", 2, link(46.0, 0.2))["ratio"] == pytest.approx(1.8)
    assert judged(modules, "ops", 2, link(46.0, 0.3))["met"] is False

    def reached(gib: int, scattered: float) -> list[dict]:
        return [row("reach", [50.0], of="sequential", gib=gib), row("reach", [scattered], of="scattered", gib=gib)]

    found = [*reached(24, 46.0), *reached(1, 10.0)]
    assert judged(modules, "ops", 3, {"reach": found})["ratio"] == pytest.approx(0.92), "of the most memory"
    assert judged(modules, "ops", 3, {})["ratio"] is None
    sizes = (("none", 1.0), ("2 MiB a call", 3.0), ("16 MiB a call", 4.0), ("128 MiB a call", 5.0))
    replays = [row("sustained", [ms], figure="p99", moves=moves) for moves, ms in sizes]
    assert judged(modules, "ops", 4, {"sustained": replays})["ratio"] == pytest.approx(0.8)
    assert judged(modules, "ops", 4, {})["ratio"] is None
    rates = {0: 5.0, 1: 3.0, 4: 7.0, 8: 8.0}
    populated = [row("populate", [rate], of="new pages", readers=readers) for readers, rate in rates.items()]
    again = row("populate", [50.0], of="pages that are there", readers=4)
    assert judged(modules, "ops", 5, {"populate": [again, *populated]})["ratio"] == pytest.approx(1.4)
    assert judged(modules, "ops", 5, {})["ratio"] is None


@pytest.mark.parametrize(("ms", "met"), [(2.2, True), (2.4, False)])
def test_a_step_in_place_is_judged_by_its_missed_bytes_and_the_links_rate(modules, ms, met):
    """0.05 GB at 50 GB/s take 1 ms, and the step from VRAM another: at most 2.3 are wanted."""
    link = {"link": [row("link", [50], of="sequential")]}
    steps = []
    for batch, slowest in ((1, 1), (4, ms)):
        for where, missed, took in (("plain", 0, 1), ("in place", 0.05, 9), ("in place, expert 0 in VRAM", 0.05, slowest)):
            same = {"function": "DeepGEMM, masked", "batch": batch}
            steps.append(row("function_step", [took], where=where, missed_gb=missed, **same))
    verdict = judged(modules, "runners", 2, {"deep_gemm": steps, **link})
    assert (verdict["met"], verdict["ratio"]) == (met, pytest.approx(ms / 2))
    assert verdict["from"].startswith("DeepGEMM, masked, batch 4: ")
    assert judged(modules, "runners", 2, {"deep_gemm": steps})["ratio"] is None, "the link was not measured"


ALIGNING = [(1, "SGLang", 4.0), (1, "slots", 3.0), (8, "SGLang", 5.0), (8, "SGLang, then slots", 9.0), (8, "slots", 6.0)]
AHEAD = [
    *((1, "none", 4.0), (1, "right", 3.0), (1, "wrong", 5.0)),
    *((2, "none", 8.0), (2, "right", 5.0), (2, "wrong", 8.0)),
]
OVERLAPPING = [(0, "before", 1.0), (0, "beside", 1.1), (4, "before", 2.0), (4, "beside", 1.6)]


def test_the_worst_of_the_slots_costs_and_rates_decides(modules):
    times = [row("resolve", [us], slots=64, batch=batch) for batch, us in ((1, 5.0), (8, 1.9))]
    assert judged(modules, "slots", 0, {"resolve": times})["met"] is False
    assert judged(modules, "slots", 0, {"resolve": times[1:]})["met"] is True

    def fills(count: int, **rates: float) -> list[dict]:
        ways = {"slots": "slots", "kernel": "copy kernel"}
        return [row("fill", [rate], way=ways[name], fills=count, expert_mib=3.0) for name, rate in rates.items()]

    found = [*fills(1, slots=10.0, kernel=50.0), *fills(8, slots=46.0, kernel=50.0)]
    assert judged(modules, "slots", 5, {"fill": found})["ratio"] == pytest.approx(0.92), "of several fills"
    assert judged(modules, "slots", 5, {"fill": found[:2]})["ratio"] is None
    reads = [row("slot_read", [rate], what=what, expert_mib=3.0) for what, rate in (("slots", 50.0), ("plain VRAM", 3000.0))]
    assert judged(modules, "slots", 6, {"fill": reads})["met"] is False, "such slots are in host RAM"
    aligned = [row("align", [us], slots=64, batch=batch, way=way) for batch, way, us in ALIGNING]
    assert judged(modules, "slots", 1, {"resolve": aligned})["ratio"] == pytest.approx(1.2), "at batch 8"
    steps = [row("overlap", [ms], misses=misses, way=way) for misses, way, ms in OVERLAPPING]
    assert judged(modules, "slots", 2, {"overlap": steps})["ratio"] == pytest.approx(0.8), "where most miss"
    steps = [row("ahead", [ms], misses=misses, way=way) for misses, way, ms in AHEAD]
    assert [judged(modules, "slots", nth, {"ahead": steps})["ratio"] for nth in (3, 4)] == [0.75, 1.25], "where the fewest miss"
