"""How this launch's ranks divide VRAM between residents, slots and stream buffers: decided once the target is built, and again
once all is loaded."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from sglang.srt.runtime_context import get_parallel

from sglang_uvm_offload.config import AUTO, OffloadConfig, RequestedConfig
from sglang_uvm_offload.flags import NEVER, FlagError, flag_name
from sglang_uvm_offload.plugin import enforce
from sglang_uvm_offload.plugin.launch.stream_settings import USUAL_TOP_K
from sglang_uvm_offload.plugin.rank.backend import Emulated
from sglang_uvm_offload.plugin.rank.built_model import BuiltModel
from sglang_uvm_offload.plugin.rank.host_memory import warn_of_host_ram
from sglang_uvm_offload.plugin.rank.rank_budget import RankBudgets, sizes_of
from sglang_uvm_offload.residency.budget import Asked, Division, RankBudget, corrected, divide
from sglang_uvm_offload.residency.manager import OffloadManager
from sglang_uvm_offload.residency.model import ModelExperts
from sglang_uvm_offload.residency.placement import InitialPlacement
from sglang_uvm_offload.routing.profile import Profile
from sglang_uvm_offload.units import size

logger = logging.getLogger(__name__)

_N, _SLOTS, _DRAFTS = flag_name("num_resident"), flag_name("slots"), flag_name("draft_num_resident")
_Decided = TypeVar("_Decided")


class Residency:
    """Every rank must call the same methods at the same points."""

    def __init__(
        self,
        config: RequestedConfig,
        manager: OffloadManager,
        backend: Emulated,
        runner: Any,
        model: ModelExperts,
        module: torch.nn.Module,
        built: BuiltModel,
    ):
        """``runner``: SGLang's, of the target; ``module``: the target as SGLang built it."""
        self._config, self._manager, self._model, self._built = config, manager, model, built
        self._backend = backend
        parallel = get_parallel()
        self._world, self._stages = parallel.world_group, parallel.pp_size
        """Of the target: a draft model may be built in a scope with other groups."""
        self._budgets = RankBudgets(config, manager.memory, runner, module, built.num_places)
        self._top_k = built.top_k or USUAL_TOP_K
        self._asked: Asked
        self._division: Division

    def decide(self, profile: Profile | None, keeps_first: bool) -> InitialPlacement:
        """What to begin with. ``profile``: the one to start from. ``keeps_first``: as of ``InitialPlacement``."""
        config = self._config
        self._asked = self._budgets.asked(profile, self._top_k, config.slots)
        drafts = 0 if config.num_resident is not None else self._budgets.draft_bytes(self._model.layers)
        ranks = self._budgets.of_all(self._model.layers, drafts)
        self._division = division = _agreed(self._world, lambda: divide(self._asked, ranks))
        if self.stream_tokens == NEVER:
            self._division = division = dataclasses.replace(division, buffers=0)
        refuse(self._built.room_problems(config.resident_ids, division.num_resident))
        if config.num_resident is None and self._manager.progress():
            logger.info("%s", self._why(ranks))
        self._warn(ranks)
        if self.stream_tokens == NEVER and self._manager.progress():
            self._tell_of_long_steps()
        chosen_by = profile if config.resident_selection == "frequency" else None
        return InitialPlacement(self._resolved(), chosen_by, self._built.first, self._asked.converts, keeps_first)

    def _resolved(self) -> OffloadConfig:
        division = self._division
        return self._config.resolved(
            num_resident=division.num_resident,
            slots=division.slots,
            stream_tokens=self.stream_tokens,
            stream_buffers=division.buffers,
        )

    def make_room(self, draft: ModelExperts) -> None:
        """A draft model is built: the target gives way to what it keeps in VRAM. Where only some ranks have a draft model, the
        KV cache is still to come and leaves it room until ``correct``."""
        number, places = self._config.draft_num_resident, draft.num_places
        if number is not None and number > places:
            raise FlagError([f"{_DRAFTS} {number}: the draft model has {places} routed experts a layer; give at most as many"])
        if self._stages == 1:
            sizes = sizes_of(draft.layers, places)
            self._correct(sizes.resident[places if number is None else number], may_grow=False)

    def correct(self) -> None:
        """All weights are loaded, and what follows is SGLang's KV cache: divide the VRAM next to it, and place the slots.
        Raises ``ManagedMemoryError``."""
        self._correct(0)
        self._model.place_slots()

    @property
    def stream_tokens(self) -> int:
        """From how many tokens on a step streams."""
        return self._budgets.stream_tokens(self._division.num_resident, self._division.slots, self._top_k)

    def _correct(self, extra: int, may_grow: bool = True) -> None:
        """``extra``: VRAM of experts that are still to be placed."""
        if self._manager.memory.device_type == "cpu":
            return
        before = self._division
        ranks = self._budgets.of_all(self._model.layers, extra, before.num_resident)
        now = _agreed(self._world, lambda: corrected(before, self._asked, ranks))
        if now == before or (now.num_resident > before.num_resident and not may_grow):
            return
        if _told(now) != _told(before) and self._manager.progress():
            logger.info("Expert offload: %s, not %s: so many fit now that all weights are in VRAM", _told(now), _told(before))
        self._division = now
        self._manager.correct(self._resolved())
        own = ranks[self._world.rank_in_group].experts
        if (fewer := own.resident[before.num_resident] - own.resident[now.num_resident]) > 0:
            self._backend.reclaim(self._manager.memory, fewer)

    def _warn(self, ranks: list[RankBudget]) -> None:
        """Once on each machine."""
        own = ranks[self._world.rank_in_group]
        here = [rank for rank in ranks if rank.node == own.node]
        if self._manager.memory.device_type != "cpu" and own is here[0]:
            warn_of_host_ram(here, self._division)

    def _tell_of_long_steps(self) -> None:
        rows, places = self._division.num_resident + self._division.slots, self._built.num_places
        if rows < places and self._config.stream_gb is None and self._config.stream_tokens is None:
            logger.info(
                "Expert offload: no step streams, and no VRAM is kept for it: with %d of %d experts of a layer in VRAM, "
                "copying them pays for longer steps than --chunked-prefill-size allows. %s gives another number.",
                rows,
                places,
                flag_name("stream_tokens"),
            )

    def _why(self, ranks: list[RankBudget]) -> str:
        """One line: the number, the VRAM it takes, and the room it leaves."""
        division, asked = self._division, self._asked
        rank = max(ranks, key=lambda each: each.experts.in_vram(division.num_resident, division.slots))
        taken = size(rank.experts.in_vram(division.num_resident, division.slots))
        stream = f", {size(division.buffers * rank.buffer_with(division.slots))} of stream buffers" if division.buffers else ""
        slots = f", {division.slots} of them as slots ({_SLOTS})" if division.slots else ""
        return (
            f"{_N} {AUTO}: {division.num_resident + division.slots} of {self._built.num_places} experts a layer fit in VRAM"
            f"{slots}: {taken} on {rank.name}, next to {size(rank.cache)} of KV cache for {asked.cache_tokens} tokens on each "
            f"rank ({asked.demand}){stream}"
        )


def _told(division: Division) -> str:
    slots = f" and {division.slots} slots" if division.slots else ""
    return f"{division.num_resident} residents{slots} a layer"


def refuse(problems: list[str]) -> None:
    """End the start if this rank, or any other, has found ``problems``. Every rank must call it at the same point."""
    world = get_parallel().world_group
    found = world.all_gather_object(problems) if world.world_size > 1 else [problems]
    if every := list(dict.fromkeys(itertools.chain.from_iterable(found))):
        _agreed(world, functools.partial(_refuse, every))


def _refuse(problems: list[str]) -> None:
    raise FlagError(problems)


def _agreed(world: Any, decide: Callable[[], _Decided]) -> _Decided:
    """What every rank decides from the same numbers. A refusal is shown once, by the first rank, and ends all."""
    try:
        return decide()
    except FlagError as error:
        if world.world_size > 1:
            if world.rank_in_group:
                world.barrier()  # until the first rank has said why
                enforce.leave()
            enforce.end(f"sglang-uvm-offload: {error}", world.barrier)
        raise
