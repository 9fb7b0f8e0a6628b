"""A server's measured link reaches the later launches and plans of its machine, over the stand-in driver at several rates."""

from __future__ import annotations

import json
from typing import Any

import pytest
from checkpoints import Checkpoints
from nursery import Nurseries

LINKS = {"none": "", "fast": "51,50,50,54", "slow in place": "35,20,33,52", "slow": "26,25,24,27"}
"""Rates as STANDIN_LINK has them. None: before any server has started."""

PROGRAM = """
import contextlib, io, json, os, shutil
from types import SimpleNamespace as Made
import numpy as np
from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.cuda.memory import CudaMemory
from sglang_uvm_offload.files.cache import cache_root
from sglang_uvm_offload.memory.layout import BLOCK_BYTES
from sglang_uvm_offload.memory.protocol import Location, Span
from sglang_uvm_offload.plugin.rank import link
from sglang_uvm_offload.plugin.rank.backend import Cuda

memory = CudaMemory()
held = memory.allocate(16 * BLOCK_BYTES, "w13")
bytes_ = memory.tensor(held)
memory.place(held, [Span(0, 16 * BLOCK_BYTES)], Location.HOST)
blocks = held.address + BLOCK_BYTES * np.arange(16)
tensor = Made(offloaded_blocks=lambda: blocks, layout=Made(expert_bytes=1 << 20))
world = Made(world_size=1, rank_in_group=0, barrier=lambda: None, all_gather_object=lambda own: [own])
link.get_world_group = lambda: world

def said(*words):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        main(list(words))
    return out.getvalue()

answers = dict()
for name, rates in {links}.items():
    shutil.rmtree(cache_root() / "links", ignore_errors=True)
    if rates:
        os.environ["STANDIN_LINK"] = rates
        assert link.measure(Cuda(0), 0, [Made(tensors=[tensor])]).measured.ranks == 1
    answers[name] = (said("doctor", "--", *{launch}), said("plan", *{plan}, "--explain"), said("plan", *{plan}, "--json"),
                     said("plan", *{plan}, "--json", "--link-gbps", "55"),
                     said("plan", *{plan}, "--json", "--read-efficiency", "0.5"))
print("RESULT", json.dumps(answers))
"""


@pytest.fixture(scope="module")
def answers(checkpoints: Checkpoints, sglang_on_standin: Nurseries) -> dict[str, dict[str, Any]]:
    model = str(checkpoints("qwen3_moe", expert_size=512))
    launch = ["--model-path", model, "--device", "cuda", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
    launch += [
        "--expert-offload-num-resident",
        "8",
        "--expert-offload-config",
        '{"stream_buffer_gb": 0.1}',
        "--log-level",
        "error",
    ]
    ended = sglang_on_standin.run(PROGRAM.format(links=LINKS, launch=launch, plan=[model, "--num-resident", "4"]))
    assert ended.code == 0, ended.err[-4000:]
    answers = json.loads(ended.out.rpartition("RESULT ")[2])
    names = ("doctor", "plan", "json", "given", "share")
    return {name: dict(zip(names, told, strict=True)) for name, told in answers.items()}


def speed(answer: dict[str, Any], plan: str = "json") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer[plan])["speeds"][0]
    return found


def test_doctor_tells_the_link_and_why_it_is_slow(answers) -> None:
    assert "the link to host memory" not in answers["none"]["doctor"]
    assert "ok       the link to host memory: scattered reads 50.0 GB/s, sequential 51.0, " in answers["fast"]["doctor"]
    assert "reads of offloaded experts are slow" not in answers["fast"]["doctor"]
    slow = answers["slow in place"]["doctor"]
    assert "WARNING  reads of offloaded experts are slow: neighbouring blocks are read at 35.0 GB/s" in slow
    assert "WARNING  reads of offloaded experts are slow: kernels read more slowly than the copy engine" in slow
    assert "the copy engine alone reaches 27.0 of 55 GB/s" in answers["slow"]["doctor"]


def test_a_launch_streams_from_fewer_tokens_where_reads_in_place_are_slower_than_copies(answers) -> None:
    tokens = {
        name: int(answer["doctor"].partition("--expert-offload-config stream_tokens ")[2].split(":")[0])
        for name, answer in answers.items()
    }
    assert tokens["none"] == tokens["fast"] == tokens["slow"]
    assert tokens["slow in place"] < tokens["fast"]


def test_a_plan_predicts_from_the_measured_rates(answers) -> None:
    step = {name: speed(answer) for name, answer in answers.items()}
    missed = step["fast"]["missed_bytes"]
    for name, rate in (("fast", 50e9), ("slow in place", 20e9), ("slow", 25e9)):
        assert step[name]["missed_bytes"] == missed
        read = step[name]["decode_step_s"] - step["fast"]["decode_step_s"]
        assert read == pytest.approx(missed / rate - missed / 50e9)
        assert step[name]["slowest"] is None, "no published range where this machine was measured"
    assert step["none"]["slowest"] is not None
    assert json.loads(answers["slow"]["json"])["stream_tokens"] == json.loads(answers["none"]["json"])["stream_tokens"]
    assert json.loads(answers["slow in place"]["json"])["stream_tokens"] < json.loads(answers["none"]["json"])["stream_tokens"]


def test_a_plan_says_that_its_rates_were_measured_here(answers) -> None:
    assert "read rate 20.0 GB/s, copy rate 33.0 GB/s: measured here" in answers["slow in place"]["plan"]
    assert "link: scattered reads 20.0 GB/s, sequential 35.0" in answers["slow in place"]["plan"]
    assert "(as a server measured it, 20" in answers["slow in place"]["plan"]
    assert "measured here" not in answers["none"]["plan"]


def test_a_given_rate_overrules_the_measured_one(answers) -> None:
    assert speed(answers["slow"], "given") == speed(answers["fast"], "given")
    assert speed(answers["slow"], "given")["decode_step_s"] < speed(answers["slow"])["decode_step_s"]
    half = speed(answers["fast"], "share")
    later = half["missed_bytes"] / (0.5 * 54e9) - half["missed_bytes"] / 50e9
    assert half["decode_step_s"] - speed(answers["fast"])["decode_step_s"] == pytest.approx(later)
