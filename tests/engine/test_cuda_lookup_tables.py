"""Real SGLang with LongCat's tables in managed memory, over the stand-in driver: they prefer host RAM before a row is written,
and lie there, never moved, while graphs replay."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import Checkpoints
from standin.run import Standin
from standin.serving import GPU, captures, serve_and_log

from scripts.harness.server import offload_state
from scripts.make_checkpoint import NGRAM_TABLES, NGRAM_TOKENS, VOCAB
from sglang_uvm_offload.memory.layout import BLOCK_BYTES

pytestmark = [pytest.mark.nightly, pytest.mark.since("0.5.23", "older versions are not tried with LongCat")]

TABLES = (NGRAM_TOKENS - 1) * NGRAM_TABLES
NBYTES = sum(4 * VOCAB + 2 * table + 1 for table in range(TABLES)) * (256 // TABLES) * 2
"""All rows in bf16; less than a block."""
OFFLOAD = {"expert_offload_num_resident": 8, "expert_offload_lookup_tables": "host", "expert_offload_warmup_tokens": 8}


@pytest.mark.works("Architecture", "LongcatFlashForCausalLM")
def test_tables_are_placed_in_host_ram_before_they_are_written_and_stay(
    tmp_path: Path, checkpoints: Checkpoints, standin: Standin
) -> None:
    engine = {"model_path": str(checkpoints("longcat_flash", expert_size=512)), **GPU, **OFFLOAD}
    job = {"engine": engine, "prompts": ["hello world"], "max_new_tokens": 8}
    result, calls = serve_and_log(job, 9, standin.library, tmp_path / "run", env={"STANDIN_LOG_ORDER": "1"})
    assert {call["call"] for call in calls if call["result"] != 0} <= {"cudaEventQuery"}, "those that are not over yet"
    table = next(call for call in calls if call["call"] == "cudaMallocManaged")  # the embedding is built first
    assert table["nbytes"] == BLOCK_BYTES
    begin, end = table["address"], table["address"] + table["nbytes"]
    touching = [call for call in calls if begin <= call.get("address", call.get("to", 0)) < end and call is not table]
    advised, later = touching[:2], touching[2:]
    assert [(call["advice"], call["location"]) for call in advised] == [
        ("SetAccessedBy", "device"),
        ("SetPreferredLocation", "host"),
    ]
    (populated,) = [call for call in later if call["call"] == "cudaMemPrefetchAsync"]
    assert populated["location"] == "host"
    assert populated["thread"] != advised[0]["thread"], "SGLang went on meanwhile"
    written = [call for call in later if call is not populated]
    assert {call["call"] for call in written} == {"cudaMemcpyAsync"}
    assert sum(call["nbytes"] for call in written) == NBYTES
    assert calls.index(later[-1]) < calls.index(next(captures(calls))[0])
    loading = calls[: calls.index(next(captures(calls))[0])]
    experts = [call for call in loading if call["call"] == "cudaMallocManaged" and call is not table]
    populated, written = (
        [[at for at, call in enumerate(loading) if call["call"] == name and call[key] in spanned(one)] for one in experts]
        for name, key in (("cudaMemPrefetchAsync", "address"), ("cudaMemcpyAsync", "to"))
    )
    assert len(experts) > 1
    assert all(max(prefetches) < min(copies) for prefetches, copies in zip(populated, written, strict=True))
    assert any("ComputeNGramIds" in call.get("kernel", "") for capture in captures(calls) for call in capture)
    state = offload_state(result["server_info"])
    assert state["lookup_table_bytes"] == BLOCK_BYTES
    assert state["fault"] is None
    assert "lookup tables in host RAM" in result["log"]
    assert len(result["answers"][0]["output_ids"]) == 8


def spanned(allocation: dict) -> range:
    return range(allocation["address"], allocation["address"] + allocation["nbytes"])
