"""Predicting decode and prefill speed from reads of VRAM, compute, and reads of offloaded experts over the link.

    decode step   = sum over pipeline stages of  max(compute, VRAM bytes / VRAM rate) + overhead + missed bytes / link rate
    prefill chunk = the same for a chunk of the prompt, where an offloaded expert is read once for each of its blocks of rows

Missed bytes are those of distinct offloaded experts. If each of T tokens in a step uses k of E experts, and residents serve the
share c of all uses, a token uses an offloaded expert with probability p = k (1 - c) / (E - N), so a layer misses
(E - N) (1 - (1 - p)^T) experts. Uniform routing is c = N / E. Tokens are assumed to be independent. An offloaded expert has
T p rows: it is used less than a resident one, so it has fewer blocks of rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_uvm_offload.sizing.machine import Machine
from sglang_uvm_offload.sizing.plan import Assumptions, Parallel, Speed, Workload

GIGA = 1e9


@dataclass(frozen=True)
class StageCost:
    """Reads and compute of one rank of a pipeline stage: bytes, and floating-point operations for one token."""

    layers: int
    dense_bytes: int
    """Weights beside routed experts, read in every step."""
    dense_flops: float
    expert_layers: tuple[int, ...]
    """For each MoE layer, the bytes of one expert that one rank of the layer's expert-parallel group reads."""
    expert_flops: float
    """One expert for one token, on one rank that holds a slice of it."""
    kv_read_bytes: int
    """One request, for one token at the end of the context."""


def hit_rate_of(residency: float, hot_half_share: float) -> float:
    """The share of routing to the hottest ``residency`` of the experts: residency ** a, with a chosen so that the hotter half
    gets ``hot_half_share``."""
    if residency <= 0:
        return 0.0
    return residency ** (math.log(hot_half_share) / math.log(0.5))


def distinct(num_experts: int, choices: float, tokens: float) -> float:
    """How many of ``num_experts`` equally likely experts are activated by ``tokens`` tokens with ``choices`` choices each."""
    if not num_experts:
        return 0.0
    return num_experts * (1 - (1 - min(1.0, choices / num_experts)) ** tokens)


def predict(
    routing: str,
    hit_rate: float,
    num_resident: int,
    num_experts: int,
    top_k: int,
    stages: list[StageCost],
    machine: Machine,
    workload: Workload,
    parallel: Parallel,
    requests: int,
    chunk: int,
    assumed: Assumptions,
) -> Speed:
    """The speed with ``num_resident`` experts of each layer in VRAM that serve the share ``hit_rate`` of all uses."""
    # Each resident serves at most one of a token's choices.
    hit_rate = min(hit_rate, num_resident / top_k, 1.0)
    if num_resident == num_experts:
        hit_rate = 1.0
    model = _Model(num_experts, top_k, stages, machine, parallel, assumed)
    per_request = workload.draft_tokens if workload.speculative else 1
    tokens = per_request * -(-requests // parallel.replicas)
    attending = -(-requests // parallel.dp)
    yielded = assumed.accepted_tokens if workload.speculative else 1
    decode, missed, missed_bytes = model.step(num_resident, hit_rate, tokens, attending, 1)
    resident_decode, _, _ = model.step(num_experts, 1.0, tokens, attending, 1)
    chunk_tokens = min(chunk, workload.prompt_tokens)
    chunks = -(-workload.prompt_tokens // chunk_tokens)
    rows = chunk_tokens * top_k * (1 - hit_rate) / max(1, num_experts - num_resident)
    reread = max(1.0, rows / assumed.rows_per_read + 0.5)  # the last block of an expert is half full on average
    prefill, _, _ = model.step(num_resident, hit_rate, chunk_tokens, 0, reread)
    resident_prefill, _, _ = model.step(num_experts, 1.0, chunk_tokens, 0, 1)
    return Speed(
        routing=routing,
        hit_rate=hit_rate,
        requests=requests,
        missed_experts=missed,
        missed_bytes=missed_bytes,
        decode_step_s=decode,
        decode_tokens_s=requests * yielded / decode,
        resident_step_s=resident_decode,
        prefill_chunk_s=prefill,
        prefill_tokens_s=workload.prompt_tokens / (chunks * prefill),
        resident_prefill_tokens_s=workload.prompt_tokens / (chunks * resident_prefill),
        reread=reread,
    )


@dataclass(frozen=True)
class _Model:
    num_experts: int
    top_k: int
    stages: list[StageCost]
    machine: Machine
    parallel: Parallel
    assumed: Assumptions

    def step(
        self, num_resident: int, hit_rate: float, tokens: int, attending: int, reread: float
    ) -> tuple[float, float, float]:
        """(seconds, experts missed by one rank, their bytes) of a step with ``tokens`` tokens in every layer; each rank
        computes the attention of ``attending`` requests."""
        hit = distinct(num_resident, self.top_k * hit_rate, tokens) / self.parallel.ep
        missed = distinct(self.num_experts - num_resident, self.top_k * (1 - hit_rate), tokens) / self.parallel.ep
        seconds = experts = bytes_missed = 0.0
        read_rate = self.machine.link_gbps * GIGA * self.assumed.read_efficiency
        vram_rate = self.machine.hbm_gbps * GIGA * self.assumed.hbm_efficiency
        flop_rate = self.machine.tflops * 1e12 * self.assumed.compute_efficiency
        collective = 2 * self.assumed.collective_us if self.parallel.tp > 1 else 0.0
        for stage in self.stages:
            expert_bytes = sum(stage.expert_layers)
            vram = stage.dense_bytes + hit * expert_bytes + attending * stage.kv_read_bytes
            choices = self.top_k / self.parallel.ep * len(stage.expert_layers)
            flops = tokens * (stage.dense_flops + choices * stage.expert_flops)
            link = missed * expert_bytes * reread
            overhead = stage.layers * (self.assumed.layer_overhead_us + collective) * 1e-6
            seconds += max(flops / flop_rate, vram / vram_rate) + overhead + link / read_rate
            experts += missed * len(stage.expert_layers)
            bytes_missed += link
        return seconds, experts, bytes_missed
