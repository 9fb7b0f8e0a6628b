"""The report command: a report of a real server, of what was saved from one, of a replay, and a reason for anything else."""

from __future__ import annotations

import contextlib
import copy
import http.server
import json
import random
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import mutation
import pytest
from builders.managers import Rank, config
from builders.reports import words
from builders.traces import trace
from paths import SAFETENSORS

from sglang_uvm_offload.cli import report as report_cli
from sglang_uvm_offload.cli import server as server_cli
from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.cli.report import report_of
from sglang_uvm_offload.cli.server import API_KEY, SourceError


@pytest.mark.slow
def test_a_report_of_a_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace([0, 2, 2], [2, 2, 1, 2]).save(tmp_path / "trace.npz")
    assert main(["replay", str(tmp_path / "trace.npz"), "--residency", "0.5", "--json"]) == 0
    (tmp_path / "replay.json").write_text(capsys.readouterr().out)
    assert main(["report", str(tmp_path / "replay.json"), "--out", str(tmp_path / "report.html")]) == 0
    said = words((tmp_path / "report.html").read_text())
    for shown in ("first_n", "static", "lru", "belady", "adaptive", "scored 1 requests in 4 decode steps"):
        assert shown in said


@pytest.fixture
def answers() -> Iterator[dict]:
    """An HTTP server of which a test says what it answers at ``/server_info``; its address is under "url", and "heard" is
    called with the headers of each request."""
    said: dict = {"heard": lambda headers: None}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = said.get(self.requestline.split()[1], (404, b""))  # ``path`` has lost a second slash
            said["heard"](self.headers)
            self.send_response(status)
            if status == 302:
                self.send_header("Location", body)
            self.end_headers()
            self.wfile.write(b"" if status == 302 else body)

        def log_message(self, *args: object) -> None:
            """Without a line on stderr for each request."""

    with running(Handler) as url:
        said["url"] = url
        yield said


