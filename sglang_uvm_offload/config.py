"""The flags: one frozen record owns the name, type, default and help of each.

``plugin`` makes SGLang's own arguments of these fields, the README's table is generated from them (``flag_table``), and
``OffloadConfig.from_flags`` is the one place that says whether values are well-formed.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

PREFIX = "expert_offload_"

SELECTIONS = ("first_n", "frequency", "manual")
ADAPTS = ("off", "warmup", "continuous")
AUTO = "auto"
PROFILE_MISMATCHES = ("refuse", "warmup")
PER_LAYERS = ("uniform", "global")
SHOWN_DEFAULTS = {"num_resident": "off", "per_layer": "uniform, or global with continuous"}
PREFETCHES = ("none", "frequency", "speculative")
BACKENDS = ("auto", "uvm", "host")
MAX_IDS_FILE_BYTES = 16 << 20


class FlagError(ValueError):
    """Flags that cannot be served. The message lists every problem, in the words of the flags."""

    def __init__(self, problems: list[str]):
        super().__init__("expert offloading cannot start:\n" + "\n".join(f"  - {problem}" for problem in problems))
        self.problems = problems


def flag(default: Any, kind: type, help: str, choices: tuple[str, ...] | None = None) -> Any:
    """A field of ``OffloadConfig``: ``kind`` is what SGLang parses, ``default`` what an absent flag means."""
    return dataclasses.field(default=default, metadata={"kind": kind, "help": help, "choices": choices})


@dataclasses.dataclass(frozen=True)
class OffloadConfig:
    """What was asked for, as typed. ``num_resident`` None: offloading is off."""

    num_resident: str | None = flag(
        None,
        str,
        "Turn expert offloading on and keep this many routed experts of each MoE layer in VRAM (over all ranks that share "
        "the layer; draft layers stay whole). The rest is read from host memory over PCIe. auto: as many as fit beside the KV "
        "cache that --max-running-requests and --context-length (or --max-total-tokens) ask for.",
    )
    resident_selection: str = flag(
        "frequency",
        str,
        "Which experts are resident. first_n: the first N of each layer, for good. frequency: starts as first_n, then the most "
        "used ones, counted until --expert-offload-warmup-tokens tokens have passed. manual: --expert-offload-resident-ids.",
        SELECTIONS,
    )
    resident_ids: str | None = flag(
        None,
        str,
        "Experts to keep resident with --expert-offload-resident-selection manual: '0-63,70' for every layer, or @FILE, a JSON "
        "list that holds one list of expert ids for each MoE layer in order.",
    )
    warmup_tokens: int = flag(
        4096,
        int,
        "Tokens (prefill and decode) to count before the resident set is chosen again (frequency only).",
    )
    adapt: str = flag(
        "warmup",
        str,
        "When residents change. off: never. warmup: once, after the warm-up (frequency only; first_n and manual stay). "
        "continuous: whenever reads saved pay for the move, from the warm-up on (frequency) or from the start.",
        ADAPTS,
    )
    per_layer: str | None = flag(
        None,
        str,
        "How the residents' VRAM is spent. uniform: N in each layer. global: the layers that save more reads get more, N a "
        "layer on average; needs --expert-offload-adapt continuous.",
        PER_LAYERS,
    )
    profile: str | None = flag(
        None,
        str,
        "Choose the residents at load from the routing in this profile, or in several, separated by commas (frequency only). "
        "Its coverage of the first --expert-offload-warmup-tokens live tokens is logged; where these tokens show it to be "
        "wrong, residents are chosen again, unless --expert-offload-adapt is off.",
    )
    profile_mismatch: str = flag(
        "refuse",
        str,
        "What to do with a profile that cannot be read or is of another model. refuse: end the launch with the reason. warmup: "
        "log the reason and start without it.",
        PROFILE_MISMATCHES,
    )
    save_profile: str | None = flag(
        None,
        str,
        "Save the routing that was counted, and what --expert-offload-profile brought, to this file: every few minutes, when "
        "requests pause, and when the server is told to end.",
    )
    trace: str | None = flag(
        None,
        str,
        "Record which experts each decoded token used to this file, for sglang-uvm-offload replay; bounded in size.",
    )
    prefetch: str = flag(
        "none",
        str,
        "Bring experts to VRAM ahead of their use. Only none is built so far; other values are refused.",
        PREFETCHES,
    )
    headroom_gb: float = flag(
        1.0,
        float,
        "VRAM in GiB to leave free beside weights and KV cache, so that the driver never has to evict a resident expert. "
        "Taken off what --mem-fraction-static grants.",
    )
    backend: str = flag(
        "auto",
        str,
        "uvm: CUDA unified memory. host: an emulation in host memory (--device cpu). auto: uvm on CUDA, host on a CPU.",
        BACKENDS,
    )

    @property
    def enabled(self) -> bool:
        return self.num_resident is not None

    @property
    def residents(self) -> int:
        """N, the resident experts a layer. Only for an enabled, checked config, with ``auto`` resolved."""
        assert self.num_resident is not None
        return int(self.num_resident)

    @classmethod
    def from_flags(cls, values: Mapping[str, Any]) -> OffloadConfig:
        """The config that ``values`` (by full field name, ``expert_offload_...``) ask for.

        Raises ``FlagError`` naming every flag whose value is not well-formed. A number may come as a string or a number (YAML,
        ``sglang.Engine``).
        """
        given = {f.name: values[PREFIX + f.name] for f in dataclasses.fields(cls) if PREFIX + f.name in values}
        if given.get("num_resident") is not None:
            given["num_resident"] = str(given["num_resident"])
        config = cls(**given)
        problems = config._problems()
        if problems:
            raise FlagError(problems)
        return config

    def _problems(self) -> list[str]:
        out: list[str] = []
        for f in dataclasses.fields(self):
            choices, value = f.metadata["choices"], getattr(self, f.name)
            if choices and value not in choices and (value is not None or f.default is not None):
                out.append(f"{flag_name(f.name)} {value!r}: must be one of {', '.join(choices)}")
        if self.num_resident is None:
            defaults = OffloadConfig()
            out += [
                f"{flag_name(f.name)} {getattr(self, f.name)!r}: has no effect without {flag_name('num_resident')}"
                for f in dataclasses.fields(self)
                if getattr(self, f.name) != getattr(defaults, f.name)
            ]
            return out
        if self.num_resident == AUTO:
            if self.resident_selection == "manual":
                out.append(f"{flag_name('num_resident')} auto: {flag_name('resident_selection')} manual needs a number")
        elif not self.num_resident.isdecimal() or len(self.num_resident) > 6:
            out.append(f"{flag_name('num_resident')} {self.num_resident!r}: must be a whole number of experts, 0 or more")
        if not _is_int(self.warmup_tokens) or self.warmup_tokens < 1:
            out.append(f"{flag_name('warmup_tokens')} {self.warmup_tokens!r}: must be a whole number of tokens, 1 or more")
        if not _is_number(self.headroom_gb) or not 0 <= self.headroom_gb < 1024:
            out.append(f"{flag_name('headroom_gb')} {self.headroom_gb!r}: must be a number of GiB from 0 to 1024")
        if self.prefetch in PREFETCHES and self.prefetch != "none":
            out.append(f"{flag_name('prefetch')} {self.prefetch}: not built yet; only none is served")
        if self.resident_selection == "frequency" and self.adapt == "off" and self.profile is None:
            out.append(
                f"{flag_name('adapt')} off: {flag_name('resident_selection')} frequency needs warmup or continuous, or a "
                f"{flag_name('profile')}; for residents that never change choose first_n or manual"
            )
        out += self._file_problems()
        if self.per_layer == "global" and self.adapt in ("off", "warmup"):
            out.append(f"{flag_name('per_layer')} global: needs {flag_name('adapt')} continuous")
        if self.resident_selection == "manual" and self.resident_ids is None:
            out.append(f"{flag_name('resident_selection')} manual: needs {flag_name('resident_ids')}")
        if self.resident_selection in ("first_n", "frequency") and self.resident_ids is not None:
            out.append(
                f"{flag_name('resident_ids')} {self.resident_ids!r}: only {flag_name('resident_selection')} manual reads it"
            )
        if self.resident_selection == "manual" and self.resident_ids is not None:
            try:
                ResidentIds.parse(self.resident_ids)
            except ValueError as error:
                out.append(f"{flag_name('resident_ids')} {self.resident_ids!r}: {error}")
        return out

    @property
    def layers_share(self) -> Literal["uniform", "global"]:
        """How the layers share the residents' VRAM."""
        chosen = self.per_layer or ("global" if self.adapt == "continuous" else "uniform")
        return "global" if chosen == "global" else "uniform"

    @property
    def profile_paths(self) -> list[Path]:
        """The files that ``profile`` names."""
        return [Path(item.strip()) for item in (self.profile or "").split(",") if item.strip()]

    def _file_problems(self) -> list[str]:
        out = []
        if self.profile is not None:
            if self.resident_selection in ("first_n", "manual"):
                out.append(
                    f"{flag_name('profile')} {self.profile!r}: only {flag_name('resident_selection')} frequency reads it"
                )
            if not self.profile_paths:
                out.append(f"{flag_name('profile')} {self.profile!r}: names no file")
        elif self.profile_mismatch == "warmup":
            out.append(f"{flag_name('profile_mismatch')} warmup: has no effect without {flag_name('profile')}")
        if self.profile is not None and self.profile_mismatch == "warmup" and self.adapt == "off":
            out.append(f"{flag_name('profile_mismatch')} warmup: needs {flag_name('adapt')} warmup or continuous")
        for field in ("save_profile", "trace"):
            value = getattr(self, field)
            if value is not None and (reason := _cannot_write(value)):
                out.append(f"{flag_name(field)} {value!r}: {reason}")
        if self.trace is not None and self.trace == self.save_profile:
            out.append(f"{flag_name('trace')} {self.trace!r}: is the file of {flag_name('save_profile')} too")
        return out


