"""Profiles in the real server: saved when it ends, by all ranks into one file, and chosen from at the next start."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
import urllib.error
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.plugins import IN_SCHEDULER, saboteur
from builders.profiles import rewritten
from checkpoints import HOT, Checkpoints
from serving import Engines

from scripts.harness.patience import patience
from scripts.harness.server import Server, free_port, offload_state
from sglang_uvm_offload.routing.counts import ROUTED, Phase
from sglang_uvm_offload.routing.merged_profile import load_whole
from sglang_uvm_offload.routing.trace import Trace

PROMPT = {"text": "the quick brown fox", "sampling_params": {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}}


def serve_once(engines: Engines, checkpoint: Path, **arguments: Any) -> dict[str, Any]:
    """What the plugin said of itself before a server answered one prompt and was told to end, and its ``log``."""
    with engines.server(checkpoint, expert_offload_num_resident=len(HOT[0]), **arguments) as server:
        state = offload_state(server.get("/server_info"))
        server.post("/generate", PROMPT)
        assert server.process is not None
        server.process.terminate()
        server.process.wait(patience(120))
        state["log"] = server.log
    return state


def decoded(path: Path) -> tuple[np.ndarray, int]:
    """The counts of decode, and its steps: how often the server was asked for its health does not show there."""
    seen = load_whole(path).seen
    return seen.counts[:, Phase.DECODE], seen.steps[Phase.DECODE]


# Two pipeline stages of two expert-parallel ranks: no rank sees the whole model.
MANY_RANKS: dict[str, Any] = {"tp_size": 2, "ep_size": 2, "pp_size": 2}


@pytest.fixture(scope="module")
def checkpoint(checkpoints: Checkpoints) -> Path:
    return checkpoints("qwen3_moe", hot=HOT, dtype="float32")


@pytest.fixture(scope="module")
def profile(checkpoint: Path, engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a server of one rank saved."""
    path = tmp_path_factory.mktemp("profile") / "p.npz"
    serve_once(engines, checkpoint, expert_offload_profile=path)
    assert list(path.parent.iterdir()) == [path]
    return path


def test_a_server_starts_from_what_another_saved_and_adds_to_it(
    checkpoint: Path, profile: Path, engines: Engines, tmp_path: Path
) -> None:
    counts, steps = decoded(profile)
    assert steps == 7
    assert counts.any()
    grown = Path(shutil.copy(profile, tmp_path / "grown.npz"))
    routings = int(load_whole(grown).seen.routed().sum())
    state = serve_once(engines, checkpoint, expert_offload_profile=grown)
    assert state["log"].count(f"profile {grown}: {routings} routings choose residents") == 1
    assert state["log"].count("server ends: saving the profile") == 1
    assert state["log"].count(f"the profile is saved to {grown}") == 1
    assert "requested by an operator" not in state["log"]
    assert [sorted(ids) for ids in state["resident_ids"]] == HOT
    assert state["moves"] == 0
    more, steps = decoded(grown)
    assert steps == 2 * 7
    assert (more == 2 * counts).all(), "what was loaded counts once"


def test_a_profile_of_a_newer_format_is_left_alone_by_a_server_that_serves(
    checkpoint: Path, profile: Path, engines: Engines, tmp_path: Path
) -> None:
    path = rewritten(Path(shutil.copy(profile, tmp_path / "p.npz")), about={"version": 2})
    before = path.read_bytes()
    with engines.server(checkpoint, expert_offload_num_resident=4, expert_offload_profile=path) as server:
        server.post("/generate", PROMPT)
        with pytest.raises(urllib.error.HTTPError) as error:
            server.post("/expert_offload", {"action": "save"})
        assert "upgrade sglang-uvm-offload" in json.loads(error.value.read())["error"]
        (save,) = offload_state(server.get("/server_info"))["saves"]
        assert len(server.post("/generate", PROMPT)["output_ids"]) == 8
        assert server.process is not None
        server.process.terminate()
        server.process.wait(patience(120))
        log = server.log
    assert save["error"].startswith(f"{path}: has format 2; ")
    assert log.count(save["error"]) == 1
    assert log.count(f"profile {path}: has format 2; ") == 1
    assert path.read_bytes() == before


