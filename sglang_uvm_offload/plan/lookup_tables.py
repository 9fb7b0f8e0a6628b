"""Large n-gram embedding tables, of which each token reads a few rows, and where SGLang 0.5.23 keeps them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from sglang_uvm_offload.flags import flag_name
from sglang_uvm_offload.memory.layout import whole_blocks
from sglang_uvm_offload.plan.inputs import Parallel
from sglang_uvm_offload.units import size

VRAM, PINNED, REGISTERED, FILE = "VRAM", "pinned host RAM", "registered host RAM", "a file"
MANAGED = "managed host RAM"
"""Where a server keeps tables. PyTorch allocates ``PINNED`` tables and rounds each up to a power of two
(``CachingHostAllocator.h``). SGLang maps ``REGISTERED`` tables at their exact size. This plugin allocates ``MANAGED`` tables in
whole blocks."""

TABLES_FLAG = flag_name("lookup_tables")

PLE_FLAG = "--ple-offload-embedding"
ENGRAM_VARIABLE = "SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE"
BACKENDS = {"pinned": PINNED, "file": FILE}
"""``--ple-offload-backend``."""

PLE_CLASS = "Qwen4ExpForConditionalGeneration"
"""The only class for which SGLang accepts ``PLE_FLAG`` (``load_model_utils.py``)."""


@dataclass(frozen=True)
class Kind:
    """One kind of table: its tensor names in checkpoints and in SGLang, and how ranks divide its rows."""

    names: str
    sharing: str
    """``tp`` or ``attention``: the ranks that share one."""
    places: tuple[str, ...]
    """Where a server can keep it besides VRAM."""
    offloaded_by: str


KINDS = {
    # models/qwen4_exp.py: VocabParallelEmbedding
    "ple": Kind(r"ple_embedding\.ngram_embedding\.", "tp", (PINNED, FILE), PLE_FLAG),
    # layers/engram.py: EngramEmbedding
    "engram": Kind(r"engram\.embed\.", "tp", (REGISTERED,), f"{ENGRAM_VARIABLE}=1"),
    # layers/n_gram_embedding.py: VocabParallelEmbedding
    "ngram": Kind(r"(?:ngram_embeddings\.embedders\.\d+|oe_embeder)\.", "attention", (MANAGED,), f"{TABLES_FLAG} host"),
}
_WORD = "embed"
"""Part of all these names, as a quick first filter: a checkpoint has hundreds of thousands of other names."""
_NAMES = re.compile("|".join(rf"(?P<{kind}>(?:^|\.){each.names})" for kind, each in KINDS.items()))


@dataclass(frozen=True)
class LookupTable:
    """All tensors of one kind in one decoder layer, or before the first layer."""

    kind: str
    layer: int
    nbytes: int

    def sharers(self, parallel: Parallel) -> int:
        """The number of ranks that together hold the whole table."""
        return parallel.tp if KINDS[self.kind].sharing == "tp" else parallel.attn_tp

    def rank_bytes(self, parallel: Parallel) -> int:
        return -(-self.nbytes // self.sharers(parallel))

    def is_in(self, place: str) -> bool:
        """Whether a server whose tables are set to ``place`` keeps this one there."""
        return place in (VRAM, *KINDS[self.kind].places)

    def vram_bytes(self, place: str, parallel: Parallel) -> int:
        """VRAM of one rank."""
        return self.rank_bytes(parallel) if place == VRAM or not self.is_in(place) else 0

    def host_bytes(self, place: str, parallel: Parallel) -> int:
        """Host RAM on the ranks of one replica. A file counts as none, because its pages are reclaimable cache."""
        if place not in (PINNED, REGISTERED, MANAGED) or not self.is_in(place):
            return 0
        if place == REGISTERED:
            return self.nbytes
        of_rank = self.rank_bytes(parallel)
        return parallel.tp * (whole_blocks(of_rank) if place == MANAGED else 1 << (of_rank - 1).bit_length())


def kind_of(name: str) -> str | None:
    """The kind of table that a tensor's name belongs to; None for other tensors."""
    found = _NAMES.search(name) if _WORD in name else None
    return found.lastgroup if found else None


def offloaded_by(tables: Iterable[LookupTable]) -> str:
    """The flag or variable that moves tables out of VRAM; "" without tables."""
    return next((KINDS[table.kind].offloaded_by for table in tables), "")


def other_place(tables: Iterable[LookupTable]) -> str:
    """Where a server that offloads these tables keeps them without further flags."""
    return next((KINDS[table.kind].places[0] for table in tables), VRAM)


def table_note(tables: Iterable[LookupTable], place: str, one_memory: bool = False) -> str:
    """How to free the VRAM that tables take; "" if they take none. ``one_memory``: GPU and host share memory, so only a file
    frees any."""
    ple = [table for table in tables if FILE in KINDS[table.kind].places]
    if one_memory and ple and place != FILE:
        what = f"the lookup tables take {size(sum(table.nbytes for table in ple))} of the memory that GPU and host share"
        return f"{what}; {PLE_FLAG} --ple-offload-backend file keeps them in a file"
    held = [table for table in tables if place == VRAM or not table.is_in(place)]
    if not held:
        return ""
    what = f"the lookup tables take {size(sum(table.nbytes for table in held))} of VRAM over the ranks that share them"
    flag = "" if one_memory else offloaded_by(held)
    return f"{what}; {flag} keeps them in host RAM" if flag else f"{what}; nothing frees it"


def table_flags(tables: Iterable[LookupTable], place: str) -> list[str]:
    """SGLang's flags that keep these tables in ``place``, if it has such flags."""
    if offloaded_by(tables) != PLE_FLAG:
        return []
    if place == VRAM:
        return [f"--no-{PLE_FLAG.removeprefix('--')}"]
    return [PLE_FLAG, *(["--ple-offload-backend file"] if place == FILE else [])]


def table_environment(tables: Iterable[LookupTable], place: str) -> tuple[str, ...]:
    """The variables, as ``NAME=value``, that keep these tables in ``place``, where SGLang has no flag."""
    by_variable = any(table.kind == "engram" and place != VRAM and table.is_in(place) for table in tables)
    return (f"{ENGRAM_VARIABLE}=1",) if by_variable else ()


def default_place(tables: Iterable[LookupTable]) -> str:
    """Where SGLang keeps these tables on an NVIDIA GPU by default, with a model that computes in bfloat16: those of Qwen4-Exp
    it offloads (``model_overrides/qwen4_exp.py``)."""
    return PINNED if any(table.kind == "ple" for table in tables) else VRAM
