"""The ``--expert-offload-*`` flags, and the options of ``--expert-offload-config``: the kind, default and help of each, and the
error that lists their problems.

``plugin`` adds ``ARGUMENTS`` to SGLang's, ``requested_config`` reads the values, and docs/flags.md shows the ``tables``.
"""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sglang_uvm_offload.files.reading import printable_lines
from sglang_uvm_offload.flag_types import FILE, FILE_OR_FALSE, FILES, IDS, Kind, choice, gib, or_off, whole

PREFIX = "expert_offload_"
CONFIG = "config"
"""The flag that takes the further options."""

TABLES = ("vram", "host")
OFF = "-1"
"""``num_resident`` of a launch that does not offload, whatever its other flags."""
NEVER = 1 << 62
"""The value of ``stream_tokens`` for ``inf``: more tokens than any step has."""
MAX_WARMUP_TOKENS = 10**12


class FlagError(ValueError):
    """Invalid or unsupported flags. The message lists every problem and names the flags."""

    def __init__(self, problems: list[str]):
        self.problems = [printable_lines(problem) for problem in problems]  # they quote configs, files and SGLang's errors
        super().__init__("expert offloading cannot start:\n" + "\n".join(f"  - {problem}" for problem in self.problems))


@dataclass(frozen=True)
class Option:
    kind: Kind
    default: Any
    """What an absent value means, as a user would write it; None for none."""
    help: str
    default_in_words: str = ""

    @property
    def shown_default(self) -> str:
        return self.default_in_words or ("none" if self.default is None else str(self.default))


FLAGS = {
    "num_resident": Option(
        whole("auto, or a whole number of experts (-1: off)", 0, 999999, auto=None),
        None,
        "Turn on expert offloading: keep this many routed experts of each MoE layer in VRAM, over all ranks that share the "
        "layer. Kernels read the rest from host memory over PCIe. auto: as many as fit next to the KV cache for "
        "--max-running-requests and --context-length (or --max-total-tokens). -1: off, whatever the other flags.",
        "off",
    ),
    "profile": Option(
        FILES,
        None,
        "Choose the initial residents from the routing in this file (frequency only), and add what the server counts to it: "
        "every five minutes, when requests pause, and on SIGTERM. A missing file is created. A read-only one, and several "
        "(separated by commas), are only read. A damaged file, or one of another model, ends the launch; one of a newer format "
        "is left alone, with a warning. A save never replaces routing that this server did not start from.",
    ),
    "adapt": Option(
        choice("off", "warmup", "continuous"),
        "warmup",
        "When residents change. off: never. warmup: once, after the warm-up (frequency only). continuous: after it, or with "
        "other selections from the start, whenever the PCIe reads saved should outweigh the cost of the move; layers that save "
        "more reads get more residents, N per layer on average.",
    ),
    "slots": Option(
        or_off(whole("auto, or a whole number of slots", 0, 999999, auto=None), 0),
        "auto",
        "Slots in VRAM per MoE layer on average, besides its residents, over all ranks that share the layer. A decode step "
        "copies the offloaded experts that it uses into slots, and later steps read them there. auto: all that "
        "--expert-offload-num-resident auto finds room for, if host RAM holds all experts; a part of it in models with fewer "
        "than 32 experts a layer, or by the split in --expert-offload-profile; none with a number of residents, or if SGLang's "
        "MoE runner cannot use slots.",
    ),
    "headroom_gb": Option(
        gib("a number of GiB", float),
        1.0,
        "VRAM in GiB to leave free besides weights and KV cache, taken off --mem-fraction-static, so that the driver never has "
        "to evict a resident expert.",
    ),
    "resident_ids": Option(
        IDS,
        None,
        "Experts to keep resident: '0-63,70' for every layer, or @FILE, a JSON list with one list of ids for each MoE layer. "
        "Only these are resident; with --expert-offload-adapt continuous, the rest of N follows the traffic.",
    ),
    "resident_selection": Option(
        choice("first_n", "frequency", "manual"),
        None,
        "Which experts are resident. first_n: the first N of each layer. frequency: at first those, or the best by "
        "--expert-offload-profile, and after the warm-up the most used ones. manual: those in --expert-offload-resident-ids.",
        "frequency, or manual with ids",
    ),
    "prefetch": Option(
        choice("none", "frequency", "speculative"),
        "none",
        "Move experts to VRAM between steps, ahead of their use. frequency: predict from each expert's own past use. "
        "speculative: also from which experts are used together. Both imply --expert-offload-adapt continuous, which on its "
        "own is speculative between steps. Within a decode step speculative has slots also look ahead: experts that the next "
        "layer's router would choose from this layer's input come beside this layer.",
    ),
}

