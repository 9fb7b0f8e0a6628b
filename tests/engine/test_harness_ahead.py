"""Servers that import ahead of their turn: they wait stopped, go on in ``with``, and none is left behind."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from scripts.harness.ahead import IMPORTED, start_ahead
from scripts.harness.patience import patience
from scripts.harness.server import EngineFailed, Server

SERVES = f"""
import http.server, sys, time
from pathlib import Path
print("importing", flush=True)
print({IMPORTED!r}, flush=True)
went_on = Path("went-on")
for _ in range(50):  # time to be stopped in
    time.sleep(0.01)
went_on.touch()
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""


def server(program: str) -> Server:
    return Server(Path(), command=[sys.executable, "-c", program], seconds=patience(30))


def went_on(each: Server) -> bool:
    return (each.folder / "went-on").exists()


def stopped(each: Server) -> bool:
    return each.process is not None and "State:\tT" in Path(f"/proc/{each.process.pid}/status").read_text()


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_each_stops_once_it_has_imported_and_goes_on_in_its_turn() -> None:
    servers = [server(SERVES), server(SERVES)]
    start_ahead(servers, patience(30))
    pids = [each.process.pid for each in servers if each.process]
    assert [stopped(each) for each in servers] == [True, True]
    time.sleep(1)  # longer than they need to go on
    assert not any(map(went_on, servers))
    for each, pid, waiting in zip(servers, pids, (servers[1:], []), strict=True):
        with each:
            assert each.process is not None
            assert each.process.pid == pid, "started anew"
            assert went_on(each)
            assert all(map(stopped, waiting))
        assert gone(pid)


@pytest.mark.parametrize("program", ["import time; time.sleep(600)", "raise SystemExit('no such flag')"])
def test_one_that_does_not_get_there_is_ended_and_started_anew_in_its_turn(program: str) -> None:
    slow, good = server(program), server(SERVES)
    start_ahead([slow, good], patience(5))
    assert slow.process is None
    assert stopped(good)
    good.give_up()
    slow.seconds = 0.5
    with pytest.raises(EngineFailed, match=r"not ready|exit code 1"), slow:
        pass
