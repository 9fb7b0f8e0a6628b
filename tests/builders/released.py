"""The tensors of a released checkpoint, by the names and shapes that its publisher's files have: of transformers' own class for
the configuration, on the ``meta`` device, with the conversions undone that transformers does as it loads such a checkpoint."""

from __future__ import annotations

import functools
from pathlib import Path

from builders.true_shape import config_folder, write

from sglang_uvm_offload.sizing.safetensors_header import TensorInfo


@functools.cache
def released_tensors(model: str) -> tuple[TensorInfo, ...]:
    """All tensors of ``owner/name``, in the types that its configuration states. Not for quantised ones."""
    import torch
    import transformers
    from safetensors.torch import _TYPES
    from transformers.core_model_loading import revert_weight_conversion

    config = transformers.AutoConfig.from_pretrained(config_folder(model))
    with torch.device("meta"):
        made = getattr(transformers, config.architectures[0])(config).to(config.dtype or torch.bfloat16)
    names = {dtype: name for name, dtype in _TYPES.items()}
    state = revert_weight_conversion(made, made.state_dict())
    return tuple(TensorInfo(name, names[tensor.dtype], tuple(tensor.shape)) for name, tensor in state.items())


def released_checkpoint(model: str, out: Path) -> Path:
    """``out``, with the published configuration of ``model`` and its checkpoint in true shape."""
    out.mkdir()
    for file in config_folder(model).iterdir():
        (out / file.name).write_bytes(file.read_bytes())
    write(out, released_tensors(model))
    return out
