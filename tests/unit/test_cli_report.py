"""The report command: a report of a real server, of what was saved from one, of a replay, and a reason for anything else."""

from __future__ import annotations

import contextlib
import http.server
import json
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from builders.managers import Rank, config
from builders.reports import words
from builders.traces import trace
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paths import SAFETENSORS, WAYS

from sglang_uvm_offload.cli import report as report_cli
from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.cli.report import SourceError, report_of


@pytest.mark.slow
def test_a_report_of_a_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace([0, 2, 2], [2, 2, 1, 2]).save(tmp_path / "trace.npz")
    assert main(["replay", str(tmp_path / "trace.npz"), "--residency", "0.5", "--json"]) == 0
    (tmp_path / "replay.json").write_text(capsys.readouterr().out)
    assert main(["report", str(tmp_path / "replay.json"), "--out", str(tmp_path / "report.html")]) == 0
    said = words((tmp_path / "report.html").read_text())
    for policy in ("first_n", "static", "lru", "belady", "adaptive"):
        assert policy in said


@pytest.fixture
def answers() -> Iterator[dict[str, tuple[int, bytes]]]:
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

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    said["url"] = f"http://127.0.0.1:{server.server_port}"
    yield said
    server.shutdown()
    server.server_close()
    thread.join()


def served() -> dict:
    return {"internal_states": [{"expert_offload": Rank(config()).status()}]}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["{}", "{}/", "{}/server_info"])
def test_an_address_may_be_that_of_the_server_or_of_its_statistics(answers, form):
    answers["/server_info"] = (200, json.dumps(served()).encode())
    assert "Where the experts are" in report_of(form.format(answers["url"]))


