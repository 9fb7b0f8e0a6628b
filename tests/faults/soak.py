"""Mixed traffic for minutes, while faults end the server or pass: see scripts/soak.sh."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
import urllib.error
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from builders.plugins import saboteur
from checkpoints import unserved_models
from faults.lives import BROKEN, LIVES, Life, Planned
from faults.samples import flat
from faults.served import code
from faults.servers import END_SECONDS, FLAGS, TESTS, Servers, shared_memory
from faults.traffic import DOMAINS, Request, alike, answer, requests

from benchmarks import reliability

CLIENTS = 4
DOMAIN_SECONDS = 20.0
"""How long most requests are of one domain; then of the next."""
ACTIONS = ("readvise", "save", "pause", "resume")
ACTION_SECONDS = 7.0


class Soak:
    """Clients that ask whatever server lives and compare its answers, and an operator, until it is over."""

    def __init__(self, wanted: Sequence[Request], expected: Sequence[Any]):
        self.wanted, self.expected = wanted, expected
        self.answered: Counter[str] = Counter()
        self.actions: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.failed: list[str] = []
        """Requests without an answer while the server lived on."""
        self._begun = time.monotonic()
        self._life: Life | None = None
        self._over = False
        self._changed = threading.Condition()

    @contextmanager
    def clients(self) -> Iterator[None]:
        with ThreadPoolExecutor(CLIENTS + 1) as threads:
            tasks = [threads.submit(self.ask, seed) for seed in range(CLIENTS)]
            tasks.append(threads.submit(self.operate))
            try:
                yield
            finally:
                self.begin(None)
            for task in tasks:
                task.result()

    def begin(self, life: Life | None) -> None:
        """From now on it is this life that clients ask; None: it is over."""
        with self._changed:
            self._life, self._over = life, life is None
            self._changed.notify_all()

    def life(self) -> Life | None:
        """That which serves, as soon as there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or (self._life is not None and self._life.serves))
            return self._life

    def ask(self, seed: int) -> None:
        draw, each = random.Random(seed), len(self.wanted) // len(DOMAINS)
        while (life := self.life()) is not None:
            domain = int((time.monotonic() - self._begun) / DOMAIN_SECONDS) * each % len(self.wanted)
            number = domain + draw.randrange(each) if draw.random() < 0.8 else draw.randrange(len(self.wanted))
            request = self.wanted[number]
            self.attempt(life, request.kind, lambda life=life, number=number: self.compare(life, number))

    def compare(self, life: Life, number: int) -> None:
        request = self.wanted[number]
        got = answer(life.server, request)
        with self._changed:
            life.requests += 1
            self.answered[request.kind] += 1
            if not alike(got, self.expected[number]):
                self.wrong.append(f"{request.kind} {request.body}: {got}, not {self.expected[number]}"[:500])

    def operate(self) -> None:
        draw = random.Random(-1)
        while (life := self.life()) is not None:
            action = draw.choice(ACTIONS)
            if self.attempt(life, action, lambda life=life, action=action: tell(life, action)):
                self.actions[action] += 1
            life.asked_to_end.wait(ACTION_SECONDS)

    def attempt(self, life: Life, what: str, request: Callable[[], object]) -> bool:
        """Whether it was answered. A request may only fail where its server ends."""
        asked = life.asked_to_end.is_set()
        try:
            request()
            return True
        except BROKEN as error:
            excused = asked or life.asked_to_end.is_set() or life.died.wait(END_SECONDS)
            with self._changed:
                life.interrupted += 1
                if not excused:
                    self.failed.append(f"{what}: {type(error).__name__}: {error}"[:500])
            return False


def tell(life: Life, action: str) -> None:
    """A save that failed is answered so; ``Life.found`` says whether a fault explains it. Residents are not chosen again where
    there were too few tokens since the last choice."""
    try:
        life.server.post("/expert_offload", {"action": action})
    except urllib.error.HTTPError as error:
        if (action, error.code) not in (("save", 500), ("readvise", 409)):
            raise


def soak(folder: Path, minutes: float, lives: Sequence[Planned] = LIVES) -> dict[str, Any]:
    servers = Servers(folder)
    saved = folder / "saved"
    saved.mkdir()
    wanted, found = requests(), []
    try:
        with servers.server({}) as server:
            soaked = Soak(wanted, [answer(server, request) for request in wanted])
        before = shared_memory()
        with soaked.clients():
            for number, planned in enumerate(lives):
                found.append(live(servers, folder / f"life {number}", saved, planned, 60 * minutes * planned.share, soaked))
        return {
            "minutes": minutes,
            "answers": dict(sorted(soaked.answered.items())),
            "wrong": soaked.wrong,
            "failed": soaked.failed,
            "actions": dict(sorted(soaked.actions.items())),
            "lives": found,
            "left": sorted({*(shared_memory() - before), *(path.name for path in saved.glob(".*"))}),
        }
    finally:
        servers.close()


def live(servers: Servers, folder: Path, saved: Path, planned: Planned, seconds: float, soaked: Soak) -> dict[str, Any]:
    """One life, on the files that the one before has left."""
    folder.mkdir()
    profile = saved / "profile.npz"
    flags = {**FLAGS, "expert_offload_save_profile": profile, "expert_offload_trace": saved / "trace.npz"}
    if profile.exists():
        flags["expert_offload_profile"] = profile
    with servers.server(saboteur(folder, code(TESTS, *planned.jobs(seconds))), **flags) as server:
        life = Life(server)
        soaked.begin(life)
        life.watch(seconds)
        life.end()
        return life.found(planned)


def good(found: dict[str, Any]) -> bool:
    """Nothing is wrong, lost or left, faults explain all trouble, and nothing grows."""
    trouble = [found["wrong"], found["failed"], found["left"], *(life["trouble"] for life in found["lives"])]
    return not any(trouble) and flat(life["growth"] for life in found["lives"])


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
    return 0 if good(found) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
