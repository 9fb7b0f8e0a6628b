"""The architectures that SGLang registers, by its files: which reach its ``FusedMoE`` layer, and which compute experts
themselves, so that the launch refuses them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from architectures import registry
from builders.launch import launch

from sglang_uvm_offload.plan.architectures import model_files
from sglang_uvm_offload.plugin.checks import launch_checks
from sglang_uvm_offload.plugin.checks.launch_checks import DIRECT_KERNEL_MODELS
from sglang_uvm_offload.requested_config import parse

pytestmark = pytest.mark.sglang

FOUND = json.loads(registry.FOUND.read_text())

SERVED = {
    "DeepseekOCRForCausalLM": "by its config, its language model is of a class with SGLang's layer or of one without",
    "DeepseekVL2ForCausalLM": "by its config, its language model is of a class with SGLang's layer or of one without",
    "Dots3NoteForCausalLM": "its encoder of images has experts, which stay in VRAM",
    "InklingForConditionalGenerationMTP": "drafts for an architecture that is refused",
    "K2HorizonForCausalLM": "its attention has experts for values, which stay in VRAM",
    "XllmForCausalLM": "its attention has experts for values, which stay in VRAM",
    "MiniCPMForCausalLM": "names experts in a checkpoint, and builds none",
    "MiniCPMSALAForCausalLM": "names experts in a checkpoint, and builds none",
    "MiniCPM3ForCausalLM": "names experts in a checkpoint, and builds none",
}
"""What reaches kernels of experts, or counts experts without SGLang's layer, and is not refused for that."""


def test_what_the_models_of_sglang_reach_is_as_it_was_found() -> None:
    assert registry.architectures().keys() == model_files().keys()
    assert registry.found() == FOUND, "look at what is new, then: cd tests && python -m architectures.registry"


def test_every_model_with_code_of_its_own_for_experts_is_refused() -> None:
    own = {*FOUND["kernels"], *FOUND["other"]}
    assert own - SERVED.keys() == DIRECT_KERNEL_MODELS
    assert own >= SERVED.keys()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.refused("Architecture", name)) for name in sorted(DIRECT_KERNEL_MODELS)]
)
def test_a_model_with_code_of_its_own_for_experts_ends_the_launch(name: str, record_property: Any) -> None:
    needed = {"layer_types": [], "local_layer_ids": []}  # which SGLang reads of Beam's and Inkling's
    _, model = launch({"architectures": [name], **needed})
    _, [reason] = launch_checks._experts(parse({"num_resident": 2}), model)
    assert reason.startswith(f"{name}: this model's code computes experts without SGLang's FusedMoE layer")
    record_property("reason", reason)