OPTIONS = {
    "warmup_tokens": Option(
        whole("a whole number of tokens", 1, MAX_WARMUP_TOKENS),
        4096,
        "Tokens (prefill and decode) to count before residents are chosen again (frequency only). A profile's hit rate over "
        "them is logged; if it is within 5 points of the best possible one, its residents stay.",
    ),
    "draft_num_resident": Option(
        whole("a whole number of experts", 0, 999999),
        None,
        "Keep this many routed experts of each MoE layer of the draft model (--speculative-algorithm) in VRAM: the first ones, "
        "and after the warm-up, if residents may change, those that drafts use most.",
        "all",
    ),
    "save_profile": Option(
        FILE_OR_FALSE,
        None,
        "Where to save the routing, if not in the file of --expert-offload-profile; false: nowhere. A file with routing that "
        "is not read stays as it is. Node N of several saves its part to FILE-nodeN, which is read with FILE.",
        "the profile",
    ),
    "trace": Option(
        FILE,
        None,
        "Record the experts of each decoded token in this file, for sglang-uvm-offload replay. The size is bounded.",
    ),
    "stats": Option(
        FILE,
        None,
        "Write statistics to this JSON file when the server ends: what /server_info shows of offloading, for "
        "sglang-uvm-offload report.",
    ),
    "stream_buffer_gb": Option(
        gib("auto, or GiB", auto=None),
        "auto",
        "VRAM in GiB for stream buffers, into which long steps copy the experts of one layer at a time, so that each offloaded "
        "byte crosses PCIe once per step. auto: two buffers of the largest layer's size, or one, or none, whichever fits; none "
        "where slots hold the experts of two layers, into which long steps copy then. 0: long steps also read in place.",
    ),
    "stream_tokens": Option(
        whole("auto, inf, or a whole number of tokens", 0, 999999999, auto=None, inf=NEVER),
        "auto",
        "Steps of this many tokens or more copy experts into slots or stream buffers; inf: no step does. Prefill CUDA graphs "
        "are captured for fewer tokens only. auto: the smallest number at which copying should be no slower than reading in "
        "place.",
    ),
    "lookup_tables": Option(
        choice(*TABLES),
        "vram",
        "host: the n-gram tables of LongCat models, of which a token reads a few rows, stay in host memory, and kernels read "
        "those rows over PCIe. vram: where SGLang keeps them.",
    ),
    "tma": Option(
        choice("on", "off"),
        "on",
        "off: SGLang's Triton MoE kernels load weights without TMA, for a GPU on which such a load of an expert that moves "
        "ends the server (docs/troubleshooting.md).",
    ),
}

_BY_ITSELF = "--expert-offload-adapt continuous, which decides by itself"
REPLACED = {
    **{name: f"--expert-offload-{CONFIG} {name}" for name in OPTIONS},
    "backend": "--device: unified memory on a GPU, ordinary memory on a CPU",
    "draft_policy": "SGLang's --speculative-num-draft-tokens and --speculative-adaptive",
    "memory_headroom": "--expert-offload-headroom-gb, in GiB",
    "prefetch_num": _BY_ITSELF,
    "prefetch_depth": _BY_ITSELF,
}
"""Flags that are parsed for now, and what replaces them."""

_TEXT = Kind(str)
ARGUMENTS = {
    **FLAGS,
    CONFIG: Option(
        _TEXT,
        None,
        """Further options, as a JSON object such as '{"warmup_tokens": 8192}', or @FILE with one. """
        + " ".join(f"{name} (default {option.shown_default}): {option.help}" for name, option in OPTIONS.items()),
    ),
    **{name: Option(_TEXT, None, f"Replaced by {by}.") for name, by in REPLACED.items()},
}
"""The flags, all that SGLang's parser is to know, by field of its arguments without ``PREFIX``."""


def turned_off(num_resident: object) -> bool:
    """Whether this is ``OFF``; YAML and ``sglang.Engine`` may pass a number."""
    return num_resident is False or str(num_resident) == OFF


def spelled(field: str) -> str:
    """``--expert-offload-num-resident`` for ``num_resident``."""
    return "--" + (PREFIX + field).replace("_", "-")


def flag_name(name: str) -> str:
    """What messages call a flag or an option: ``--expert-offload-config trace`` for ``trace``."""
    return f"{spelled(CONFIG)} {name}" if name in OPTIONS else spelled(name)


def config_flag(**options: Any) -> str:
    """The flag that gives these options, for a shell."""
    return f"{spelled(CONFIG)} {shlex.quote(json.dumps(options, default=str))}"


def no_such_flag(word: str, known: Iterable[str]) -> str | None:
    """Why ``word`` of a command line is a flag that looks like ours, but is not ``known``; None for any other word."""
    flag = word.partition("=")[0]
    name = flag.replace("-", "_").removeprefix("__" + PREFIX.removesuffix("_"))
    if len(name) == len(flag) or flag in known or " " in flag:
        return None
    names = {each: flag_name(each) for each in (*FLAGS, CONFIG, *OPTIONS)}
    return f"{flag}: no such flag; {did_you_mean(name.strip('_'), names)}"


def did_you_mean(given: str, names: dict[str, str]) -> str:
    """The end of a message about a name that is none of ``names``, each with how to show it."""
    close = [name for name in names if given and name.startswith(given)] or difflib.get_close_matches(given, names, 1)
    return f"did you mean {' or '.join(names[name] for name in close)}?" if close else f"there are {', '.join(names.values())}"


def tables() -> dict[str, str]:
    """The Markdown tables in docs/flags.md, by name."""
    old: dict[str, list[str]] = {}
    for name, by in REPLACED.items():
        old.setdefault(by.removesuffix(f" {name}"), []).append(f"`{spelled(name)}`")
    return {
        "flags": _table("flag", {spelled(name): option for name, option in FLAGS.items()}),
        "options": _table("option", OPTIONS),
        "replaced": "\n".join(["| flag | now |", "| --- | --- |", *(f"| {', '.join(old[by])} | {by} |" for by in old)]),
    }


def _table(what: str, options: dict[str, Option]) -> str:
    rows = [f"| {what} | default | meaning |", "| --- | --- | --- |"]
    for name, option in options.items():
        value = " `" + r"\|".join(option.kind.choices) + "`" if option.kind.choices else ""
        rows.append(f"| `{name}`{value} | {option.shown_default} | {option.help} |")
    return "\n".join(rows)