@contextlib.contextmanager
def running(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def served() -> bytes:
    return json.dumps({"internal_states": [{"expert_offload": Rank(config()).status()}]}).encode()


def refused(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that the command says, having failed and written nothing."""
    assert main(["report", source, "--out", str(tmp_path / "report.html")]) == 2
    assert not (tmp_path / "report.html").exists()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"cannot report: {source}")
    return err


# Servers


@pytest.mark.slow
@pytest.mark.parametrize("form", ["{}", "{}/", "{}/server_info"])
def test_an_address_may_be_that_of_the_server_or_of_its_statistics(answers, form):
    answers["/server_info"] = (200, served())
    assert "Where the experts are" in report_of(form.format(answers["url"]).replace("http", "HTTP"))


@pytest.mark.parametrize(
    ("answer", "ranks"),
    [((200, None), ["tp0", "tp1"]), ((503, b""), []), ((200, b"no"), []), ((200, b'{"version": "1", "ranks": [{}]}'), [])],
)
def test_all_ranks_are_asked_for_and_done_without(answers, answer, ranks):
    status, body = answer
    every = [Rank(config()).status() | {"rank": {"tp": tp}} for tp in (0, 1)]
    answers["/server_info"] = (200, served())
    answers["/expert_offload"] = (status, json.dumps({"version": "1", "ranks": every}).encode() if body is None else body)
    said = words(report_of(answers["url"] + "/server_info"))
    assert [name for name in ("tp0", "tp1") if name in said] == ranks


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((200, b""), "not the JSON"),
        ((404, b"no"), "answers 404"),
        ((401, b"no"), "API key"),
        ((200, b'{"internal_states": []}'), "does not offload experts"),
        ((200, b'{"internal_states": [{"tp_size": 1, "expert_offload": null}]}'), "--expert-offload-num-resident"),
    ],
)
def test_an_answer_that_is_no_statistics_is_told_in_words(answers, tmp_path, capsys, answer, reason):
    answers["/server_info"] = answer
    assert reason in refused(answers["url"], tmp_path, capsys)


@pytest.mark.parametrize("url", ["http://", "http://[", "http://a b", "http://127.0.0.1:99999", "http://127.0.0.1:9"])
def test_an_address_at_which_nobody_answers(url, tmp_path, capsys):
    assert "does not answer: " in refused(url, tmp_path, capsys)


CUT_SHORT = "the connection closed before the answer was complete"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not answer in HTTP"),
        (b"", CUT_SHORT),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc", CUT_SHORT),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", CUT_SHORT),
        # Control characters do not reach the terminal.
        (b"HTTP/1.1 404 \x1b]0;owned\x07\x1b[2Jgone\r\n\r\n", "gone"),
        (b"HTTP/1.1 401 \x9b2Jgone\r\n\r\n", "gone"),
        (b"HTTP/1.1 302 Found\r\nLocation: gone://\x1b[2J\r\n\r\n", "does not answer"),
        (b'HTTP/1.1 200 OK\r\n\r\n{"internal_states": [], "gone\x1b[2J": }', "not the JSON"),
    ],
)
def test_an_answer_that_is_not_whole_or_hostile_is_told_in_words(answer, reason, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def speak() -> None:
            with server.accept()[0] as peer:
                peer.recv(1 << 16)
                peer.sendall(answer)

        thread = threading.Thread(target=speak, daemon=True)
        thread.start()
        err = refused(f"http://127.0.0.1:{server.getsockname()[1]}", tmp_path, capsys)
        thread.join()
    assert reason in err
    assert err.rstrip("\n").isprintable(), repr(err)
    assert "IncompleteRead(" not in err, "no repr of an exception"


@pytest.mark.slow
@pytest.mark.parametrize("body", [True, False])
def test_an_answer_that_drips_is_not_awaited_for_ever(body, tmp_path, capsys, monkeypatch):
    stopping = threading.Event()

    class Dripping(http.server.BaseHTTPRequestHandler):
        """Answers with a byte now and then, for ever: in its head or in its body."""

        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if body:
                self.send_response(200)
                self.end_headers()
            with contextlib.suppress(OSError):
                while not stopping.wait(0.02):
                    self.wfile.write(b" ")
                    self.wfile.flush()

        def log_message(self, *args: object) -> None: ...

    monkeypatch.setattr(server_cli, "TIMEOUT_SECONDS", 0.3)
    with running(Dripping) as url:
        try:
            err = refused(url, tmp_path, capsys)
        finally:
            stopping.set()
    assert err.endswith("does not answer within 0.3 seconds\n")


@pytest.mark.slow
def test_an_api_key_is_sent_to_the_server_alone_and_not_shown(answers, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(API_KEY, "s3cret")
    sent = []
    answers["heard"] = sent.append
    answers["/server_info"] = (302, answers["url"].replace("127.0.0.1", "localhost") + "/elsewhere")
    answers["/elsewhere"] = (200, served())
    assert main(["report", answers["url"], "--out", str(tmp_path / "report.html")]) == 0
    assert [headers["Authorization"] for headers in sent] == ["Bearer s3cret", None, "Bearer s3cret"], "and for all ranks"
    assert "s3cret" not in (tmp_path / "report.html").read_text() + "".join(capsys.readouterr())


@pytest.mark.parametrize("key", ["s3cret\n", "s3cret key", "s3crét"])
def test_an_api_key_that_cannot_be_sent_is_not_shown_either(key, answers, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(API_KEY, key)
    err = refused(answers["url"], tmp_path, capsys)
    assert API_KEY in err
    assert "s3cr" not in err


# Files


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x89PNG", "not the JSON"),
        (b"[1]", "Expected `object`"),
        (b'{"results": ' + b"[" * 100_000, "recursion"),
        (b'{"a": 1}', "no internal_states"),
        (b'{"results": []}', "not the JSON of this version"),
        (b'{"internal_states": [{"expert_offload": {"backend": "uvm"}}]}', "missing required field"),
    ],
)
def test_a_file_that_holds_no_statistics(content, reason, tmp_path, capsys):
    (tmp_path / "file").write_bytes(content)
    assert reason in refused(str(tmp_path / "file"), tmp_path, capsys)


@pytest.mark.parametrize("source", ["127.0.0.1:30000", "[::1]:30000", "my-host.example:8000/server_info"])
def test_an_address_without_its_scheme_is_told_how_it_begins(source, tmp_path, capsys):
    assert f"did you mean http://{source}?" in refused(source, tmp_path, capsys)


@pytest.mark.parametrize("source", ["info.json", "a:b", "folder/127.0.0.1:30000"])
def test_a_file_that_is_missing_is_not_taken_for_an_address(source, tmp_path, capsys):
    assert "did you mean" not in refused(source, tmp_path, capsys)


def test_more_than_the_bound_is_not_read(answers, tmp_path, capsys, monkeypatch):
    for module in (report_cli, server_cli):
        monkeypatch.setattr(module, "MAX_BYTES", 1 << 20)
    (tmp_path / "file").write_bytes(b'{"a": "' + b"x" * (1 << 20) + b'"}')
    assert "larger than 1 MiB" in refused(str(tmp_path / "file"), tmp_path, capsys)
    answers["/server_info"] = (200, b" " * ((1 << 20) + 1))
    assert "larger than 1 MiB" in refused(answers["url"], tmp_path, capsys)


@pytest.mark.slow
def test_whatever_a_file_holds_gives_a_report_or_a_reason(tmp_path):
    """Real statistics with a value replaced. Charts included, which scripts/fuzz.sh leaves out."""
    rank = Rank(config(resident_selection="first_n"), num_shared=1)
    for _ in range(300):
        rank.step([[0, 7, 8], [1, 6, 8]])
    statistics = {"internal_states": [{"expert_offload": rank.status(), "ep_size": 2}]}
    reports = 0
    for seed in range(60):
        chance, node, key = random.Random(seed), copy.deepcopy(statistics), "internal_states"
        content = node
        while isinstance(node[key], (dict, list)) and node[key]:
            node = node[key]
            key = chance.choice(sorted(node) if isinstance(node, dict) else range(len(node)))
        node[key] = chance.choice((0, 1, 3, 0.5, "x", mutation.value(chance)))
        (tmp_path / "file").write_text(json.dumps(content))
        with contextlib.suppress(SourceError):
            reports += "</html>" in report_of(str(tmp_path / "file"))
    assert 10 < reports < 60


# What is written


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "info.json").write_bytes(served())
    return str(tmp_path / "info.json")


def test_without_matplotlib_the_command_says_what_to_install_before_it_asks_a_server(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(report_cli, "report_of", lambda source: pytest.fail("asked"))
    assert main(["report", "http://127.0.0.1:9", "--out", str(tmp_path / "report.html")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_neither_the_source_nor_a_report_of_somebody_else_is_replaced(source, tmp_path, capsys, monkeypatch):
    """That is told before anything is asked."""
    monkeypatch.setattr(report_cli, "report_of", lambda source: pytest.fail("asked"))
    other = tmp_path / "other.html"
    other.write_text("<!doctype html>\n<html><body>sglang-uvm-offload</body></html>")
    for out in (Path(source), other):
        before = out.read_bytes()
        assert main(["report", source, "--out", str(out)]) == 2
        assert out.read_bytes() == before
        assert capsys.readouterr().err.startswith(f"cannot report: --out {out}: exists")
    assert main(["report", source, "--out", str(tmp_path / "none" / "report.html")]) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.slow
def test_a_report_is_replaced(source, tmp_path):
    report = tmp_path / "report.html"
    assert main(["report", source, "--out", str(report)]) == 0
    whole = report.read_bytes()
    report.write_bytes(whole[:1000])  # a report that was cut short is known by its head
    assert main(["report", source, "--out", str(report)]) == 0
    assert len(report.read_bytes()) == len(whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["info.json", "report.html"]


def test_a_file_that_appears_while_the_report_is_made_stays(source, tmp_path, capsys, monkeypatch):
    out = tmp_path / "report.html"
    monkeypatch.setattr(report_cli, "report_of", lambda source: (out.write_bytes(SAFETENSORS), "report")[1])
    assert main(["report", source, "--out", str(out)]) == 2
    assert f"--out {out}: exists" in capsys.readouterr().err
    assert out.read_bytes() == SAFETENSORS
