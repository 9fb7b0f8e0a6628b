"""Writes a tiny random mixture-of-experts checkpoint that serving engines load like a released one.

    python -m scripts.make_checkpoint glm4_moe /tmp/glm --dtype bfloat16
    python -m scripts.make_checkpoint qwen3_moe /tmp/gptq --quant gptq
    python -m scripts.make_checkpoint deepseek_v3 /tmp/skewed --skew 1,5,9,12

The layout is Hugging Face's (config.json, model.safetensors, a byte-level tokenizer with a chat template). Every tensor is
drawn from a generator seeded by the seed and the tensor's name, so the same arguments give the same files. It needs no network.

Three properties are deliberate:

* An expert's slice of each projection is at least 64 KiB, so that experts can be placed one by one.
* Weights are scaled to their fan-in, so that every expert affects the output and a misplaced one changes the tokens.
* Only printable characters are generated, never the end-of-text token, so that answers have the requested length.
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

from scripts.config_tensors import Writer, grouped_attention, latent_attention, routed_experts, shared_and_routed, tensors_of
from sglang_uvm_offload.plan.safetensors_header import TensorInfo

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
BLOCK = 128  # block-FP8's block in both directions, and GPTQ's group

# LongCat's n-gram embedding: tokens in the longest n-gram, and tables per n-gram length.
NGRAM_TOKENS, NGRAM_TABLES = 3, 2
ZERO_EXPERTS = 4  # LongCat's; they compute nothing

# The lead of hot experts, with a standard deviation of 1 between the others' logits: they get most tokens, not all.
HOT_CORRECTION = 0.6  # added to a sigmoid's score
HOT_BIAS = 3.0  # added to a logit
HOT_CHANNEL = 1.2  # times channel 0, which is CONSTANT in every token's embedding, and 2 to 5 after a layer's norm
CONSTANT = 6.0

REPEATED = {
    ".embed_tokens.weight": "model.embed_tokens.weight",
    ".shared_head.head.weight": "lm_head.weight",
}
"""The model's tensors that a draft layer repeats, as in released checkpoints."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a checkpoint, with the same names for every family."""

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

    def draw(self, info: TensorInfo, biased: bool) -> None:
        """Draws a tensor of the model. ``biased``: it belongs to a router with a bias or a correction."""
        name, size = info.name, info.shape
        module, _, part = name.rpartition(".")
        if name == "model.embed_tokens.weight":
            self.embedding(module)
        elif name == "lm_head.weight":
            self.head(module)
        elif name.endswith(".eh_proj.weight"):
            # Favours the newest token, so that drafts from random weights are sometimes right.
            lean = self.random(name, *size, std=0.1 / math.sqrt(size[0]))
            lean[:, : size[0]] += torch.eye(size[0])
            self.add(name, lean)
        elif repeated := next((of for end, of in REPEATED.items() if name.endswith(end)), None):
            self.tensors[name] = self.tensors[repeated].clone()
        elif module.endswith((".gate", ".mlp.router")):
            self.router(name, size, biased)
        elif part == "weight" and len(size) == 1:
            self.norm(module, size[0])
        elif part.endswith("bias"):
            self.add(name, self.random(name, *size, std=0.1))
        elif len(size) > 1 and ".embedders." not in name:  # stacked experts are [inputs, outputs]
            self.add(name, self.random(name, *size, std=1 / math.sqrt(size[1])))
        else:
            self.add(name, self.random(name, *size))

    def embedding(self, name: str) -> None:
        table = self.random(name, VOCAB, self.shape.hidden)
        if self.hot:
            table[:, 0] = CONSTANT
        self.add(f"{name}.weight", table)

    def head(self, name: str) -> None:
        """Draws an output head that gives only printable bytes competitive logits."""
        table = self.random(name, VOCAB, self.shape.hidden, std=4 / math.sqrt(self.shape.hidden))
        chosen = [1 + byte for byte in PRINTABLE]
        silent = torch.ones(VOCAB, dtype=torch.bool)
        silent[chosen] = False
        table[silent] = 0
        table[:, 0] = 0
        self.add(f"{name}.weight", table)

    def router(self, name: str, size: tuple[int, ...], biased: bool) -> None:
        """Draws a tensor of a layer's gate. Hot experts lead by its correction, by its bias, or along channel 0."""
        module, _, part = name.rpartition(".")
        hot = torch.zeros(size[0])
        if self.hot:
            hot[self.hot[int(name.split(".")[2])]] = 1
        if part == "e_score_correction_bias":
            self.add(name, HOT_CORRECTION * hot + self.random(name, *size, std=0.02), torch.float32)
        elif part == "bias":
            self.add(name, HOT_BIAS * hot + self.random(name, *size, std=0.1))
        else:
            table = self.random(module, *size, std=1 / math.sqrt(self.shape.hidden))
            if self.hot:
                table[:, 0] = 0 if biased else HOT_CHANNEL * hot
            self.add(name, table)


