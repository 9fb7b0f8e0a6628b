"""SGLang's sparse-attention indexer takes its budget of VRAM when it is told to, as it would at its first long prefill."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_uvm_offload.plugin.rank.vram_limits import INDEXER, take_indexer_budget


@pytest.fixture
def indexer(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """SGLang's module as far as it matters, on GPU 3, with what is free as the budget."""
    free = {"bytes": 100}
    module = SimpleNamespace(
        Indexer=SimpleNamespace(_mqa_logits_budget_bytes={}),
        mqa_logits_budget_bytes=lambda device_index, allow_sync: free["bytes"] if allow_sync else 0,
        free=free,
    )
    monkeypatch.setitem(sys.modules, INDEXER, module)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    return module


def test_the_budget_is_of_what_is_free_when_it_is_taken_first(indexer):
    take_indexer_budget()
    indexer.free["bytes"] = 1  # after moves
    take_indexer_budget()
    assert indexer.Indexer._mqa_logits_budget_bytes == {3: 100}


def test_a_process_without_such_a_model_or_an_sglang_that_does_not_ask_is_left_alone(indexer, monkeypatch):
    monkeypatch.setattr(indexer, "mqa_logits_budget_bytes", lambda **given: pytest.fail("measured"))
    del indexer.Indexer._mqa_logits_budget_bytes
    take_indexer_budget()
    assert not vars(indexer.Indexer)
    monkeypatch.delitem(sys.modules, INDEXER)
    take_indexer_budget()
    assert INDEXER not in sys.modules


@pytest.mark.sglang
def test_this_sglang_keeps_its_budget_there():
    """Read, because importing it takes seconds."""
    spec = importlib.util.find_spec(INDEXER)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).read_text()
    assert "_mqa_logits_budget_bytes: Dict[int, int] = {}" in source
    assert "self._mqa_logits_budget_bytes[device_index] = budget_bytes" in source
    assert "    mqa_logits_budget_bytes,\n" in source
