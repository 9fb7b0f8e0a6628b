"""The resident experts that a user names with ``--expert-offload-resident-ids``."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_uvm_offload.files import reading
from sglang_uvm_offload.flags import flag_name

MAX_IDS_FILE_BYTES = 16 << 20
MAX_ID = 999_999
"""More experts than any model has. Bounds the memory of a range."""


@dataclass(frozen=True)
class ResidentIds:
    """The experts to keep resident: the same in every layer, or one list per layer."""

    text: str
    """The value of the flag."""
    per_layer: tuple[frozenset[int], ...] | None
    every_layer: frozenset[int] | None

    @classmethod
    def parse(cls, given: str | list[Any]) -> ResidentIds:
        """Parse ``0-63,70`` (ignoring empty items and spaces), ``@file.json``, or the contents of such a file. Raises
        ``ValueError`` with the reason."""
        if isinstance(given, list):
            return cls(json.dumps(given, default=repr), per_layer=_per_layer(given, "it"), every_layer=None)
        text = given
        if text.strip().startswith("@"):
            return cls(text, per_layer=_ids_file(Path(text.strip()[1:])), every_layer=None)
        ids: set[int] = set()
        for item in (part.strip() for part in text.split(",")):
            if not item:
                continue
            ends = [end.strip() for end in item.split("-")]
            if len(ends) > 2 or not all(end.isdecimal() and len(end) <= 6 for end in ends):  # at most MAX_ID
                raise ValueError(f"{item!r} is neither an expert id (0 to {MAX_ID}) nor a range such as 0-63")
            first, last = int(ends[0]), int(ends[-1])
            if last < first:
                raise ValueError(f"the range {item!r} is reversed; give {last}-{first}")
            ids.update(range(first, last + 1))
        if not ids:
            raise ValueError("names no expert")
        return cls(text, per_layer=None, every_layer=frozenset(ids))

    def of_layer(self, index: int) -> frozenset[int]:
        """The ids of the model's ``index``-th MoE layer."""
        if self.every_layer is not None:
            return self.every_layer
        assert self.per_layer is not None
        return self.per_layer[index]

    @property
    def _lists(self) -> tuple[frozenset[int], ...]:
        return self.per_layer or (self.every_layer or frozenset(),)

    @property
    def least_residents(self) -> int:
        """The smallest ``num_resident`` with room for these experts."""
        return -(-sum(map(len, self._lists)) // len(self._lists))

    def number_problems(self, num_resident: int) -> list[str]:
        """Why these are more experts than ``num_resident`` per layer allows, whatever the model."""
        lists = self._lists
        total, allowed = sum(map(len, lists)), num_resident * len(lists)
        if total <= allowed:
            return []
        where = "a layer" if self.per_layer is None else f"over {len(lists)} layers"
        return [f"{self._flag}: names {total} experts {where}, but {flag_name('num_resident')} {num_resident} allows {allowed}"]

    def expert_problems(self, num_experts: int) -> list[str]:
        """Why these ids do not fit a model with ``num_experts`` routed experts per layer."""
        most = max((i for ids in self.per_layer or (self.every_layer or (),) for i in ids), default=0)
        if most < num_experts:
            return []
        return [f"{self._flag}: expert {most} does not exist; the model's experts are 0-{num_experts - 1}"]

    def layer_problems(self, moe_layers: Sequence[int]) -> list[str]:
        """Why these lists do not fit a model with the decoder layers ``moe_layers`` as MoE layers."""
        if self.per_layer is None or len(self.per_layer) == len(moe_layers):
            return []
        return [
            f"{self._flag}: lists {len(self.per_layer)} layers, but each of the model's {len(moe_layers)} MoE layers needs a "
            f"list: {', '.join(map(str, moe_layers))}"
        ]

    @property
    def _flag(self) -> str:
        return f"{flag_name('resident_ids')} {self.text!r}"


def _ids_file(path: Path) -> tuple[frozenset[int], ...]:
    try:
        lists = json.loads(reading.read(path, MAX_IDS_FILE_BYTES).decode())
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or a number with thousands of digits
        raise ValueError(f"{path} is not JSON: {error}") from error
    return _per_layer(lists, str(path))


def _per_layer(lists: Any, where: str) -> tuple[frozenset[int], ...]:
    if not isinstance(lists, list) or not lists or not all(isinstance(ids, list) for ids in lists):
        raise ValueError(f"{where} must be a list with one list of expert ids per MoE layer")
    for number, ids in enumerate(lists):
        bad = [i for i in ids if type(i) is not int or not 0 <= i <= MAX_ID]
        if bad:
            raise ValueError(f"{where}: list {number} has {reprlib.repr(bad[0])}, which is not an expert id (0 to {MAX_ID})")
    return tuple(frozenset(ids) for ids in lists)
