"""The part that reads rows of a lookup table in managed host RAM, as LongCat's n-gram embedding does, beside one in VRAM."""

from __future__ import annotations

import torch
from torch.nn.functional import embedding

from benchmarks.gpu.environment import computes
from benchmarks.gpu.rows import Rows, run_part
from sglang_uvm_offload.cuda.memory import CudaMemory
from sglang_uvm_offload.memory.protocol import Location, Span

WIDTH, NGRAMS = 256, 12
"""LongCat-Flash-Lite: rows of 256 numbers in bf16, and how many a token reads."""
TOKENS = (1, 64, 8192)
GATHERS = 8
"""In one graph, each of other rows, so that no cache serves the next."""
REPEATS = 7


def tables(rows: Rows) -> None:
    memory, nbytes = CudaMemory(), rows.pick(16 << 30, 32 << 20)
    managed = memory.allocate(nbytes, "a lookup table")
    flat = memory.tensor(managed)
    memory.place(managed, [Span(0, nbytes)], Location.HOST)
    plain = torch.empty(rows.pick(4 << 30, 32 << 20), dtype=torch.uint8, device="cuda")
    for where, held in (("managed", flat), ("plain", plain)):
        numbered = held.view(torch.int64).view(-1, WIDTH // 4)
        numbered[:, 0] = torch.arange(len(numbered), device="cuda")
        for tokens in TOKENS:
            if rows.late():
                return
            _read(rows, where, numbered, tokens)


def _read(rows: Rows, where: str, numbered: torch.Tensor, tokens: int) -> None:
    """Time gathers of ``tokens`` from a table whose rows begin with their number, under graph replay, and check each row."""
    table = numbered.view(torch.bfloat16)
    ids = torch.zeros(GATHERS, tokens * NGRAMS, dtype=torch.int64, device="cuda")
    out = torch.zeros(*ids.shape, WIDTH, dtype=torch.bfloat16, device="cuda")
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        for gather in range(GATHERS):
            out[gather] = embedding(ids[gather], table)
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found, wrong = [], 0
    for repeat in range(REPEATS + 1):
        ids.random_(0, len(table))
        began.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        wrong += int((out.view(torch.int64)[..., 0] != ids).sum())
        if repeat:
            found.append(began.elapsed_time(ended) * 1000 / GATHERS)
    rows.put("table_rows", "us", found, where=where, tokens=tokens, table_gib=numbered.nbytes / 2**30)
    rows.put("table_rows_wrong", "rows", [wrong], where=where, tokens=tokens, read=ids.numel() * (REPEATS + 1))


PARTS = {"tables": tables}

if __name__ == "__main__":
    if not computes():
        print("no kernel computes here: no time is a measurement, and no row is read")
    run_part(PARTS)
