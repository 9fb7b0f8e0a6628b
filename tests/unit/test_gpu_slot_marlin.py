"""The GPU session's call of SGLang's Marlin MoE function, whose kernels a reference stands for (``builders.marlin``)."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import marlin

from sglang_uvm_offload.plugin.slot_seam_marlin import MarlinSlotSeam

GPU = str(Path(__file__).resolve().parents[2] / "benchmarks" / "gpu")
BATCH = 3


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator:
    monkeypatch.syspath_prepend(GPU)
    import slot_marlin

    seam = MarlinSlotSeam()
    marlin.on_cpu(
        monkeypatch,
        lambda *a, **k: seam._around_gemm(marlin.gemm, *a, **k),
        lambda *a, **k: seam.around_experts(marlin.FUSED, *a, **k),
    )
    monkeypatch.setattr(slot_marlin, "installed_seam", lambda: seam)
    yield slot_marlin
    for name in [name for name, each in sys.modules.items() if str(getattr(each, "__file__", "")).startswith(GPU)]:
        del sys.modules[name]


def shape(module):
    from shapes import MoeShape

    return MoeShape("small", 1, experts=4, top_k=2, hidden=256, intermediate=128)


def test_every_tensor_of_the_layer_is_computed_with(module):
    small = shape(module)
    weights = module.SglangMarlin.weights(small, "cpu")
    assert tuple(weights) == module.NAMES
    moe = module.SglangMarlin(small, BATCH, lambda address: None, "cpu")
    moe.route(np.array([[0, 1], [1, 2], [2, 0]], dtype=np.int32))

    def output() -> torch.Tensor:
        moe.run(weights)
        return moe.result(weights)

    expected = output()
    assert expected.shape == (BATCH, small.hidden)
    assert expected.isfinite().all()
    assert expected.abs().max() > 0
    for name, tensor in weights.items():
        kept = tensor.clone()
        marlin.poison(tensor[1])
        assert not torch.equal(output(), expected), name
        tensor.copy_(kept)
        marlin.poison(tensor[3])
        assert torch.equal(output(), expected), "nobody chose this expert"
        tensor.copy_(kept)


def test_where_no_kernel_runs_the_tensors_are_as_large(module):
    small = dataclasses.replace(shape(module), hidden=512)
    real, stood_in = (kind.weights(small, "cpu") for kind in (module.SglangMarlin, module.MarlinRowsRead))
    assert [*real] == [*stood_in]
    for name, tensor in real.items():
        nbytes = tensor.numel() * tensor.element_size()
        assert (stood_in[name].dtype, stood_in[name].numel() * tensor.element_size()) == (tensor.dtype, nbytes), name


def test_a_gpu_without_sglangs_kernels_is_told_what_it_lacks(module, monkeypatch):
    import slot_function

    monkeypatch.setattr(slot_function, "computes", lambda: True)
    monkeypatch.setattr(slot_function, "find_spec", lambda name: None if name == "sgl_kernel" else object())
    with pytest.raises(SystemExit, match="SGLang's Marlin kernels need sgl_kernel"):
        module.marlin_here()
    monkeypatch.setattr(slot_function, "find_spec", lambda name: object())
    assert module.marlin_here() is module.SglangMarlin
    monkeypatch.setattr(slot_function, "computes", lambda: False)
    assert module.marlin_here() is module.MarlinRowsRead
