"""Write a tiny random mixture-of-experts checkpoint that real serving code loads like a real one.

    python -m scripts.make_checkpoint glm4_moe /tmp/glm --dtype bfloat16
    python -m scripts.make_checkpoint qwen3_moe /tmp/gptq --quant gptq
    python -m scripts.make_checkpoint deepseek_v3 /tmp/skewed --skew 1,5,9,12

The layout is Hugging Face's (config.json, model.safetensors, a byte-level tokenizer with a chat template). Every tensor is
drawn from a generator seeded by the seed and the tensor's name, so the same arguments give the same files. No network.

Three properties are on purpose:

* an expert's slice of each projection is at least 64 KiB, so that experts can be placed one by one;
* weights are scaled to their fan-in, so that every expert shows in the output and a misplaced one changes the tokens;
* only printable characters can be generated, and never the end-of-text token, so that answers have the requested length.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

# Byte-level vocabulary: the end token, 256 bytes, the roles of the chat template, and padding up to a multiple of 64.
END = "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
VOCAB = 320
PRINTABLE = frozenset(range(0x20, 0x7F))
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

QUANTS = ("fp8", "int8", "gptq")
BLOCK = 128  # of block-FP8 in both directions, and the group of GPTQ

# LongCat's n-gram embedding: tokens that the longest n-gram has, and tables for each number of tokens.
NGRAM_TOKENS, NGRAM_TABLES = 3, 2
ZERO_EXPERTS = 4  # of LongCat: they compute nothing

# How far hot experts are ahead, where the logits of the others have a standard deviation of 1: most tokens, not all.
HOT_CORRECTION = 0.6  # added to a sigmoid's score
HOT_BIAS = 3.0  # added to a logit
HOT_CHANNEL = 1.2  # times channel 0, which is CONSTANT in every token's embedding and 2 to 5 after a layer's norm
CONSTANT = 6.0


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a checkpoint; the same words for every family."""

    layers: int = 3
    hidden: int = 256
    experts: int = 16
    top_k: int = 4
    expert_size: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    dense_size: int = 256


