"""Lists the tensors of a quantised linear layer in a checkpoint, by the method that the checkpoint states.

Names, shapes and types are those that SGLang 0.5.23 registers and loads (``layers/quantization``), as ModelOpt and
llm-compressor write them."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from sglang_uvm_offload.plan.safetensors_header import CheckpointError, TensorInfo

NVFP4_GROUP = 16
"""Weights per one-byte scale."""


class UnknownTensors(CheckpointError):
    """The config may be valid, but does not determine the checkpoint's tensors, or their names are unknown."""


_Rows = list[tuple[str, str, tuple[int, ...]]]
"""(suffix, dtype, shape) of each tensor."""


class QuantizedLinear:
    """The linear layers of a checkpoint that states ``quant``. Raises ``UnknownTensors`` with the method's name if its tensors
    are unknown."""

    def __init__(self, quant: Mapping[str, Any], dtype: str):
        self._quant, self._dtype = quant, dtype
        self.method = quant.get("quant_method")
        if self.method not in (None, "mxfp4", *_WRITERS):
            raise UnknownTensors(f"the tensors of a {self.method!r} checkpoint are not known from its config here")
        names = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
        patterns = [str(pattern) for name in names for pattern in quant.get(name) or ()]
        self._ignored = _Modules([pattern.rstrip(".") if self.method == "fp8" else pattern for pattern in patterns])

    def tensors(self, name: str, out: int, into: int) -> list[TensorInfo]:
        """Returns the tensors of a layer of ``out`` x ``into``, as in torch.nn.Linear."""
        if self.method in (None, "mxfp4") or self._is_ignored(name):
            rows: _Rows = [("weight", self._dtype, (out, into))]
        else:
            rows = _WRITERS[self.method](self._quant, self._dtype, name, out, into)
        return [TensorInfo(f"{name}.{suffix}", dtype, shape) for suffix, dtype, shape in rows]

    def _is_ignored(self, name: str) -> bool:
        if not self._ignored:
            return False
        if str(self.method).startswith("modelopt"):  # ``ModelOptQuantConfig.is_layer_excluded`` also matches parts of the name
            return self._ignored.name(*_names(name), *name.split("."))
        if self.method == "fp8" and self._ignored.any_run(name):
            return True
        return self._ignored.name_or_above(_names(name))


class _Modules:
    """Patterns of module names: globs, or regular expressions after ``re:``. Some configs have hundreds of them for a hundred
    thousand names, so plain names and prefixes are looked up, and a module's parents are matched once for all in it."""

    def __init__(self, patterns: list[str]):
        globs = [pattern for pattern in patterns if not pattern.startswith("re:")]
        self.exact = frozenset(pattern for pattern in globs if not _GLOB.search(pattern))
        self._beginnings = tuple(pattern[:-1] for pattern in globs if pattern.endswith("*") and not _GLOB.search(pattern[:-1]))
        others = [fnmatch.translate(pattern) for pattern in globs if _GLOB.search(pattern[:-1])]
        self._others = [re.compile(pattern) for pattern in [*others, *(p[3:] for p in patterns if p.startswith("re:"))]]
        self._above = lru_cache(maxsize=_RECENT)(self.name_or_above)
        self._any_run_above = lru_cache(maxsize=_RECENT)(self.any_run)

    def __bool__(self) -> bool:
        return bool(self.exact or self._beginnings or self._others)

    def name(self, *names: str) -> bool:
        """Whether a pattern matches one of ``names``."""
        return any(
            name in self.exact or name.startswith(self._beginnings) or any(other.match(name) for other in self._others)
            for name in names
        )

    def name_or_above(self, names: tuple[str, ...]) -> bool:
        """Whether a pattern matches one of ``names``, or a parent module of one."""
        if self.name(*names):
            return True
        above = tuple(name[:dot] for name in names if (dot := name.rfind(".")) > 0)
        return bool(above) and self._above(above)

    def any_run(self, name: str) -> bool:
        """Whether a plain name is a run of the dotted parts of ``name``, like ``mlp.experts``: FP8's ``is_layer_skipped``."""
        ends = [name, *(name[at + 1 :] for at, letter in enumerate(name) if letter == ".")]
        above = name.rpartition(".")[0]
        return not self.exact.isdisjoint(ends) or (bool(above) and self._any_run_above(above))


_GLOB = re.compile(r"[*?[]")
_RECENT = 64
"""Cache size: more than a module has parents, because a checkpoint's tensors come module by module."""


@lru_cache(maxsize=_RECENT)
def _targets(patterns: tuple[str, ...]) -> _Modules:
    return _Modules([*patterns])


def _names(name: str) -> tuple[str, str, str]:
    """Returns a language model's module name, and its names inside a multimodal model."""
    return name, f"language_model.{name}", name.replace("model.", "model.language_model.", 1)


def _fp8(quant: Mapping[str, Any], dtype: str, name: str, out: int, into: int) -> _Rows:
    block = quant.get("weight_block_size")
    if not block:
        raise UnknownTensors("the tensors of FP8 with a scale for a whole tensor are not known here")
    return [("weight", "F8_E4M3", (out, into)), ("weight_scale_inv", "F32", (-(-out // block[0]), -(-into // block[1])))]


def _modelopt_fp4(quant: Mapping[str, Any], dtype: str, name: str, out: int, into: int) -> _Rows:
    group = quant.get("group_size") or NVFP4_GROUP
    return [
        ("weight", "U8", (out, into // 2)),
        ("weight_scale", "F8_E4M3", (out, -(-into // group))),
        ("weight_scale_2", "F32", ()),
        ("input_scale", "F32", ()),
    ]


def _compressed_tensors(quant: Mapping[str, Any], dtype: str, name: str, out: int, into: int) -> _Rows:
    """Packed integers of 4 or 8 bits, with a scale per group."""
    group = _config_group(quant, name)
    if group is None:
        return [("weight", dtype, (out, into))]
    weights, kind = group["weights"], group.get("format") or quant.get("format")
    bits, scales = weights.get("num_bits"), weights.get("group_size")
    if kind != "pack-quantized" or bits not in (4, 8) or not scales or not weights.get("symmetric", True):
        raise UnknownTensors(f"the tensors of compressed-tensors' {kind!r} of {bits} bits are not known here")
    packed: _Rows = [("weight_packed", "I32", (out, -(-into * bits // 32))), ("weight_shape", "I64", (2,))]
    return [*packed, ("weight_scale", dtype, (out, -(-into // scales)))]


def _config_group(quant: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Returns the group whose targets match the module, or linear layers in general."""
    groups = [group for group in (quant.get("config_groups") or {}).values() if isinstance(group, dict)]
    names = _names(name)
    named = (g for g in groups if _targets(tuple(str(target) for target in g.get("targets") or ())).name_or_above(names))
    return next(named, None) or next((group for group in groups if "Linear" in (group.get("targets") or ())), None)


_WRITERS: Mapping[str, Callable[[Mapping[str, Any], str, str, int, int], _Rows]] = {
    "fp8": _fp8,
    "modelopt_fp4": _modelopt_fp4,
    "compressed-tensors": _compressed_tensors,
}
