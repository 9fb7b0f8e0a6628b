"""A checkpoint whose weights ``--quantization`` converts as a server loads them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from sglang_uvm_offload.sizing.checkpoint_shape import CheckpointShape, ExpertPart, LayerShape
from sglang_uvm_offload.sizing.lookup_tables import LookupTable
from sglang_uvm_offload.sizing.quantization import UNQUANTIZED

_BITS = {
    "fp8": 8.0,
    "mxfp8": 8 + 8 / 32,
    "quark_mxfp4": 4 + 8 / 32,
    **dict.fromkeys(("modelopt_fp4", "nvfp4_online"), 4 + 8 / 16),
    **dict.fromkeys(("w8a8_fp8", "w8a8_int8"), 8.0),
}
"""Of a weight and its part of a block's scale, once SGLang 0.5.23 has quantised it (``layers/quantization``). Scales of whole
experts and channels are nothing next to these."""

_ANEW = {("modelopt_fp4", "fp8"), ("nvfp4_online", "fp8"), ("nvfp4_online", "modelopt_fp8")}
"""A method, and the format that it converts. Other pairs that differ SGLang refuses, or takes for names of the same tensors
(``ModelConfig._verify_quantization``)."""


@dataclass(frozen=True)
class Conversion:
    """From the format ``stated`` to that of ``method``."""

    method: str
    stated: str

    def __str__(self) -> str:
        counted = f"at {self.bits:g} bits a weight" if self.known else "as they are"
        return f"--quantization {self.method} converts the checkpoint as it loads: its experts are counted {counted}"

    @property
    def known(self) -> bool:
        """Whether this is a method that needs no file other than the checkpoint's, and whose bits are known."""
        return self.method in _BITS

    @property
    def bits(self) -> float:
        """Of a weight and its part of a block's scale. Only for a method that is ``known``."""
        return _BITS[self.method]

    def applied(self, model: CheckpointShape) -> CheckpointShape:
        """``model`` as it is served. Which of its other weights are converted depends on their modules: none is counted so. Nor
        are experts of a method that is not known."""
        if not self.known:
            return model
        ratio = min(1.0, self.bits / _stored_bits(model))
        layers, drafts = (tuple(_scaled(layer, ratio) for layer in part) for part in (model.layers, model.draft_layers))
        tables = tuple(self._of_table(table) for table in model.tables)
        less = sum(map(_bytes, model.layers + model.draft_layers)) - sum(map(_bytes, layers + drafts))
        less += sum(table.nbytes for table in model.tables) - sum(table.nbytes for table in tables)
        return dataclasses.replace(
            model, layers=layers, draft_layers=drafts, tables=tables, total_bytes=model.total_bytes - less
        )

    def _of_table(self, table: LookupTable) -> LookupTable:
        """SGLang makes FP8 of the n-gram table of Qwen4-Exp where that is the method (``_ple_table_is_fp8``), and leaves other
        tables as they are."""
        fp8 = self.method == "fp8" and self.stated == UNQUANTIZED and table.kind == "ple"
        return dataclasses.replace(table, nbytes=table.nbytes // 2) if fp8 else table


def conversion(method: str | None, stated: str) -> Conversion | None:
    """What a server that runs ``method`` (SGLang's ``ModelConfig.quantization``) makes of a checkpoint whose quantisation is
    ``stated``; None where it serves it as it is."""
    if method is None:
        return None
    anew = (method == "quark_mxfp4" and stated != "quark") or (method, stated) in _ANEW
    return Conversion(method, stated) if stated == UNQUANTIZED or anew else None


_DENSE = ("attention", "keys_values", "feed_forward", "replicated")


def _stored_bits(model: CheckpointShape) -> float:
    """Of a weight of an expert, without scales."""
    layer = next(layer for layer in model.layers if layer.experts)
    return 8 * sum(part.nbytes for part in layer.experts if not _is_scale(part)) / max(model.expert_parameters, 1)


def _is_scale(part: ExpertPart) -> bool:
    return "scale" in part.name


def _bytes(layer: LayerShape) -> int:
    return layer.expert_bytes + sum(getattr(layer, kind) for kind in _DENSE)


def _scaled(layer: LayerShape, ratio: float) -> LayerShape:
    parts = tuple(
        dataclasses.replace(part, nbytes=int(part.nbytes * ratio))
        for part in layer.experts
        if not _is_scale(part)  # the new format's bits include its scales
    )
    kept = sum(part.nbytes for part in parts)
    stored = sum(part.nbytes for part in layer.experts)
    return dataclasses.replace(
        layer,
        experts=parts,
        expert_bytes=layer.expert_bytes * kept // stored if stored else 0,
    )