# ---------------------------------------------------------------- families


@dataclasses.dataclass(frozen=True)
class Family:
    """The configuration of one architecture, and its default sizes."""

    model_type: str
    architecture: str
    own: Callable[[Shape], dict[str, Any]]
    shape: Shape = Shape()

    def config(self, shape: Shape) -> dict[str, Any]:
        """Returns the content of config.json."""
        return base_config(shape, self.architecture, self.model_type, **self.own(shape))


def base_config(shape: Shape, architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    config = {
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
    return {name: value for name, value in config.items() if name != "head_dim" or value is not None}


LATENT: dict[str, Any] = {
    "kv_lora_rank": 256,  # plus 32 is a size that Triton's attention supports
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


def mixture(shape: Shape) -> dict[str, Any]:
    """Returns the sizes by the names in GLM-4.5's and DeepSeek's configs."""
    return {
        "intermediate_size": shape.dense_size,
        "moe_intermediate_size": shape.expert_size,
        "n_routed_experts": shape.experts,
        "first_k_dense_replace": 1,
    }


def latent(shape: Shape) -> dict[str, Any]:
    return {"num_key_value_heads": shape.heads, "head_dim": None, **LATENT}


def glm4_moe(shape: Shape) -> dict[str, Any]:
    routing = {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5}
    attention = {"attention_bias": True, "use_qk_norm": True, "partial_rotary_factor": 0.5}
    return {**mixture(shape), **routing, **attention, "num_nextn_predict_layers": 1}


def deepseek_v2(shape: Shape) -> dict[str, Any]:
    routing = {"n_shared_experts": 2, "n_group": 1, "topk_group": 1, "topk_method": "greedy", "scoring_func": "softmax"}
    routing |= {"norm_topk_prob": False, "routed_scaling_factor": 1.0, "moe_layer_freq": 1}
    return {**mixture(shape), **latent(shape), **routing, "q_lora_rank": None}


def deepseek_v3(shape: Shape) -> dict[str, Any]:
    routing = {"n_shared_experts": 1, "n_group": 4, "topk_group": 2, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    routing |= {"norm_topk_prob": True, "routed_scaling_factor": 2.5, "moe_layer_freq": 1}
    return {**mixture(shape), **latent(shape), **routing, "q_lora_rank": 64, "num_nextn_predict_layers": 1}


def qwen3_moe(shape: Shape) -> dict[str, Any]:
    sizes = {"intermediate_size": shape.dense_size, "moe_intermediate_size": shape.expert_size, "num_experts": shape.experts}
    return {**sizes, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "attention_bias": False}


def mixtral(shape: Shape) -> dict[str, Any]:
    return {"intermediate_size": shape.expert_size, "num_local_experts": shape.experts, "sliding_window": None}


def olmoe(shape: Shape) -> dict[str, Any]:
    sizes = {"intermediate_size": shape.expert_size, "num_experts": shape.experts}
    return {**sizes, "norm_topk_prob": False, "clip_qkv": None, "pad_token_id": 0}


def dots1(shape: Shape) -> dict[str, Any]:
    """SGLang has no own class for it and serves it with Transformers' class."""
    routing = {"n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.5}
    return {**mixture(shape), **routing, "sliding_window": None}


def gpt_oss(shape: Shape) -> dict[str, Any]:
    sizes = {"intermediate_size": shape.expert_size, "num_local_experts": shape.experts, "experts_per_token": shape.top_k}
    windows = ["sliding_attention" if layer % 2 == 0 else "full_attention" for layer in range(shape.layers)]
    return {**sizes, "layer_types": windows, "sliding_window": 16, "attention_bias": True, "swiglu_limit": 7.0}


def longcat_flash(shape: Shape) -> dict[str, Any]:
    """Includes LongCat-Flash-Lite's n-gram embedding, and experts that compute nothing."""
    sizes = {"num_layers": shape.layers, "ffn_hidden_size": shape.dense_size, "expert_ffn_hidden_size": shape.expert_size}
    sizes |= {"n_routed_experts": shape.experts, "moe_topk": shape.top_k, "q_lora_rank": 64}
    routing = {"zero_expert_num": ZERO_EXPERTS, "zero_expert_type": "identity", "routed_scaling_factor": 2.0}
    ngrams = {"ngram_vocab_size_ratio": 4, "emb_neighbor_num": NGRAM_TOKENS, "emb_split_num": NGRAM_TABLES}
    return {**latent(shape), **sizes, **routing, **ngrams}


def dots1_layer(w: Writer, name: str, routed: bool) -> None:
    head = grouped_attention(w, f"{name}.self_attn", bias=False)
    for norm in ("q_norm", "k_norm"):
        w.plain(f"{name}.self_attn.{norm}.weight", head)
    shared_and_routed(w, f"{name}.mlp", routed, correction=True)


def longcat_flash_layer(w: Writer, name: str, routed: bool) -> None:
    """Adds attention, dense MLP and norms, two of each, and experts. The first layer adds the n-gram embedding."""
    for half in range(2):
        latent_attention(w, f"{name}.self_attn.{half}")
        w.mlp(f"{name}.mlps.{half}", w.size("ffn_hidden_size"))
        for norm in ("input_layernorm", "post_attention_layernorm"):
            w.plain(f"{name}.{norm}.{half}.weight", w.hidden)
    rows = w.num_experts + w.size("zero_expert_num")
    w.plain(f"{name}.mlp.router.classifier.weight", rows, w.hidden)
    w.plain(f"{name}.mlp.router.e_score_correction_bias", rows, dtype="F32")
    routed_experts(w, f"{name}.mlp.experts", w.size("expert_ffn_hidden_size"))


def ngram_embeddings(config: dict[str, Any]) -> list[TensorInfo]:
    """Returns a table and its projection per n-gram length from two on and per hash; each has a few more rows than the last."""
    tables, name = (NGRAM_TOKENS - 1) * NGRAM_TABLES, "model.ngram_embeddings"
    hidden, rows = config["hidden_size"], config["ngram_vocab_size_ratio"] * VOCAB
    infos = []
    for table in range(tables):
        infos.append(TensorInfo(f"{name}.embedders.{table}.weight", "BF16", (rows + 2 * table + 1, hidden // tables)))
        infos.append(TensorInfo(f"{name}.post_projs.{table}.weight", "BF16", (hidden, hidden // tables)))
    return infos


_ALL = (
    Family("glm4_moe", "Glm4MoeForCausalLM", glm4_moe),
    Family("qwen3_moe", "Qwen3MoeForCausalLM", qwen3_moe),
    Family("deepseek_v2", "DeepseekV2ForCausalLM", deepseek_v2),
    Family("deepseek_v3", "DeepseekV3ForCausalLM", deepseek_v3),
    Family("mixtral", "MixtralForCausalLM", mixtral, Shape(experts=8, top_k=2)),
    Family("olmoe", "OlmoeForCausalLM", olmoe, Shape(kv_heads=4)),
    Family("dots1", "Dots1ForCausalLM", dots1),
    Family("gpt_oss", "GptOssForCausalLM", gpt_oss, Shape(experts=8, top_k=2)),
    Family("longcat_flash", "LongcatFlashForCausalLM", longcat_flash),
)
FAMILIES = {family.model_type: family for family in _ALL}

# At one byte per weight or less, experts are larger, so that a slice still has 64 KiB.
SHAPE_OF_QUANT = {
    "fp8": Shape(layers=2, hidden=512, experts=8, top_k=2, expert_size=128, dense_size=512),
    "int8": Shape(layers=2, hidden=512, experts=8, top_k=2, expert_size=128, dense_size=512),
    "gptq": Shape(layers=2, hidden=512, experts=8, top_k=2, expert_size=256, dense_size=512),
}


def model_weights(
    config: dict[str, Any], shape: Shape, dtype: torch.dtype, seed: int, hot: list[list[int]] | None
) -> dict[str, torch.Tensor]:
    weights = Weights(shape, dtype, seed, hot)
    infos = tensors_of(config, {"dots1": dots1_layer, "longcat_flash": longcat_flash_layer})
    infos += ngram_embeddings(config) if "ngram_vocab_size_ratio" in config else []
    biased = {info.name.rpartition(".")[0] for info in infos if info.name.endswith("bias")}
    for info in infos:
        weights.draw(info, info.name.rpartition(".")[0] in biased)
    return weights.tensors


# ---------------------------------------------------------------- quantised experts


def pack_int4(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Packs eight 4-bit values along ``dim`` into one int32, the first in the lowest bits."""
    groups = values.to(torch.int64).movedim(dim, -1).unflatten(-1, (-1, 8))
    packed = (groups << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32).movedim(-1, dim).contiguous()


def block_fp8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantises ``[out, in]`` with one scale per 128 x 128 block."""
    blocks = weight.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
    scale = blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
    scale[scale == 0] = 1  # a block of zeros
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return {f"{name}.weight": (weight / spread).to(torch.float8_e4m3fn), f"{name}.weight_scale_inv": scale}


def channel_int8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantises ``[out, in]`` with one scale per output channel."""
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {f"{name}.weight": (weight / scale).round().to(torch.int8), f"{name}.weight_scale": scale}


def group_int4(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantises to GPTQ's layout: ``[in / 8, out]`` packed, symmetric, one scale per 128 inputs of an output."""
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
    """Returns a config that quantises only the experts and excludes everything else, in each method's format."""
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
    """Writes a byte-level tokenizer. Each of ``words`` is one token, with ids from VOCAB on."""
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
    """Saves a ``tokenizers.Tokenizer`` that has ``END`` and ``ROLES``, with the chat template."""
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
    """Returns the visible character that byte-level tokenizers use for each byte: itself, or one moved past U+0100."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {byte: chr(byte) for byte in itself} | {byte: chr(256 + rank) for rank, byte in enumerate(others)}


def hot_by_layer(hot: list[int] | list[list[int]] | None, layers: int, experts: int) -> list[list[int]] | None:
    """Returns a list of hot experts for each layer, including the draft layer: ``hot`` as given, or the same for all."""
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
    """Writes a checkpoint of ``family`` to ``out`` and returns its folder. ``sizes`` override fields of ``Shape``."""
    if quant and family != "qwen3_moe":
        raise ValueError("quantised experts are written for qwen3_moe only")
    shape = dataclasses.replace(SHAPE_OF_QUANT[quant] if quant else FAMILIES[family].shape, **sizes)
    config = FAMILIES[family].config(shape) | {"torch_dtype": dtype}
    tensors = model_weights(config, shape, getattr(torch, dtype), seed, hot_by_layer(hot, shape.layers, shape.experts))
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
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--quant", choices=QUANTS, help="quantise the experts (qwen3_moe)")
    parser.add_argument("--skew", metavar="IDS", help="experts that get nearly all tokens in every layer, such as 1,5,9")
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
