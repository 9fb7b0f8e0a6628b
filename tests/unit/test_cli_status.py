"""The status command: what it shows of a server once and while it watches, how often it asks, and how it ends."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Iterator

import msgspec
import pytest
from builders.managers import Rank, config

from sglang_uvm_offload.cli import status as status_cli
from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.cli.server import API_KEY
from sglang_uvm_offload.cli.terminal import Frames
from sglang_uvm_offload.residency.status import OffloadStatus, RankId, SaveStatus, rank_status

BUSY = (503, b'{"error": "no rank has answered within 60 s"}')


class Serving:
    """Two ranks of a server whose experts 0, 1 and 2 of 8 are resident, by whose clock a second passes at each look."""

    def __init__(self) -> None:
        seconds = iter(range(10**6))
        self.ranks = [Rank(config(resident_selection="first_n"), clock=lambda: float(next(seconds))) for _ in range(2)]
        self.changes: dict = {}

    def step(self, ids: list[list[int]]) -> None:
        for rank in self.ranks:
            rank.step(ids)

    def answer(self) -> tuple[int, bytes]:
        ranks = [
            msgspec.structs.replace(rank_status(rank.manager), rank=RankId(tp=tp), **self.changes)
            for tp, rank in enumerate(self.ranks)
        ]
        return 200, msgspec.json.encode(OffloadStatus("1.2.3", ranks))


@pytest.fixture
def server() -> Iterator[dict]:
    """An HTTP server that answers GET /expert_offload with what ``answers`` (status and body) has next, and its last one from
    then on; its address is under "url", and the requests' headers under "heard"."""
    said: dict = {"answers": [], "heard": []}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers = said["answers"]
            status, body = (
                (answers.pop(0) if len(answers) > 1 else answers[0]) if self.path == "/expert_offload" else (500, b"")
            )
            said["heard"].append(self.headers)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None: ...

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        said["url"] = f"http://127.0.0.1:{listening.server_port}"
        yield said
        listening.shutdown()
        thread.join()


