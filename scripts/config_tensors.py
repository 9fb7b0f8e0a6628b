"""Lists the tensors of a checkpoint with a given config.json: names, shapes and types as in released checkpoints of some
families. Used to write checkpoints and to compare with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scripts.quantized_linear import QuantizedLinear, UnknownTensors
from sglang_uvm_offload.plan.safetensors_header import CheckpointError, NoExperts, TensorInfo

DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""Safetensors dtype of a model's weights by torch's name."""

MXFP4_BLOCK = 32
"""Weights per one-byte scale."""

_OF_THE_WHOLE = ("quantization_config", "compression_config", "torch_dtype", "dtype")


def read_config(folder: Path) -> dict[str, Any]:
    """Reads the language model's config.json in ``folder``, with the quantisation that ModelOpt states beside it."""
    config = text_config(json.loads((folder / "config.json").read_text()))
    beside = folder / "hf_quant_config.json"
    if "quantization_config" not in config and "compression_config" not in config and beside.exists():
        config["quantization_config"] = json.loads(beside.read_text())["quantization"]
    return config


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    outer = {name: config[name] for name in _OF_THE_WHOLE if config.get(name) is not None}
    for name in ("thinker_config", "llm_config", "language_config", "text_config"):
        if isinstance(inner := config.get(name), dict):
            return text_config(outer | {key: value for key, value in inner.items() if value is not None or key not in outer})
    return dict(config)


def tensors_of(config: Mapping[str, Any], others: Mapping[str, Family] | None = None) -> list[TensorInfo]:
    """Returns the tensors of a checkpoint with ``config`` (as config.json has it), and of its draft layers. ``others`` adds
    families."""
    writer, families = Writer(config), {**FAMILIES, **(others or {})}
    family = families.get(config.get("model_type", ""))
    if family is None:
        raise UnknownTensors(
            f"the tensors of a {config.get('model_type')!r} checkpoint are not known, only those of {', '.join(families)}"
        )
    if writer.method == "mxfp4" and family is not _gpt_oss:
        raise UnknownTensors(f"the tensors of a {config['model_type']!r} checkpoint in mxfp4 are not known")
    layers = writer.size("num_hidden_layers")
    writer.plain("model.embed_tokens.weight", writer.size("vocab_size"), writer.hidden)
    for layer in range(layers):
        _decoder_layer(writer, family, f"model.layers.{layer}", writer.routes(layer))
    writer.plain("model.norm.weight", writer.hidden)
    if not config.get("tie_word_embeddings"):
        writer.plain("lm_head.weight", writer.size("vocab_size"), writer.hidden)
    for draft in range(writer.size("num_nextn_predict_layers", 0)):
        _draft_layer(writer, family, f"model.layers.{layers + draft}")
    return writer.tensors


def _quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the quantisation that ``config`` states, with SGLang's name of the method."""
    quant = config.get("quantization_config") or config.get("compression_config") or {}
    if not quant or quant.get("quant_method") not in (None, "modelopt"):
        return dict(quant)
    return {**quant, "quant_method": "modelopt_fp4" if "FP4" in str(quant.get("quant_algo")) else "modelopt_fp8"}