@pytest.mark.works("Live change", "SIGTERM under load")
def test_sigterm_saves_at_once_while_a_client_waits_for_a_long_answer(
    checkpoint: Path, engines: Engines, tmp_path: Path
) -> None:
    path = tmp_path / "p.npz"
    long = PROMPT | {"sampling_params": {"temperature": 0, "max_new_tokens": 600, "ignore_eos": True}}
    with engines.server(checkpoint, expert_offload_num_resident=4, expert_offload_save_profile=path) as server:
        answers = server.stream("/generate", long)
        next(answers)
        assert server.process is not None
        server.process.terminate()
        while not path.exists():
            assert next(answers, None) is not None, "the answer has ended, and the profile is not there"
        assert server.process.poll() is None
        assert sum(1 for _ in answers) > 0
        server.process.wait(patience(120))
    assert decoded(path)[1] == 599, "the last save has the whole answer"


@pytest.mark.parametrize(
    ("number", "under_load", "ranks"),
    [
        (signal.SIGINT, False, {}),
        pytest.param(signal.SIGINT, True, {"tp_size": 2}, marks=pytest.mark.nightly),
        pytest.param(signal.SIGINT, False, {"dp_size": 2}, marks=pytest.mark.nightly),
        pytest.param(signal.SIGTERM, True, {}, marks=pytest.mark.nightly),
    ],
)
def test_a_signal_to_all_processes_ends_the_server_with_its_profile(
    number: signal.Signals, under_load: bool, ranks: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    """As Ctrl-C in a terminal does, and a service manager. No fork server is in the way, which the signal would end too."""
    path, trace = tmp_path / "p.npz", tmp_path / "t.npz"
    long = PROMPT | {"sampling_params": {"temperature": 0, "max_new_tokens": 1000, "ignore_eos": True}}
    saved = {"expert_offload_profile": path, "expert_offload_trace": trace}
    with Server(checkpoint, expert_offload_num_resident=4, **saved, **ranks) as server:
        for _ in range(2):  # one for each replica
            server.post("/generate", PROMPT)
        answers = server.stream("/generate", long)
        if under_load:
            next(answers)
        assert server.process is not None
        os.killpg(server.process.pid, number)
        server.process.wait(patience(60))
    answered = 1 if "dp_size" in ranks else 2
    assert decoded(path)[1] >= 7 * answered
    assert Trace.load(trace).num_requests >= answered


def test_an_engine_saves_its_profile_when_it_is_shut_down(checkpoint: Path, engines: Engines, tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    engines.run(checkpoint, ["the quick"], max_new_tokens=8, expert_offload_num_resident=4, expert_offload_profile=str(path))
    assert decoded(path)[1] == 7


MOVES_SLOWLY = (
    IN_SCHEDULER
    + """
    import pathlib, time
    from sglang_uvm_offload.experts.layer import ExpertLayer
    folder, demote = pathlib.Path(FOLDER), ExpertLayer.demote
    def slow(*args):
        (folder / "moving").touch()
        while not (folder / "go on").exists():
            time.sleep(0.01)
        return demote(*args)
    ExpertLayer.demote = slow
"""
)


@pytest.mark.parametrize("move", ["goes on", pytest.param("hangs", marks=pytest.mark.nightly)])
@pytest.mark.works("Live change", "SIGTERM while experts move")
def test_sigterm_inside_a_move_ends_the_server_with_its_profile(
    move: str, checkpoint: Path, engines: Engines, tmp_path: Path
) -> None:
    path = tmp_path / "p.npz"
    flags: dict[str, Any] = {"expert_offload_num_resident": 4, "expert_offload_warmup_tokens": 16}
    env = saboteur(tmp_path, MOVES_SLOWLY.replace("FOLDER", repr(str(tmp_path))))
    with engines.server(checkpoint, env=env, expert_offload_save_profile=path, **flags) as server:
        first, second = (server.post("/generate", PROMPT)["output_ids"] for _ in range(2))
        deadline = time.monotonic() + patience(60)
        while not (tmp_path / "moving").exists():
            assert time.monotonic() < deadline, "nothing moves"
            time.sleep(0.1)
        assert server.process is not None
        server.process.terminate()
        if move == "goes on":
            (tmp_path / "go on").touch()
        server.process.wait(patience(120))
    assert first == second, "steps do not wait for the move"
    assert decoded(path)[1] == 2 * 7


@pytest.mark.nightly
@pytest.mark.works("Parallel", "--nnodes 2, one saved profile")
def test_nodes_that_share_a_disk_save_one_profile(checkpoint: Path, profile: Path, tmp_path: Path) -> None:
    """Each node has a launcher of its own. Tokens are those of one rank."""
    path = tmp_path / "nodes.npz"
    nodes: dict[str, Any] = {"tp_size": 2, "ep_size": 2, "nnodes": 2, "dist_init_addr": f"127.0.0.1:{free_port()}"}
    nodes |= {"expert_offload_num_resident": len(HOT[0]), "expert_offload_save_profile": path}
    first, second = (Server(checkpoint, node_rank=rank, **nodes) for rank in range(2))
    second.process = second.start()
    try:
        with first as server:
            answer = server.post("/generate", PROMPT)
            assert server.post("/expert_offload", {"action": "save"})["ranks"][0]["saves"][0]["error"] is None
            deadline = time.monotonic() + patience(60)
            while not (whole := path.exists() and (decoded(path)[0] == decoded(profile)[0]).all()):
                assert time.monotonic() < deadline, "the part of a node is missing"
                time.sleep(0.5)
    finally:
        second.stop()
    assert whole
    assert len(answer["output_ids"]) == 8


@pytest.mark.nightly
@pytest.mark.works("Parallel", "TP 2 x PP 2 with EP 2, one saved profile")
def test_ranks_that_each_hold_a_part_of_the_model_save_one_profile(
    checkpoint: Path, profile: Path, engines: Engines, tmp_path: Path
) -> None:
    serve_once(engines, checkpoint, expert_offload_save_profile=tmp_path / "many.npz", **MANY_RANKS)
    one, many = decoded(profile), decoded(tmp_path / "many.npz")
    assert many[1] == one[1]
    assert (many[0] == one[0]).all()


@pytest.mark.nightly
@pytest.mark.works("Parallel", "PP 2 through the Transformers fallback, one saved profile")
def test_stages_that_number_their_layers_anew_share_the_profile_of_one_rank(
    checkpoints: Checkpoints, engines: Engines, tmp_path: Path
) -> None:
    """As SGLang's Transformers fallback does, which serves this model."""
    hot = [HOT[0], *HOT]
    checkpoint = checkpoints("dots1", layers=4, hot=hot, dtype="float32")
    serve_once(engines, checkpoint, expert_offload_save_profile=tmp_path / "one.npz")
    counts, steps = decoded(tmp_path / "one.npz")
    assert (len(counts), steps) == (3, 7)
    assert (counts[:, 0].sum(-1) == 7 * 4).all(), "every layer with a router is counted"
    stages: dict[str, Any] = {"pp_size": 2, "expert_offload_profile": tmp_path / "one.npz"}
    state = serve_once(engines, checkpoint, expert_offload_save_profile=tmp_path / "two.npz", **stages)
    assert [sorted(ids) for ids in state["resident_ids"]] == hot[1:2]
    both, steps = decoded(tmp_path / "two.npz")
    assert steps == 14
    assert (both == 2 * counts).all()


BACKWARDS = json.dumps({"physical_to_logical_map": [list(range(15, -1, -1))] * 3})
EPLB: dict[str, Any] = {
    "tp_size": 2,
    "ep_size": 2,
    "enable_eplb": True,
    "ep_num_redundant_experts": 2,
    "eplb_rebalance_num_iterations": 4,
    "expert_distribution_recorder_buffer_size": 4,
}


@pytest.mark.nightly
@pytest.mark.works("Parallel", "--init-expert-location")
def test_experts_that_lie_elsewhere_are_read_and_saved_by_the_checkpoints_ids(
    checkpoint: Path, profile: Path, engines: Engines, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {"init_expert_location": BACKWARDS, "expert_offload_trace": tmp_path / "t.npz"}
    state = serve_once(
        engines, checkpoint, expert_offload_profile=profile, expert_offload_save_profile=tmp_path / "p.npz", **arguments
    )
    assert [sorted(ids) for ids in state["resident_ids"]] == HOT
    (counts, steps), (both, more) = decoded(profile), decoded(tmp_path / "p.npz")
    assert more == 2 * steps
    assert (both == 2 * counts).all()
    recorded = Trace.load(tmp_path / "t.npz")
    for layer in range(3):
        assert (np.bincount(recorded.ids[:, layer].ravel(), minlength=16) == counts[layer, ROUTED]).all()


@pytest.mark.nightly
@pytest.mark.works("Parallel", "--enable-eplb with --ep-num-redundant-experts, one saved profile")
def test_ranks_whose_experts_are_rearranged_save_the_profile_of_one_rank(
    checkpoint: Path, profile: Path, engines: Engines, tmp_path: Path
) -> None:
    serve_once(engines, checkpoint, expert_offload_save_profile=tmp_path / "p.npz", **EPLB)
    (counts, steps), (rearranged, as_many) = decoded(profile), decoded(tmp_path / "p.npz")
    assert as_many == steps
    assert (rearranged == counts).all()
