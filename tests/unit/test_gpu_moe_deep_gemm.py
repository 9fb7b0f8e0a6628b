"""The GPU session's call of SGLang's DeepGEMM runner, whose kernels a reference stands for (``builders.deep_gemm``)."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from builders import deep_gemm, marlin
from sglang.srt.environ import envs
from sglang.srt.layers.moe.moe_runner.deep_gemm import DeepGemmRunnerCore

from sglang_uvm_offload.plugin.slots.deep_gemm import DeepGemmSlotSeam

pytestmark = pytest.mark.sglang

BATCH = 3
RUN = DeepGemmRunnerCore.run


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setenv("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "0")
    from benchmarks.gpu import moe_deep_gemm

    seam = DeepGemmSlotSeam()
    monkeypatch.setattr(DeepGemmRunnerCore, "run", lambda *a, **k: seam.around_run(RUN, *a, **k))
    monkeypatch.setattr(moe_deep_gemm, "installed_seam", lambda: seam)
    monkeypatch.setattr(moe_deep_gemm, "kernels", deep_gemm.Kernels(monkeypatch), raising=False)
    return moe_deep_gemm


def shape(module):
    from benchmarks.gpu.moe_function import MoeShape

    return MoeShape(experts=4, top_k=2, hidden=256, intermediate=128)


def test_every_tensor_of_the_layer_is_computed_with(module):
    small = shape(module)
    weights = module.SglangDeepGemm.weights(small, "cpu")
    assert [*weights] == [*module.SglangDeepGemm.sizes(small)]
    moe = module.SglangDeepGemm(small, BATCH, lambda address: None, "cpu")
    moe.route(np.array([[0, 1], [1, 2], [2, 0]], dtype=np.int32))

    def output() -> torch.Tensor:
        module.kernels.gemms.clear()
        moe.run(weights)
        return moe.result(weights)

    assert output().shape == (BATCH, small.hidden)
    marlin.assert_each_is_computed_with(weights, output)


def test_each_layout_is_asked_for_while_its_step_runs(module):
    small, asked = shape(module), []

    def run(*_: object) -> SimpleNamespace:
        asked.append(envs.SGLANG_DEEPGEMM_STANDARD_LAYOUT.get())
        return SimpleNamespace(hidden_states=None)

    for each in (module.SglangDeepGemm, module.MaskedDeepGemm):
        moe = each(small, BATCH, lambda address: None, "cpu")
        moe._runner.run = run
        moe.run(each.weights(small, "cpu"))
    assert tuple(asked) == module.LAYOUTS
    assert envs.SGLANG_DEEPGEMM_STANDARD_LAYOUT.get() not in module.LAYOUTS


def test_where_no_kernel_runs_the_tensors_are_as_large(module, monkeypatch):
    from benchmarks.gpu import moe_function

    monkeypatch.setattr(moe_function, "computes", lambda: False)
    small = shape(module)
    real, stood_in = (
        kind.weights(small, "cpu") for kind in (module.SglangDeepGemm, moe_function.function_here(module.SglangDeepGemm))
    )
    assert [(name, each.dtype, each.shape) for name, each in real.items()] == [
        (name, each.dtype, each.shape) for name, each in stood_in.items()
    ]
