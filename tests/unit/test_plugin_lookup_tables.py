"""SGLang's own n-gram embedding, built under the hooks: where its tables lie, and what they hold."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from simulated_driver import SimulatedDriver

from scripts.harness.shims.cpu_shims.hooks import OnCpu
from sglang_uvm_offload.flags import FlagError
from sglang_uvm_offload.memory.layout import BLOCK_BYTES
from sglang_uvm_offload.memory.protocol import Location, Span
from sglang_uvm_offload.plugin.rank.lookup_tables import TableHooks

pytestmark = pytest.mark.sglang

VOCAB, HIDDEN, ROWS = 320, 256, 4 * 320
TABLES = [ROWS + 2 * table + 1 for table in range(4)]
"""Rows, for two-grams and three-grams with two tables each."""
PADDED = -(-sum(TABLES) // 64) * 64


tried = pytest.mark.since("0.5.23", "older versions are not tried with LongCat")


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[SimulatedDriver, TableHooks]]:
    from sglang.srt.runtime_context import get_parallel

    def add(target: str, hook: Any, kind: Any) -> None:
        owner, _, name = target.rpartition(".")
        found = pkgutil.resolve_name(owner)
        original = getattr(found, name)
        monkeypatch.setattr(found, name, functools.wraps(original)(lambda *args, **kwargs: hook(original, *args, **kwargs)))

    memory = SimulatedDriver()
    hooks = TableHooks(lambda: memory, lambda phase: nullcontext())
    hooks.install(add)
    with get_parallel().override(tp_size=1, tp_rank=0):
        yield memory, hooks


def build() -> Any:
    from sglang.srt.layers.n_gram_embedding import NgramEmbedding

    with OnCpu():
        return NgramEmbedding(
            num_embeddings=VOCAB,
            embedding_dim=HIDDEN,
            over_embedding_m=ROWS,
            over_embedding_k=2,
            over_embedding_n=3,
            eos_token_id=0,
        )


@tried
def test_tables_lie_in_host_ram_and_the_embedding_of_tokens_does_not(hooked: tuple[SimulatedDriver, TableHooks]) -> None:
    memory, hooks = hooked
    built = build()
    (managed,) = [live.managed for live in memory._live.values()]
    weight = built.oe_embeder.weight
    assert weight.shape == (PADDED, HIDDEN // 4)
    assert weight.data_ptr() == managed.address
    assert managed.nbytes == weight.nbytes
    assert hooks.nbytes == -(-weight.nbytes // BLOCK_BYTES) * BLOCK_BYTES
    assert memory.location(managed, Span(0, managed.nbytes)) is Location.HOST
    memory.read(managed, [Span(0, managed.nbytes)])
    assert memory.device_peak == 0, "a read leaves them there"
    assert not weight.any(), "rows of padding are zeros"


@tried
def test_rows_are_what_sglang_loads_and_leave_host_ram_no_more(hooked: tuple[SimulatedDriver, TableHooks]) -> None:
    memory, _ = hooked
    built = build()
    loaded = [torch.randn(rows, HIDDEN // 4) for rows in TABLES]
    for table, rows in enumerate(loaded):
        built.load_weight(None, f"model.ngram_embeddings.embedders.{table}.weight", rows)
    assert torch.equal(built.oe_embeder.weight[: sum(TABLES)], torch.cat(loaded))
    ids = torch.randint(sum(TABLES), (7,))
    assert torch.equal(built.oe_embeder.quant_method.embedding(built.oe_embeder, ids), torch.cat(loaded)[ids])
    memory.notice_writes()
    assert memory.device_used == 0
    assert memory.traffic.to_device_bytes == memory.traffic.to_host_bytes == 0


@tried
def test_a_model_on_the_meta_device_takes_nothing(hooked: tuple[SimulatedDriver, TableHooks]) -> None:
    """SGLang builds one first for ``--load-format presharded``."""
    memory, hooks = hooked
    with torch.device("meta"):
        assert build().oe_embeder.weight.is_meta
    assert hooks.nbytes == memory.live_ranges == 0


@tried
@pytest.mark.parametrize("elsewhere", [True, False])
def test_an_sglang_that_allocates_tables_in_another_way_is_refused(
    hooked: tuple[SimulatedDriver, TableHooks], monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    """On another device, or by other code."""
    from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod as Method

    if elsewhere:
        monkeypatch.setattr(hooked[0], "device_type", "cuda")
    else:
        monkeypatch.setattr(Method, "create_weights", Method.create_weights.__wrapped__)  # type: ignore[attr-defined]
    with pytest.raises(FlagError, match="--expert-offload-config lookup_tables host: this SGLang allocates n-gram tables"):
        build()
