"""The tensors of a checkpoint with a given config.json, for planning without the checkpoint.

Names, shapes and types follow released checkpoints of these families. Other families and quantisations are refused; for them,
plan from the headers of the checkpoint itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from sglang_uvm_offload.sizing.moe_shape import EXPERTS, MoeShape, moe_shape, most, stated_experts
from sglang_uvm_offload.sizing.quantization import quantization_of
from sglang_uvm_offload.sizing.quantized_linear import QuantizedLinear, UnknownTensors
from sglang_uvm_offload.sizing.safetensors_header import DTYPES, CheckpointError, NoExperts, TensorInfo

MXFP4_BLOCK = 32
"""Weights that share a scale of one byte."""


_LIMITS = {
    **{"num_hidden_layers": 4096, "num_nextn_predict_layers": 64},
    **dict.fromkeys(EXPERTS, 1 << 16),
}
_MOST_EXPERTS = 1 << 18
"""In all layers, those that draft included. As all of these limits far beyond any model: a config beyond them is broken, and
loops over its counts would take minutes, or not end."""


_SIZES = (
    *("hidden_size", "vocab_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "v_head_dim", "qk_nope_head_dim", "q_lora_rank", "max_position_embeddings"),
)
"""What no model has none of; a config may leave it out, or state null."""


def check_counts(config: Mapping[str, Any]) -> None:
    """Refuse counts of layers and experts that are not numbers, or beyond the limits, and sizes of 0 or less."""
    for name in _SIZES:
        value = config.get(name)
        value = most(value) if isinstance(value, list) else value
        if isinstance(value, (int, float)) and not 0 < value < 1 << 31:
            raise CheckpointError(f"the config's {name} is {value!r}, not a size of 1 or more")
    for name, limit in _LIMITS.items():
        value = config.get(name)
        # Experts may be stated layer by layer, or for each modality.
        each = value if isinstance(value, list) and name in EXPERTS else [value]
        if value is not None and not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= limit for n in each):
            raise CheckpointError(f"the config's {name} is {value!r:.80}, not a number up to {limit}")
    layers = (config.get("num_hidden_layers") or 0) + (config.get("num_nextn_predict_layers") or 0)
    experts = stated_experts(SimpleNamespace(**config)) or 0
    if layers * experts > _MOST_EXPERTS:
        raise CheckpointError(f"the config has {layers} layers of {experts} experts, more than {_MOST_EXPERTS} in all")


def tensors_of(config: Mapping[str, Any]) -> list[TensorInfo]:
    """The tensors of a checkpoint with ``config`` (as in config.json), draft layers included."""
    writer = _Writer(config)
    family = FAMILIES.get(config.get("model_type"))
    if family is None:
        raise UnknownTensors(
            f"the tensors of a {config.get('model_type')!r} checkpoint are not known from its config; give the checkpoint's "
            f"folder (known from the config: {', '.join(FAMILIES)})"
        )
    if writer.method == "mxfp4" and family is not _gpt_oss:
        raise UnknownTensors(f"the tensors of a {config['model_type']!r} checkpoint in mxfp4 are not known; give its folder")
    layers = writer.size("num_hidden_layers")
    writer.plain("model.embed_tokens.weight", writer.size("vocab_size"), writer.hidden)
    for layer in range(layers):
        _decoder_layer(writer, family, f"model.layers.{layer}", layer in writer.moe.moe_layers)
    writer.plain("model.norm.weight", writer.hidden)
    if not config.get("tie_word_embeddings"):
        writer.plain("lm_head.weight", writer.size("vocab_size"), writer.hidden)
    for draft in range(writer.size("num_nextn_predict_layers", 0)):
        _draft_layer(writer, family, f"model.layers.{layers + draft}")
    return writer.tensors


class _Writer:
    """Collects tensors, with the config's quantisation applied to the modules that it includes."""

    def __init__(self, config: Mapping[str, Any]):
        check_counts(config)
        self.config = config
        moe = moe_shape(SimpleNamespace(**config))
        if moe is None:
            raise NoExperts("the config describes no routed experts")
        self.moe: MoeShape = moe
        self.hidden = self.size("hidden_size")
        self.dtype = DTYPES.get(config.get("torch_dtype") or config.get("dtype") or "bfloat16", "")
        if not self.dtype:
            raise CheckpointError(f"torch_dtype {config.get('torch_dtype')!r} is not one of {', '.join(DTYPES)}")
        self.quantized = QuantizedLinear(quantization_of(config), self.dtype)
        self.method = self.quantized.method
        self.tensors: list[TensorInfo] = []

    def size(self, name: str, default: int | None = None) -> int:
        value = self.config.get(name, default)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
            raise CheckpointError(f"the config's {name} is {value!r}, not a size")
        return value

    def plain(self, name: str, *shape: int, dtype: str | None = None) -> None:
        self.tensors.append(TensorInfo(name, dtype or self.dtype, shape))

    def linear(self, name: str, out: int, into: int, bias: bool = False) -> None:
        """``name``.weight and what its quantisation adds. ``out`` x ``into``, as torch.nn.Linear has it."""
        self.tensors += self.quantized.tensors(name, out, into)
        if bias:
            self.plain(f"{name}.bias", out)

    def mlp(self, name: str, size: int, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> None:
        self.linear(f"{name}.{gate}", size, self.hidden)
        self.linear(f"{name}.{up}", size, self.hidden)
        self.linear(f"{name}.{down}", self.hidden, size)


def _decoder_layer(w: _Writer, family: Callable[[_Writer, str, bool], None], name: str, routed: bool) -> None:
    w.plain(f"{name}.input_layernorm.weight", w.hidden)
    w.plain(f"{name}.post_attention_layernorm.weight", w.hidden)
    family(w, name, routed)


def _draft_layer(w: _Writer, family: Callable[[_Writer, str, bool], None], name: str) -> None:
    """The draft layer of NEXTN speculation. It repeats the model's embedding and head, except in GLM-5."""
    _decoder_layer(w, family, name, routed=True)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        w.plain(f"{name}.{norm}.weight", w.hidden)
    w.plain(f"{name}.eh_proj.weight", w.hidden, 2 * w.hidden)
    if w.config.get("model_type") == "glm_moe_dsa":
        return
    w.plain(f"{name}.embed_tokens.weight", w.size("vocab_size"), w.hidden)
    w.plain(f"{name}.shared_head.head.weight", w.size("vocab_size"), w.hidden)


def _grouped_attention(w: _Writer, name: str, bias: bool, out_bias: bool = False) -> int:
    """Query, key, value and output projections. Returns the size of a head."""
    heads = w.size("num_attention_heads")
    kv_heads = w.size("num_key_value_heads", heads)
    head = w.size("head_dim", w.hidden // heads)
    w.linear(f"{name}.q_proj", heads * head, w.hidden, bias)
    w.linear(f"{name}.k_proj", kv_heads * head, w.hidden, bias)
    w.linear(f"{name}.v_proj", kv_heads * head, w.hidden, bias)
    w.linear(f"{name}.o_proj", w.hidden, heads * head, out_bias)
    return head


def _latent_attention(w: _Writer, name: str) -> None:
    heads, latent, rope = w.size("num_attention_heads"), w.size("kv_lora_rank"), w.size("qk_rope_head_dim")
    nope, value, query = w.size("qk_nope_head_dim"), w.size("v_head_dim"), w.size("q_lora_rank", 0)
    if query:
        w.linear(f"{name}.q_a_proj", query, w.hidden)
        w.plain(f"{name}.q_a_layernorm.weight", query)
        w.linear(f"{name}.q_b_proj", heads * (nope + rope), query)
    else:
        w.linear(f"{name}.q_proj", heads * (nope + rope), w.hidden)
    w.linear(f"{name}.kv_a_proj_with_mqa", latent + rope, w.hidden)
    w.plain(f"{name}.kv_a_layernorm.weight", latent)
    w.linear(f"{name}.kv_b_proj", heads * (nope + value), latent)
    w.linear(f"{name}.o_proj", w.hidden, heads * value)
    if w.size("index_head_dim", 0):
        index, size = f"{name}.indexer", w.size("index_head_dim")
        w.linear(f"{index}.wq_b", w.size("index_n_heads") * size, query)
        w.linear(f"{index}.wk", size, w.hidden)
        w.plain(f"{index}.k_norm.weight", size)
        w.plain(f"{index}.k_norm.bias", size)
        w.plain(f"{index}.weights_proj.weight", w.size("index_n_heads"), w.hidden)


def _experts(w: _Writer, name: str, size: int, **projections: str) -> None:
    for expert in range(w.moe.num_experts):
        w.mlp(f"{name}.{expert}", size, **projections)


def _shared_and_routed(w: _Writer, name: str, routed: bool, correction: bool) -> None:
    """As in DeepSeek and GLM: a dense MLP, or routed and shared experts."""
    if not routed:
        return w.mlp(name, w.size("intermediate_size"))
    size = w.size("moe_intermediate_size")
    w.plain(f"{name}.gate.weight", w.moe.num_experts, w.hidden)
    if correction:
        w.plain(f"{name}.gate.e_score_correction_bias", w.moe.num_experts, dtype="F32")
    if w.size("n_shared_experts", 0):
        w.mlp(f"{name}.shared_experts", w.size("n_shared_experts") * size)
    _experts(w, f"{name}.experts", size)


def _deepseek(w: _Writer, name: str, routed: bool) -> None:
    _latent_attention(w, f"{name}.self_attn")
    _shared_and_routed(w, f"{name}.mlp", routed, correction=w.config.get("topk_method") == "noaux_tc")


def _glm4(w: _Writer, name: str, routed: bool) -> None:
    head = _grouped_attention(w, f"{name}.self_attn", bias=bool(w.config.get("attention_bias")))
    if w.config.get("use_qk_norm"):
        w.plain(f"{name}.self_attn.q_norm.weight", head)
        w.plain(f"{name}.self_attn.k_norm.weight", head)
    _shared_and_routed(w, f"{name}.mlp", routed, correction=True)


def _qwen3(w: _Writer, name: str, routed: bool) -> None:
    bias = bool(w.config.get("attention_bias"))
    head = _grouped_attention(w, f"{name}.self_attn", bias, bias)
    w.plain(f"{name}.self_attn.q_norm.weight", head)
    w.plain(f"{name}.self_attn.k_norm.weight", head)
    if not routed:
        return w.mlp(f"{name}.mlp", w.size("intermediate_size"))
    w.plain(f"{name}.mlp.gate.weight", w.moe.num_experts, w.hidden)
    _experts(w, f"{name}.mlp.experts", w.size("moe_intermediate_size"))


def _mixtral(w: _Writer, name: str, routed: bool) -> None:
    _grouped_attention(w, f"{name}.self_attn", bias=False)
    w.plain(f"{name}.block_sparse_moe.gate.weight", w.moe.num_experts, w.hidden)
    _experts(w, f"{name}.block_sparse_moe.experts", w.size("intermediate_size"), gate="w1", down="w2", up="w3")


def _olmoe(w: _Writer, name: str, routed: bool) -> None:
    head = _grouped_attention(w, f"{name}.self_attn", bias=bool(w.config.get("attention_bias")))
    heads = w.size("num_attention_heads")
    w.plain(f"{name}.self_attn.q_norm.weight", heads * head)
    w.plain(f"{name}.self_attn.k_norm.weight", w.size("num_key_value_heads", heads) * head)
    w.plain(f"{name}.mlp.gate.weight", w.moe.num_experts, w.hidden)
    _experts(w, f"{name}.mlp.experts", w.size("intermediate_size"))


def _gpt_oss(w: _Writer, name: str, routed: bool) -> None:
    """The experts of a layer are stacked in one tensor for each part, gate and up interleaved, with biases."""
    bias = bool(w.config.get("attention_bias"))
    _grouped_attention(w, f"{name}.self_attn", bias, bias)
    w.plain(f"{name}.self_attn.sinks", w.size("num_attention_heads"))
    experts, size = w.moe.num_experts, w.size("intermediate_size")
    w.plain(f"{name}.mlp.router.weight", experts, w.hidden)
    w.plain(f"{name}.mlp.router.bias", experts)
    for part, out, into in (("gate_up_proj", 2 * size, w.hidden), ("down_proj", w.hidden, size)):
        tensor = f"{name}.mlp.experts.{part}"
        if w.method == "mxfp4":
            blocks = -(-into // MXFP4_BLOCK)
            w.plain(f"{tensor}_blocks", experts, out, blocks, MXFP4_BLOCK // 2, dtype="U8")
            w.plain(f"{tensor}_scales", experts, out, blocks, dtype="U8")
        else:
            w.plain(tensor, experts, into, out)
        w.plain(f"{tensor}_bias", experts, out)


FAMILIES: dict[Any, Callable[[_Writer, str, bool], None]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa"), _deepseek),
    "glm4_moe": _glm4,
    "qwen3_moe": _qwen3,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "gpt_oss": _gpt_oss,
}
