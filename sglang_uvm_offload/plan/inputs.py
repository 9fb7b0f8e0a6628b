"""What the planner is given in addition to the model and the machine: work, ranks, reserved VRAM and assumptions."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_uvm_offload.memory.layout import round_up


@dataclass(frozen=True)
class Workload:
    """The concurrent requests to serve. Without ``max_total_tokens``, every request may be as long as the context."""

    context_length: int
    requests: int = 1
    prompt_tokens: int = 4096
    """Tokens of one prompt, for the prefill figures."""
    max_total_tokens: int | None = None
    """Tokens of KV cache on each rank, in place of requests x context."""
    page_tokens: int = 64
    """Tokens in a page of the KV cache (``--page-size``): 64 is the largest that SGLang's attention backends choose by
    themselves."""
    kv_cache_dtype: str = "auto"
    speculative: bool = False
    """NEXTN: the model's draft layers are loaded too."""
    draft_num_resident: int | None = None
    """Residents of each draft layer; None: all its experts."""
    draft_tokens: int = 4
    """Tokens that one step verifies for a request, with drafts."""
    other_drafts: bool = False
    """Drafts that come from elsewhere: a draft model of its own, or n-grams."""
    cache_for: str = ""
    """What the KV cache is for, in a message; "": as the fields above say it."""

    @property
    def demand(self) -> str:
        if self.cache_for or self.max_total_tokens is not None:
            return self.cache_for or "as --max-total-tokens gives them"
        return f"for {self.requests} request{'s' if self.requests > 1 else ''} of {self.context_length} tokens"

    @property
    def drafts(self) -> bool:
        return self.speculative or self.other_drafts

    def requests_of_rank(self, parallel: Parallel) -> int:
        return -(-self.requests // parallel.dp)

    def running_requests(self, parallel: Parallel) -> int:
        """The value of ``--max-running-requests``: requests of one replica. Its attention groups share them evenly."""
        return self.requests_of_rank(parallel) * (parallel.dp if parallel.dp_attention else 1)

    def tokens_of_rank(self, parallel: Parallel) -> int:
        """Tokens of KV cache that a rank needs."""
        if self.max_total_tokens is not None:
            return self.max_total_tokens
        return round_up(self.context_length, self.page_tokens) * self.requests_of_rank(parallel)


@dataclass(frozen=True)
class Parallel:
    """SGLang's parallel sizes. Without ``dp_attention``, ``dp`` counts whole replicas; with it, groups of the ``tp`` ranks."""

    tp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1
    dp_attention: bool = False
    shared_whole: bool = False
    """With DeepEP, every rank holds shared experts whole."""
    dp_lm_head: bool = False
    """Whether each group of DP attention has a head of its own (``--enable-dp-lm-head``)."""

    @property
    def attn_tp(self) -> int:
        return self.tp // self.dp if self.dp_attention else self.tp

    @property
    def head_tp(self) -> int:
        return self.attn_tp if self.dp_lm_head else self.tp

    @property
    def moe_tp(self) -> int:
        return self.tp // self.ep

    @property
    def replicas(self) -> int:
        return 1 if self.dp_attention else self.dp

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.replicas


@dataclass(frozen=True)
class Reserve:
    """Memory that the plan must leave free. None: SGLang's choice."""

    mem_fraction_static: float | None = None
    headroom_gb: float = 1.0
    chunked_prefill_size: int | None = None
    free_vram_bytes: int | None = None
    """Free VRAM of every GPU before the server's processes start, None if unknown: then all of it."""
    hicache_bytes: int = 0
    """Host RAM of each rank's hierarchical cache (``--hicache-size``)."""
    hicache_ratio: float = 0.0
    """The same in terms of the rank's KV cache (``--hicache-ratio``), without ``hicache_bytes``."""
    stream_gb: float | None = None
    """GiB for each rank's stream buffers, rounded down to whole ones. 0: none. None: as many as fit."""
    stream_tokens: int | None = None
    """From how many tokens on a step streams; None: the default."""


@dataclass(frozen=True)
class Assumptions:
    """Every number that comes from neither the checkpoint nor a flag. What was measured, was on an H200 (GPU_STATUS.md)."""

    context_gib: float = 0.8
    """assumed: CUDA context, libraries and kernels of one rank"""
    collectives_gib: float = 0.7
    """assumed: NCCL and all-reduce buffers of a rank that has peers"""
    process_gib: float = 4.0
    """assumed: host RAM of one rank's process without its experts"""
    read_efficiency: float = 0.94
    """zero-copy reads by kernels against the copy engine: measured, 51.1 of 54.5 GB/s over PCIe 5 x16"""
    copy_efficiency: float = 0.92
    """the kernel that fills stream buffers against the copy engine: measured, 50.4 of 54.5 GB/s over PCIe 5 x16"""
    vram_copy_gbps: float = 920.0
    """copying what is in VRAM into a stream buffer, beside a MoE: measured, 920 to 1140 on an H200 with 95 % resident"""
    copy_slows: float = 0.15
    """the share of its time that a copy over the link takes from a MoE beside it: measured, .04 to .21 on an H200"""
    vram_copy_slows: float = 0.35
    """the same of a copy within VRAM: measured, .30 to .39 on an H200 with 95 % resident"""
    host_efficiency: float = 0.7
    """assumed: share of the host memory's nominal rate that the reads of all GPUs reach together. Published shares of GH200's
    546 GB/s: .63 (https://github.com/NVIDIA/nvbandwidth/issues/23) to .77 (https://github.com/NVIDIA/Megatron-LM/issues/6491)"""
    hbm_efficiency: float = 0.7
    """assumed: share of VRAM bandwidth that decoding reaches"""
    compute_efficiency: float = 0.5
    """assumed: share of dense bfloat16 rate that prefill reaches"""
    layer_overhead_us: float = 55.0
    """launches and small kernels of one decoder layer, on top of reading its weights: fits a decode step that was measured with
    all experts in VRAM (an H200, 16 layers of Qwen3-30B-A3B's shape)"""
    latent_overhead_us: float = 105.0
    """the same for a layer with latent attention (DeepSeek, Kimi, GLM-5): fits SGLang's DeepSeek-R1 on 8 B200"""
    prefill_layer_ms: float = 1.0
    """launching one layer's kernels in prefill: fits SGLang's Qwen3-235B and gpt-oss-120b on 8 B200, 600 tokens"""
    latent_prefill_layer_ms: float = 2.0
    """the same with latent attention: fits SGLang's DeepSeek-R1 on 8 B200, 600 tokens"""
    collective_us: float = 15.0
    """assumed: one of a layer's two all-reduces at small batches, where ranks share layers"""
    slot_layer_us: float = 5.0
    """the kernel that chooses what slots hold and redirects to them, in each MoE layer, beyond what it copies: measured, 4.5 to
    5.7 beside the MoE"""
    expert_skew: float = 0.35
    """how unevenly the tokens of a decode step choose among offloaded experts, as the squared coefficient of variation of how
    likely these are: .18 to .56 in measured routing, half resident"""
    draft_token_weight: float = 0.75
    """a drafted token activates as many further experts as this share of an independent one: .59 to .86 in measured routing"""
    accepted_tokens: float = 2.5
    """assumed: mean tokens per request from a step that verifies draft tokens"""
    rows_per_read: int = 128
    """assumed: rows that share one read of an expert's tile in prefill; host memory is mapped uncached, so each further block
    of rows reads it over the link again. 128, and half a block more, fit the one prefill that was measured (an H200, SGLang's
    Triton experts); no other model has tested them"""
    cpu_efficiency: float = 0.5
    """assumed: share of the host memory's nominal rate at which a CPU engine reads experts"""
