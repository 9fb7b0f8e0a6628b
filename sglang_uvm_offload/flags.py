"""The ``--expert-offload-*`` flags: the name, type, default and help of each, and the error that lists their problems.

``plugin`` adds the fields of ``OffloadFlags`` to SGLang's arguments, ``flag_table`` generates the table in docs/flags.md, and
``config.parse`` checks the values.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang_uvm_offload.files.reading import printable_lines

PREFIX = "expert_offload_"

SELECTIONS = ("first_n", "frequency", "manual")
ADAPTS = ("off", "warmup", "continuous")
PREFETCHES = ("none", "frequency", "speculative")
TABLES = ("vram", "host")
OFF = "-1"
"""``num_resident`` of a launch that does not offload, whatever its other flags."""
BACKENDS = ("auto", "uvm", "emulated")
SHOWN_DEFAULTS = {"num_resident": "off", "draft_num_resident": "all", "slots": "off"}


class FlagError(ValueError):
    """Invalid or unsupported flags. The message lists every problem and names the flags."""

    def __init__(self, problems: list[str]):
        self.problems = [printable_lines(problem) for problem in problems]  # they quote configs, files and SGLang's errors
        super().__init__("expert offloading cannot start:\n" + "\n".join(f"  - {problem}" for problem in self.problems))


def turned_off(num_resident: object) -> bool:
    """Whether this is ``OFF``; YAML and ``sglang.Engine`` may pass a number."""
    return str(num_resident) == OFF


def flag_name(field: str) -> str:
    """``--expert-offload-num-resident`` for ``num_resident``."""
    return "--" + (PREFIX + field).replace("_", "-")


def flag(default: Any, kind: type, help: str, choices: tuple[str, ...] | None = None) -> Any:
    """A field of ``OffloadFlags``: ``kind`` is what SGLang parses, ``default`` what an absent flag means."""
    return dataclasses.field(default=default, metadata={"kind": kind, "help": help, "choices": choices})


@dataclasses.dataclass(frozen=True)
class OffloadFlags:
    """The flags as the user gave them. ``num_resident`` None: offloading is off."""

    num_resident: str | None = flag(
        None,
        str,
        "Turn on expert offloading and keep this many routed experts of each MoE layer in VRAM, in blocks of 2 MiB, counted "
        "over all ranks that share the layer. Kernels read the rest from host memory over PCIe. auto: as many as fit next to "
        "the KV cache for --max-running-requests and --context-length (or --max-total-tokens). -1: off, whatever the other "
        "flags. For draft layers, see --expert-offload-draft-num-resident.",
    )
    draft_num_resident: int | None = flag(
        None,
        int,
        "Keep this many routed experts of each MoE layer of the draft model (--speculative-algorithm) in VRAM. Starts with the "
        "first ones; if residents may change, switches to those that drafts use most after --expert-offload-warmup-tokens "
        "tokens.",
    )
    resident_selection: str = flag(
        "frequency",
        str,
        "Which experts are resident. first_n: the first N of each layer. frequency: starts as first_n and switches to the most "
        "used experts after --expert-offload-warmup-tokens tokens. manual: those in --expert-offload-resident-ids.",
        SELECTIONS,
    )
    resident_ids: str | None = flag(
        None,
        str,
        "Experts to keep resident: '0-63,70' for every layer, or @FILE, a JSON list with one list of expert ids for each MoE "
        "layer in order. With --expert-offload-resident-selection manual, only these are resident. With --expert-offload-adapt "
        "continuous, these stay resident and the rest of N follows the traffic.",
    )
    warmup_tokens: int = flag(
        4096,
        int,
        "Tokens (prefill and decode) to count before choosing residents again (frequency only).",
    )
    adapt: str = flag(
        "warmup",
        str,
        "When residents change. off: never. warmup: once, after the warm-up, with N per layer (frequency only; first_n and "
        "manual never change). continuous: whenever the PCIe reads saved should outweigh the cost of the move, after the "
        "warm-up (frequency) or from the start; layers that save more reads get more residents, N per layer on average.",
        ADAPTS,
    )
    profile: str | None = flag(
        None,
        str,
        "Choose the initial residents from the routing in this profile, or in several, separated by commas (frequency only). "
        "The server logs their hit rate over the first --expert-offload-warmup-tokens live tokens, and chooses again if it is "
        "over 5 points below the best possible one, unless --expert-offload-adapt is off. The launch fails if a file cannot be "
        "read or belongs to another model.",
    )
    save_profile: str | None = flag(
        None,
        str,
        "Save the counted routing, added to that of --expert-offload-profile, to this file every five minutes, when requests "
        "pause, and on SIGTERM. Node N of several saves its part to FILE-nodeN, which is read with FILE.",
    )
    trace: str | None = flag(
        None,
        str,
        "Record the experts of each decoded token in this file, for sglang-uvm-offload replay. The size is bounded.",
    )
    stats: str | None = flag(
        None,
        str,
        "Write statistics to this JSON file when the server ends: what /server_info shows of offloading, with hit rates before "
        "and after the warm-up. sglang-uvm-offload report reads it.",
    )
    prefetch: str = flag(
        "none",
        str,
        "Move experts to VRAM between steps, ahead of their use. frequency: predict from each expert's own past use. "
        "speculative: also from which experts are used together, across layers and tokens. Both imply --expert-offload-adapt "
        "continuous, which on its own is speculative.",
        PREFETCHES,
    )
    slots: str | None = flag(
        None,
        str,
        "Slots in VRAM per MoE layer, in addition to the residents and over all ranks that share the layer. A decode step "
        "copies the offloaded experts that it uses into slots, and later steps read them from VRAM. auto: a part of what "
        "--expert-offload-num-resident auto finds room for, by the split in --expert-offload-profile if it has one; none if "
        "SGLang's MoE runner cannot use slots.",
    )
    stream_buffer_gb: str = flag(
        "auto",
        str,
        "VRAM in GiB for stream buffers. Long steps copy the experts of one layer at a time into them, so that each offloaded "
        "byte crosses PCIe once per step. auto: two buffers of the largest layer's size, or one, or none, whichever fits. 0: "
        "long steps also read offloaded experts in place.",
    )
    stream_tokens: str = flag(
        "auto",
        str,
        "Steps of this many tokens or more copy experts into the stream buffers; inf: no step does. Prefill CUDA graphs are "
        "captured for fewer tokens only. auto: the smallest number at which copying should be no slower than reading in place, "
        "which grows with what is resident.",
    )
    headroom_gb: float = flag(
        1.0,
        float,
        "VRAM in GiB to leave free besides weights and KV cache, so that the driver never has to evict a resident expert. "
        "Subtracted from what --mem-fraction-static allows.",
    )
    lookup_tables: str = flag(
        "vram",
        str,
        "host: the n-gram tables of LongCat models, of which a token reads a few rows, stay in host memory, and kernels read "
        "those rows over PCIe. vram: where SGLang keeps them.",
        TABLES,
    )
    tma: str = flag(
        "on",
        str,
        "off: SGLang's Triton MoE kernels load weights without TMA, whatever their tile configurations say. For a GPU on which "
        "such a load of an expert that moves ends the server; see docs/operations.md.",
        ("on", "off"),
    )
    backend: str = flag(
        "auto",
        str,
        "uvm: CUDA unified memory. emulated: ordinary memory (--device cpu). auto: uvm on CUDA, emulated on a CPU.",
        BACKENDS,
    )


def flag_table() -> str:
    """The Markdown table in docs/flags.md."""
    rows = ["| flag | default | meaning |", "| --- | --- | --- |"]
    for f in dataclasses.fields(OffloadFlags):
        choices = f.metadata["choices"]
        value = " `" + r"\|".join(choices) + "`" if choices else ""
        default = SHOWN_DEFAULTS.get(f.name, "none" if f.default is None else f.default)
        rows.append(f"| `{flag_name(f.name)}`{value} | {default} | {f.metadata['help']} |")
    return "\n".join(rows)
