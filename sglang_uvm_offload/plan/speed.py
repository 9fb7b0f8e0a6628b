"""Predicts decode and prefill speed from VRAM reads, compute, and reads of offloaded experts over the link.

    decode step   = sum over pipeline stages of  max(compute, VRAM bytes / VRAM rate) + overhead + missed bytes / link rate
                    + one pass of the draft layers for each drafted token
    prefill chunk = the same for a chunk of the prompt, where an offloaded expert is read once for each of its blocks of rows;
                    at least the time of launching its kernels
    streamed      = compute and VRAM reads + the longer of what a copy takes from these and what its layer waits for:
                    the longer of  bytes of its offloaded experts / copy rate  and  bytes of its residents / rate of copies in
                    VRAM,  less the time of what runs meanwhile

Streaming copies each layer's offloaded experts into slots once, while the previous layer computes. Without slots it copies
all of the layer's experts to a buffer. With one buffer, a copy overlaps only the work between the experts of two layers. The
copy for a chunk's first MoE layer begins with the chunk and overlaps the work before its experts; layers without experts are
assumed to come first.

With slots, N counts residents and slots together, and slots are taken to be full. Every miss fills one: it crosses the link
once, at the rate of a copy, before its layer computes, and is then read from VRAM; each MoE layer takes time to decide. Where a
prefill reads in place, residents and slots serve their share of the experts, as if by chance, because slots hold what other
requests decoded with.

Missed bytes are those of distinct offloaded experts. If each of T tokens in a step uses k of E experts, and residents serve the
share c of all uses, a token uses an offloaded expert with probability p = k (1 - c) / (E - N), so a layer misses
(E - N) (1 - (1 - p)^T) experts; uniform routing is c = N / E. Some offloaded experts are more likely than others, so a decode
step of several tokens misses fewer (``expert_skew``); a prompt uses nearly all. The tokens that a step verifies for one request
share experts, so each after the first counts as less than an independent one.

For comparison, a CPU engine computes the routed experts in host memory. Its step is the resident step without expert reads,
plus the bytes of all active experts divided by the rate that a CPU engine reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import expm1, lgamma
from typing import NamedTuple

from sglang_uvm_offload.plan.inputs import Assumptions, Parallel, Workload
from sglang_uvm_offload.plan.machine import Machine
from sglang_uvm_offload.plan.outcome import Speed
from sglang_uvm_offload.plan.rates import GIGA, copy_rate, read_rate, vram_copy_rate
from sglang_uvm_offload.plan.stage_cost import IN_PLACE, StageCost, Stream

HIDING_CHUNKS = range(256, 65536 + 1, 256)
"""Chunk sizes to search for the smallest that hides its copies, in tokens."""


def distinct(num_experts: int, choices: float, tokens: float, skew: float = 0.0) -> float:
    """The expected number of distinct experts, of ``num_experts``, that ``tokens`` tokens with ``choices`` choices activate.
    Experts are equally likely, or follow a beta distribution with the squared coefficient of variation ``skew``."""
    mean = min(1.0, choices / num_experts) if num_experts else 0.0
    if not skew or mean in (0.0, 1.0):
        return num_experts * (1 - (1 - mean) ** tokens)
    often, seldom = 1 / skew, (1 / mean - 1) / skew
    unused = lgamma(seldom + tokens) - lgamma(seldom) + lgamma(often + seldom) - lgamma(often + seldom + tokens)
    return num_experts * -expm1(unused)


@dataclass(frozen=True)
class _Batch:
    """A batch of ``tokens`` rows, one per request in decode. Each rank computes attention for ``attending`` requests. Each
    request adds ``drafts`` drafted tokens to its row."""

    tokens: int
    attending: int
    drafts: int

    def rows(self) -> int:
        return self.tokens * (1 + self.drafts)

    def independent(self, draft_token_weight: float) -> float:
        """The number of independent tokens that would activate as many experts."""
        return self.tokens * (1 + self.drafts * draft_token_weight)


@dataclass(frozen=True)
class _Step:
    """A step's seconds, and the expert bytes that one rank reads or copies over the link."""

    seconds: float
    missed_bytes: float


