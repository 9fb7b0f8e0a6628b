"""``/expert_offload`` on an app with SGLang's own rules for API keys: who is answered, with what, and what is refused."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
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
from sglang_uvm_offload.plugin.operate import actions, http_routes
from sglang_uvm_offload.plugin.operate.actions import Action
from sglang_uvm_offload.plugin.server_config import attach, attach_requested
from sglang_uvm_offload.residency.status import SaveStatus

pytestmark = pytest.mark.sglang


class TokenizerManager:
    """Stands for SGLang's, with one rank behind it: keeps what it is asked to set."""

    def __init__(self, cfg):
        self.server_args = SimpleNamespace()
        attach_requested(self.server_args, cfg)
        attach(self.server_args, cfg)
        self.rank = None if cfg is None else Rank(cfg)
        self.asked, self.saves, self.replicas = [], [], [0]

    async def set_internal_state(self, request):
        self.asked.append(Action.of(request.server_args))

    async def get_internal_state(self):
        save = self.saves.pop(0) if len(self.saves) > 1 else self.saves
        status = {**self.rank.status(), "saves": msgspec.to_builtins(save)}
        return [{"expert_offload": {**status, "replica": replica}} for replica in self.replicas]


@pytest.fixture
def serve(monkeypatch):
    """A client of a server with these flags and keys, and its tokenizer manager."""

    def made(cfg, **keys):
        manager = TokenizerManager(cfg)
        server = ModuleType("http_server")
        server.app = FastAPI()
        server.get_global_state = lambda: SimpleNamespace(tokenizer_manager=manager)
        monkeypatch.setitem(sys.modules, http_routes.SERVER, server)
        monkeypatch.setattr(http_routes, "get_serving", lambda: SimpleNamespace(tokenizer_worker_num=1))
        local = SimpleNamespace(enable_dp_attention_local_control_broadcast=False)
        monkeypatch.setattr(actions, "get_parallel", lambda: local)
        http_routes.add_where_served()
        if keys:
            add_api_key_middleware(server.app, **{"api_key": None, "admin_api_key": None, **keys})
        return TestClient(server.app), manager

    return made


def bearer(key):
    return {"Authorization": f"Bearer {key}"}


def test_the_status_is_that_of_each_replicas_first_rank(serve):
    client, manager = serve(config())
    answer = client.get("/expert_offload")
    assert answer.status_code == 200
    assert answer.json()["version"] == __version__
    (rank,), status = answer.json()["ranks"], manager.rank.status()
    assert {**rank, "history": None} == {**status, "history": None}


@pytest.mark.parametrize("action", list(Action))
def test_an_action_reaches_the_ranks_and_its_answer_is_the_status(serve, action):
    client, manager = serve(config(save_profile="p.npz"))
    answer = client.post("/expert_offload", json={"action": action})
    assert (answer.status_code, len(answer.json()["ranks"])) == (200, 1)
    assert manager.asked == [action]


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

    async def without():
        return [{}]

    monkeypatch.setattr(manager, "get_internal_state", without)
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
    heard, release, asked = threading.Event(), threading.Event(), manager.get_internal_state

    async def slow():
        heard.set()
        await asyncio.to_thread(release.wait, patience(60))
        return await asked()

    manager.get_internal_state = slow
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

    saver = Saver("profile", lambda _: write)

    async def set_internal_state(request):
        actions.perform(Action.of(request.server_args), manager.rank.manager, [saver])

    async def get_internal_state():
        status = [SaveStatus(saver.what, saver.under_way, saver.saved_at, saver.failures, saver.error)]
        if seen:
            asked_again.set()
        seen.append(saver.under_way)
        return [{"expert_offload": {**manager.rank.status(), "saves": msgspec.to_builtins(status)}}]

    seen = []
    monkeypatch.setattr(manager, "set_internal_state", set_internal_state)
    monkeypatch.setattr(manager, "get_internal_state", get_internal_state)
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
