"""Weights that are replaced while a server serves, in each of SGLang's ways: answers afterwards are those of a server that was
started with them, where experts are offloaded and have moved."""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from builders import checkpoint_parts
from builders.plugins import IN_SCHEDULER, saboteur
from checkpoints import Checkpoints
from safetensors.torch import load_file
from serving import PROMPTS, TESTS, Engines

from scripts.harness.patience import patience
from scripts.harness.server import Server, free_port, offload_state

pytestmark = pytest.mark.nightly
FLAGS: dict[str, Any] = {
    **{"dtype": "float32", "expert_offload_num_resident": 6, "expert_offload_warmup_tokens": 16},
    "expert_offload_stream_tokens": 8,
}
GROUP = "trainer"
TAKES_PARTS = f"""{IN_SCHEDULER}
    sys.path.insert(0, {str(TESTS)!r})
    from builders import checkpoint_parts
    checkpoint_parts.install()
"""


def ask(server: Server) -> list[list[int]]:
    sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
    return [server.post("/generate", {"text": prompt, "sampling_params": sampling})["output_ids"] for prompt in PROMPTS]


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


def from_disk(server: Server, checkpoint: Path) -> None:
    assert server.post("/update_weights_from_disk", {"model_path": str(checkpoint)})["success"]


def from_tensor(server: Server, checkpoint: Path) -> None:
    """As a trainer on the same host sends them: through files that both map."""
    from sglang.srt.utils import MultiprocessingSerializer

    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        tensors = list(weights_of(checkpoint).items())
        server.post("/begin_weight_update", {})
        for part in (tensors[::2], tensors[1::2]):
            sent = base64.b64encode(MultiprocessingSerializer.serialize(part)).decode()
            assert server.post("/update_weights_from_tensor", {"serialized_named_tensors": [sent]})["success"]
        server.post("/end_weight_update", {})
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)


def from_distributed(server: Server, checkpoint: Path) -> None:
    """As a trainer sends them that is one more rank of a group."""
    from sglang.srt.utils import init_custom_process_group

    port, joined = free_port(), []
    there = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
    joining = threading.Thread(
        target=lambda: joined.append(server.post("/init_weights_update_group", {**there, "group_name": GROUP}))
    )
    joining.start()
    ends = timedelta(seconds=patience(60))  # of waiting for a server that has refused
    group = init_custom_process_group("gloo", f"tcp://127.0.0.1:{port}", ends, world_size=2, rank=0, group_name=GROUP)
    joining.join()
    tensors = weights_of(checkpoint)
    told = {
        "names": [*tensors],
        "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [[*tensor.shape] for tensor in tensors.values()],
        "group_name": GROUP,
    }
    assert joined[0]["success"], joined
    server.post("/begin_weight_update", {})
    updated: list[Any] = []
    updating = threading.Thread(target=lambda: updated.append(server.post("/update_weights_from_distributed", told)))
    updating.start()
    for tensor in tensors.values():
        torch.distributed.broadcast(tensor, src=0, group=group)
    updating.join()
    assert updated[0]["success"], updated
    server.post("/end_weight_update", {})
    server.post("/destroy_weights_update_group", {"group_name": GROUP})
    torch.distributed.destroy_process_group(group)


def from_ipc(server: Server, checkpoint: Path) -> None:
    """As the engine of checkpoints sends them, part by part."""
    tensors = list(weights_of(checkpoint).items())
    with zmq.Context() as context, context.socket(zmq.REQ) as socket:
        socket.setsockopt(zmq.RCVTIMEO, round(1000 * patience(60)))  # the server has refused
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        told = {"zmq_handles": {checkpoint_parts.DEVICE: f"tcp://127.0.0.1:{port}"}}
        updated: list[Any] = []
        updating = threading.Thread(target=lambda: updated.append(server.post("/update_weights_from_ipc", told)))
        updating.start()
        checkpoint_parts.send(socket, [tensors[::2], tensors[1::2]])
        updating.join()
    assert updated[0]["success"], updated


WAYS: dict[str, Callable[[Server, Path], None]] = {
    "disk": from_disk,
    "tensor": from_tensor,
    "distributed": from_distributed,
    "IPC": from_ipc,
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.works("Live change", f"update from {way}")) for way in WAYS]
)
def test_answers_are_those_of_the_new_weights_before_and_after_moves(
    way: str, checkpoints: Checkpoints, engines: Engines, tmp_path: Path
) -> None:
    """There before the warm-up moves experts, and back after that: what was moved is written too."""
    old, new = (checkpoints("qwen3_moe", dtype="float32", seed=seed) for seed in (0, 7))
    expected = {each: [a.output_ids for a in engines.baseline(each, dtype="float32").answers] for each in (old, new)}
    env = saboteur(tmp_path, TAKES_PARTS) if way == "IPC" else {}
    with engines.server(old, env=env, **FLAGS) as server:
        WAYS[way](server, new)
        first = ask(server)
        moved = offload_state(server.get("/server_info"))
        server.wait_until_idle()
        WAYS[way](server, old)
        second = ask(server)
        state = offload_state(server.get("/server_info"))
    assert first == expected[new] != expected[old]
    assert second == expected[old]
    assert moved["moves"] > 0
    assert state["moves"] > moved["moves"]  # chosen anew for the new weights
    assert state["fault"] is None
    assert state["offloaded_bytes"] > 0


@pytest.mark.works("Live change", "update of quantised experts (FP8 in blocks) from disk")
def test_quantised_experts_are_updated(checkpoints: Checkpoints, engines: Engines) -> None:
    old, new = (checkpoints("qwen3_moe", quant="fp8", seed=seed) for seed in (0, 7))
    expected = {each: [a.output_ids for a in engines.baseline(each).answers] for each in (old, new)}
    with engines.server(old, **{**FLAGS, "dtype": "auto"}) as server:
        answers = [ask(server)]
        for each in (new, old):
            server.wait_until_idle()
            from_disk(server, each)
            answers.append(ask(server))
        state = offload_state(server.get("/server_info"))
    assert answers == [expected[old], expected[new], expected[old]]
    assert expected[old] != expected[new]
    assert state["fault"] is None


@pytest.mark.works("Live change", "update from disk under load")
def test_an_update_under_load_reaches_what_is_asked_next(checkpoints: Checkpoints, engines: Engines) -> None:
    """SGLang first ends what is under way, and holds what comes meanwhile."""
    old, new = (checkpoints("qwen3_moe", dtype="float32", seed=seed) for seed in (0, 7))
    expected = {each: [a.output_ids for a in engines.baseline(each, dtype="float32").answers] for each in (old, new)}
    ended = threading.Event()
    continuous = {**FLAGS, "expert_offload_adapt": "continuous"}

    def load(server: Server) -> list[list[list[int]]]:
        answers = []
        while not ended.is_set():
            answers.append(ask(server))
        return answers

    with engines.server(old, **continuous) as server, ThreadPoolExecutor(4) as clients:
        try:
            loads = [clients.submit(load, server) for _ in range(4)]
            for each in (new, old, new):
                from_disk(server, each)
        finally:
            ended.set()
        answers = [answer for client in loads for answer in client.result()]
        server.wait_until_idle()
        last, state = ask(server), offload_state(server.get("/server_info"))
    assert last == expected[new]
    for answer in answers:
        for number, tokens in enumerate(answer):
            assert tokens in (expected[old][number], expected[new][number]), "no answer is of both weights"
    assert state["fault"] is None
    assert state["moves"] > 0
