"""Each architecture that SGLang builds with its ``FusedMoE`` layer is built with the plugin's hooks on, small and on a CPU: all
of its experts are taken over, to the byte."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from architectures.names import DRAFT, EXCEPTIONS, FOLDER, FOUND, UNBUILDABLE, served
from nursery import Nursery

from sglang_uvm_offload.plugin.checks.launch_checks import DIRECT_KERNEL_MODELS

EVERY_RUN = (
    "GlmMoeDsaForCausalLM",
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",
    "MixtralForCausalLM",
    "OlmoeForCausalLM",
    "GptOssForCausalLM",
)
"""Among those that the tests' other servers import."""
HIDDEN = 256
EXPERT_SIZES = (128, 512)
"""For configurations that state a size for their experts, and for those that state one size for all."""
PLACEABLE = 64 << 10
"""Bytes of an expert in a tensor that is managed."""


def program(*names: str, plugin: bool = True) -> str:
    return f"""
        import os, sys
        sys.path.insert(0, {str(FOLDER.parent)!r})
        from architectures.build import main
        main(*{names!r}, plugin={plugin})
        os._exit(0)  # nothing of SGLang is to be ended in order
    """


def built(python: Nursery, *names: str, plugin: bool = True) -> dict[str, Any]:
    ended = python.run(program(*names, plugin=plugin))
    assert ended.code == 0, ended.err[-4000:]
    return json.loads(ended.out.rpartition("RESULT ")[2])


def assert_accounted(name: str, builds: list[dict[str, Any]]) -> None:
    """``builds``: with some experts a layer, and with twice as many."""
    exception = EXCEPTIONS.get(name, {})
    for build in builds:
        layers = {path: layer for path, layer in build["modules"].items() if not layer["is_shared"]}
        experts, top_k = build["stated"]
        assert experts == build["experts"], "the launch reads another number of experts from the config"
        given = {layer["top_k"] - layer["shared"] for layer in layers.values() if layer["top_k"] is not None}
        assert given | {top_k} == {2}, "and of a token"
        assert len(build["managed"]) == len(layers) * exception.get("times", 1)
        for (path, layer), managed in zip(layers.items(), build["managed"][-len(layers) :], strict=True):
            experts = build["experts"] + layer["shared"]
            sizes = [exception["expert"]] if "expert" in exception else [3 * HIDDEN * size for size in EXPERT_SIZES]
            assert layer["experts"] == managed["experts"] == experts
            assert managed["managed"] in [experts * 2 * size for size in sizes]
            assert managed["managed"] + managed["plain"] == layer["bytes"]
            assert managed["plain"] < experts * PLACEABLE
            number = re.findall(r"\blayers\.(\d+)\.", path)
            assert DRAFT.search(name) or not number or managed["layer"] == int(number[-1])
        routed = sum(layer["bytes"] * (layer["experts"] - layer["shared"]) // layer["experts"] for layer in layers.values())
        assert build["planned"]["bytes"] == routed, "plan counts other experts"
        assert (build["planned"]["experts"], build["planned"]["top_k"]) == (build["experts"], 2)
    fewer, more = (build["outside"] for build in builds)
    assert fewer.keys() == more.keys(), "experts outside of SGLang's layer"
    for path, shape in more.items():
        grown = math.prod(shape) - math.prod(fewer[path])
        assert grown <= builds[0]["experts"] * HIDDEN, f"{path} has more than a row of the router for an expert"


@pytest.mark.parametrize("name", EVERY_RUN)
def test_experts_of_a_much_used_architecture_are_all_taken_over(name: str, sglang: Nursery) -> None:
    came = built(sglang, name)[name]
    assert not isinstance(came, str), came
    assert_accounted(name, came)


def cases() -> list[Any]:
    tried = [name for name in FOUND["FusedMoE"] if name not in DIRECT_KERNEL_MODELS | UNBUILDABLE]
    dense = [name for name in tried if "no_experts" in EXCEPTIONS.get(name, {})]
    return [pytest.param(name, marks=() if name in dense or DRAFT.search(name) else served(name)) for name in tried]


@pytest.mark.nightly
@pytest.mark.parametrize("name", cases())
def test_all_experts_are_taken_over(name: str, every_model: Nursery) -> None:
    exception = EXCEPTIONS.get(name, {})
    came = built(every_model, name)[name]
    if "no_experts" in exception:
        assert "the model has no MoE layer" in came
    elif "not_tried" in exception:
        assert isinstance(came, str), f"it is built now: take not_tried out of {FOLDER / 'exceptions.json'}"
        assert exception["not_tried"] in came
        pytest.skip(f"not built on a CPU by these tests: {came.splitlines()[0]}")
    else:
        assert not isinstance(came, str), came
        assert_accounted(name, came)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.sglang_fails("Architecture", name)) for name in sorted(UNBUILDABLE)]
)
def test_sglang_itself_cannot_build_it(name: str, every_model: Nursery, record_property: Any) -> None:
    came = built(every_model, name, plugin=False)[name]
    assert isinstance(came, str), f"it is built now: take sglang_fails out of {FOLDER / 'exceptions.json'}"
    assert EXCEPTIONS[name]["sglang_fails"] in came
    record_property("reason", came.splitlines()[0])


@pytest.mark.nightly
def test_sglang_registers_the_architectures_that_its_files_name(every_model: Nursery) -> None:
    ended = every_model.run("from sglang.srt.models.registry import ModelRegistry\nprint(*ModelRegistry.models)")
    known = set(ended.out.split())
    assert set(FOUND["FusedMoE"]) | FOUND["kernels"].keys() | set(FOUND["other"]) <= known
