"""Modules on the ``meta`` device do what those of SGLang's towers do as they are built."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def _on_meta() -> Iterator[None]:
    from sglang_uvm_offload.plugin.meta.build import _OnMeta

    with torch.device("meta"), _OnMeta():
        yield


@pytest.mark.sglang
@pytest.mark.usefixtures("_on_meta")
def test_what_is_moved_stays_without_memory() -> None:
    tensor = torch.empty(8, 4)
    half = torch.empty(1, dtype=torch.bfloat16, device="cpu")
    moved = [
        tensor.to("cpu"),
        tensor.to(torch.bfloat16),
        tensor.to(half),
        torch.nn.Linear(4, 8).to("cpu", torch.bfloat16).weight,
    ]
    assert all(each.is_meta and each.shape == (8, 4) for each in moved)
    assert [each.dtype for each in moved] == [torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16]


@pytest.mark.sglang
@pytest.mark.usefixtures("_on_meta")
def test_numbers_that_a_class_computes_can_be_read() -> None:
    assert [rate.item() for rate in torch.linspace(0, 0.5, 3)] == [0, 0.25, 0.5]
