"""What the GPU probe makes of the times of replays around a move: its own code, compiled for this machine."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from standin.build import cuda_include

PROBE = Path(__file__).parents[2] / "benchmarks" / "gpu" / "probe"
PROGRAM = """
#include <cstdio>
#include "stalls.h"
int main() {{
    const stall it = stall_of({{{times}}}, {moment}, {meanwhile});
    printf("{{\\"before\\": %g, \\"slowest\\": %g, \\"after\\": %g, \\"lost\\": %g, \\"control\\": %g}}",
           it.before, it.slowest, it.after, it.lost, it.control);
}}
"""


def stall(folder: Path, times: list[float], moment: int, meanwhile: int) -> dict[str, float]:
    source, program = folder / "stall.cpp", folder / "stall"
    source.write_text(PROGRAM.format(times=", ".join(map(str, times)), moment=moment, meanwhile=meanwhile))
    paths = ["-I", str(PROBE), "-I", str(cuda_include())]
    subprocess.run(["g++", "-std=c++17", *paths, "-o", str(program), str(source)], check=True)
    found: dict[str, float] = json.loads(subprocess.run([str(program)], capture_output=True, text=True, check=True).stdout)
    return found


@pytest.mark.parametrize(
    ("beside", "after", "lost"),
    [
        ([5.0, 5.0, 5.0], 2.0, 0.0),  # the promotion cost nothing, and replays are faster once it is over
        ([5.0, 9.0, 6.0], 2.0, 5.0),
        ([5.0, 9.0, 2.0], 2.0, 1.0),  # what the last one gained counts
        ([5.0, 7.0, 8.0], 8.0, -4.0),  # a demotion: slower replays after it are no loss
    ],
)
def test_only_replays_beside_the_move_lose_and_what_they_gain_counts(
    tmp_path: Path, beside: list[float], after: float, lost: float
) -> None:
    found = stall(tmp_path, [99.0] + [5.0] * 7 + beside + [after] * 8, 8, len(beside))
    assert (found["before"], found["after"]) == (5.0, after)
    assert found["lost"] == pytest.approx(lost)
    assert found["slowest"] == max([*beside, after])
    assert found["control"] == 0.0


def test_as_many_replays_before_the_move_are_the_control(tmp_path: Path) -> None:
    found = stall(tmp_path, [99.0, 5.0, 5.0, 5.0, 5.0, 5.0, 6.0, 5.5] + [5.0, 5.0] + [5.0] * 8, 8, 2)
    assert (found["lost"], found["control"]) == pytest.approx((0.0, 1.5))
    longer = stall(tmp_path, [99.0] + [5.0] * 3 + [6.0] * 4 + [5.0] * 16, 8, 8)
    assert longer["control"] == pytest.approx(8.0), "for as many as there were beside the move"


def test_a_call_that_held_the_thread_is_followed_by_one_replay_that_counts(tmp_path: Path) -> None:
    assert stall(tmp_path, [99.0] + [5.0] * 7 + [7.0] + [5.0] * 8, 8, 0)["lost"] == pytest.approx(2.0)
