"""What a soak compares, what it takes for a request that failed, and what it calls growth; the soak itself takes minutes
(scripts/soak.sh)."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, TimeoutError
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError

import pytest
from faults import lives, samples, soak
from faults.lives import LIVES, Life, Planned
from faults.samples import FEW, GROWTH, flat, grown
from faults.served import STRUCK
from faults.traffic import DOMAINS, GREEDY, VARIANTS, Interrupted, Request, alike, answer, requests

from benchmarks import reliability
from scripts.harness.patience import patience


def test_answers_are_alike_but_for_the_last_bits_of_log_probabilities():
    assert alike([["text", [[-1.5, 7, None]]]], [["text", [[-1.5004, 7, None]]]])
    assert not alike([["text", [[-1.5, 7, None]]]], [["text", [[-1.6, 7, None]]]])
    assert not alike([["text", [[-1.5, 7, None]]]], [["text", [[-1.5, 8, None]]]])
    assert not alike(["a"], ["b"])
    assert not alike(["a", "b"], ["a"])
    assert not alike("a", None)


def test_every_domain_gets_every_kind_of_request_with_other_words():
    made = requests()
    each = len(made) // len(DOMAINS)
    kinds = [request.kind for request in made]
    assert all(kinds[n * each : (n + 1) * each] == kinds[:each] for n in range(len(DOMAINS)))
    assert {"short", "long", "streamed", "aborted", "n", "logprobs", "regex", "json_schema", "chat", "completions"} == set(
        kinds
    )
    assert len({str(request) for request in made}) == len(made) == len(DOMAINS) * VARIANTS * 10


def native(text, ended):
    return {"text": text, "meta_info": {"finish_reason": {"type": ended} if ended else None}}


NATIVE = Request("short", "/generate", {"text": "a", "sampling_params": GREEDY})
STREAMED, ABORTED = NATIVE._replace(kind="streamed"), NATIVE._replace(kind="aborted")
OPENAI = Request("completions", "/v1/completions", {"prompt": "a"})


@pytest.mark.parametrize(
    ("request_", "got", "compared"),
    [
        (NATIVE, native("b", "length"), [["b", None]]),
        (NATIVE, [native("b", "length"), native("c", "stop")], [["b", None], ["c", None]]),
        (NATIVE, native("b", "abort"), None),
        (OPENAI, {"choices": [{"text": "b", "finish_reason": "length"}]}, ["b"]),
        (OPENAI, {"choices": [{"text": "b", "finish_reason": "abort"}]}, None),
        (STREAMED, [native("b", None), native("bc", "length")], "bc"),
        (STREAMED, [native("b", None), native("bc", None)], None),
        (STREAMED, [], None),
        (ABORTED, [native("b", None)] * 2, None),
    ],
)
def test_an_answer_that_its_server_cut_short_is_not_compared(request_, got, compared):
    server = SimpleNamespace(post=lambda path, body: got, stream=lambda path, body: iter(got))
    if compared is None:
        with pytest.raises(Interrupted):
            answer(server, request_)
    else:
        assert answer(server, request_) == compared


def refused():
    raise ConnectionRefusedError("nobody listens")


def begun(monkeypatch):
    monkeypatch.setattr(soak, "END_SECONDS", 0.05)
    return soak.Soak([], []), Life(SimpleNamespace(post=None))


@pytest.mark.parametrize(("ends", "failed"), [("asked_to_end", 0), ("died", 0), (None, 1)])
def test_a_request_may_only_fail_where_its_server_ends(ends, failed, monkeypatch):
    soaked, life = begun(monkeypatch)
    if ends:
        getattr(life, ends).set()
    assert not soaked.attempt(life, "short", refused)
    assert (len(soaked.failed), life.interrupted) == (failed, 1)


@pytest.mark.parametrize(
    ("action", "code", "failed"),
    [("save", 500, 0), ("save", 503, 1), ("pause", 500, 1), ("readvise", 409, 0), ("pause", 409, 1)],
)
def test_a_save_may_fail_and_a_choice_of_residents_may_want_for_tokens(action, code, failed, monkeypatch):
    soaked, life = begun(monkeypatch)

    def refuse(path: str, body: object) -> None:
        raise HTTPError(path, code, "refused", Message(), None)

    life.server.post = refuse
    soaked.attempt(life, action, lambda: soak.tell(life, action))
    assert len(soaked.failed) == failed


def test_a_server_that_is_asked_to_end_after_a_request_failed_excuses_nothing(monkeypatch):
    soaked, life = begun(monkeypatch)
    monkeypatch.setattr(life.died, "wait", lambda seconds: life.asked_to_end.set() or False)
    soaked.attempt(life, "short", refused)
    assert len(soaked.failed) == 1


def test_a_wrong_answer_is_kept_with_its_request(monkeypatch):
    soaked, life = begun(monkeypatch)
    soaked.wanted, soaked.expected = [NATIVE], [[["b", None]]]
    for text in ("b", "c"):
        life.server.post = lambda path, body, text=text: native(text, "length")
        soaked.compare(life, 0)
    assert (life.requests, len(soaked.wrong)) == (2, 1)
    assert "c" in soaked.wrong[0]


def test_clients_ask_the_life_that_serves(monkeypatch):
    soaked, life = begun(monkeypatch)
    soaked.begin(life)
    assert soaked.life() is life
    life.died.set()
    with ThreadPoolExecutor(1) as client:
        waiting = client.submit(soaked.life)
        with pytest.raises(TimeoutError):
            waiting.result(0.05)
        soaked.begin(following := Life(SimpleNamespace()))
        assert waiting.result(patience(10)) is following
    soaked.begin(None)
    assert soaked.life() is None


def server(log="", code=None):
    process = SimpleNamespace(pid=0, poll=lambda: code, wait=lambda seconds: 0, terminate=lambda: None)
    return SimpleNamespace(log=log, process=process, open=lambda *_, **__: refused())


@pytest.mark.parametrize(("code", "died"), [(None, False), (1, True)])
def test_a_life_ends_when_its_time_is_over_or_its_server_is(code, died):
    life = Life(server(code=code))
    life.watch(0.01)
    assert (life.died.is_set(), life.asked_to_end.is_set(), life.serves) == (died, not died, False)


def test_processes_that_stay_are_trouble(monkeypatch):
    monkeypatch.setattr(lives, "END_SECONDS", 0.05)
    program = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        life = Life(server())
        life.server.process.pid = program.pid
        life.end()
    finally:
        program.kill()
        program.wait()
    assert life.found(Planned(1.0, ()))["trouble"] == ["left: sleep"]


STATUS = {"moves": 3, "hit_rate": 0.5, "fault": None, "saves": [{"failures": 0}]}
FAILED_SAVES = {**STATUS, "saves": [{"failures": 2}, {"failures": 1}]}
NOTHING = Planned(1.0, ())


@pytest.mark.parametrize(
    ("planned", "status", "log", "died", "trouble"),
    [
        (NOTHING, STATUS, "", False, 0),
        (NOTHING, {**STATUS, "fault": "moves end"}, "", False, 1),
        (NOTHING._replace(ends_moves=True), {**STATUS, "fault": "moves end"}, "", False, 0),
        (NOTHING, FAILED_SAVES, "", False, 1),
        (NOTHING, FAILED_SAVES, f"{STRUCK}no space to save in\n", False, 0),
        (NOTHING, STATUS, "", True, 1),
        (NOTHING._replace(reasons=("this is why",)), STATUS, "a word", True, 1),
        (NOTHING._replace(reasons=("this is why",)), STATUS, "and this is why", True, 0),
    ],
)
def test_trouble_is_what_no_fault_explains(planned, status, log, died, trouble):
    life = Life(server(log), status=status)
    if died:
        life.died.set()
    assert len(life.found(planned)["trouble"]) == trouble


def test_faults_come_in_the_order_and_at_the_share_of_their_life():
    assert sum(planned.share for planned in LIVES) == pytest.approx(1.0)
    for planned in LIVES:
        afters = [job["after"] for job in planned.jobs(100.0)]
        assert afters == sorted(afters)
        assert all(0 < after < 100.0 for after in afters)


def taken(rss):
    return [{"rss": each, "handles": 10, "threads": 5, "shm": 3} for each in rss]


def test_what_fills_at_the_start_is_no_growth_and_what_goes_on_is():
    filled = grown(taken([10] * 20 + [100] * 40))
    assert filled == dict.fromkeys(GROWTH, 0.0)
    leaking = grown(taken(range(1000, 2000, 20)))
    assert leaking["rss"] > GROWTH["rss"]
    assert leaking["handles"] == leaking["threads"] == leaking["shm"] == 0
    assert flat([filled])
    assert not flat([filled, leaking])


def test_too_short_a_life_judges_nothing():
    assert grown(taken([10] * (FEW - 1))) == {}


MAPS_A_FILE = """
import mmap
with open({!r}, "w+b") as file:
    file.truncate(9)
    mapped = mmap.mmap(file.fileno(), 9)
    print(flush=True)
    input()