class Writer:
    """Collects tensors, and quantises the modules that the config includes."""

    def __init__(self, config: Mapping[str, Any]):
        self.config = config
        names = ("n_routed_experts", "num_experts", "num_local_experts")
        self.num_experts = next((self.size(name) for name in names if config.get(name)), 0)
        if not self.num_experts:
            raise NoExperts("the config describes no routed experts")
        self.hidden = self.size("hidden_size")
        self.dtype = DTYPES.get(config.get("torch_dtype") or config.get("dtype") or "bfloat16", "")
        if not self.dtype:
            raise CheckpointError(f"torch_dtype {config.get('torch_dtype')!r} is not one of {', '.join(DTYPES)}")
        self.quantized = QuantizedLinear(_quantization_of(config), self.dtype)
        self.method = self.quantized.method
        self.tensors: list[TensorInfo] = []

    def routes(self, layer: int) -> bool:
        """Whether the decoder layer has routed experts."""
        step = self.config.get("decoder_sparse_step") or self.config.get("moe_layer_freq") or 1
        first = self.config.get("first_k_dense_replace") or 0
        at = layer + 1 if self.config.get("decoder_sparse_step") else layer
        return layer >= first and at % step == 0 and layer not in (self.config.get("mlp_only_layers") or ())

    def size(self, name: str, default: int | None = None) -> int:
        value = self.config.get(name, default)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 31:
            raise CheckpointError(f"the config's {name} is {value!r}, not a size")
        return value

    def plain(self, name: str, *shape: int, dtype: str | None = None) -> None:
        self.tensors.append(TensorInfo(name, dtype or self.dtype, shape))

    def linear(self, name: str, out: int, into: int, bias: bool = False) -> None:
        """Adds ``name``.weight and what its quantisation adds. ``out`` x ``into``, as in torch.nn.Linear."""
        self.tensors += self.quantized.tensors(name, out, into)
        if bias:
            self.plain(f"{name}.bias", out)

    def mlp(self, name: str, size: int, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> None:
        self.linear(f"{name}.{gate}", size, self.hidden)
        self.linear(f"{name}.{up}", size, self.hidden)
        self.linear(f"{name}.{down}", self.hidden, size)


Family = Callable[[Writer, str, bool], None]
"""Adds the tensors of the decoder layer of this name. The last argument says whether it has routed experts."""


def _decoder_layer(w: Writer, family: Family, name: str, routed: bool) -> None:
    if w.config.get("model_type") != "longcat_flash":  # LongCat has two of each
        w.plain(f"{name}.input_layernorm.weight", w.hidden)
        w.plain(f"{name}.post_attention_layernorm.weight", w.hidden)
    family(w, name, routed)


def _draft_layer(w: Writer, family: Family, name: str) -> None:
    """Adds the draft layer of NEXTN speculation. It repeats the model's embedding and head, except in GLM-5."""
    _decoder_layer(w, family, name, routed=True)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        w.plain(f"{name}.{norm}.weight", w.hidden)
    w.plain(f"{name}.eh_proj.weight", w.hidden, 2 * w.hidden)
    if w.config.get("model_type") == "glm_moe_dsa":
        return
    w.plain(f"{name}.embed_tokens.weight", w.size("vocab_size"), w.hidden)
    w.plain(f"{name}.shared_head.head.weight", w.size("vocab_size"), w.hidden)


def grouped_attention(w: Writer, name: str, bias: bool, out_bias: bool = False) -> int:
    """Adds query, key, value and output projections. Returns the head size."""
    heads = w.size("num_attention_heads")
    kv_heads = w.size("num_key_value_heads", heads)
    head = w.size("head_dim", w.hidden // heads)
    w.linear(f"{name}.q_proj", heads * head, w.hidden, bias)
    w.linear(f"{name}.k_proj", kv_heads * head, w.hidden, bias)
    w.linear(f"{name}.v_proj", kv_heads * head, w.hidden, bias)
    w.linear(f"{name}.o_proj", w.hidden, heads * head, out_bias)
    return head


def latent_attention(w: Writer, name: str) -> None:
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


def routed_experts(w: Writer, name: str, size: int, **projections: str) -> None:
    for expert in range(w.num_experts):
        w.mlp(f"{name}.{expert}", size, **projections)


def shared_and_routed(w: Writer, name: str, routed: bool, correction: bool) -> None:
    """Adds a dense MLP, or routed and shared experts, as in DeepSeek and GLM."""
    if not routed:
        return w.mlp(name, w.size("intermediate_size"))
    size = w.size("moe_intermediate_size")
    w.plain(f"{name}.gate.weight", w.num_experts, w.hidden)
    if correction:
        w.plain(f"{name}.gate.e_score_correction_bias", w.num_experts, dtype="F32")
    if w.size("n_shared_experts", 0):
        w.mlp(f"{name}.shared_experts", w.size("n_shared_experts") * size)
    routed_experts(w, f"{name}.experts", size)


def _deepseek(w: Writer, name: str, routed: bool) -> None:
    latent_attention(w, f"{name}.self_attn")
    shared_and_routed(w, f"{name}.mlp", routed, correction=w.config.get("topk_method") == "noaux_tc")


def _glm4(w: Writer, name: str, routed: bool) -> None:
    head = grouped_attention(w, f"{name}.self_attn", bias=bool(w.config.get("attention_bias")))
    if w.config.get("use_qk_norm"):
        w.plain(f"{name}.self_attn.q_norm.weight", head)
        w.plain(f"{name}.self_attn.k_norm.weight", head)
    shared_and_routed(w, f"{name}.mlp", routed, correction=True)


def _qwen3(w: Writer, name: str, routed: bool) -> None:
    bias = bool(w.config.get("attention_bias"))
    head = grouped_attention(w, f"{name}.self_attn", bias, bias)
    w.plain(f"{name}.self_attn.q_norm.weight", head)
    w.plain(f"{name}.self_attn.k_norm.weight", head)
    if not routed:
        return w.mlp(f"{name}.mlp", w.size("intermediate_size"))
    w.plain(f"{name}.mlp.gate.weight", w.num_experts, w.hidden)
    routed_experts(w, f"{name}.mlp.experts", w.size("moe_intermediate_size"))


def _mixtral(w: Writer, name: str, routed: bool) -> None:
    grouped_attention(w, f"{name}.self_attn", bias=False)
    w.plain(f"{name}.block_sparse_moe.gate.weight", w.num_experts, w.hidden)
    routed_experts(w, f"{name}.block_sparse_moe.experts", w.size("intermediate_size"), gate="w1", down="w2", up="w3")


def _olmoe(w: Writer, name: str, routed: bool) -> None:
    head = grouped_attention(w, f"{name}.self_attn", bias=bool(w.config.get("attention_bias")))
    heads = w.size("num_attention_heads")
    w.plain(f"{name}.self_attn.q_norm.weight", heads * head)
    w.plain(f"{name}.self_attn.k_norm.weight", w.size("num_key_value_heads", heads) * head)
    w.plain(f"{name}.mlp.gate.weight", w.num_experts, w.hidden)
    routed_experts(w, f"{name}.mlp.experts", w.size("intermediate_size"))


def _gpt_oss(w: Writer, name: str, routed: bool) -> None:
    """Stacks a layer's experts in one tensor per part, with gate and up interleaved, and with biases."""
    bias = bool(w.config.get("attention_bias"))
    grouped_attention(w, f"{name}.self_attn", bias, bias)
    w.plain(f"{name}.self_attn.sinks", w.size("num_attention_heads"))
    experts, size = w.num_experts, w.size("intermediate_size")
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


FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm_moe_dsa"), _deepseek),
    "glm4_moe": _glm4,
    "qwen3_moe": _qwen3,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "gpt_oss": _gpt_oss,
}
