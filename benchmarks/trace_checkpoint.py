"""Writes a checkpoint that servers load like any other and whose routing replays a measured trace.

    python -m benchmarks.trace_checkpoint qwen3-30b-a3b benchmarks/gpu/routing_trace.npz OUT --quant fp8 --layers 16

Decoding walks the trace: each token stands for one position, routes in every layer to the experts recorded there, and is
followed by a token of the next position. ``trace_weights.py`` explains the method; ``trace_walk.py`` selects the part of the
trace and makes prompts; ``routing_overlay.py`` maps a trace to a model of other sizes. ``walk.npz`` beside the checkpoint is
the replayed trace.

Weights are random and vocabularies small, as the walk needs them. There is no draft layer and no expert grouping (``n_group``
is 1). The other sizes are the model's own, for DeepSeek-V3 those of one of 8 tensor-parallel ranks. With fp8, routed and
shared experts are block-FP8 and the rest is bfloat16.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.routing_overlay import OverlayError, lay_over
from benchmarks.trace_walk import STRETCH, Walk, WalkError, available, cut, read
from benchmarks.trace_weights import CODE_BLOCK, TraceWeights, code_size
from scripts import make_checkpoint
from scripts.config_tensors import tensors_of
from scripts.make_checkpoint import Shape
from sglang_uvm_offload.routing.trace import Trace

MAX_BYTES = 40 * 10**9
SHARD_BYTES = 1 << 30


class Refused(ValueError):
    """The checkpoint was not written. The message gives every reason."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A family of ``make_checkpoint`` with sizes, and where its config differs from the family's."""

    family: str
    shape: Shape
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    follows_trace: bool = False
    """Whether the number of experts and top-k are the trace's."""

    def sized(self, trace: Trace, layers: int | None) -> Model:
        shape = dataclasses.replace(self.shape, layers=self.shape.layers if layers is None else layers)
        if self.follows_trace:
            shape = dataclasses.replace(shape, experts=trace.num_experts, top_k=trace.ids.shape[2])
        return dataclasses.replace(self, shape=shape)

    def configured(self, vocabulary: int, quant: str | None) -> dict[str, Any]:
        """Returns the content of config.json."""
        config = make_checkpoint.FAMILIES[self.family].config(self.shape)
        config |= {"torch_dtype": "bfloat16", "vocab_size": vocabulary, "num_nextn_predict_layers": 0}
        config |= {"n_group": 1, "topk_group": 1} | self.config
        if quant:
            config["quantization_config"] = make_checkpoint.quantization_config(quant, self.shape.layers)
            config["quantization_config"]["modules_to_not_convert"] = self.not_converted(config)
        return config

    def not_converted(self, config: dict[str, Any]) -> list[str]:
        """Lists the modules that stay unquantised: everything but experts."""
        dense = config.get("first_k_dense_replace", 0)
        modules = [f"model.layers.{layer}.self_attn" for layer in range(self.shape.layers)]
        modules += [f"model.layers.{layer}.mlp" + ".gate" * (layer >= dense) for layer in range(self.shape.layers)]
        return [*modules, "lm_head"]