def _cannot_write(text: str) -> str | None:
    """Why no file can be put at this path, None where it can, as far as can be told without writing it."""
    path = Path(text)
    if not text.strip() or path.is_dir():
        return "must be the path of a file"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if not os.access(path.parent, os.W_OK):
        return f"the folder {path.parent} cannot be written to"
    return None


@dataclasses.dataclass(frozen=True)
class ResidentIds:
    """The experts that a person wants resident: the same in every layer, or one list a layer."""

    per_layer: tuple[frozenset[int], ...] | None
    every_layer: frozenset[int] | None

    @classmethod
    def parse(cls, text: str) -> ResidentIds:
        """Read ``0-63,70`` (empty items and spaces are harmless) or ``@file.json``. Raises ``ValueError`` with the reason."""
        if text.strip().startswith("@"):
            return cls(per_layer=_ids_file(Path(text.strip()[1:])), every_layer=None)
        ids: set[int] = set()
        for item in (part.strip() for part in text.split(",")):
            if not item:
                continue
            ends = [end.strip() for end in item.split("-")]
            if len(ends) > 2 or not all(end.isdecimal() and len(end) <= 6 for end in ends):
                raise ValueError(f"{item!r} is neither an expert id nor a range like 0-63")
            first, last = int(ends[0]), int(ends[-1])
            if last < first:
                raise ValueError(f"the range {item!r} runs backwards")
            ids.update(range(first, last + 1))
        if not ids:
            raise ValueError("names no expert")
        return cls(per_layer=None, every_layer=frozenset(ids))

    def of_layer(self, index: int) -> frozenset[int]:
        """The ids for the ``index``-th MoE layer of the model."""
        if self.every_layer is not None:
            return self.every_layer
        assert self.per_layer is not None
        return self.per_layer[index]

    def problems(self, num_layers: int, num_experts: int, num_resident: int) -> list[str]:
        """Why these ids do not fit a model with so many MoE layers of so many routed experts, N of them resident."""
        name = flag_name("resident_ids")
        if self.per_layer is not None and len(self.per_layer) != num_layers:
            return [f"{name}: lists {len(self.per_layer)} layers, but the model has {num_layers} MoE layers"]
        out = []
        lists = self.per_layer if self.per_layer is not None else (self.every_layer,)
        too_high = sorted({i for ids in lists if ids for i in ids if i >= num_experts})
        if too_high:
            out.append(f"{name}: expert {too_high[0]} does not exist; the model's experts are 0-{num_experts - 1}")
        total = sum(len(self.of_layer(index)) for index in range(num_layers))
        if total > num_resident * num_layers:
            out.append(
                f"{name}: names {total} experts over {num_layers} layers, more than "
                f"{flag_name('num_resident')} {num_resident} a layer allows ({num_resident * num_layers})"
            )
        return out


