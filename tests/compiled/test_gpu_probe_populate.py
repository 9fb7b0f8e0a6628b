"""The part of the GPU probe that populates host pages by several threads: what it calls, what it tells, and that wrong bytes
have no figure. Over the stand-in, with the kernels that this part uses written out for the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from standin.build import build, cuda_include, environment

ROOT = Path(__file__).resolve().parents[2]
THREADS = (1, 2, 4, 8)
REPEATS = 3
MANAGED, PLAIN = ("prefetch", "CPU writes"), "CPU writes, plain memory"
BYTES, BLOCK, WORD = 32 << 20, 2 << 20, 4
"""Of each range; of each call; of what the GPU counts."""
COMPUTING = """
#define _GNU_SOURCE
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern const char* standin_kernel_name(const void* kernel);
static int setting(const char* name) { return getenv(name) ? atoi(getenv(name)) : 0; }

/* Damage is done before the look of this number, from 1. */
static void look(unsigned char* start, size_t units, int stamped, unsigned* right) {
    static int looks;
    looks++;
    struct cudaMemLocation vram = {cudaMemLocationTypeDevice, 0};
    if (looks == setting("LOOK_MIGRATES")) cudaMemPrefetchAsync(start, units * 16, vram, 0, 0);
    if (looks == setting("LOOK_SPOILED")) start[units * 8] ^= 0x80;
    if (looks == setting("LOOK_MISSING")) return;
    for (size_t word = 0; word < units * 4; word++) {
        unsigned expected = stamped && word % 1024 == 0 ? 1 + word / 1024 % 251 : 0;
        *right += ((unsigned*)start)[word] == expected;
    }
}

int __cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t shared, void* stream) {
    int (*next)(const void*, dim3, dim3, void**, size_t, void*) = dlsym(RTLD_NEXT, __func__);
    const char* name = standin_kernel_name(kernel);
    unsigned* start = *(unsigned**)arguments[0];
    size_t count = *(size_t*)arguments[1];
    if (!strcmp(name, "_Z4fillPjmj")) {
        for (size_t i = 0; i < count; i++) start[i] = (unsigned)i * 2654435761u + *(unsigned*)arguments[2];
    } else if (!strcmp(name, "_Z10read_plainILi4EEvPK5uint4mPj")) {
        for (size_t i = 0; i < count * 4; i++) **(unsigned**)arguments[2] ^= start[i];
    } else if (!strcmp(name, "_Z11count_rightPK5uint4mbPj")) {
        look((unsigned char*)start, count, *(unsigned char*)arguments[2], *(unsigned**)arguments[3]);
    }
    return next(kernel, grid, block, arguments, shared, stream);
}