TINY = Shape(layers=3, hidden=512, dense_size=512)
LONG = {"max_position_embeddings": 32768}
DEEPSEEK_ROPE = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
MODELS = {
    "qwen3-30b-a3b": Model(
        "qwen3_moe",
        Shape(48, hidden=2048, experts=128, top_k=8, expert_size=768, heads=32, kv_heads=4, head_dim=128, dense_size=6144),
        {**LONG, "rope_theta": 1e6},
    ),
    "deepseek-v3": Model(
        "deepseek_v3",
        Shape(61, hidden=7168, experts=256, top_k=8, expert_size=2048 // 8, heads=128 // 8, dense_size=18432 // 8),
        {
            **LONG,
            "first_k_dense_replace": 3,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "rope_scaling": {**DEEPSEEK_ROPE, "original_max_position_embeddings": 4096},
        },
    ),
    "tiny-qwen3": Model("qwen3_moe", TINY, follows_trace=True),
    "tiny-glm": Model("glm4_moe", TINY, follows_trace=True),
    "tiny-deepseek": Model("deepseek_v3", TINY, follows_trace=True),
}


class Shards:
    """Writes tensors as they come, in files of about SHARD_BYTES, and then the index."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.held: dict[str, torch.Tensor] = {}
        self.held_bytes = self.total_bytes = 0
        self.files: dict[str, str] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self.held[name] = tensor
        self.held_bytes += tensor.nbytes
        if self.held_bytes >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        if not self.held:
            return
        file = f"model-{len(set(self.files.values())) + 1:05}.safetensors"
        save_file(self.held, str(self.folder / file), metadata={"format": "pt"})
        self.files |= dict.fromkeys(self.held, file)
        self.total_bytes += self.held_bytes
        self.held, self.held_bytes = {}, 0

    def close(self) -> None:
        self.flush()
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": self.files}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index))


def walk_for(model: Model, trace: Trace, positions: int | None, stretch: int) -> Walk:
    """Maps ``positions`` positions of the trace (by default half the hidden size) to the model's MoE layers."""
    shape = model.shape
    if positions is None:
        positions = min(shape.hidden // 2, available(trace, stretch))
    if code_size(positions) > shape.hidden - CODE_BLOCK:
        raise WalkError(
            f"--positions {positions}: each takes a dimension of the stream, and of {shape.hidden} at most "
            f"{shape.hidden - CODE_BLOCK} may be taken"
        )
    measured = cut(trace, positions, stretch)
    ids = lay_over(measured.ids, measured.num_experts, shape.layers - dense_layers(model), shape.experts, shape.top_k)
    return Walk(Trace(ids, measured.seq_len, shape.experts))


def dense_layers(model: Model) -> int:
    """Returns how many of the first layers have no experts."""
    return int(model.configured(0, None).get("first_k_dense_replace", 0))


def check_layers(model: Model) -> None:
    least = dense_layers(model) + 1
    if model.shape.layers < least:
        raise Refused(f"--layers {model.shape.layers}: at least {least} are needed, so that one has experts")


def check_bytes(model: Model, vocabulary: int, quant: str | None, free: int) -> None:
    """Refuses a checkpoint larger than MAX_BYTES or than the ``free`` bytes on the disk."""
    needed, room = sum(info.nbytes for info in tensors_of(model.configured(vocabulary, quant))), min(MAX_BYTES, free)
    if needed > room:
        where = "a checkpoint may have" if room == MAX_BYTES else "the disk has free"
        raise Refused(
            f"the checkpoint would have {needed / 1e9:.1f} GB, more than the {room / 1e9:.1f} GB that {where}: lower --layers"
        )


def write(
    model: Model,
    trace: Trace,
    out: str | Path,
    *,
    quant: str | None = None,
    layers: int | None = None,
    positions: int | None = None,
    stretch: int = STRETCH,
    seed: int = 0,
) -> Path:
    """Writes the checkpoint to the folder ``out``, which must be new or empty, and returns it.

    Raises ``Refused``, ``WalkError`` or ``OverlayError`` before it writes anything."""
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise Refused(f"{folder} already exists; name a new or empty folder")
    model = model.sized(trace, layers)
    check_layers(model)
    walk = walk_for(model, trace, positions, stretch)
    there = next(parent for parent in [folder.absolute(), *folder.absolute().parents] if parent.exists())
    check_bytes(model, walk.vocabulary, quant, shutil.disk_usage(there).free)
    config = model.configured(walk.vocabulary, quant)
    folder.mkdir(parents=True, exist_ok=True)
    weights, shards = TraceWeights(config, walk, seed), Shards(folder)
    for info in tensors_of(config):
        for name, tensor in weights(info).items():
            shards.add(name, tensor)
    shards.close()
    walk.save(folder)
    make_checkpoint.write_tokenizer(folder, walk.texts(), config["max_position_embeddings"])
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("shape", choices=sorted(MODELS), metavar="SHAPE", help=", ".join(MODELS))
    parser.add_argument("trace", type=Path, metavar="TRACE.npz", help="ids[token, layer, k], seq_len, num_experts")
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write; must be new or empty")
    parser.add_argument("--quant", choices=("fp8",), help="experts as block-FP8 (default: bfloat16)")
    parser.add_argument("--layers", type=int, metavar="N", help="decoder layers, dense ones included (default: the model's)")
    parser.add_argument("--positions", type=int, metavar="V", help="tokens to walk (default: half of the hidden size)")
    parser.add_argument(
        "--stretch", type=int, default=STRETCH, metavar="S", help=f"most tokens of a request (default: {STRETCH})"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    options = {name: getattr(args, name) for name in ("quant", "layers", "positions", "stretch", "seed")}
    try:
        folder = write(MODELS[args.shape], read(args.trace), args.out, **options)
    except (Refused, WalkError, OverlayError) as problem:
        parser.error(str(problem))
    walk = Walk.load(folder)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    print(f"{folder}: {args.shape}, {size / 1e9:.2f} GB, walks {walk.positions} tokens of {len(walk.starts)} requests")


if __name__ == "__main__":
    main()
