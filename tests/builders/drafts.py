"""EAGLE draft models for the tests' checkpoints: one dense layer that reads the target's hidden states."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from scripts.make_checkpoint import VOCAB, Shape, Weights, base_config

SHAPE = Shape(layers=1)
AUXILIARY = 3
"""Number of target layers whose hidden states EAGLE-3 reads."""


def eagle(folder: Path, dtype: str = "float32") -> Path:
    """Writes a draft that favours the newest token and shares its target's embedding and head."""
    weights = Weights(SHAPE, getattr(torch, dtype), seed=5, hot=None)
    _layer(weights, "layers.0", SHAPE.hidden)
    weights.norm("layers.0.post_attention_layernorm")
    weights.linear("fc", SHAPE.hidden, 2 * SHAPE.hidden, bias=True, gain=0.1)
    weights.tensors["fc.weight"][:, : SHAPE.hidden] += torch.eye(SHAPE.hidden)
    return _written(weights, folder, "LlamaForCausalLMEagle", torch_dtype=dtype)


def eagle3(folder: Path, target: Path, dtype: str = "float32") -> Path:
    """Writes a draft with its own head, a copy of the head of the checkpoint ``target``."""
    weights = Weights(SHAPE, getattr(torch, dtype), seed=6, hot=None)
    _layer(weights, "midlayer", 2 * SHAPE.hidden)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        weights.norm(f"midlayer.{name}")
    weights.norm("norm")
    weights.linear("fc", SHAPE.hidden, AUXILIARY * SHAPE.hidden)
    weights.add("lm_head.weight", load_file(target / "model.safetensors")["lm_head.weight"])
    return _written(weights, folder, "LlamaForCausalLMEagle3", torch_dtype=dtype, draft_vocab_size=VOCAB)


def _layer(weights: Weights, name: str, into: int) -> None:
    """Adds attention over ``into`` inputs, and an MLP."""
    heads, kv_heads = SHAPE.heads * SHAPE.head_dim, SHAPE.kv_heads * SHAPE.head_dim
    for part, out in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        weights.linear(f"{name}.self_attn.{part}_proj", out, into)
    weights.linear(f"{name}.self_attn.o_proj", SHAPE.hidden, heads)
    for part in ("gate", "up"):
        weights.linear(f"{name}.mlp.{part}_proj", SHAPE.dense_size, SHAPE.hidden)
    weights.linear(f"{name}.mlp.down_proj", SHAPE.hidden, SHAPE.dense_size)


def _written(weights: Weights, folder: Path, architecture: str, **more: object) -> Path:
    config = base_config(SHAPE, architecture, "llama", intermediate_size=SHAPE.dense_size, **more)
    del config["num_experts_per_tok"]
    folder.mkdir(parents=True)
    save_file(weights.tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