/* A machine with as many NUMA nodes as files of this name. */
FILE* fopen64(const char* path, const char* mode) {
    FILE* (*next)(const char*, const char*) = dlsym(RTLD_NEXT, __func__);
    const char *nodes = "/sys/devices/system/node/", *folder = getenv("NODES");
    char moved[512];
    if (folder && !strncmp(path, nodes, strlen(nodes))) {
        snprintf(moved, sizeof moved, "%s/%s", folder, path + strlen(nodes));
        path = moved;
    }
    return next(path, mode);
}
FILE* fopen(const char* path, const char* mode) { return fopen64(path, mode); }
"""
"""Runs before the stand-in, whose kernels do nothing."""


@dataclass(frozen=True)
class Ran:
    code: int
    err: str
    rows: list[dict[str, Any]]
    calls: list[dict[str, Any]]

    def values(self, what: str, how: str) -> dict[int, list[float]]:
        """By number of threads."""
        return {row["threads"]: row["values"] for row in self.rows if (row["row"], row.get("how")) == (what, how)}


Run = Callable[..., Ran]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("populate")
    variables = os.environ | {"XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.gpu.probe_build"]
    program = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    (folder / "computing.c").write_text(COMPUTING)
    flags = ["-shared", "-fPIC", "-O2", "-Wall", "-Werror", f"-I{cuda_include()}"]
    subprocess.run(["gcc", *flags, str(folder / "computing.c"), "-o", str(folder / "computing.so"), "-ldl"], check=True)
    standin = environment(build(folder / "cuda").parent)
    variables |= standin | {"LD_PRELOAD": f"{folder / 'computing.so'}:{standin['LD_PRELOAD']}", "STANDIN_LOG_ORDER": "1"}

    def run(**settings: object) -> Ran:
        rows, calls = folder / "rows", folder / "calls"
        for path in (rows, calls):
            path.unlink(missing_ok=True)
        ours = {"STANDIN_LOG": str(calls)} | {name: str(value) for name, value in settings.items()}
        command = [program, "populate", str(rows), "3600", "--small"]
        ended = subprocess.run(command, env=variables | ours, capture_output=True, text=True)
        read = ([json.loads(line) for line in path.read_text().splitlines()] for path in (rows, calls))
        return Ran(ended.returncode, ended.stderr, *read)

    return run


@pytest.fixture(scope="module")
def ran(run: Run) -> Ran:
    return run()


def test_every_way_has_a_figure_for_each_number_of_threads(ran: Ran) -> None:
    assert ran.code == 0, ran.err
    assert [row["values"] for row in ran.rows if row["row"] in ("computes", "finished")] == [[1], [1]]
    for how in (*MANAGED, PLAIN):
        rates = ran.values("populate", how)
        assert [*rates] == [*THREADS]
        assert all(len(values) == REPEATS and min(values) > 0 for values in rates.values())
    for how in MANAGED:
        assert [len(values) for values in ran.values("populate_then_read", how).values()] == [REPEATS] * len(THREADS)
    assert not ran.values("populate_then_read", PLAIN), "the GPU cannot read it"
    assert {row["unit"] for row in ran.rows if row["row"] == "populate"} == {"GB/s"}


def test_each_thread_populates_pieces_of_its_own_as_the_extension_does(ran: Ran) -> None:
    """In turn: advice, a prefetch, and a wait for its stream."""
    ranges: list[list[dict[str, Any]]] = []
    for call in ran.calls:
        if call["call"] == "cudaMallocManaged":
            assert call["live_managed_bytes"] <= BYTES + BLOCK, "an earlier one was not freed"
            ranges.append([])
        elif ranges:
            ranges[-1].append(call)
    arms = [(how, threads) for how in MANAGED for threads in THREADS for _ in range(REPEATS)]
    for (how, threads), calls in zip(arms, ranges, strict=True):
        steps, streams = steps_by_thread(calls), streams_by_thread(calls)
        first = min(at for made in steps.values() for name, at in made if name == "advise")
        of_one = ["advise", "prefetch", "wait"] if how == "prefetch" else ["advise"]
        pieces = [range(first + hand * BLOCK, first + BYTES, threads * BLOCK) for hand in range(threads)]
        dealt = [[(name, 0 if name == "wait" else at) for at in mine for name in of_one] for mine in pieces]
        assert sorted(steps.values()) == [[*mine, ("wait", 0)] for mine in dealt]
        assert len({*streams.values()}) == len(streams) == (threads if how == "prefetch" else 0)


def steps_by_thread(calls: list[dict[str, Any]]) -> dict[int, list[tuple[str, int]]]:
    """What each thread that gives advice does, and where."""
    steps: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for call in calls:
        if call["call"] in ("cudaMemAdvise", "cudaMemPrefetchAsync") and call.get("advice") != "SetAccessedBy":
            assert (call["location"], call["nbytes"]) == ("host", BLOCK)
            steps[call["thread"]].append(("advise" if "advice" in call else "prefetch", call["address"]))
        if call["call"] == "cudaStreamSynchronize":
            steps[call["thread"]].append(("wait", 0))
    return {thread: made for thread, made in steps.items() if made[0] != ("wait", 0)}


def streams_by_thread(calls: list[dict[str, Any]]) -> dict[int, str]:
    streams: dict[int, str] = {}
    for call in calls:
        if call["call"] == "cudaMemPrefetchAsync":
            assert streams.setdefault(call["thread"], call["stream"]) == call["stream"]
    return streams


FIRST_WRITES = len(THREADS) * REPEATS + 1
"""The first look at what the CPU wrote."""


@pytest.mark.parametrize(
    ("damage", "look", "told"),
    [
        ("LOOK_SPOILED", 1, f"populate, prefetch, threads 1: 1 of {BYTES // WORD} words are wrong"),
        ("LOOK_SPOILED", FIRST_WRITES, f"populate, CPU writes, threads 1: 1 of {BYTES // WORD} words are wrong"),
        ("LOOK_SPOILED", FIRST_WRITES + 2 * REPEATS, f"CPU writes, threads 4: 1 of {BYTES // WORD} words are wrong"),
        ("LOOK_MISSING", 1, f"populate, prefetch, threads 1: {BYTES // WORD} of {BYTES // WORD} words are wrong"),
    ],
)
def test_a_wrong_byte_ends_the_part_and_has_no_figure(run: Run, damage: str, look: int, told: str) -> None:
    ended = run(**{damage: look})
    assert ended.code == 1
    assert told in ended.err
    figures = [row for row in ended.rows if row["row"] == "populate" and row["how"] != PLAIN]
    assert len(figures) == (look - 1) // REPEATS


def test_pages_that_leave_host_ram_when_they_are_read_have_a_reason_and_no_figure(run: Run) -> None:
    ended = run(LOOK_MIGRATES=REPEATS + 2)
    assert ended.code == 0, ended.err
    reasons = {(row["how"], row["threads"]): row["reason"] for row in ended.rows if "reason" in row}
    assert reasons == {("prefetch", 2): "the GPU's reads brought the pages into VRAM"}
    assert {threads for threads, values in ended.values("populate", "prefetch").items() if values} == {1, 4, 8}
    assert [*ended.values("populate_then_read", "prefetch")] == [1, 4, 8]


@pytest.mark.parametrize(("nodes", "accepted", "prefers"), [(2, 2, "node 1"), (2, 0, "host"), (1, 2, "host")])
def test_pages_lie_on_the_gpus_node_where_the_machine_has_several_and_the_driver_accepts_it(
    run: Run, tmp_path: Path, nodes: int, accepted: int, prefers: str
) -> None:
    for node in range(nodes):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "meminfo").write_text(f"Node {node} MemTotal: 1048576 kB\n")
    ended = run(NODES=tmp_path, STANDIN_NODES=accepted, STANDIN_ATTRIBUTE_134=1)
    assert ended.code == 0, ended.err
    assert {row["prefers"] for row in ended.rows if row.get("how") in MANAGED} == {prefers}
    sent = [call["location"] for call in ended.calls if call["call"] == "cudaMemPrefetchAsync" and call["result"] == 0]
    assert {*sent} == {prefers}
