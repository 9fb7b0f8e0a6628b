"""Lists the tensors of a released checkpoint with the names and shapes of its publisher's files. They come from transformers'
class for the configuration, on the ``meta`` device, with transformers' load-time conversions undone."""

from __future__ import annotations

import contextlib
import functools
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from builders.true_shape import checkpoint, config_folder, write

from scripts.config_tensors import read_config, tensors_of
from sglang_uvm_offload.plan.safetensors_header import CheckpointError, TensorInfo

_EXPERT = re.compile(r"(.*\.experts\.\d+\.)(\w+)\.weight$")


class Untold(Exception):
    """Neither our rules nor transformers determine the checkpoint's tensors."""


def written(model: str, folder: Path) -> Path | None:
    """Writes the checkpoint of ``owner/name`` to ``folder``. Returns None if its tensors cannot be determined."""
    out = folder / model.replace("/", "--")
    with contextlib.suppress(CheckpointError):
        return checkpoint(model, out)
    try:
        return released_checkpoint(model, out.with_name(f"{out.name}-released"))
    except (AttributeError, KeyError, ValueError, OSError):
        return None


@functools.cache
def released_tensors(model: str) -> tuple[TensorInfo, ...]:
    """Returns all tensors of ``owner/name`` with the dtypes that its configuration states. Not for quantised models."""
    return tuple(_by_transformers(config_folder(model)))


def released_checkpoint(model: str, out: Path) -> Path:
    """Writes the published configuration of ``model`` and its true-shape checkpoint to ``out``, and returns that."""
    shutil.copytree(config_folder(model), out)
    write(out, released_tensors(model))
    return out


def tensors_of_folder(folder: Path) -> list[TensorInfo]:
    """Returns the tensors of the model that ``folder`` configures, by our rules or by transformers' class."""
    with contextlib.suppress(CheckpointError):
        return list(tensors_of(read_config(folder)))
    try:
        return list(_by_transformers(folder))
    except Exception as error:  # the class may raise anything on an unsuitable configuration
        raise Untold(str(error)) from error


def _by_transformers(folder: Path) -> Iterator[TensorInfo]:
    import torch
    import transformers
    from safetensors.torch import _TYPES
    from transformers.core_model_loading import revert_weight_conversion

    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        made = getattr(transformers, config.architectures[0])(config).to(config.dtype or torch.bfloat16)
    names = {dtype: name for name, dtype in _TYPES.items()}
    state = revert_weight_conversion(made, made.state_dict())
    tensors = [TensorInfo(name, names[tensor.dtype], tuple(tensor.shape)) for name, tensor in state.items()]
    for tensor in tensors:
        expert = _EXPERT.match(tensor.name)
        # LongCat's class has a row for each expert that computes nothing, of which its files have none.
        if expert is None or f"{expert[1]}down_proj.weight" in state or not expert[2].startswith(("gate", "up")):
            yield tensor
    yield from _draft_layer(read_config(folder), tensors)


def _draft_layer(config: dict[str, Any], tensors: list[TensorInfo]) -> Iterator[TensorInfo]:
    """Yields the draft layer that files have and transformers' class omits: a decoder layer like the last (MiMo-V2's is dense
    like the first) and what joins it to the model, with the names that SGLang 0.5.23 loads (``qwen3_next.load_weights``,
    ``deepseek_nextn``, ``mimo_v2_nextn``)."""
    layers, hidden, dtype = config["num_hidden_layers"], config["hidden_size"], tensors[0].dtype
    last = 0 if config.get("model_type") == "mimo_v2_flash" else layers - 1
    like = [(found[1], tensor) for tensor in tensors if (found := re.search(rf"\blayers\.{last}\.(.+)", tensor.name))]
    if config.get("model_type") == "qwen3_next" or config.get("mtp_num_hidden_layers"):
        name, joint, norms = "mtp.layers.0", "mtp.fc", ("mtp.norm", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden")
        vocabulary: tuple[str, ...] = ()
    elif config.get("model_type") == "mimo_v2_flash":
        name, vocabulary = "model.mtp.layers.0", ()
        joint, norms = f"{name}.eh_proj", tuple(f"{name}.{norm}" for norm in ("enorm", "hnorm", "final_layernorm"))
    elif config.get("num_nextn_predict_layers") and not any(f"layers.{layers}." in tensor.name for tensor in tensors):
        name = f"model.layers.{layers}"
        joint, norms = f"{name}.eh_proj", tuple(f"{name}.{norm}" for norm in ("enorm", "hnorm", "shared_head.norm"))
        vocabulary = (f"{name}.embed_tokens", f"{name}.shared_head.head")
    else:
        return
    yield from (TensorInfo(f"{name}.{path}", tensor.dtype, tensor.shape) for path, tensor in like)
    yield TensorInfo(f"{joint}.weight", dtype, (hidden, 2 * hidden))
    yield from (TensorInfo(f"{norm}.weight", dtype, (hidden,)) for norm in norms)
    yield from (TensorInfo(f"{each}.weight", dtype, (config["vocab_size"], hidden)) for each in vocabulary)
