"""The ``--expert-offload-*`` flags: the name, type, default and help of each, and the error that lists their problems.

``plugin`` adds the fields of ``OffloadFlags`` to SGLang's arguments, ``flag_table`` makes the table of docs/flags.md of them,
and ``config.parse`` checks their values.
"""

from __future__ import annotations

import dataclasses
from typing import Any

PREFIX = "expert_offload_"

SELECTIONS = ("first_n", "frequency", "manual")
ADAPTS = ("off", "warmup", "continuous")
PREFETCHES = ("none", "frequency", "speculative")
BACKENDS = ("auto", "uvm", "emulated")
SHOWN_DEFAULTS = {"num_resident": "off", "draft_num_resident": "all", "slots": "off"}


class FlagError(ValueError):
    """Flags that cannot be served. The message lists every problem and names the flags."""

    def __init__(self, problems: list[str]):
        super().__init__("expert offloading cannot start:\n" + "\n".join(f"  - {problem}" for problem in problems))
        self.problems = problems


def flag_name(field: str) -> str:
    """``--expert-offload-num-resident`` for ``num_resident``."""
    return "--" + (PREFIX + field).replace("_", "-")


def flag(default: Any, kind: type, help: str, choices: tuple[str, ...] | None = None) -> Any:
    """A field of ``OffloadFlags``: ``kind`` is what SGLang parses, ``default`` what an absent flag means."""
    return dataclasses.field(default=default, metadata={"kind": kind, "help": help, "choices": choices})


@dataclasses.dataclass(frozen=True)
class OffloadFlags:
    """The flags as given. ``num_resident`` None: offloading is off."""

    num_resident: str | None = flag(
        None,
        str,
        "Turn expert offloading on and keep this many routed experts of each MoE layer in VRAM, in blocks of 2 MiB (over all "
        "ranks that share the layer; --expert-offload-draft-num-resident: of draft layers). The rest is read from host memory "
        "over PCIe. auto: as many as fit beside the KV cache for --max-running-requests and --context-length (or "
        "--max-total-tokens).",
    )
    draft_num_resident: int | None = flag(
        None,
        int,
        "Keep this many routed experts of each MoE layer of the draft model (--speculative-algorithm) in VRAM: the first ones, "
        "and where residents change, after --expert-offload-warmup-tokens tokens those that drafts use most.",
    )
    resident_selection: str = flag(
        "frequency",
        str,
        "Which experts are resident. first_n: the first N of each layer. frequency: starts as first_n; after "
        "--expert-offload-warmup-tokens tokens, the most used experts so far. manual: --expert-offload-resident-ids.",
        SELECTIONS,
    )
    resident_ids: str | None = flag(
        None,
        str,
        "Experts to keep resident: '0-63,70' for every layer, or @FILE, a JSON list with one list of expert ids for each MoE "
        "layer in order. With --expert-offload-resident-selection manual these and no others. With --expert-offload-adapt "
        "continuous these stay for good, and the rest of N follows the traffic.",
    )
    warmup_tokens: int = flag(
        4096,
        int,
        "Tokens (prefill and decode) to count before residents are chosen again (frequency only).",
    )
    adapt: str = flag(
        "warmup",
        str,
        "When residents change. off: never. warmup: once, after the warm-up (frequency only; first_n and manual stay), in the "
        "VRAM of N in each layer. continuous: whenever the PCIe reads saved should outweigh the move, from the warm-up on "
        "(frequency) or from the start; layers that save more reads get more residents, N a layer on average.",
        ADAPTS,
    )
    profile: str | None = flag(
        None,
        str,
        "Choose the initial residents from the routing in this profile, or in several, separated by commas (frequency only). "
        "Their hit rate over the first --expert-offload-warmup-tokens live tokens is logged. If it is over 5 points below the "
        "best possible one, residents are chosen again, unless --expert-offload-adapt is off. A file that cannot be read or is "
        "of another model ends the launch.",
    )
    save_profile: str | None = flag(
        None,
        str,
        "Save the counted routing, added to that of --expert-offload-profile, to this file: every five minutes, when requests "
        "pause, and on SIGTERM.",
    )
    trace: str | None = flag(
        None,
        str,
        "Record which experts each decoded token used, to this file, for sglang-uvm-offload replay. Bounded in size.",
    )
    prefetch: str = flag(
        "none",
        str,
        "Move experts to VRAM ahead of their use, between steps. frequency: by each expert's own past. speculative: also by "
        "which experts are used together, across layers and tokens. Both mean --expert-offload-adapt continuous, which alone "
        "is speculative.",
        PREFETCHES,
    )
    slots: str | None = flag(
        None,
        str,
        "Rows in VRAM beside each MoE layer's experts (over all ranks that share the layer), which a decode step fills with "
        "the offloaded experts that it uses: one that is used again is read from VRAM. auto: a part of what "
        "--expert-offload-num-resident auto finds room for, by the split in --expert-offload-profile if it has one; none where "
        "SGLang's MoE runner cannot use them.",
    )
    stream_buffer_gb: str = flag(
        "auto",
        str,
        "VRAM in GiB for buffers, into which long steps copy one layer's experts after the other's, so that each offloaded "
        "byte crosses PCIe once a layer. auto: two of the largest layer's size, or one, or none, as they fit. 0: long steps "
        "too read offloaded experts in place.",
    )
    stream_tokens: str = flag(
        "auto",
        str,
        "Steps of this many tokens or more copy experts into the stream buffers; inf: none does. Prefill CUDA graphs are "
        "captured for fewer tokens only. auto: from where on that is no slower than reading in place.",
    )
    headroom_gb: float = flag(
        1.0,
        float,
        "VRAM in GiB to leave free beside weights and KV cache, so that the driver never has to evict a resident expert. "
        "Subtracted from what --mem-fraction-static grants.",
    )
    backend: str = flag(
        "auto",
        str,
        "uvm: CUDA unified memory. emulated: ordinary memory (--device cpu). auto: uvm on CUDA, emulated on a CPU.",
        BACKENDS,
    )


def flag_table() -> str:
    """The flags as the Markdown table in docs/flags.md."""
    rows = ["| flag | default | meaning |", "| --- | --- | --- |"]
    for f in dataclasses.fields(OffloadFlags):
        choices = f.metadata["choices"]
        value = " `" + r"\|".join(choices) + "`" if choices else ""
        default = SHOWN_DEFAULTS.get(f.name, "none" if f.default is None else f.default)
        rows.append(f"| `{flag_name(f.name)}`{value} | {default} | {f.metadata['help']} |")
    return "\n".join(rows)
