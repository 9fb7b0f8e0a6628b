"""The ``--expert-offload-*`` flags and the options of ``--expert-offload-config``: their kinds, defaults and help texts, and
the error that lists their problems.

``plugin`` adds ``ARGUMENTS`` to SGLang's arguments, ``requested_config`` reads the values, and docs/flags.md shows ``tables``.
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
"""The flag that takes further options."""

TABLES = ("vram", "host")
OFF = "-1"
"""The value of ``num_resident`` that turns offloading off, whatever the other flags."""
NEVER = 1 << 62
"""The value of ``stream_tokens`` for ``inf``: more tokens than any step has."""
MAX_WARMUP_TOKENS = 10**12


class FlagError(ValueError):
    """Invalid or unsupported flags. The message lists every problem and names the flags."""

    def __init__(self, problems: list[str]):
        self.problems = [printable_lines(problem) for problem in problems]  # may quote configs, files and SGLang's errors
        super().__init__("expert offloading cannot start:\n" + "\n".join(f"  - {problem}" for problem in self.problems))


@dataclass(frozen=True)
class Option:
    kind: Kind
    default: Any
    """The default as a user would write it; None for none."""
    help: str
    default_in_words: str = ""

    @property
    def shown_default(self) -> str:
        return self.default_in_words or ("none" if self.default is None else str(self.default))


FLAGS = {
    "num_resident": Option(
        whole("auto, or a whole number of experts (-1: off)", 0, 999999, auto=None),
        None,
        "Turn on expert offloading and keep this many routed experts per MoE layer in VRAM, over all ranks that share the "
        "layer. Kernels read the others from host memory over PCIe. auto: as many as fit next to the KV cache for "
        "--max-running-requests and --context-length (or --max-total-tokens). -1: off, whatever the other flags.",
        "off",
    ),
    "profile": Option(
        FILES,
        None,
        "Choose the initial residents from the routing profile in this file (frequency only), and add the server's counts to "
        "it every five minutes, when requests pause, and when it ends. A missing file is created. A read-only file, or several "
        "files separated by commas, are only read. A damaged profile, or one of another model, fails the launch; one of a "
        "newer format is left alone, with a warning. A save never replaces routing that this server did not start from.",
    ),
    "adapt": Option(
        choice("off", "warmup", "continuous"),
        "warmup",
        "When to change residents. off: never. warmup: once, after the warm-up (frequency only). continuous: from the warm-up "
        "on (with other selections from the start), whenever a move should save more PCIe traffic than it costs. Layers that "
        "save more get more residents; the average stays N per layer.",
    ),
    "slots": Option(
        or_off(whole("auto, or a whole number of slots", 0, 999999, auto=None), 0),
        "auto",
        "Average number of slots in VRAM per MoE layer, besides its residents, over all ranks that share the layer. A decode "
        "step copies the offloaded experts that it uses into slots, and later steps read them there. auto: use all the room "
        "that --expert-offload-num-resident auto finds, if host RAM holds all experts; only part of it in models with fewer "
        "than 32 experts a layer, or if --expert-offload-profile has a split; no slots with a fixed number of residents, or if "
        "SGLang's MoE runner does not support them.",
    ),
    "headroom_gb": Option(
        gib("a number of GiB", float),
        1.0,
        "VRAM in GiB to keep free besides weights and KV cache, so that the driver never has to evict residents. Subtracted "
        "from --mem-fraction-static.",
    ),
    "resident_ids": Option(
        IDS,
        None,
        "Experts to keep resident: '0-63,70' for every layer, or @FILE with a JSON list of one id list per MoE layer. No "
        "others are resident, unless --expert-offload-adapt continuous fills the rest of N by traffic.",
    ),
    "resident_selection": Option(
        choice("first_n", "frequency", "manual"),
        None,
        "How to choose residents. first_n: the first N of each layer. frequency: initially the first N, or the best by "
        "--expert-offload-profile; after the warm-up the most used ones. manual: those in --expert-offload-resident-ids.",
        "frequency, or manual with ids",
    ),
    "prefetch": Option(
        choice("none", "frequency", "speculative"),
        "none",
        "Move experts to VRAM between steps, ahead of their use. frequency: predict from each expert's own past use. "
        "speculative: also from co-activation, the experts that are used together. Both imply --expert-offload-adapt "
        "continuous, which on its own predicts like speculative. In addition, speculative makes slots look ahead within a "
        "decode step: while one layer computes, they load the experts that the next layer's router would pick from this "
        "layer's input.",
    ),
}

OPTIONS = {
    "warmup_tokens": Option(
        whole("a whole number of tokens", 1, MAX_WARMUP_TOKENS),
        4096,
        "Tokens (prefill and decode) to count before re-selecting residents (frequency only). Logs the hit rate of a profile's "
        "residents over these tokens and keeps them if it is within 5 points of the best possible one.",
    ),
    "draft_num_resident": Option(
        whole("a whole number of experts", 0, 999999),
        None,
        "Keep this many routed experts per MoE layer of the draft model (--speculative-algorithm) in VRAM: initially the first "
        "ones, and after the warm-up those that drafts use most, if residents may change.",
        "all",
    ),
    "save_profile": Option(
        FILE_OR_FALSE,
        None,
        "Save the routing profile to this file instead of the one in --expert-offload-profile; false: do not save it. A file "
        "with routing that is not read stays as it is. With several nodes, node N saves its part to FILE-nodeN, which is read "
        "together with FILE.",
        "the profile",
    ),
    "trace": Option(
        FILE,
        None,
        "Record the experts of each decoded token in this file, for sglang-uvm-offload replay. The file size is bounded.",
    ),
    "stats": Option(
        FILE,
        None,
        "Write the offloading part of /server_info to this JSON file when the server exits, for sglang-uvm-offload report.",
    ),
    "stream_buffer_gb": Option(
        gib("auto, or GiB", auto=None),
        "auto",
        "VRAM in GiB for stream buffers. Long steps copy the experts of one layer at a time into them, so that each offloaded "
        "byte crosses PCIe once per step. auto: two, one or no buffers with the size of the largest layer, as many as fit; "
        "none if slots can hold the experts of two layers, because long steps then copy into slots. 0: long steps read in "
        "place.",
    ),
    "stream_tokens": Option(
        whole("auto, inf, or a whole number of tokens", 0, 999999999, auto=None, inf=NEVER),
        "auto",
        "Stream in steps with at least this many tokens: copy experts into slots or stream buffers. inf: never. Prefill CUDA "
        "graphs are captured only for fewer tokens. auto: the smallest number with which copying should be no slower than "
        "reading in place.",
    ),
    "lookup_tables": Option(
        choice(*TABLES),
        "vram",
        "Where to keep the n-gram tables of LongCat models, from which a token reads only a few rows. host: in host memory; "
        "kernels read the rows over PCIe. vram: in VRAM, like SGLang.",
    ),
    "tma": Option(
        choice("on", "off"),
        "on",
        "off: stop SGLang's Triton MoE kernels from loading weights with TMA. For GPUs on which a TMA load of an expert being "
        "moved crashes the server (docs/troubleshooting.md).",
    ),
}

_BY_ITSELF = "--expert-offload-adapt continuous, which chooses it automatically"
_NOW_OPTIONS = (
    "warmup_tokens",
    "draft_num_resident",
    "save_profile",
    "trace",
    "stats",
    "stream_buffer_gb",
    "stream_tokens",
    "lookup_tables",
    "tma",
)
"""The options that used to be flags. New ones do not belong here."""

REPLACED = {
    **{name: f"--expert-offload-{CONFIG} {name}" for name in _NOW_OPTIONS},
    "backend": "--device: unified memory on a GPU, ordinary memory on a CPU",
    "draft_policy": "SGLang's --speculative-num-draft-tokens and --speculative-adaptive",
    "memory_headroom": "--expert-offload-headroom-gb, in GiB",
    "prefetch_num": _BY_ITSELF,
    "prefetch_depth": _BY_ITSELF,
}
"""Deprecated flags that are still parsed, and their replacements."""

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
"""All flags that are added to SGLang's parser, by field of its arguments without ``PREFIX``."""


