"""Runs a program's work at many random timings over the stand-in driver."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

from standin.order import Order
from standin.run import Standin

SEEDS = 200

BEGINNING = """
import ctypes
import threading
shuffle = ctypes.CDLL("libcuda.so.1").standin_shuffle
shuffle.argtypes = [ctypes.c_longlong]
stream_a, stream_b = torch.cuda.Stream(), torch.cuda.Stream()
def cells(*values):
    return on_device(np.array(values, dtype=np.int32))
"""

EACH_SEED = """
outcomes = []
for seed in range({seeds}):
    begin()
    torch.cuda.synchronize()
    shuffle(seed)
    work()
    torch.cuda.synchronize()
    outcomes.append(outcome())
print(json.dumps(outcomes))
"""


@dataclass(frozen=True)
class Shuffled:
    """A program's outcome for each seed, and its calls with that seed."""

    outcomes: list[Any]
    rounds: list[list[dict]]
    order: Order
    before: list[dict]
    """The calls before the first seed."""


def run_shuffled(standin: Standin, program: str, seeds: int = SEEDS) -> Shuffled:
    """Runs the program's ``begin()``, then ``work()`` with each seed's timing, and collects its ``outcome()``."""
    ran = standin.run(BEGINNING + textwrap.dedent(program) + EACH_SEED.format(seeds=seeds), log_order=1)
    before, rounds = list[dict](), list[list[dict]]()
    outcomes = ran.said
    assert isinstance(outcomes, list)
    for call in ran.calls:
        if call["call"] == "standin_shuffle":
            rounds.append([])
        else:
            (rounds[-1] if rounds else before).append(call)
    assert len(rounds) == len(outcomes) == seeds
    return Shuffled(outcomes, rounds, Order(ran.calls), before)


def named(calls: list[dict], *names: str) -> list[dict]:
    return [call for call in calls if names and (call["call"] in names or call.get("kernel") in names)]
