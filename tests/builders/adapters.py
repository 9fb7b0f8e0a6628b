"""LoRA adapters for the tests' checkpoints, as PEFT writes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("gate_proj", "up_proj", "down_proj")
RANK = 4


def adapter(checkpoint: Path, folder: Path, modules: Sequence[str] = ATTENTION, seed: int = 3) -> Path:
    """Writes an adapter of rank ``RANK`` for ``modules`` in every layer. Returns its folder."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, weight in load_file(file).items():
            if name.endswith(tuple(f".{module}.weight" for module in modules)):
                out, into = weight.shape
                part = f"base_model.model.{name.removesuffix('.weight')}"
                tensors[f"{part}.lora_A.weight"] = torch.randn(RANK, into, generator=generator) / into**0.5
                tensors[f"{part}.lora_B.weight"] = torch.randn(out, RANK, generator=generator) / RANK**0.5
    assert tensors, f"{checkpoint} has no {modules}"
    folder.mkdir(parents=True)
    save_file(tensors, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(modules), "bias": "none"}
    config["base_model_name_or_path"] = str(checkpoint)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
