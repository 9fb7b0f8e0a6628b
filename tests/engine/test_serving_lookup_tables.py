"""LongCat's n-gram tables in host RAM: the same tokens, on one rank and where ranks divide the tables."""

from __future__ import annotations

from typing import Any

import pytest
from checkpoints import Checkpoints
from serving import PROMPTS, Engines, assert_offloaded, assert_same_answers

from scripts.make_checkpoint import NGRAM_TABLES, NGRAM_TOKENS, VOCAB
from sglang_uvm_offload.memory.layout import BLOCK_BYTES

pytestmark = pytest.mark.since("0.5.23", "older versions are not tried with LongCat")

EXPERTS, HIDDEN, FLOAT32 = 16, 256, 4
COMMON: dict[str, Any] = {"prompts": PROMPTS, "max_new_tokens": 12, "dtype": "float32"}


def table_bytes(ranks: int) -> int:
    """The bytes of one rank's tables; SGLang pads rows to a multiple of 64."""
    tables = (NGRAM_TOKENS - 1) * NGRAM_TABLES
    rows = sum(4 * VOCAB + 2 * table + 1 for table in range(tables))
    padded = -(-rows // 64) * 64
    return padded // ranks * (HIDDEN // tables) * FLOAT32


@pytest.mark.works("Architecture", "LongcatFlashForCausalLM")
@pytest.mark.parametrize(("resident", "ranks"), [(EXPERTS // 2, 2), pytest.param(EXPERTS, 1, marks=pytest.mark.nightly)])
def test_tables_in_host_ram_change_no_token(resident: int, ranks: int, checkpoints: Checkpoints, engines: Engines) -> None:
    checkpoint = checkpoints("longcat_flash", dtype="float32")
    off = engines.baseline(checkpoint, **COMMON, tp_size=ranks)
    on = engines.run(
        checkpoint,
        **COMMON,
        tp_size=ranks,
        expert_offload_num_resident=resident,
        expert_offload_warmup_tokens=16,
        expert_offload_lookup_tables="host",
    )
    assert_offloaded(on.server_info, everything_resident=resident == EXPERTS)
    assert on.offload["lookup_table_bytes"] == -(-table_bytes(ranks) // BLOCK_BYTES) * BLOCK_BYTES
    assert_same_answers(on, off)
    assert len({tuple(answer.output_ids) for answer in off.answers}) == len(PROMPTS)
