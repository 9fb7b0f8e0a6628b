"""Mixed traffic for minutes: see scripts/soak.sh."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import reliability
from checkpoints import unserved_models
from faults.servers import FLAGS, Servers, session_of
from faults.traffic import DOMAINS, Request, alike, answer, requests
from harness.server import Server

CLIENTS = 4
DOMAIN_SECONDS = 20.0
"""How long most requests are of one domain; then of the next."""
ACTIONS = ("readvise", "save", "pause", "resume")
ACTION_SECONDS, SAMPLE_SECONDS = 7.0, 2.0
SETTLED = 1 / 3
"""The share of the time that is no part of the judgement: caches fill."""
GROWTH = {"rss": 0.03, "handles": 0.02, "threads": 0.02, "shm": 0.0}
"""How much of its median each may grow from the first half of the judged time to the second."""


def sample(pid: int) -> dict[str, int]:
    """Of all processes of the session: bytes of memory, open handles, threads; and the entries of /dev/shm."""
    total = {"rss": 0, "handles": 0, "threads": 0, "shm": len(os.listdir("/dev/shm"))}
    for process in session_of(pid):
        with contextlib.suppress(OSError):  # it has just ended
            total["rss"] += int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            total["handles"] += len(list((process / "fd").iterdir()))
            total["threads"] += len(list((process / "task").iterdir()))
    return total


def grown(samples: Sequence[dict[str, int]]) -> dict[str, float]:
    """By how much of its median each grew between the halves of the judged time."""
    if len(samples) < 2:
        return dict.fromkeys(GROWTH, 0.0)
    judged = samples[int(SETTLED * len(samples)) :]
    half = len(judged) // 2
    found = {}
    for name in GROWTH:
        first, second = (statistics.median(each[name] for each in part) for part in (judged[:half], judged[half:]))
        found[name] = round(second / max(first, 1) - 1, 4)
    return found


class Soak:
    """Clients that ask a server and compare its answers, until the time is over."""

    def __init__(self, server: Server, wanted: Sequence[Request], expected: Sequence[Any], seconds: float):
        self.server, self.wanted, self.expected = server, wanted, expected
        self.answered: Counter[str] = Counter()
        self.actions: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.samples: list[dict[str, int]] = []
        self.begun = time.monotonic()
        self.until = self.begun + seconds
        self._lock = threading.Lock()

    def run(self) -> None:
        with ThreadPoolExecutor(CLIENTS + 2) as threads:
            tasks = [threads.submit(self.ask, seed) for seed in range(CLIENTS)]
            for task in [*tasks, threads.submit(self.operate), threads.submit(self.look)]:
                task.result()

    def going_on(self) -> bool:
        return time.monotonic() < self.until

    def ask(self, seed: int) -> None:
        draw, each = random.Random(seed), len(self.wanted) // len(DOMAINS)
        while self.going_on():
            domain = int((time.monotonic() - self.begun) / DOMAIN_SECONDS) * each % len(self.wanted)
            number = domain + draw.randrange(each) if draw.random() < 0.8 else draw.randrange(len(self.wanted))
            request = self.wanted[number]
            got = answer(self.server, request)
            with self._lock:
                self.answered[request.kind] += 1
                if not alike(got, self.expected[number]):
                    self.wrong.append(f"{request.kind} {request.body}: {got}, not {self.expected[number]}"[:500])

    def operate(self) -> None:
        """Ends with residents that may change."""
        draw = random.Random(-1)
        while self.going_on():
            time.sleep(ACTION_SECONDS)
            action = draw.choice(ACTIONS) if self.going_on() else "resume"
            self.server.post("/expert_offload", {"action": action})
            self.actions[action] += 1

    def look(self) -> None:
        assert self.server.process is not None
        while self.going_on():
            self.samples.append(sample(self.server.process.pid))
            time.sleep(SAMPLE_SECONDS)


def soak(folder: Path, minutes: float) -> dict[str, Any]:
    servers = Servers(folder)
    saved = folder / "saved"
    saved.mkdir()
    wanted = requests()
    try:
        with servers.server({}) as server:
            expected = [answer(server, request) for request in wanted]
        flags = {"expert_offload_save_profile": saved / "profile.npz", "expert_offload_trace": saved / "trace.npz"}
        with servers.server({}, **FLAGS, **flags) as server:
            soaked = Soak(server, wanted, expected, 60 * minutes)
            soaked.run()
            (status,) = server.get("/expert_offload")["ranks"]
        return {
            "minutes": minutes,
            "answers": dict(sorted(soaked.answered.items())),
            "wrong": soaked.wrong,
            "actions": dict(sorted(soaked.actions.items())),
            "moves": status["moves"],
            "hit_rate": round(status["hit_rate"], 3),
            "fault": status["fault"],
            "saves_failed": sum(save["failures"] for save in status["saves"]),
            "growth": grown(soaked.samples),
        }
    finally:
        servers.close()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("minutes", type=float)
    parser.add_argument("--out", type=Path, help="write only this JSON")
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(unserved_models())
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        found = soak(folder, options.minutes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    (options.out or reliability.SOAK).write_text(json.dumps(found, indent=1) + "\n")
    if options.out is None:
        reliability.write_page()
    print(json.dumps(found, indent=1))
    flat = all(found["growth"][name] <= most for name, most in GROWTH.items())
    return 0 if flat and not found["wrong"] and not found["saves_failed"] and found["fault"] is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