class _LayerCopy(NamedTuple):
    """The copy of a layer's experts into slots or a buffer: seconds over the link, and within VRAM."""

    link: float
    vram: float

    def slows(self, assumed: Assumptions) -> float:
        """Seconds that the copy costs kernels that compute meanwhile."""
        return assumed.copy_slows * self.link + assumed.vram_copy_slows * self.vram


@dataclass(frozen=True)
class SpeedModel:
    """Predicts the speed of a model on the ranks of a machine."""

    num_experts: int
    top_k: int
    stages: Sequence[StageCost]
    machine: Machine
    parallel: Parallel
    assumed: Assumptions

    def predict(
        self,
        routing: str,
        hit_rate: float,
        num_resident: int,
        workload: Workload,
        requests: int,
        chunk: int,
        stream: Stream = IN_PLACE,
        slots: int = 0,
    ) -> Speed:
        """The speed with ``num_resident`` resident experts and ``slots`` per layer, which serve the share ``hit_rate`` of all
        activations in decode."""
        rows = num_resident + slots
        # Each row serves at most one of a token's choices.
        hit_rate = 1.0 if num_resident == self.num_experts else min(hit_rate, rows / self.top_k, 1.0)
        drafts = workload.draft_tokens - 1 if workload.speculative else 0
        batch = _Batch(-(-requests // self.parallel.replicas), -(-requests // self.parallel.dp), drafts)
        yielded = self.assumed.accepted_tokens if workload.speculative else 1
        decode = self.decode_step(rows, hit_rate, batch, fills=slots > 0)
        resident = replace(self, stages=[replace(stage, draft_residents=None, draft_hit_rate=1.0) for stage in self.stages])
        chunk_tokens = min(chunk, workload.prompt_tokens)
        chunks = -(-workload.prompt_tokens // chunk_tokens)
        prompt = _Batch(chunk_tokens, 0, 0)
        streamed = num_resident < self.num_experts and stream.serves(chunk_tokens)
        if streamed:
            prefill = self.streamed_chunk(rows, prompt, stream)
        else:
            prefill = self.prefill_chunk(rows, rows / self.num_experts if slots else hit_rate, prompt)
        return Speed(
            routing=routing,
            hit_rate=hit_rate,
            requests=requests,
            missed_bytes=decode.missed_bytes,
            decode_step_s=decode.seconds,
            decode_tokens_s=requests * yielded / decode.seconds,
            resident_step_s=resident.decode_step(self.num_experts, 1.0, batch).seconds,
            prefill_chunk_s=prefill,
            prefill_tokens_s=workload.prompt_tokens / (chunks * prefill),
            resident_prefill_tokens_s=workload.prompt_tokens / (chunks * self.prefill_chunk(self.num_experts, 1.0, prompt)),
            streamed=streamed,
            cpu_engine_step_s=self.cpu_engine_step(rows, batch),
        )

    def hiding_chunk(self, rows: int, stream: Stream) -> int:
        """The smallest of ``HIDING_CHUNKS`` that streams and in which only the first layer waits for copies, with ``rows``
        residents and slots per layer; 0 if there is none."""
        chunks = (tokens for tokens in HIDING_CHUNKS if stream.serves(tokens))
        return next((tokens for tokens in chunks if self.hides(rows, _Batch(tokens, 0, 0), stream)), 0)

    def decode_step(self, rows: int, hit_rate: float, batch: _Batch, fills: bool = False) -> _Step:
        """A step in which ``rows`` in VRAM serve ``hit_rate`` of the activations. Misses are read in place or fill slots."""
        hit, missed = self.activated(rows, hit_rate, batch, self.assumed.expert_skew)
        layers = sum(len(stage.expert_layers) for stage in self.stages)
        crossing = missed * sum(sum(stage.expert_layers) for stage in self.stages)
        from_vram = hit + missed if fills else hit
        seconds = sum(self.in_vram(stage, from_vram, batch) + self.drafting(stage, batch) for stage in self.stages)
        drafted = sum(self.drafted_misses(stage, batch) for stage in self.stages)
        seconds += crossing / (self.copy_rate if fills else self.read_rate)
        seconds += layers * self.assumed.slot_layer_us * 1e-6 if fills else 0
        return _Step(seconds, crossing + drafted)

    def prefill_chunk(self, num_resident: int, hit_rate: float, prompt: _Batch) -> float:
        """Seconds of a prompt chunk, which reads a missed expert once per block of its rows."""
        hit, missed = self.activated(num_resident, hit_rate, prompt)
        rows = prompt.tokens * self.top_k * (1 - hit_rate) / max(1, self.num_experts - num_resident)
        reads = max(1.0, rows / self.assumed.rows_per_read + 0.5)  # the last block of an expert is half full on average
        return sum(
            max(
                self.launching(stage),
                self.in_vram(stage, hit, prompt) + missed * reads * sum(stage.expert_layers) / self.read_rate,
            )
            for stage in self.stages
        )

    def streamed_chunk(self, num_resident: int, prompt: _Batch, stream: Stream) -> float:
        """Seconds of a chunk whose layers find all their experts in VRAM."""
        hit, _ = self.activated(self.num_experts, 1.0, prompt)
        seconds = 0.0
        for stage in self.stages:
            slowed = (copy.slows(self.assumed) for copy in self.copies(stage, num_resident, stream))
            longer = sum(map(max, slowed, self.waits(stage, num_resident, prompt, stream)))
            seconds += max(self.launching(stage), self.in_vram(stage, hit, prompt) + longer)
        return seconds

    def copies(self, stage: StageCost, num_resident: int, stream: Stream) -> list[_LayerCopy]:
        """The copy for each MoE layer of a stage."""
        copied = 0 if stream.into_slots else num_resident
        in_vram = copied / self.parallel.ep / vram_copy_rate(self.machine, self.assumed)
        offloaded = (self.num_experts - num_resident) / self.parallel.ep / self.copy_rate
        return [_LayerCopy(offloaded * nbytes, in_vram * nbytes) for nbytes in stage.expert_layers]

    def hides(self, num_resident: int, prompt: _Batch, stream: Stream) -> bool:
        """Whether only a chunk's first layer waits for copies. Time that kernel launches hide is not counted."""
        return not any(sum(self.waits(stage, num_resident, prompt, stream)[1:]) for stage in self.stages)

    def waits(self, stage: StageCost, num_resident: int, prompt: _Batch, stream: Stream) -> list[float]:
        """Seconds that each MoE layer of a stage waits for its experts to arrive in VRAM."""
        hit, _ = self.activated(self.num_experts, 1.0, prompt)
        whole, between = self.in_vram(stage, hit, prompt), self.in_vram(replace(stage, expert_layers=()), hit, prompt)
        rest = between / stage.layers
        found, meanwhile = [], (stage.layers - len(stage.expert_layers)) * rest
        for nbytes, copy in zip(stage.expert_layers, self.copies(stage, num_resident, stream), strict=True):
            found.append(max(0.0, max(copy) - meanwhile - rest))
            meanwhile = (whole - between) * nbytes / sum(stage.expert_layers) if stream.ahead else 0.0
        return found

    def launching(self, stage: StageCost) -> float:
        """The minimum seconds of a chunk, in which its kernels are launched one by one."""
        assumed = self.assumed
        milliseconds = assumed.latent_prefill_layer_ms if stage.latent_attention else assumed.prefill_layer_ms
        return stage.layers * milliseconds * 1e-3

    def activated(self, num_resident: int, hit_rate: float, batch: _Batch, skew: float = 0.0) -> tuple[float, float]:
        """The distinct experts of a layer that one rank reads from VRAM and over the link. ``skew``: among the latter."""
        tokens, ep = batch.independent(self.assumed.draft_token_weight), self.parallel.ep
        hit = distinct(num_resident, self.top_k * hit_rate, tokens)
        missed = distinct(self.num_experts - num_resident, self.top_k * (1 - hit_rate), tokens, skew)
        return hit / ep, missed / ep

    def in_vram(self, stage: StageCost, hit: float, batch: _Batch) -> float:
        """Seconds of a stage that reads ``hit`` experts a layer, all from VRAM."""
        read = stage.dense_bytes + hit * sum(stage.expert_layers) + batch.attending * stage.kv_read_bytes
        choices = self.top_k / self.parallel.ep * len(stage.expert_layers)
        flops = batch.rows() * (stage.dense_flops + choices * stage.expert_flops)
        flop_rate = self.machine.tflops * 1e12 * self.assumed.compute_efficiency * stage.gemm_rate
        return max(flops / flop_rate, read / self.vram_rate) + stage.layers * self.layer_overhead(stage)

    def drafting(self, stage: StageCost, batch: _Batch) -> float:
        """Seconds of the draft layers' passes, one per drafted token of a request."""
        if not stage.draft_layers:
            return 0.0
        residents = self.num_experts if stage.draft_residents is None else stage.draft_residents
        experts = distinct(residents, self.top_k * stage.draft_hit_rate, batch.tokens) / self.parallel.ep
        read = stage.draft_bytes + experts * stage.draft_expert_bytes
        passes = batch.drafts * (read / self.vram_rate + stage.draft_layers * self.layer_overhead(stage))
        return passes + self.drafted_misses(stage, batch) / self.read_rate

    def drafted_misses(self, stage: StageCost, batch: _Batch) -> float:
        """Bytes that the draft layers' passes read over the link."""
        if not stage.draft_layers or stage.draft_residents is None:
            return 0.0
        offloaded = self.num_experts - stage.draft_residents
        missed = distinct(offloaded, self.top_k * (1 - stage.draft_hit_rate), batch.tokens) / self.parallel.ep
        return batch.drafts * missed * stage.draft_expert_bytes

    def cpu_engine_step(self, rows: int, batch: _Batch) -> float:
        """Seconds of a CPU engine's step with as many experts in VRAM, which are used no more than others: such engines place
        whole layers, or the same experts for good. 0 if the host memory's rate is unknown."""
        tokens, parallel = batch.independent(self.assumed.draft_token_weight), self.parallel
        active, share = distinct(self.num_experts, self.top_k, tokens), rows / self.num_experts
        copies = parallel.moe_tp * parallel.replicas  # each rank's slice of an expert, in each replica
        read = (1 - share) * active * copies * sum(sum(s.expert_layers) for s in self.stages)
        rate = self.machine.host_gbps * GIGA * self.assumed.cpu_efficiency
        in_vram = share * active / parallel.ep
        seconds = sum(self.in_vram(stage, in_vram, batch) + self.drafting(stage, batch) for stage in self.stages)
        return seconds + read / rate if rate else 0.0

    @property
    def vram_rate(self) -> float:
        return self.machine.hbm_gbps * GIGA * self.assumed.hbm_efficiency

    @property
    def read_rate(self) -> float:
        return read_rate(self.machine, self.parallel, self.assumed)

    @property
    def copy_rate(self) -> float:
        return copy_rate(self.machine, self.parallel, self.assumed)

    def layer_overhead(self, stage: StageCost) -> float:
        """Seconds of one layer besides its reads and compute."""
        own = self.assumed.latent_overhead_us if stage.latent_attention else self.assumed.layer_overhead_us
        return (own + (2 * self.assumed.collective_us if self.parallel.tp > 1 else 0.0)) * 1e-6
