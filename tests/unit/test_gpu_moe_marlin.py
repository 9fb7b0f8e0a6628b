"""The GPU session's call of SGLang's Marlin MoE function, whose kernels a reference stands for (``builders.marlin``)."""

from __future__ import annotations

import dataclasses
import inspect
from types import ModuleType

import numpy as np
import pytest
import torch
from builders import marlin
from sglang.kernels.ops.moe import moe_wna16_marlin

from sglang_uvm_offload.plugin.slots.marlin import MarlinSlotSeam

pytestmark = pytest.mark.sglang

BATCH = 3


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    from benchmarks.gpu import moe_marlin

    seam = MarlinSlotSeam()
    marlin.on_cpu(
        monkeypatch,
        lambda *a, **k: seam._around_gemm(marlin.gemm, *a, **k),
        lambda *a, **k: seam.around_experts(marlin.FUSED, *a, **k),
    )
    monkeypatch.setattr(moe_marlin, "installed_seam", lambda: seam)
    return moe_marlin


def shape(module):
    from benchmarks.gpu.moe_function import MoeShape

    return MoeShape(experts=4, top_k=2, hidden=256, intermediate=128)


def test_every_tensor_of_the_layer_is_computed_with(module):
    small = shape(module)
    weights = module.SglangMarlin.weights(small, "cpu")
    assert [*weights] == [*module.SglangMarlin.sizes(small)]
    moe = module.SglangMarlin(small, BATCH, lambda address: None, "cpu")
    moe.route(np.array([[0, 1], [1, 2], [2, 0]], dtype=np.int32))

    def output() -> torch.Tensor:
        moe.run(weights)
        return moe.result(weights)

    assert output().shape == (BATCH, small.hidden)
    marlin.assert_each_is_computed_with(weights, output)


def test_where_no_kernel_runs_the_tensors_are_as_large(module, monkeypatch):
    from benchmarks.gpu import moe_function

    monkeypatch.setattr(moe_function, "computes", lambda: False)
    small = dataclasses.replace(shape(module), hidden=512)
    real, stood_in = (
        kind.weights(small, "cpu") for kind in (module.SglangMarlin, moe_function.function_here(module.SglangMarlin))
    )
    assert [*real] == [*stood_in]
    for name, tensor in real.items():
        nbytes = tensor.numel() * tensor.element_size()
        assert (stood_in[name].dtype, stood_in[name].numel() * tensor.element_size()) == (tensor.dtype, nbytes), name


def test_a_gpu_without_sglangs_kernels_is_told_what_it_lacks(module, monkeypatch):
    from benchmarks.gpu import moe_function

    monkeypatch.setattr(moe_function, "computes", lambda: True)
    monkeypatch.setattr(moe_function, "find_spec", lambda name: None if name == "sgl_kernel" else object())
    with pytest.raises(SystemExit, match="SGLang's Marlin kernels need sgl_kernel"):
        moe_function.function_here(module.SglangMarlin)
    monkeypatch.setattr(moe_function, "find_spec", lambda name: object())
    assert moe_function.function_here(module.SglangMarlin) is module.SglangMarlin


@pytest.mark.parametrize("biases", [True, False])
def test_the_variants_that_are_compiled_ahead_are_those_that_sglang_asks_for(module, monkeypatch, biases):
    from sglang.srt.layers.moe.fused_moe_triton import fused_marlin_moe

    from benchmarks.gpu.marlin_build import VARIANTS
    from benchmarks.gpu.modes_parts import MODES as modes

    asked = []
    gemm = fused_marlin_moe.moe_wna16_marlin_gemm

    def recorded(*args, **kwargs):
        given = inspect.signature(moe_wna16_marlin.moe_wna16_marlin_gemm).bind(*args, **kwargs)
        given.apply_defaults()
        asked.append(given.arguments)
        return gemm(*args, **kwargs)

    monkeypatch.setattr(fused_marlin_moe, "moe_wna16_marlin_gemm", recorded)
    weights = dict(module.SglangMarlin.weights(shape(module), "cpu"))
    if not biases:
        weights |= {"w13_weight_bias": None, "w2_weight_bias": None}
    moe = module.SglangMarlin(shape(module), BATCH, lambda address: None, "cpu")
    moe.run(weights)
    names = ("is_ep", "expert_ids_are_sorted", "has_inactive_prefix_count")
    assert [tuple(each[name] for name in names) for each in asked] == 2 * [(False, True, True)]
    [dtype] = {variant.dtype for variant in VARIANTS if variant.has_bias == biases}
    assert dtype == ("bfloat16" if biases else modes["gptq"].arguments["dtype"])
    found = [(each["b_bias_or_none"] is not None, each["zero_inactive_output"]) for each in asked]
    assert found == [variant for variant in VARIANTS if variant.has_bias == biases]


def test_a_variant_that_cannot_be_compiled_is_named(module, monkeypatch):
    from benchmarks.gpu import marlin_build

    monkeypatch.setattr(marlin_build, "ONE", "")
    assert [*marlin_build.build()] == marlin_build.VARIANTS
    monkeypatch.setattr(marlin_build, "ONE", "import sys; sys.exit(sys.argv[1:] == ['float16', 'False', 'True'])")
    with pytest.raises(AssertionError, match=r"compiled: GEMM 2 of experts without biases$"):
        marlin_build.build()