def watch(url: str, monkeypatch: pytest.MonkeyPatch, looks: int) -> list[float]:
    """Watch for so many looks, until Ctrl-C. Returns how long it sleeps between two."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == looks:
            raise KeyboardInterrupt

    monkeypatch.setattr(status_cli.time, "sleep", sleep)
    assert main(["status", url, "--watch"]) == 0
    return slept[:-1]


def test_one_look_has_a_row_for_each_rank_that_fits_a_terminal(server, capsys):
    serving = Serving()
    serving.step([[0, 7], [1, 7]])
    server["answers"] = [serving.answer()]
    assert main(["status", server["url"] + "/"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 79
    assert "since the start: 1 steps, 2 tokens" in lines[1]
    rows = [line.split() for line in lines if line.startswith("tp")]
    # Experts 0, 1 and 7, of 64 KiB, in three layers: 7 is read once a step, and has half of the tokens.
    assert [row[:5] for row in rows] == [["tp0", "9/24", "0.00", "50.0", "%"], ["tp1", "9/24", "0.00", "50.0", "%"]]
    assert [float(row[5]) for row in rows] == [pytest.approx(3 * 64 / 1024, abs=0.05)] * 2


def test_the_table_of_a_large_server_fits_a_terminal(server, capsys):
    serving = Serving()
    serving.changes = {
        "resident_experts": 16384,
        "num_experts": 16384,
        "resident_bytes": 9999 << 30,
        "host_free_bytes": 9999 << 30,
    }
    server["answers"] = [serving.answer()]
    assert main(["status", server["url"]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 79
    (titles,) = (index for index, line in enumerate(lines) if line.startswith("rank"))
    above, below = lines[titles - 1 : titles + 1]
    for title, under in (("residents", "GiB"), ("hit", "rate"), ("over the link", "GB/s"), ("host RAM", "GiB free")):
        assert above.index(title) + len(title) == below.index(under) + len(under), "they end alike"


def test_json_is_the_answer_itself(server, capsys):
    server["answers"] = [Serving().answer()]
    assert main(["status", server["url"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(server["answers"][0][1])


def test_a_watch_shows_what_happened_since_the_last_look_and_ends_with_ctrl_c(server, capsys, monkeypatch):
    serving = Serving()
    serving.step([[0, 1]])
    server["answers"] = [serving.answer()]
    serving.step([[6, 7]])
    server["answers"] += [serving.answer()]
    serving.step([[0, 7]])
    server["answers"] += [serving.answer()] * 2
    slept = watch(server["url"], monkeypatch, looks=4)
    lines = capsys.readouterr().out.splitlines()
    assert ["since the start: 1 steps, 1 tokens" in lines[0], *("in the last " in line for line in lines[1:])] == [True] * 4
    shown = [line.partition("hit rate ")[2].partition(";")[0] for line in lines]
    assert shown == ["100.0 %", "0.0 %", "50.0 %", ""]
    assert "no hit rate" in lines[-1], "nothing was routed since"
    assert slept == [status_cli.PERIOD_SECONDS] * 3
    assert status_cli.PERIOD_SECONDS >= 1, "ranks answer between two steps"
    assert len(server["heard"]) == 4


def test_a_watch_of_another_server_at_the_same_address_begins_anew(server, capsys, monkeypatch):
    before, after = Serving(), Serving()
    for _ in range(3):
        before.step([[0, 1]])
    after.step([[6, 7]])
    server["answers"] = [before.answer(), after.answer()]
    watch(server["url"], monkeypatch, looks=2)
    assert "hit rate 0.0 %" in capsys.readouterr().out.splitlines()[1]


def test_a_watch_outlasts_a_long_step_and_ends_with_the_server(server, capsys, monkeypatch):
    server["answers"] = [Serving().answer(), BUSY, Serving().answer(), (500, b"")]
    monkeypatch.setattr(status_cli.time, "sleep", lambda seconds: None)
    assert main(["status", server["url"], "--watch"]) == 1
    out, err = capsys.readouterr()
    assert len(out.splitlines()) == 2
    assert err == f"the server ended or stopped answering: {server['url']}: /expert_offload answers 500 Internal Server Error\n"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ((404, b'{"detail": "Not Found"}'), "this server does not offload experts: it needs sglang-uvm-offload installed"),
        (
            (401, b'{"error": "Unauthorized"}'),
            f"answers 401 Unauthorized: give its API key in the environment variable {API_KEY}",
        ),
        (BUSY, "answers 503 Service Unavailable: no rank has answered within 60 s"),
        ((200, b"{}"), "not the JSON of this version's /expert_offload"),
        ((200, b'{"version": "1", "ranks": [{}]}'), "not the JSON of this version's /expert_offload"),
    ],
)
@pytest.mark.parametrize("watch", [[], ["--watch"]])
def test_without_a_status_the_reason_is_one_line(server, capsys, answer, reason, watch):
    server["answers"] = [answer]
    assert main(["status", server["url"], *watch]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert reason in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("source", ["127.0.0.1:30000", "file:///etc/hostname", "server_info.json"])
def test_what_is_no_url_of_a_server_is_not_opened(source, capsys):
    assert main(["status", source]) == 2
    assert f"{source}: not the URL of a server" in capsys.readouterr().err


def test_the_api_key_of_the_environment_is_sent(server, monkeypatch):
    server["answers"] = [Serving().answer()]
    monkeypatch.setenv(API_KEY, "s3cret")
    assert main(["status", server["url"]]) == 0
    assert [headers["Authorization"] for headers in server["heard"]] == ["Bearer s3cret"]


def test_what_is_wrong_is_said_once_with_its_ranks(server, capsys):
    serving = Serving()
    saves = [SaveStatus("profile", False, None, 1, "No space left on device")]
    serving.changes = {"saves": saves, "evicted_bytes": 3 << 30}
    serving.ranks[1].manager.mover.failure = "prefetch failed\x1b[2J"
    serving.ranks[0].manager.pause()
    server["answers"] = [serving.answer()]
    assert main(["status", server["url"]]) == 0
    notes = capsys.readouterr().out.splitlines()[-4:]
    assert sorted(notes) == [
        "3.00 GiB of residents are evicted from VRAM",
        "FAULT: saving the profile: No space left on device",
        "tp0: paused: residents stay until resume",
        "tp1: FAULT: prefetch failed?[2J",
    ]


def test_frames_are_drawn_over_each_other_and_fit_the_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "10")
    monkeypatch.setenv("LINES", "4")
    frames = Frames()
    frames.show(["a" * 20, "b\x1b[2J\n"])
    frames.show([str(line) for line in range(9)])
    frames.show(["c"])
    assert capsys.readouterr().out == "a" * 9 + "\nb?[2J?\n\x1b[2F\x1b[J0\n1\n2\n\x1b[3F\x1b[Jc\n"


def test_a_watch_in_a_terminal_draws_the_table_in_place(server, capsys, monkeypatch):
    server["answers"] = [Serving().answer()]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    watch(server["url"], monkeypatch, looks=3)
    frames = capsys.readouterr().out.split("\x1b[J")
    assert len(frames) == 3
    assert all("promotions" in frame and "tp1" in frame for frame in frames)
    assert frames[-1].endswith("\n\n"), "what follows does not stand behind ^C"
