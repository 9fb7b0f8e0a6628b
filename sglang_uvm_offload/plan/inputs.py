"""The planner's inputs besides the model and the machine: workload, ranks, reserved VRAM and assumptions."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_uvm_offload.memory.layout import round_up


@dataclass(frozen=True)
class Workload:
    """The concurrent requests to serve. Without ``max_total_tokens``, each request may fill the whole context."""

    context_length: int
    requests: int = 1
    prompt_tokens: int = 4096
    """Tokens per prompt, for the prefill predictions."""
    max_total_tokens: int | None = None
    """KV cache tokens per rank; replaces requests x context."""
    page_tokens: int = 64
    """Tokens per page of the KV cache (``--page-size``). 64 is the largest size that SGLang's attention backends choose by
    default."""
    kv_cache_dtype: str = "auto"
    speculative: bool = False
    """Whether the model's own draft layers are loaded (NEXTN)."""
    draft_num_resident: int | None = None
    """Resident experts per draft layer; None: all."""
    draft_tokens: int = 4
    """Tokens that a step verifies per request when drafting."""
    other_drafts: bool = False
    """Whether drafts come from elsewhere: a separate draft model, or n-grams."""
    cache_for: str = ""
    """How messages describe the KV cache's purpose; "": derived from the fields above."""

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
        """KV cache tokens that a rank needs."""
        if self.max_total_tokens is not None:
            return self.max_total_tokens
        return round_up(self.context_length, self.page_tokens) * self.requests_of_rank(parallel)


@dataclass(frozen=True)
class Parallel:
    """SGLang's parallel sizes. ``dp`` counts whole replicas, or with ``dp_attention`` groups of the ``tp`` ranks."""

    tp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1
    dp_attention: bool = False
    shared_whole: bool = False
    """Whether every rank holds whole shared experts, as with DeepEP."""
    dp_lm_head: bool = False
    """Whether each DP attention group has its own LM head (``--enable-dp-lm-head``)."""

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
    """Memory that the plan must leave free. None means SGLang's default."""

    mem_fraction_static: float | None = None
    headroom_gb: float = 1.0
    chunked_prefill_size: int | None = None
    free_vram_bytes: int | None = None
    """Free VRAM of each GPU before the server starts; None: all of it."""
    hicache_bytes: int = 0
    """Host RAM of the hierarchical cache per rank (``--hicache-size``)."""
    hicache_ratio: float = 0.0
    """The same as a multiple of the rank's KV cache (``--hicache-ratio``); used without ``hicache_bytes``."""
    stream_gb: float | None = None
    """GiB of stream buffers per rank, rounded down to whole buffers. 0: none. None: as many as fit."""
    stream_tokens: int | None = None
    """The smallest step that streams, in tokens; None: the default."""


@dataclass(frozen=True)
class Assumptions:
    """Every number that comes from neither the checkpoint nor a flag. "measured" means on an H200 (GPU_STATUS.md)."""

    context_gib: float = 0.8
    """assumed: CUDA context, libraries and kernels of one rank"""
    collectives_gib: float = 0.7
    """assumed: NCCL and all-reduce buffers of a rank that has peers"""
    process_gib: float = 4.0
    """assumed: host RAM of one rank's process without its experts"""
    read_efficiency: float = 0.94
    """zero-copy reads by kernels, relative to the copy engine: measured, 51.1 of 54.5 GB/s over PCIe 5 x16"""
    copy_efficiency: float = 0.92
    """the kernel that fills stream buffers, relative to the copy engine: measured, 50.4 of 54.5 GB/s over PCIe 5 x16"""
    vram_copy_gbps: float = 920.0
    """copies from VRAM into a stream buffer while a MoE layer computes: measured, 920 to 1140 on an H200 with 95 % resident"""
    copy_slows: float = 0.15
    """how much a copy over the link slows a concurrent MoE layer, as a share of the copy's time: measured, .04 to .21"""
    vram_copy_slows: float = 0.35
    """the same for a copy within VRAM: measured, .30 to .39 with 95 % resident"""
    host_efficiency: float = 0.7
    """assumed: share of the host memory's nominal rate that all GPUs reach together when reading. Published shares of GH200's
    546 GB/s: .63 (https://github.com/NVIDIA/nvbandwidth/issues/23) to .77 (https://github.com/NVIDIA/Megatron-LM/issues/6491)"""
    hbm_efficiency: float = 0.7
    """assumed: share of VRAM bandwidth that decoding reaches"""
    compute_efficiency: float = 0.5
    """assumed: share of the dense bfloat16 rate that prefill reaches"""
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
    """the slot kernel of each MoE layer, without its copies: it chooses what the slots hold and redirects reads to them;
    measured, 4.5 to 5.7 beside the MoE"""
    expert_skew: float = 0.35
    """how unevenly the tokens of a decode step choose among offloaded experts: the squared coefficient of variation of the
    experts' probabilities; .18 to .56 in measured routing with half resident"""
    draft_token_weight: float = 0.75
    """a drafted token activates as many more experts as this share of an independent one: .59 to .86 in measured routing"""
    accepted_tokens: float = 2.5
    """assumed: mean tokens that a request gains from a step that verifies draft tokens"""
    rows_per_read: int = 128
    """assumed: rows that share one read of an expert's tile in prefill; host memory is mapped uncached, so each further block
    of rows reads it over the link again. 128, plus half a block, fits the only prefill measured (an H200, SGLang's Triton
    experts); no other model has been tested"""
    cpu_efficiency: float = 0.5
    """assumed: share of the host memory's nominal rate at which a CPU engine reads experts"""