class Weights:
    """The tensors of a checkpoint, each drawn from its own generator."""

    def __init__(self, shape: Shape, dtype: torch.dtype, seed: int, hot: list[list[int]] | None):
        self.shape = shape
        self.dtype = dtype
        self.seed = seed
        self.hot = hot
        self.tensors: dict[str, torch.Tensor] = {}

    def random(self, name: str, *size: int, std: float = 1.0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.seed}/{name}".encode()))
        return torch.randn(size, generator=generator) * std

    def add(self, name: str, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        self.tensors[name] = tensor.to(dtype or self.dtype).contiguous()

    def linear(self, name: str, out: int, into: int, bias: bool = False, gain: float = 1.0) -> None:
        self.add(f"{name}.weight", self.random(f"{name}.weight", out, into, std=gain / math.sqrt(into)))
        if bias:
            self.add(f"{name}.bias", self.random(f"{name}.bias", out, std=0.1))

    def norm(self, name: str, size: int | None = None) -> None:
        size = size or self.shape.hidden
        self.add(f"{name}.weight", 1 + self.random(f"{name}.weight", size, std=0.1))

    def embedding(self, name: str) -> None:
        table = self.random(name, VOCAB, self.shape.hidden)
        if self.hot:
            table[:, 0] = CONSTANT
        self.add(f"{name}.weight", table)

    def head(self, name: str) -> None:
        """An output head of which only the printable bytes have logits worth choosing."""
        table = self.random(name, VOCAB, self.shape.hidden, std=4 / math.sqrt(self.shape.hidden))
        chosen = [1 + byte for byte in PRINTABLE]
        silent = torch.ones(VOCAB, dtype=torch.bool)
        silent[chosen] = False
        table[silent] = 0
        table[:, 0] = 0
        self.add(f"{name}.weight", table)

    def mlp(self, name: str, size: int, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> None:
        self.linear(f"{name}.{gate}", size, self.shape.hidden)
        self.linear(f"{name}.{up}", size, self.shape.hidden)
        self.linear(f"{name}.{down}", self.shape.hidden, size)

    def router(self, name: str, layer: int, correction: str | None = None, bias: bool = False) -> None:
        """The gate of one layer, with its hot experts ahead by its correction, by its bias, or along channel 0."""
        table = self.random(name, self.shape.experts, self.shape.hidden, std=1 / math.sqrt(self.shape.hidden))
        hot = torch.zeros(self.shape.experts)
        if self.hot:
            hot[self.hot[layer]] = 1
            table[:, 0] = 0 if correction or bias else HOT_CHANNEL * hot
        self.add(f"{name}.weight", table)
        if correction:
            noise = self.random(correction, self.shape.experts, std=0.02)
            self.add(correction, HOT_CORRECTION * hot + noise, torch.float32)
        if bias:
            self.add(f"{name}.bias", HOT_BIAS * hot + self.random(f"{name}.bias", self.shape.experts, std=0.1))

    def attention(self, name: str, bias: bool = False, out_bias: bool = False) -> None:
        shape = self.shape
        self.linear(f"{name}.q_proj", shape.heads * shape.head_dim, shape.hidden, bias)
        self.linear(f"{name}.k_proj", shape.kv_heads * shape.head_dim, shape.hidden, bias)
        self.linear(f"{name}.v_proj", shape.kv_heads * shape.head_dim, shape.hidden, bias)
        self.linear(f"{name}.o_proj", shape.hidden, shape.heads * shape.head_dim, out_bias)


# ---------------------------------------------------------------- families


@dataclasses.dataclass(frozen=True)
class Family:
    """How one architecture is configured, and which tensors one of its layers holds."""

    config: Callable[[Shape], dict[str, Any]]
    layer: Callable[[Weights, str, int], None]
    shape: Shape = Shape()
    next_token_layer: bool = False
    own_norms: bool = False
    """Whether ``layer`` also adds the norms before attention and before the MLP."""
    ngrams: bool = False


def base_config(shape: Shape, architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_experts_per_tok": shape.top_k,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "tie_word_embeddings": False,
        **more,
    }


def glm4_moe_config(shape: Shape) -> dict[str, Any]:
    return base_config(
        shape,
        "Glm4MoeForCausalLM",
        "glm4_moe",
        intermediate_size=shape.dense_size,
        moe_intermediate_size=shape.expert_size,
        n_routed_experts=shape.experts,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        attention_bias=True,
        use_qk_norm=True,
        partial_rotary_factor=0.5,
        num_nextn_predict_layers=1,
    )


def glm4_moe_layer(weights: Weights, name: str, layer: int) -> None:
    weights.attention(f"{name}.self_attn", bias=True)
    weights.norm(f"{name}.self_attn.q_norm", weights.shape.head_dim)
    weights.norm(f"{name}.self_attn.k_norm", weights.shape.head_dim)
    mlp_after_dense(weights, f"{name}.mlp", layer, shared_experts=1, correction=True)


def mlp_after_dense(weights: Weights, name: str, layer: int, shared_experts: int, correction: bool) -> None:
    """GLM-4.5's and DeepSeek's: the first layer is dense, the others have shared experts in addition to routed ones."""
    if layer == 0:
        return weights.mlp(name, weights.shape.dense_size)
    weights.router(f"{name}.gate", layer, f"{name}.gate.e_score_correction_bias" if correction else None)
    weights.mlp(f"{name}.shared_experts", shared_experts * weights.shape.expert_size)
    routed_experts(weights, f"{name}.experts")


def routed_experts(weights: Weights, name: str, **projections: str) -> None:
    for expert in range(weights.shape.experts):
        weights.mlp(f"{name}.{expert}", weights.shape.expert_size, **projections)


LATENT: dict[str, Any] = {
    "kv_lora_rank": 256,  # with 32, a size that Triton's attention knows
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 512,
    },
}
"""DeepSeek's attention, and LongCat's."""


def deepseek_config(shape: Shape, version: int, **more: Any) -> dict[str, Any]:
    config = base_config(
        shape,
        f"DeepseekV{version}ForCausalLM",
        f"deepseek_v{version}",
        intermediate_size=shape.dense_size,
        moe_intermediate_size=shape.expert_size,
        n_routed_experts=shape.experts,
        first_k_dense_replace=1,
        moe_layer_freq=1,
        num_key_value_heads=shape.heads,
        **LATENT,
        **more,
    )
    del config["head_dim"]
    return config


def deepseek_v2_config(shape: Shape) -> dict[str, Any]:
    return deepseek_config(
        shape,
        2,
        q_lora_rank=None,
        n_shared_experts=2,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        scoring_func="softmax",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
    )


def deepseek_v3_config(shape: Shape) -> dict[str, Any]:
    return deepseek_config(
        shape,
        3,
        q_lora_rank=64,
        n_shared_experts=1,
        n_group=4,
        topk_group=2,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        num_nextn_predict_layers=1,
    )


def latent_attention(weights: Weights, name: str, config: dict[str, Any]) -> None:
    hidden, heads = weights.shape.hidden, weights.shape.heads
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    latent, query_latent = config["kv_lora_rank"], config["q_lora_rank"]
    if query_latent:
        weights.linear(f"{name}.q_a_proj", query_latent, hidden)
        weights.norm(f"{name}.q_a_layernorm", query_latent)
        weights.linear(f"{name}.q_b_proj", heads * (nope + rope), query_latent)
    else:
        weights.linear(f"{name}.q_proj", heads * (nope + rope), hidden)
    weights.linear(f"{name}.kv_a_proj_with_mqa", latent + rope, hidden)
    weights.norm(f"{name}.kv_a_layernorm", latent)
    weights.linear(f"{name}.kv_b_proj", heads * (nope + value), latent)
    weights.linear(f"{name}.o_proj", hidden, heads * value)


def deepseek_v2_layer(weights: Weights, name: str, layer: int) -> None:
    latent_attention(weights, f"{name}.self_attn", deepseek_v2_config(weights.shape))
    mlp_after_dense(weights, f"{name}.mlp", layer, shared_experts=2, correction=False)


def deepseek_v3_layer(weights: Weights, name: str, layer: int) -> None:
    latent_attention(weights, f"{name}.self_attn", deepseek_v3_config(weights.shape))
    mlp_after_dense(weights, f"{name}.mlp", layer, shared_experts=1, correction=True)


def qwen3_moe_config(shape: Shape) -> dict[str, Any]:
    return base_config(
        shape,
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        intermediate_size=shape.dense_size,
        moe_intermediate_size=shape.expert_size,
        num_experts=shape.experts,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        attention_bias=False,
    )


def qwen3_moe_layer(weights: Weights, name: str, layer: int) -> None:
    weights.attention(f"{name}.self_attn")
    weights.norm(f"{name}.self_attn.q_norm", weights.shape.head_dim)
    weights.norm(f"{name}.self_attn.k_norm", weights.shape.head_dim)
    weights.router(f"{name}.mlp.gate", layer)
    routed_experts(weights, f"{name}.mlp.experts")


def mixtral_config(shape: Shape) -> dict[str, Any]:
    return base_config(
        shape,
        "MixtralForCausalLM",
        "mixtral",
        intermediate_size=shape.expert_size,
        num_local_experts=shape.experts,
        sliding_window=None,
    )


def mixtral_layer(weights: Weights, name: str, layer: int) -> None:
    weights.attention(f"{name}.self_attn")
    weights.router(f"{name}.block_sparse_moe.gate", layer)
    routed_experts(weights, f"{name}.block_sparse_moe.experts", gate="w1", down="w2", up="w3")


def olmoe_config(shape: Shape) -> dict[str, Any]:
    return base_config(
        shape,
        "OlmoeForCausalLM",
        "olmoe",
        intermediate_size=shape.expert_size,
        num_experts=shape.experts,
        norm_topk_prob=False,
        clip_qkv=None,
        pad_token_id=0,
    )


def olmoe_layer(weights: Weights, name: str, layer: int) -> None:
    weights.attention(f"{name}.self_attn")
    weights.norm(f"{name}.self_attn.q_norm", weights.shape.heads * weights.shape.head_dim)
    weights.norm(f"{name}.self_attn.k_norm", weights.shape.kv_heads * weights.shape.head_dim)
    weights.router(f"{name}.mlp.gate", layer)
    routed_experts(weights, f"{name}.mlp.experts")


def dots1_config(shape: Shape) -> dict[str, Any]:
    """SGLang has no model of its own for it, and serves it over that of Transformers."""
    return base_config(
        shape,
        "Dots1ForCausalLM",
        "dots1",
        intermediate_size=shape.dense_size,
        moe_intermediate_size=shape.expert_size,
        n_routed_experts=shape.experts,
        n_shared_experts=1,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
        sliding_window=None,
    )


def dots1_layer(weights: Weights, name: str, layer: int) -> None:
    weights.attention(f"{name}.self_attn")
    weights.norm(f"{name}.self_attn.q_norm", weights.shape.head_dim)
    weights.norm(f"{name}.self_attn.k_norm", weights.shape.head_dim)
    mlp_after_dense(weights, f"{name}.mlp", layer, shared_experts=1, correction=True)


def gpt_oss_config(shape: Shape) -> dict[str, Any]:
    return base_config(
        shape,
        "GptOssForCausalLM",
        "gpt_oss",
        intermediate_size=shape.expert_size,
        num_local_experts=shape.experts,
        experts_per_token=shape.top_k,
        layer_types=["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(shape.layers)],
        sliding_window=16,
        attention_bias=True,
        swiglu_limit=7.0,
    )


def gpt_oss_layer(weights: Weights, name: str, layer: int) -> None:
    """The experts of a layer are four stacked tensors, gate and up interleaved, all with biases."""
    shape = weights.shape
    weights.attention(f"{name}.self_attn", bias=True, out_bias=True)
    weights.add(f"{name}.self_attn.sinks", weights.random(f"{name}.self_attn.sinks", shape.heads))
    weights.router(f"{name}.mlp.router", layer, bias=True)
    for part, out, into in (
        ("gate_up_proj", 2 * shape.expert_size, shape.hidden),
        ("down_proj", shape.hidden, shape.expert_size),
    ):
        tensor = f"{name}.mlp.experts.{part}"
        weights.add(tensor, weights.random(tensor, shape.experts, into, out, std=1 / math.sqrt(into)))
        weights.add(f"{tensor}_bias", weights.random(f"{tensor}_bias", shape.experts, out, std=0.1))


def longcat_flash_config(shape: Shape) -> dict[str, Any]:
    """With the n-gram embedding of LongCat-Flash-Lite, and experts that compute nothing."""
    config = base_config(
        shape,
        "LongcatFlashForCausalLM",
        "longcat_flash",
        num_layers=shape.layers,
        ffn_hidden_size=shape.dense_size,
        expert_ffn_hidden_size=shape.expert_size,
        n_routed_experts=shape.experts,
        moe_topk=shape.top_k,
        zero_expert_num=ZERO_EXPERTS,
        zero_expert_type="identity",
        routed_scaling_factor=2.0,
        q_lora_rank=64,
        ngram_vocab_size_ratio=4,
        emb_neighbor_num=NGRAM_TOKENS,
        emb_split_num=NGRAM_TABLES,
        num_key_value_heads=shape.heads,
        **LATENT,
    )
    del config["head_dim"]
    return config


def longcat_flash_layer(weights: Weights, name: str, layer: int) -> None:
    """Attention and a dense MLP twice, and experts beside them."""
    for half in range(2):
        latent_attention(weights, f"{name}.self_attn.{half}", longcat_flash_config(weights.shape))
        weights.mlp(f"{name}.mlps.{half}", weights.shape.dense_size)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights.norm(f"{name}.{norm}.{half}")
    router, rows = f"{name}.mlp.router", weights.shape.experts + ZERO_EXPERTS
    weights.linear(f"{router}.classifier", rows, weights.shape.hidden)
    weights.add(f"{router}.e_score_correction_bias", weights.random(f"{router}.bias", rows, std=0.02), torch.float32)
    routed_experts(weights, f"{name}.mlp.experts")


def ngram_embeddings(weights: Weights, name: str) -> None:
    """A table for each number of tokens from two on and each hash, of a few more rows than the last one, and its projection."""
    tables = (NGRAM_TOKENS - 1) * NGRAM_TABLES
    width, rows = weights.shape.hidden // tables, 4 * VOCAB
    for table in range(tables):
        weights.add(f"{name}.embedders.{table}.weight", weights.random(f"{name}.{table}", rows + 2 * table + 1, width))
        weights.linear(f"{name}.post_projs.{table}", weights.shape.hidden, width)


FAMILIES: dict[str, Family] = {
    "glm4_moe": Family(glm4_moe_config, glm4_moe_layer, next_token_layer=True),
    "qwen3_moe": Family(qwen3_moe_config, qwen3_moe_layer),
    "deepseek_v2": Family(deepseek_v2_config, deepseek_v2_layer),
    "deepseek_v3": Family(deepseek_v3_config, deepseek_v3_layer, next_token_layer=True),
    "mixtral": Family(mixtral_config, mixtral_layer, Shape(experts=8, top_k=2)),
    "olmoe": Family(olmoe_config, olmoe_layer, Shape(kv_heads=4)),
    "dots1": Family(dots1_config, dots1_layer),
    "gpt_oss": Family(gpt_oss_config, gpt_oss_layer, Shape(experts=8, top_k=2)),
    "longcat_flash": Family(longcat_flash_config, longcat_flash_layer, own_norms=True, ngrams=True),
}

# One byte or less a weight: larger experts, so that a slice of one still reaches 64 KiB.
SHAPE_OF_QUANT = {
    "fp8": Shape(layers=2, hidden=512, experts=8, top_k=2, expert_size=128, dense_size=512),
    "int8": Shape(layers=2, hidden=512, experts=8, top_k=2, expert_size=128, dense_size=512),
    "gptq": Shape(layers=2, hidden=512, experts=8, top_k=2, expert_size=256, dense_size=512),
}


def model_weights(
    family: str, shape: Shape, dtype: torch.dtype, seed: int, hot: list[list[int]] | None
) -> dict[str, torch.Tensor]:
    weights = Weights(shape, dtype, seed, hot)
    weights.embedding("model.embed_tokens")
    if FAMILIES[family].ngrams:
        ngram_embeddings(weights, "model.ngram_embeddings")
    for layer in range(shape.layers):
        decoder_layer(weights, family, f"model.layers.{layer}", layer)
    weights.norm("model.norm")
    weights.head("lm_head")
    if FAMILIES[family].next_token_layer:
        next_token_layer(weights, family, f"model.layers.{shape.layers}")
    return weights.tensors


def decoder_layer(weights: Weights, family: str, name: str, layer: int) -> None:
    if not FAMILIES[family].own_norms:
        weights.norm(f"{name}.input_layernorm")
        weights.norm(f"{name}.post_attention_layernorm")
    FAMILIES[family].layer(weights, name, layer)


def next_token_layer(weights: Weights, family: str, name: str) -> None:
    """The layer that drafts for NEXTN speculation. Its embedding and head repeat the model's, as in real checkpoints."""
    hidden = weights.shape.hidden
    decoder_layer(weights, family, name, weights.shape.layers)
    weights.norm(f"{name}.enorm")
    weights.norm(f"{name}.hnorm")
    # Leaning on the newest token, so that the drafts of random weights are sometimes right.
    lean = weights.random(f"{name}.eh_proj.weight", hidden, 2 * hidden, std=0.1 / math.sqrt(hidden))
    lean[:, :hidden] += torch.eye(hidden)
    weights.add(f"{name}.eh_proj.weight", lean)
    weights.norm(f"{name}.shared_head.norm")
    weights.tensors[f"{name}.embed_tokens.weight"] = weights.tensors["model.embed_tokens.weight"].clone()
    weights.tensors[f"{name}.shared_head.head.weight"] = weights.tensors["lm_head.weight"].clone()


# ---------------------------------------------------------------- quantised experts


def pack_int4(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Eight 4-bit values along ``dim`` into one int32, the first in the lowest bits."""
    groups = values.to(torch.int64).movedim(dim, -1).unflatten(-1, (-1, 8))
    packed = (groups << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32).movedim(-1, dim).contiguous()


def block_fp8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """[out, in] with one scale for each block of 128 x 128."""
    blocks = weight.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    scale[scale == 0] = 1  # a block of zeros
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return {f"{name}.weight": (weight / spread).to(torch.float8_e4m3fn), f"{name}.weight_scale_inv": scale}


def channel_int8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """[out, in] with one scale for each output channel."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {f"{name}.weight": (weight / scale).round().to(torch.int8), f"{name}.weight_scale": scale}


def group_int4(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """GPTQ's layout: [in / 8, out] packed, symmetric, one scale for 128 inputs of an output."""
    transposed = weight.t()
    scale = transposed.unflatten(0, (-1, BLOCK)).abs().amax(1) / 7
    values = (transposed / scale.repeat_interleave(BLOCK, 0)).round().clamp(-8, 7) + 8
    zeros = torch.full((scale.shape[0], weight.shape[0]), 7)
    return {
        f"{name}.qweight": pack_int4(values, 0),
        f"{name}.qzeros": pack_int4(zeros, 1),
        f"{name}.scales": scale.to(torch.bfloat16),
        f"{name}.g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // BLOCK,
    }


QUANTISE = {"fp8": block_fp8, "int8": channel_int8, "gptq": group_int4}


def quantise_experts(tensors: dict[str, torch.Tensor], quant: str) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if ".experts." in name and name.endswith(".weight"):
            result.update(QUANTISE[quant](name.removesuffix(".weight"), tensor.float()))
        else:
            result[name] = tensor
    return {name: tensor.contiguous() for name, tensor in result.items()}


def quantization_config(quant: str, layers: int) -> dict[str, Any]:
    """Only the experts are quantised: everything else is listed as left alone, in each method's own words."""
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj", "self_attn.o_proj")
    plain = [f"model.layers.{layer}.{part}" for layer in range(layers) for part in (*parts, "mlp.gate")] + ["lm_head"]
    if quant == "fp8":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": plain,
        }
    if quant == "int8":
        return {"quant_method": "w8a8_int8", "ignore": plain, "modules_to_not_convert": plain}
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": BLOCK,
        "desc_act": False,
        "sym": True,
        "lm_head": False,
        "modules_to_not_convert": plain,
        "dynamic": {r"-:.*self_attn.*": {}, r"-:.*mlp\.gate$": {}, r"-:.*lm_head.*": {}},
    }


# ---------------------------------------------------------------- tokenizer, files


def write_tokenizer(folder: Path, words: Sequence[str] = (), max_length: int = 2048) -> None:
    """Byte by byte, but for ``words``: each is one token, with the ids from VOCAB on."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {END: 0} | {character: 1 + byte for byte, character in byte_characters().items()}
    special = [END, *ROLES]
    for token in ROLES:
        vocab[token] = len(vocab)
    while len(vocab) < VOCAB:
        special.append(f"<|reserved {len(vocab)}|>")
        vocab[special[-1]] = len(vocab)
    for word in words:
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    save_tokenizer(tokenizer, folder, max_length)


def save_tokenizer(tokenizer: Any, folder: Path, max_length: int = 2048) -> None:
    """A ``tokenizers.Tokenizer`` that knows ``END`` and ``ROLES``, with the chat template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def byte_characters() -> dict[int, str]:
    """The visible character that byte-level tokenizers write for each byte: itself, or one moved past U+0100."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {byte: chr(byte) for byte in itself} | {byte: chr(256 + rank) for rank, byte in enumerate(others)}


def hot_by_layer(hot: list[int] | list[list[int]] | None, layers: int, experts: int) -> list[list[int]] | None:
    """One list of hot experts for each layer (and the drafting one): ``hot`` as given, or the same for all."""
    if not hot:
        return None
    alike = [item for item in hot if isinstance(item, int)]
    per_layer = [alike] * layers if len(alike) == len(hot) else [item for item in hot if not isinstance(item, int)]
    if len(per_layer) != layers:
        raise ValueError(f"hot experts are given for {len(per_layer)} layers, and there are {layers}")
    for ids in per_layer:
        if not all(0 <= expert < experts for expert in ids):
            raise ValueError(f"hot experts {ids} are not all among 0..{experts - 1}")
    return [*per_layer, per_layer[-1]]


def make_checkpoint(
    family: str,
    out: str | Path,
    *,
    dtype: str = "bfloat16",
    quant: str | None = None,
    hot: list[int] | list[list[int]] | None = None,
    seed: int = 0,
    **sizes: int,
) -> Path:
    """Write a checkpoint of ``family`` to ``out`` and return its folder. ``sizes`` override fields of ``Shape``."""
    if quant and family != "qwen3_moe":
        raise ValueError("quantised experts are written for qwen3_moe only")
    shape = dataclasses.replace(SHAPE_OF_QUANT[quant] if quant else FAMILIES[family].shape, **sizes)
    tensors = model_weights(family, shape, getattr(torch, dtype), seed, hot_by_layer(hot, shape.layers, shape.experts))
    config = FAMILIES[family].config(shape) | {"torch_dtype": dtype}
    if quant:
        tensors = quantise_experts(tensors, quant)
        config["quantization_config"] = quantization_config(quant, shape.layers)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("family", choices=sorted(FAMILIES))
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--quant", choices=QUANTS, help="quantise the experts (qwen3_moe)")
    parser.add_argument("--skew", metavar="IDS", help="experts that get nearly all tokens in every layer: 1,5,9")
    parser.add_argument("--seed", type=int, default=0)
    for field in dataclasses.fields(Shape):
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=int, metavar="N")
    args = parser.parse_args()
    sizes = {field.name: getattr(args, field.name) for field in dataclasses.fields(Shape)}
    try:
        hot = [int(expert) for expert in args.skew.split(",") if expert.strip()] if args.skew else None
        folder = make_checkpoint(
            args.family,
            args.out,
            dtype=args.dtype,
            quant=args.quant,
            hot=hot,
            seed=args.seed,
            **{name: size for name, size in sizes.items() if size is not None},
        )
    except ValueError as problem:
        parser.error(str(problem))
    size = (folder / "model.safetensors").stat().st_size
    print(f"{folder}: {args.family}, {size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