"""


def test_a_process_is_sampled_as_long_as_it_lives():
    code = MAPS_A_FILE.format(f"/dev/shm/soak-{os.getpid()}")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True, **pipes) as program:
        try:
            program.stdout.readline()
            found = samples.sample(program.pid)
        finally:
            Path(f"/dev/shm/soak-{os.getpid()}").unlink(missing_ok=True)
            program.kill()
            program.wait()
    assert (found["threads"], found["shm"], found["rss"] > 0, found["handles"] > 3) == (1, 1, True, True)
    assert samples.sample(program.pid)["threads"] == 0


LIFE = {"faults": ["a", "b"], "died": True, "requests": 1200, "interrupted": 4, "moves": 7, "moves_ended": True}
LIFE |= {"hit_rate": 0.5, "failed_saves": 1, "growth": {"rss": 0.012}, "trouble": []}
FOUND = {"minutes": 2, "answers": {"chat": 1200, "short": 34}, "wrong": [], "failed": [], "actions": {"pause": 2}, "left": []}
FOUND |= {"lives": [LIFE, {**LIFE, "growth": {}, "faults": [], "died": False, "moves_ended": False}]}


def test_the_page_says_what_was_asked_and_found():
    page = reliability.markdown([], {**FOUND, "wrong": ["x"]})
    assert "1,234 requests in 2 minutes: 1,200 chat, 34 short." in page
    assert "Wrong answers: 1. Failed requests: 0. Left behind: 0. Trouble that no fault explains: 0." in page
    assert "Told: pause 2." in page
    assert "| 1 | a<br>b | by itself, with its reason | 1,200 | 4 | 7, then ended | 50.0% | 1 |" in page
    assert "| 2 | none | when asked | 1,200 | 4 | 7 | 50.0% | 1 |" in page
    assert "rss +1.2%" in page


@pytest.mark.parametrize(
    ("change", "good"),
    [
        ({}, True),
        ({"wrong": ["x"]}, False),
        ({"failed": ["x"]}, False),
        ({"left": ["x"]}, False),
        ({"lives": [{**LIFE, "trouble": ["x"]}]}, False),
        ({"lives": [LIFE, {**LIFE, "growth": {"rss": 0.5}}]}, False),
    ],
)
def test_a_soak_is_good_without_any_of_what_it_looks_for(change, good):
    assert soak.good({**FOUND, **change}) == good
