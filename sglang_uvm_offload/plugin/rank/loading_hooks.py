"""Hooks on building and loading a model. They place its experts, then start slots, streaming and recording."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.runtime_context import get_device, get_parallel, get_server_args

from sglang_uvm_offload.experts.takeover import WatchWrites
from sglang_uvm_offload.flags import FlagError
from sglang_uvm_offload.memory.protocol import ManagedMemoryError
from sglang_uvm_offload.plan.moe_shape import stated_top_k
from sglang_uvm_offload.plugin import enforce
from sglang_uvm_offload.plugin.launch.profiles import load_profiles, named
from sglang_uvm_offload.plugin.rank import built_runners, link
from sglang_uvm_offload.plugin.rank.buffers import make_slots, make_streamer
from sglang_uvm_offload.plugin.rank.built_model import BuiltModel
from sglang_uvm_offload.plugin.rank.lookahead import NextExperts
from sglang_uvm_offload.plugin.rank.prefill_graphs import limit_prefill_graphs
from sglang_uvm_offload.plugin.rank.residency import Residency, refuse
from sglang_uvm_offload.plugin.rank.start_clock import StartPhase
from sglang_uvm_offload.plugin.rank.state import MODEL, RankState
from sglang_uvm_offload.plugin.slots.runners import pads_with_first
from sglang_uvm_offload.residency.model import ModelExperts

_WRITTEN_BY_WEIGHT = ("auto", "pt", "safetensors", "fastsafetensors", "instanttensor", "npcache", "mistral")
"""The ``--load-format`` values whose loader writes weights one by one while it reads."""


class LoadingHooks:
    def __init__(self, rank: RankState):
        self.rank = rank
        self._on_build: Callable[[torch.nn.Module], None] | None = None
        """Called once after the loading model is built and before its first weight is read."""
        self._residency: Residency | None = None
        """The residency of the built target."""

    def _place_target(self, runner: Any, model: ModelExperts, module: torch.nn.Module) -> None:
        """Check the flags against the built target, decide with the other ranks what is resident, and place it."""
        rank, model_config = self.rank, model_config_of(get_server_args())
        built, profile, problems = BuiltModel(model, self._top_k()), None, []
        try:
            profiles = load_profiles(rank.config, model_config)
            profile, rank.history = profiles.merged, profiles.continued
        except FlagError as error:  # its file is another one on another machine
            problems += error.problems
        rank.routed_model = built.routed_model(*named(model_config))
        problems += built.problems(rank.config, profile, rank.routed_model)
        if rank.recording is not None:
            problems += rank.recording.problems(built)
        if rank.backend.on_cuda:
            problems += built_runners.problems(rank.config, module, _layers(model), model_config.quantization)
        refuse(problems)
        self._residency = Residency(rank.config, rank.manager, rank.backend, runner, model, module, built)
        keeps_first = rank.backend.on_cuda and any(map(pads_with_first, _layers(model)))
        rank.manager.place_model(model, self._residency.decide(profile, keeps_first))

    def _place_draft(self, model: ModelExperts, module: torch.nn.Module) -> None:
        """Place a built draft model, shrinking the target's residents to make room."""
        config = self.rank.config
        if self.rank.backend.on_cuda and config.draft_num_resident is not None:
            problems = built_runners.tma_problems(config, _layers(model), built_runners.DRAFT_RUNNER)
            if problems:
                raise FlagError(problems)
        if self._residency is not None:
            self._residency.make_room(model)
        self.rank.manager.place_model(model)

    def _top_k(self) -> int | None:
        """The target's top-k from its layers, else from its config."""
        return self.rank.layer_hooks.top_k or stated_top_k(model_config_of(get_server_args()).hf_text_config)

    def around_build(self, original: Callable[..., Any], model_config: Any, load_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Hook on building a model's modules, before any weights are read. ``--load-format presharded`` first builds a
        throwaway model on the meta device to get tensor shapes."""
        if torch.get_default_device().type == "meta":
            with self.rank.layer_hooks.leaving_alone():
                return original(model_config, load_config, *args, **kwargs)
        with self.rank.start.timing(StartPhase.BUILD):
            with WatchWrites(self.rank.layer_hooks.storage_written) if self._may_join_pools else nullcontext():
                result = original(model_config, load_config, *args, **kwargs)
            self._built(result)
        if load_config.load_format not in _WRITTEN_BY_WEIGHT:
            with self.rank.start.timing(StartPhase.PLACE):
                self.rank.manager.memory.wait_until_populated()
        self.rank.start.add(StartPhase.READ, sum(tensor.nbytes for tensor in result.parameters()))
        return result

    @property
    def _may_join_pools(self) -> bool:
        """Whether the model being built may move its experts into slot pools. Only the target does, which is built first."""
        return self.rank.config.slots != 0 and self._residency is None

    def _built(self, module: torch.nn.Module) -> None:
        on_build, self._on_build = self._on_build, None
        if on_build is not None:
            with self.rank.start.timing(StartPhase.PLACE):
                on_build(module)

    def around_load_model(self, original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            manager, draft = self.rank.manager, runner.is_draft_worker
            model = manager.begin_model(draft)
            runner.__dict__[MODEL] = model
            place = self._place_draft if draft else functools.partial(self._place_target, runner)
            self._on_build = functools.partial(place, model)
            with (
                self.rank.start.timing(StartPhase.PLACE),  # pages still to be populated after the weights are read
                manager.memory.loading(),
                self.rank.start.timing(StartPhase.READ),
                self.rank.layer_hooks.taking_over(manager, model),
            ):
                result = original(runner, *args, **kwargs)
                if self._on_build is not None:  # this loader builds and reads in one call
                    for layer in model.layers:
                        layer.mark_written()
                    self._built(runner.model)
                for layer in model.layers:
                    layer.sync_tensors(*layer.holders)  # loaders may replace tensors after post-load processing
            placed = sum(layer.resident_bytes + layer.offloaded_bytes for layer in model.layers)
            self.rank.start.add(StartPhase.PLACE, placed if model.draft else placed + self.rank.tables.nbytes)
            if not model.draft:
                with self.rank.start.timing(StartPhase.LINK):
                    manager.link = link.measure(self.rank.backend, get_device().gpu_id, model.layers)
            self._loaded(model, runner.model)
        except (FlagError, ManagedMemoryError) as error:
            enforce.end(f"sglang-uvm-offload: {error}")
        return result

    def before_weight(self, layer: Any, param: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Wait until ``param`` is populated before SGLang writes an expert's weight into it. The write itself would populate
        pages of the same size (``block_populate_pages_cpu`` in ``uvm_va_block.c`` of NVIDIA's open kernel modules, 580.95.05),
        but one fault at a time and without checking the remaining host RAM."""
        self.rank.manager.memory.wait_until_populated(param.untyped_storage().data_ptr())

    def _loaded(self, model: ModelExperts, module: torch.nn.Module) -> None:
        """Finish a model that has its weights, and start recording the target."""
        self.rank.manager.finish_model(model, may_be_empty=get_parallel().pp_size > 1)
        if self.rank.recording is not None and not model.draft:
            saver = self.rank.recording.begin(model, self._top_k(), module, _layers(model))
            self.rank.savers += [] if saver is None else [saver]

    def around_pools(self, original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        """Hook on allocating the KV cache from the remaining VRAM. By now all weights are loaded, including draft models."""
        if not runner.is_draft_worker and self._residency is not None:
            try:
                with self.rank.start.timing(StartPhase.PLACE):
                    self._residency.correct()
                with self.rank.start.timing(StartPhase.BUFFERS):
                    self._begin_slots(runner.__dict__[MODEL], runner.model)
                    self._begin_streams(runner)
            except (FlagError, ManagedMemoryError) as error:
                enforce.end(f"sglang-uvm-offload: {error}")
        with self.rank.start.timing(StartPhase.POOLS):
            return original(runner, *args, **kwargs)

    def _begin_streams(self, runner: Any) -> None:
        """Create the streamer, and capture prefill graphs only below the token count from which steps stream."""
        manager, layers = self.rank.manager, runner.__dict__[MODEL].layers
        shared = (manager.memory, layers, self.rank.slots, manager.ledger.add_streamed)
        # In this region, releasing the weights also releases the buffers, and resuming restores them at the same size.
        with runner.memory_saver_adapter.region(GPU_MEMORY_TYPE_WEIGHTS):
            streamer = make_streamer(manager.placement.config, self.rank.backend, *shared)
        self.rank.layer_hooks.streamer = streamer
        if streamer is not None:
            limit_prefill_graphs(streamer.min_tokens)

    def _begin_slots(self, model: ModelExperts, module: torch.nn.Module) -> None:
        top_k = self._top_k() if self.rank.config.looks_ahead else None
        guess = NextExperts(module, _layers(model), model.layers, top_k) if top_k else None
        self.rank.slots = self.rank.layer_hooks.slots = make_slots(model, self.rank.backend, guess)
        if self.rank.slots is not None:
            for seam in self.rank.seams:
                seam.find = self.rank.slots.at


def _layers(model: ModelExperts) -> list[Any]:
    """The ``FusedMoE`` layers of a built model."""
    return [layer.holders[0] for layer in model.layers]
