"""``/expert_offload`` on an app with SGLang's own rules for API keys: who is answered, with what, and what is refused."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import msgspec
import pytest
import uvicorn
from builders.managers import Rank, config
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sglang.srt.utils.auth import add_api_key_middleware

from scripts.harness.patience import patience
from sglang_uvm_offload import __version__
from sglang_uvm_offload.files.autosave import Saver
from sglang_uvm_offload.plugin import compat
from sglang_uvm_offload.plugin.operate import actions, all_ranks, http_routes, rank_files
from sglang_uvm_offload.plugin.operate.actions import Action
from sglang_uvm_offload.plugin.server_config import attach, attach_requested
from sglang_uvm_offload.residency.status import RankId, SaveStatus, rank_status

pytestmark = pytest.mark.sglang


class TokenizerManager:
    """Stands for SGLang's, with one process behind it that writes the files of all ranks: keeps what it is asked to set."""

    def __init__(self, cfg):
        self.server_args = SimpleNamespace()
        attach_requested(self.server_args, cfg)
        attach(self.server_args, cfg)
        self.rank = None if cfg is None else Rank(cfg)
        self.asked, self.saves, self.ids, self.numbers = [], [], [RankId()], []

    async def set_internal_state(self, request):
        number = rank_files.requested(request.server_args)
        if number is None:
            self.asked.append(action := Action.of(request.server_args))
            actions.perform(action, self.rank.manager, [])
            return
        self.numbers.append(number)
        for rank in self.ids:
            rank_files.write(number, rank, self.status(rank))

    def status(self, rank):
        saves = self.saves.pop(0) if len(self.saves) > 1 else self.saves
        return msgspec.structs.replace(rank_status(self.rank.manager, wait=False), rank=rank, saves=saves)


@pytest.fixture
def serve(monkeypatch, tmp_path):
    """A client of a server with these flags and keys on ``nodes`` nodes, and its tokenizer manager."""

    def made(cfg, nodes=1, **keys):
        manager = TokenizerManager(cfg)
        server = ModuleType("http_server")
        server.app = FastAPI()
        server.get_global_state = lambda: SimpleNamespace(tokenizer_manager=manager)
        monkeypatch.setitem(sys.modules, http_routes.SERVER, server)
        monkeypatch.setattr(http_routes, "get_serving", lambda: SimpleNamespace(tokenizer_worker_num=1))
        local = SimpleNamespace(enable_dp_attention_local_control_broadcast=False, nnodes=nodes)
        for module in (actions, all_ranks):
            monkeypatch.setattr(module, "get_parallel", lambda: local)
        monkeypatch.setattr(compat, "num_ranks", lambda: len(manager.ids) * nodes)
        monkeypatch.setenv("TMPDIR", str(tmp_path))
        monkeypatch.setattr(tempfile, "tempdir", None)  # it is kept once a process
        http_routes.add_where_served()
        if keys:
            add_api_key_middleware(server.app, **{"api_key": None, "admin_api_key": None, **keys})
        return TestClient(server.app), manager

    return made


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def test_every_rank_has_a_status_in_the_order_of_its_place(serve, tmp_path):
    client, manager = serve(config())
    manager.ids = [RankId(dp, pp, tp) for tp in (1, 0) for pp in (0, 1) for dp in (1, 0)]
    answer = client.get("/expert_offload")
    assert answer.status_code == 200
    assert (answer.json()["version"], answer.json()["left_out"], answer.json()["note"]) == (__version__, 0, None)
    ids, status = [rank["rank"] for rank in answer.json()["ranks"]], manager.rank.status()
    assert [tuple(rank.values())[:3] for rank in ids] == list(itertools.product((0, 1), repeat=3))
    moving = dict.fromkeys(("history", "rank", "host_free_bytes"))
    for rank in answer.json()["ranks"]:
        assert {**rank, **moving} == {**status, **moving}
    assert list(tmp_path.iterdir()) == [], "the files last as long as the request"


def test_ranks_of_other_nodes_are_left_out_and_not_awaited(serve, monkeypatch):
    monkeypatch.setattr(all_ranks, "RANK_SECONDS", 1.0)
    monkeypatch.setattr(all_ranks.asyncio, "sleep", None)
    client, _ = serve(config(), nodes=2)
    answer = client.get("/expert_offload").json()
    assert (len(answer["ranks"]), answer["left_out"]) == (1, 1)


def test_a_rank_that_does_not_answer_is_left_out(serve, monkeypatch):
    monkeypatch.setattr(all_ranks, "RANK_SECONDS", 0.05)
    client, _ = serve(config())
    monkeypatch.setattr(compat, "num_ranks", lambda: 2)
    answer = client.get("/expert_offload").json()
    assert (len(answer["ranks"]), answer["left_out"]) == (1, 1)