def turned_off(num_resident: object) -> bool:
    """Whether this value is ``OFF``. YAML and ``sglang.Engine`` may pass a number."""
    return num_resident is False or str(num_resident) == OFF


def spelled(field: str) -> str:
    """``--expert-offload-num-resident`` for ``num_resident``."""
    return "--" + (PREFIX + field).replace("_", "-")


def flag_name(name: str) -> str:
    """The name of a flag or option in messages: ``--expert-offload-config trace`` for ``trace``."""
    return f"{spelled(CONFIG)} {name}" if name in OPTIONS else spelled(name)


def config_flag(**options: Any) -> str:
    """The shell-quoted flag that sets these options."""
    return f"{spelled(CONFIG)} {shlex.quote(json.dumps(options, default=str))}"


def no_such_flag(word: str, known: Iterable[str]) -> str | None:
    """The error for a command line ``word`` that looks like one of our flags but is not ``known``; None for any other word."""
    flag = word.partition("=")[0]
    name = flag.replace("-", "_").removeprefix("__" + PREFIX.removesuffix("_"))
    if len(name) == len(flag) or flag in known or " " in flag:
        return None
    names = {each: flag_name(each) for each in (*FLAGS, CONFIG, *OPTIONS)}
    return f"{flag}: no such flag; {did_you_mean(name.strip('_'), names)}"


def did_you_mean(given: str, names: dict[str, str]) -> str:
    """A suggestion for a name that is not in ``names``, which map to how they are shown."""
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