def refused(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that the command says, having failed and written nothing."""
    assert main(["report", source, "--out", str(tmp_path / "report.html")]) == 2
    assert not (tmp_path / "report.html").exists()
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith(f"cannot report: {source}")
    return err


def refused_after(answer: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The same of a server that answers so."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def speak() -> None:
            with server.accept()[0] as peer:
                peer.recv(1 << 16)
                peer.sendall(answer)

        thread = threading.Thread(target=speak, daemon=True)
        thread.start()
        err = refused(f"http://127.0.0.1:{server.getsockname()[1]}", tmp_path, capsys)
        thread.join()
    return err


def test_a_server_that_does_not_answer(answers, tmp_path, capsys):
    assert "does not answer: Connection refused" in refused("http://127.0.0.1:9", tmp_path, capsys)
    answers["/server_info"] = (200, b"")
    assert "not the JSON" in refused(answers["url"], tmp_path, capsys)
    answers["/server_info"] = (404, b"no")
    assert "answers 404" in refused(answers["url"], tmp_path, capsys)
    answers["/server_info"] = (401, b"no")
    assert "API key" in refused(answers["url"], tmp_path, capsys)


@pytest.mark.parametrize("url", ["http://", "http://[", "http://a b", "http://127.0.0.1:99999"])
def test_an_address_that_is_none(url, tmp_path, capsys):
    assert "does not answer" in refused(url, tmp_path, capsys)


@pytest.mark.parametrize("states", [[], [{"tp_size": 1}], [{"tp_size": 1, "expert_offload": None}]])
def test_a_server_that_does_not_offload(answers, tmp_path, capsys, states):
    answers["/server_info"] = (200, json.dumps({"internal_states": states}).encode())
    said = refused(answers["url"], tmp_path, capsys)
    assert "does not offload experts" in said
    assert "--expert-offload-num-resident" in said


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x89PNG", "not the JSON"),
        (b"[1]", "Expected `object`"),
        (b'{"results": ' + b"[" * 100_000, "recursion"),
        (b'{"a": NaN}', "not the JSON"),
        (b'{"a": 1}', "no internal_states"),
        (b'{"results": []}', "not the JSON of this version"),
        (b'{"internal_states": [{"expert_offload": {"backend": "uvm"}}]}', "missing required field"),
        (b'{"internal_states": {"a": 1}}', "Expected `array`"),
    ],
)
def test_a_file_that_holds_no_statistics(content, reason, tmp_path, capsys):
    (tmp_path / "file").write_bytes(content)
    assert reason in refused(str(tmp_path / "file"), tmp_path, capsys)


def test_a_file_that_is_not_there_or_is_a_folder(tmp_path, capsys):
    assert "No such file" in refused(str(tmp_path / "none"), tmp_path, capsys)
    assert "a folder" in refused(str(tmp_path), tmp_path, capsys)


def test_more_than_the_bound_is_not_read(answers, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report_cli, "MAX_BYTES", 1 << 20)
    (tmp_path / "file").write_bytes(b'{"a": "' + b"x" * (1 << 20) + b'"}')
    assert "larger than 1 MiB" in refused(str(tmp_path / "file"), tmp_path, capsys)
    answers["/server_info"] = (200, b" " * ((1 << 20) + 1))
    assert "larger than 1 MiB" in refused(answers["url"], tmp_path, capsys)


def test_without_matplotlib_the_command_says_what_to_install_before_it_asks_a_server(answers, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(report_cli, "report_of", lambda source: pytest.fail("asked"))
    assert main(["report", answers["url"], "--out", str(tmp_path / "report.html")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_a_report_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "info.json").write_text(json.dumps(served()))
    assert main(["report", str(tmp_path / "info.json"), "--out", str(tmp_path / "none" / "report.html")]) == 2
    assert "--out" in capsys.readouterr().err


@pytest.fixture
def statistics(tmp_path: Path) -> str:
    (tmp_path / "info.json").write_text(json.dumps(served()))
    return str(tmp_path / "info.json")


@pytest.mark.parametrize("way", WAYS)
def test_a_file_that_is_no_report_is_not_replaced(statistics, tmp_path, capsys, monkeypatch, way):
    """That is told before anything is asked."""
    for name in ("model", "work"):
        (tmp_path / name).mkdir()
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(SAFETENSORS)
    out = way(weights, tmp_path / "work")
    monkeypatch.setattr(report_cli, "report_of", lambda source: pytest.fail("asked"))
    assert main(["report", statistics, "--out", str(out)]) == 2
    assert capsys.readouterr().err.startswith(f"cannot report: --out {out}: exists")
    assert weights.read_bytes() == SAFETENSORS


def test_the_source_is_not_replaced_by_its_report(statistics):
    before = Path(statistics).read_bytes()
    assert main(["report", statistics, "--out", statistics]) == 2
    assert Path(statistics).read_bytes() == before


def test_a_report_of_somebody_else_is_not_replaced(statistics, tmp_path):
    (tmp_path / "report.html").write_text("<!doctype html>\n<html><body>sglang-uvm-offload</body></html>")
    assert main(["report", statistics, "--out", str(tmp_path / "report.html")]) == 2
    assert "</body>" in (tmp_path / "report.html").read_text()


@pytest.mark.slow
def test_a_report_is_replaced(statistics, tmp_path):
    report = tmp_path / "report.html"
    assert main(["report", statistics, "--out", str(report)]) == 0
    whole = report.read_bytes()
    report.write_bytes(whole[:1000])  # a report that was cut short is known by its head
    assert main(["report", statistics, "--out", str(report)]) == 0
    assert report.read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["info.json", "report.html"]


def test_a_file_that_appears_while_the_report_is_made_stays(statistics, tmp_path, capsys, monkeypatch):
    out = tmp_path / "report.html"
    monkeypatch.setattr(report_cli, "report_of", lambda source: (out.write_bytes(SAFETENSORS), "report")[1])
    assert main(["report", statistics, "--out", str(out)]) == 2
    assert f"--out {out}: exists" in capsys.readouterr().err
    assert out.read_bytes() == SAFETENSORS


LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-5, 1 << 62), st.floats(allow_nan=False), st.text(max_size=5))


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_whatever_a_file_holds_gives_a_report_or_a_reason(data, tmp_path):
    """Real statistics with some of their values replaced by anything."""
    content = json.loads(STATISTICS)
    for _ in range(data.draw(st.integers(1, 3))):
        node, key = content, "internal_states"
        while isinstance(node[key], (dict, list)) and len(node[key]) and data.draw(st.integers(0, 5)):
            node = node[key]
            key = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        node[key] = data.draw(st.one_of(LEAVES, st.lists(LEAVES, max_size=3)))
    (tmp_path / "file").write_text(json.dumps(content))
    with contextlib.suppress(SourceError):
        assert "</html>" in report_of(str(tmp_path / "file"))


def _statistics() -> str:
    rank = Rank(config(resident_selection="first_n"), num_shared=1)
    for _ in range(300):
        rank.step([[0, 7, 8], [1, 6, 8]])
    return json.dumps({"internal_states": [{"expert_offload": rank.status(), "ep_size": 2}]})


STATISTICS = _statistics()


class Dripping(http.server.BaseHTTPRequestHandler):
    """Answers with a byte now and then, for ever: in its head or in its body."""

    protocol_version, body = "HTTP/1.1", True

    def do_GET(self) -> None:
        if self.body:
            self.send_response(200)
            self.end_headers()
        with contextlib.suppress(OSError):
            while not stopping.wait(0.02):
                self.wfile.write(b" ")
                self.wfile.flush()

    def log_message(self, *args: object) -> None: ...


stopping = threading.Event()


@pytest.mark.slow
@pytest.mark.parametrize("body", [True, False])
def test_an_answer_that_drips_is_not_awaited_for_ever(body, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(report_cli, "TIMEOUT_SECONDS", 0.3)
    monkeypatch.setattr(Dripping, "body", body)
    stopping.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Dripping) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            err = refused(f"http://127.0.0.1:{server.server_port}", tmp_path, capsys)
        finally:
            stopping.set()
            server.shutdown()
            thread.join()
    assert err.endswith("does not answer within 0.3 seconds\n")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "does not answer in HTTP"),
        (b"", "the connection closed before the answer was complete"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc", "the connection closed before the answer was complete"),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            "the connection closed before the answer was complete",
        ),
    ],
)
def test_an_answer_that_is_not_whole_or_not_http_is_told_in_words(answer, reason, tmp_path, capsys):
    err = refused_after(answer, tmp_path, capsys)
    assert reason in err
    assert "(" not in err, "no repr of an exception"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 \x1b]0;owned\x07\x1b[2Jgone\r\n\r\n",
        b"HTTP/1.1 401 \x9b2Jgone\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: gone://\x1b[2J\r\n\r\n",
        b'HTTP/1.1 200 OK\r\n\r\n{"internal_states": [], "gone\x1b[2J": }',
    ],
)
def test_a_servers_words_reach_the_terminal_without_their_control_characters(answer, tmp_path, capsys):
    err = refused_after(answer, tmp_path, capsys)
    assert all(line.isprintable() for line in err.splitlines()), repr(err)


@pytest.mark.slow
def test_an_address_in_capitals_is_one_too(answers):
    answers["/server_info"] = (200, json.dumps(served()).encode())
    assert "Where the experts are" in report_of(answers["url"].replace("http", "HTTP"))


@pytest.mark.parametrize("source", ["127.0.0.1:30000", "localhost:30000/", "[::1]:30000", "my-host.example:8000/server_info"])
def test_an_address_without_its_scheme_is_told_how_it_begins(source, tmp_path, capsys):
    assert f"did you mean http://{source}?" in refused(source, tmp_path, capsys)


@pytest.mark.parametrize("source", ["info.json", "a:b", "folder/127.0.0.1:30000"])
def test_a_file_that_is_missing_is_not_taken_for_an_address(source, tmp_path, capsys):
    assert "did you mean" not in refused(source, tmp_path, capsys)


@pytest.mark.slow
def test_an_api_key_is_sent_and_not_shown(answers, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(report_cli.API_KEY, "s3cret")
    sent = []
    answers["heard"] = sent.append
    answers["/server_info"] = (200, json.dumps(served()).encode())
    assert main(["report", answers["url"], "--out", str(tmp_path / "report.html")]) == 0
    assert sent[-1]["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in (tmp_path / "report.html").read_text() + "".join(capsys.readouterr())


@pytest.mark.slow
def test_an_api_key_is_not_sent_to_where_the_server_points(answers, monkeypatch):
    monkeypatch.setenv(report_cli.API_KEY, "s3cret")
    sent = []
    answers["heard"] = sent.append
    answers["/server_info"] = (302, answers["url"].replace("127.0.0.1", "localhost") + "/elsewhere")
    answers["/elsewhere"] = (200, json.dumps(served()).encode())
    report_of(answers["url"])
    assert [headers["Authorization"] for headers in sent] == ["Bearer s3cret", None]


@pytest.mark.parametrize("key", ["s3cret\n", "s3cret key", "s3crét"])
def test_an_api_key_that_cannot_be_sent_is_not_shown_either(key, answers, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(report_cli.API_KEY, key)
    err = refused(answers["url"], tmp_path, capsys)
    assert report_cli.API_KEY in err
    assert "s3cr" not in err