def test_ranks_that_hang_do_not_hang_the_request(serve, monkeypatch):
    monkeypatch.setattr(all_ranks, "STEP_SECONDS", 0.05)
    client, manager = serve(config())

    async def never(request):
        await asyncio.Event().wait()

    monkeypatch.setattr(manager, "set_internal_state", never)
    answer = client.get("/expert_offload")
    assert answer.status_code == 503
    assert "no rank has answered within 0.05 s" in answer.json()["error"]


def test_a_server_without_a_folder_for_temporary_files_says_so(serve, tmp_path, monkeypatch):
    client, manager = serve(config())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    answer = client.get("/expert_offload")
    assert answer.status_code == 503
    assert "TMPDIR" in answer.json()["error"]
    assert str(tmp_path / "gone") in answer.json()["error"]
    assert manager.numbers == []


def test_a_rank_writes_for_nobody_once_the_request_has_been_answered(serve, tmp_path):
    client, manager = serve(config())
    client.get("/expert_offload")
    rank_files.write(manager.numbers[0], RankId(), None)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_writes_into_no_folder_that_another_user_can_reach(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with rank_files.RankFiles() as files:
        (number,) = files.message().values()
        (folder,) = tmp_path.iterdir()
        folder.chmod(0o755)
        rank_files.write(number, RankId(), None)
        assert len(files) == 0
        folder.chmod(0o700)
        rank_files.write(number, RankId(), None)
        assert files.read() == [None]


@pytest.mark.parametrize("message", [{}, {"expert_offload": 1}, {rank_files.KEY: -1}, {rank_files.KEY: 1.0}])
def test_other_messages_ask_for_no_status(message):
    assert rank_files.requested(message) is None


@pytest.mark.parametrize("action", list(Action))
def test_an_action_reaches_the_ranks_and_its_answer_is_the_status(serve, action):
    client, manager = serve(config(save_profile="p.npz", warmup_tokens=10**6))
    manager.rank.step([[5, 6, 7]])
    answer = client.post("/expert_offload", json={"action": action})
    assert (answer.status_code, len(answer.json()["ranks"])) == (200, 1)
    assert manager.asked == [action]


def test_residents_are_not_chosen_from_too_few_tokens(serve):
    client, manager = serve(config(warmup_tokens=10**6))
    manager.rank.manager.fewest_tokens = 3
    manager.rank.step([[5, 6, 7]])
    answer = client.post("/expert_offload", json={"action": "readvise"})
    assert answer.status_code == 409
    assert "readvise: tokens since residents were last chosen: 1. " in answer.json()["error"]
    assert "serve 2 more first" in answer.json()["error"]
    assert manager.asked == []
    manager.rank.step([[5, 6, 7]] * 2)
    answer = client.post("/expert_offload", json={"action": "readvise"})
    assert answer.json()["note"] == "residents chosen from the routing of 3 tokens"
    assert [rank["chosen_from_tokens"] for rank in answer.json()["ranks"]] == [3]
    assert manager.rank.resident() == [[5, 6, 7]] * 3


@pytest.mark.parametrize(
    "body", [b"", b"pause", b"{}", b'{"action": "stop"}', b'{"action": "save", "n": 1}', b"\xff", b"[" * 4000]
)
def test_a_malformed_body_is_refused_with_what_would_be_right(serve, body):
    client, manager = serve(config(save_profile="p.npz"))
    answer = client.post("/expert_offload", content=body)
    assert answer.status_code == 400
    assert all(f'{{"action": "{action}"}}' in answer.json()["error"] for action in Action)
    assert manager.asked == []


def test_a_status_that_a_rank_could_not_make_is_said_to_be_missing(serve, monkeypatch):
    client, manager = serve(config())

    monkeypatch.setattr(manager, "status", lambda rank: None)
    answer = client.get("/expert_offload")
    assert answer.status_code == 503
    assert "its log has the reason" in answer.json()["error"]


def test_a_long_body_is_not_read(serve):
    client, manager = serve(config())
    answer = client.post("/expert_offload", content=b" " * 10**6)
    assert answer.status_code == 413
    assert manager.asked == []


@contextmanager
def listening(app) -> Iterator[int]:
    """The port of SGLang's HTTP server."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


@pytest.mark.parametrize("sent", [b'{"action"', b'{"action": "pause"}'])
def test_a_client_that_leaves_costs_no_traceback(serve, sent, caplog):
    client, manager = serve(config(), admin_api_key="a")
    heard, release, asked = threading.Event(), threading.Event(), manager.set_internal_state

    async def slow(request):
        heard.set()
        await asyncio.to_thread(release.wait, patience(60))
        return await asked(request)

    manager.set_internal_state = slow
    whole = sent.endswith(b"}")
    headers = ["Host: a", "Authorization: Bearer a", f"Content-Length: {len(sent) + (not whole)}"]
    head = "\r\n".join(["POST /expert_offload HTTP/1.1", *headers, "", ""])
    with listening(client.app) as port:
        with socket.create_connection(("127.0.0.1", port)) as peer:
            peer.sendall(head.encode() + sent)
            if whole:
                assert heard.wait(patience(60))
        release.set()
    assert manager.asked == [Action.PAUSE] * whole
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_what_the_server_cannot_do_is_refused_with_the_flags(serve):
    client, manager = serve(config(resident_selection="first_n"))
    answer = client.post("/expert_offload", json={"action": "pause"})
    assert answer.status_code == 409
    assert "--expert-offload-resident-selection first_n" in answer.json()["error"]
    assert manager.asked == []


def test_a_save_is_waited_for(serve, monkeypatch, tmp_path):
    """It is being written while the status is asked for again and again."""
    client, manager = serve(config(save_profile="p.npz"))
    asked_again, path = threading.Event(), tmp_path / "p.npz"

    def write():
        assert asked_again.wait(patience(60))
        path.write_bytes(b"saved")

    saver, perform, status = Saver("profile", lambda _: write), actions.perform, manager.status

    def status_now(rank):
        manager.saves = [[SaveStatus(saver.what, saver.under_way, saver.saved_at, saver.failures, saver.error)]] * 2
        if seen:
            asked_again.set()
        seen.append(saver.under_way)
        return status(rank)

    seen = []
    monkeypatch.setattr(actions, "perform", lambda action, manager, _: perform(action, manager, [saver]))
    monkeypatch.setattr(manager, "status", status_now)
    answer = client.post("/expert_offload", json={"action": "save"})
    assert answer.status_code == 200
    assert (seen[:2], seen[-1]) == ([True, True], False)
    (saved,) = answer.json()["ranks"][0]["saves"]
    assert (saved["under_way"], saved["error"], path.read_bytes()) == (False, None, b"saved")


def test_a_save_that_fails_is_an_error_with_its_reason(serve):
    client, manager = serve(config(save_profile="p.npz"))
    manager.saves = [[SaveStatus("profile", False, None, 1, "[Errno 28] No space left on device")]] * 2
    answer = client.post("/expert_offload", json={"action": "save"})
    assert answer.status_code == 500
    assert answer.json()["error"] == "save: profile: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("keys", "sent", "may_read", "may_act"),
    [
        ({"api_key": "k"}, None, False, False),
        ({"api_key": "k"}, "k", True, True),
        ({"admin_api_key": "a"}, None, True, False),
        ({"admin_api_key": "a"}, "a", True, True),
        ({"api_key": "k", "admin_api_key": "a"}, "k", True, False),
        ({"api_key": "k", "admin_api_key": "a"}, "a", False, True),
    ],
)
def test_sglangs_rules_for_keys_hold(serve, keys, sent, may_read, may_act):
    client, manager = serve(config(), **keys)
    headers = {} if sent is None else bearer(sent)
    assert client.get("/expert_offload", headers=headers).status_code == (200 if may_read else 401)
    assert client.post("/expert_offload", json={"action": "pause"}, headers=headers).status_code == (200 if may_act else 401)
    assert manager.asked == [Action.PAUSE] * may_act


def test_a_server_that_offloads_nothing_has_no_status(serve):
    client, _ = serve(None)
    assert client.get("/expert_offload").status_code == 404


@pytest.mark.parametrize("app", [None, "mine:app"])
def test_several_http_processes_import_an_app_with_the_routes_which_wraps_the_users(monkeypatch, app):
    monkeypatch.setitem(sys.modules, http_routes.SERVER, ModuleType("http_server"))
    monkeypatch.setattr(http_routes, "get_serving", lambda: SimpleNamespace(tokenizer_worker_num=2))
    for name, value in (("SGLANG_HTTP_SERVER_APP_PATH", app), (http_routes.WRAPPED, None)):
        monkeypatch.setenv(name, value or "")  # restored at the end
        if value is None:
            monkeypatch.delenv(name)
    for _ in range(2):
        http_routes.add_where_served()
    assert os.environ["SGLANG_HTTP_SERVER_APP_PATH"] == http_routes.WORKERS_APP
    assert os.environ[http_routes.WRAPPED] == (app or "sglang.srt.entrypoints.http_server:app")