def _ids_file(path: Path) -> tuple[frozenset[int], ...]:
    try:
        if path.stat().st_size > MAX_IDS_FILE_BYTES:
            raise ValueError(f"{path} is larger than {MAX_IDS_FILE_BYTES >> 20} MiB")
        lists = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(lists, list) or not lists or not all(isinstance(ids, list) for ids in lists):
        raise ValueError(f"{path} must hold a JSON list with one list of expert ids for each MoE layer")
    for number, ids in enumerate(lists):
        bad = [i for i in ids if not _is_int(i) or i < 0]
        if bad:
            raise ValueError(f"{path}: list {number} holds {bad[0]!r}, which is no expert id")
    return tuple(frozenset(ids) for ids in lists)


def flag_name(field: str) -> str:
    """``--expert-offload-num-resident`` for ``num_resident``."""
    return "--" + (PREFIX + field).replace("_", "-")


def flag_table() -> str:
    """The flags as the Markdown table that README.md shows."""
    rows = ["| flag | default | meaning |", "| --- | --- | --- |"]
    for f in dataclasses.fields(OffloadConfig):
        choices = f.metadata["choices"]
        value = " `" + r"\|".join(choices) + "`" if choices else ""
        default = SHOWN_DEFAULTS.get(f.name, "none" if f.default is None else f.default)
        rows.append(f"| `{flag_name(f.name)}`{value} | {default} | {f.metadata['help']} |")
    return "\n".join(rows)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
