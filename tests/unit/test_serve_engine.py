"""What a server's own account says of its graphs and backends, in the words of SGLang 0.5.23."""

from __future__ import annotations

from benchmarks import serve_engine

DECODED = (
    "[2026-01-02 03:04:05] Decode batch [40], #running-req: 1, #token: 88, cuda graph: {}, gen throughput (token/s): 9.00\n"
)
LOG = (
    "Capture target prefill CUDA graph end. elapsed=3.10 s, mem usage=0.50 GB, avail mem=9.00 GB.\n"
    "Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, avail mem=9.00 GB\n"
    "Capture target decode CUDA graph end. bs=[1, 2], elapsed=1.00 s, mem usage=0.10 GB, avail mem=8.90 GB.\n"
    "[2026-01-02 03:04:05] Prefill batch [7], #new-seq: 1, #new-token: 64, cuda graph: True, input throughput (token/s): 5.00\n"
    + 2
    * DECODED.format(True)
)
STATE = {"decode_cuda_graph_bs": [1, 2], "attention_backend": "fa3", "hidden": 1}


def test_backends_captures_and_logged_batches_are_told() -> None:
    engine = serve_engine.describe(STATE, LOG)
    assert engine["attention_backend"] == "fa3"
    assert "hidden" not in engine
    assert engine["decode_graph_batches"] == [1, 2]
    assert [line.split(" end.")[0] for line in engine["captures"]] == [
        "Capture target prefill CUDA graph",
        "Capture target decode CUDA graph",
    ]
    assert engine["batches"] == {"prefill": {"graph": 1, "eager": 0}, "decode": {"graph": 2, "eager": 0}}
