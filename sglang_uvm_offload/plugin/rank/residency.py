"""Divides VRAM between residents, slots and stream buffers: once after the target is built, and again after all weights are
loaded. All ranks decide alike."""

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
    """The division of VRAM on this launch's ranks. All ranks must call the same methods at the same points."""

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
        """``runner`` is the target's model runner and ``module`` its built module."""
        self._config, self._manager, self._model, self._built = config, manager, model, built
        self._backend = backend
        parallel = get_parallel()
        self._world, self._stages = parallel.world_group, parallel.pp_size
        """The target's groups, because a draft model may be built in a scope with other ones."""
        self._budgets = RankBudgets(config, manager.memory, runner, module, built.num_places)
        self._top_k = built.top_k or USUAL_TOP_K
        self._asked: Asked
        self._division: Division

    def decide(self, profile: Profile | None, keeps_first: bool) -> InitialPlacement:
        """The initial placement, chosen by ``profile`` if there is one. ``keeps_first`` is passed to ``InitialPlacement``."""
        config = self._config
        self._asked = self._budgets.asked(profile, self._top_k, config.slots)
        drafts = 0 if config.num_resident is not None else self._budgets.draft_bytes(self._model.layers)
        ranks = self._budgets.of_all(self._model.layers, drafts)
        self._division = division = _decided_by_all(self._world, lambda: divide(self._asked, ranks))
        if self.stream_tokens == NEVER:
            self._division = division = dataclasses.replace(division, buffers=0)
        refuse(self._built.room_problems(config.resident_ids, division.num_resident))
        if config.num_resident is None and self._manager.progress():
            logger.info("%s", self._why(ranks))
        self._warn(ranks)
        if self.stream_tokens == NEVER and self._manager.progress():
            self._log_no_streaming()
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
        """Shrink the target's residents to fit a built draft model. With pipeline stages, only some ranks have a draft model,
        which then uses the VRAM of the future KV cache until ``correct``."""
        number, places = self._config.draft_num_resident, draft.num_places
        if number is not None and number > places:
            raise FlagError([f"{_DRAFTS} {number}: the draft model has {places} routed experts a layer; give at most {places}"])
        if self._stages == 1:
            sizes = sizes_of(draft.layers, places)
            self._correct(sizes.resident[places if number is None else number], may_grow=False)

    def correct(self) -> None:
        """Divide the VRAM again after all weights are loaded and before SGLang allocates the KV cache, then place the slots.
        Raises ``ManagedMemoryError``."""
        self._correct(0)
        self._model.place_slots()

    @property
    def stream_tokens(self) -> int:
        """The number of tokens from which a step streams."""
        return self._budgets.stream_tokens(self._division.num_resident, self._division.slots, self._top_k)

    def _correct(self, extra: int, may_grow: bool = True) -> None:
        """Divide again. ``extra`` is the VRAM in bytes of experts still to be placed."""
        if self._manager.memory.device_type == "cpu":
            return
        before = self._division
        ranks = self._budgets.of_all(self._model.layers, extra, before.num_resident)
        now = _decided_by_all(self._world, lambda: corrected(before, self._asked, ranks))
        if now == before or (now.num_resident > before.num_resident and not may_grow):
            return
        if _shown(now) != _shown(before) and self._manager.progress():
            logger.info("Expert offload: %s instead of %s, measured with all weights in VRAM", _shown(now), _shown(before))
        self._division = now
        self._manager.correct(self._resolved())
        own = ranks[self._world.rank_in_group].experts
        if (fewer := own.resident[before.num_resident] - own.resident[now.num_resident]) > 0:
            self._backend.reclaim(self._manager.memory, fewer)

    def _warn(self, ranks: list[RankBudget]) -> None:
        """Warn about host RAM, once per machine."""
        own = ranks[self._world.rank_in_group]
        here = [rank for rank in ranks if rank.node == own.node]
        if self._manager.memory.device_type != "cpu" and own is here[0]:
            warn_of_host_ram(here, self._division)

    def _log_no_streaming(self) -> None:
        rows, places = self._division.num_resident + self._division.slots, self._built.num_places
        if rows < places and self._config.stream_gb is None and self._config.stream_tokens is None:
            logger.info(
                "Expert offload: steps do not stream, and no VRAM is reserved for it: with %d of %d experts of a layer in "
                "VRAM, streaming pays off only in longer steps than --chunked-prefill-size allows. %s overrides this.",
                rows,
                places,
                flag_name("stream_tokens"),
            )

    def _why(self, ranks: list[RankBudget]) -> str:
        """One log line with the number, the VRAM that it takes, and what is left for the KV cache."""
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


def _shown(division: Division) -> str:
    slots = f" and {division.slots} slots" if division.slots else ""
    return f"{division.num_resident} residents{slots} a layer"


def refuse(problems: list[str]) -> None:
    """End the launch if any rank has found ``problems``. All ranks must call this at the same point."""
    world = get_parallel().world_group
    found = world.all_gather_object(problems) if world.world_size > 1 else [problems]
    if every := list(dict.fromkeys(itertools.chain.from_iterable(found))):
        _decided_by_all(world, functools.partial(_refuse, every))


def _refuse(problems: list[str]) -> None:
    raise FlagError(problems)


def _decided_by_all(world: Any, decide: Callable[[], _Decided]) -> _Decided:
    """The decision that every rank makes from the same numbers. The first rank prints a refusal, which ends all ranks."""
    try:
        return decide()
    except FlagError as error:
        if world.world_size > 1:
            if world.rank_in_group:
                world.barrier()  # until the first rank has printed the reason
                enforce.leave()
            enforce.end(f"sglang-uvm-offload: {error}", world.barrier)
        raise
