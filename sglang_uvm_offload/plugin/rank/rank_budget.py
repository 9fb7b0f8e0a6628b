"""Measures this rank's memory and needs, and gathers those of all ranks."""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sglang.srt.arg_groups.overrides import post_capture_kv_sizing_planned
from sglang.srt.mem_cache.kv_cache_configurator import mm_runtime_reservation_gb
from sglang.srt.runtime_context import (
    get_device,
    get_mm,
    get_parallel,
    get_schedule,
    get_server_args,
    pre_capture_activation_reserve_mb,
)
from sglang.srt.utils import get_device_memory_capacity

from sglang_uvm_offload.config import AUTO, RequestedConfig
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.memory.layout import round_up
from sglang_uvm_offload.memory.protocol import Memory
from sglang_uvm_offload.plugin.compat import resolving_view
from sglang_uvm_offload.plugin.launch.demand import demand_of
from sglang_uvm_offload.plugin.launch.draft_source import from_the_checkpoint
from sglang_uvm_offload.plugin.launch.ranks import has_one_memory, hicache, longest_step, rates_of_streams
from sglang_uvm_offload.plugin.launch.requested_slots import requested_slots
from sglang_uvm_offload.plugin.launch.stream_settings import stream_tokens
from sglang_uvm_offload.plugin.rank.cache_need import CacheNeed
from sglang_uvm_offload.plugin.slots.runners import no_slots_in
from sglang_uvm_offload.residency.budget import Asked, RankBudget
from sglang_uvm_offload.residency.demand import Demand
from sglang_uvm_offload.residency.expert_sizes import ExpertSizes, LayerExperts, expert_sizes
from sglang_uvm_offload.routing.profile import Profile
from sglang_uvm_offload.streaming.model_slots import cannot_share
from sglang_uvm_offload.streaming.replicas import buffer_bytes

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_LEAST_TOKENS = 2
"""SGLang 0.5.23 needs a KV cache of at least two tokens, in whole pages: it allows one request per two tokens
(``KVCacheConfigurator.resolve_max_num_reqs``) and refuses to serve none."""
_NO_LIMIT = 1 << 60
"""Stands for the VRAM of a device that has none."""


class RankBudgets:
    """The budgets of this launch's ranks. Each rank must construct it after building its model and call it at the same
    points."""

    def __init__(self, config: RequestedConfig, memory: Memory, runner: Any, model: torch.nn.Module, num_places: int):
        """``runner`` is the target's model runner and ``model`` its built module. ``num_places`` is the number of places for
        routed experts per layer, over all ranks that share it."""
        self._config, self._memory, self._runner = config, memory, runner
        self._model, self._num_places = model, num_places
        self._cfg = resolving_view(get_server_args())
        self._on_gpu = memory.device_type != "cpu"
        self._world = get_parallel().world_group

    def asked(self, profile: Profile | None, top_k: int, slots: int | None) -> Asked:
        """What the launch requests. ``slots`` is None for ``auto``."""
        demand = self._demand
        streams = functools.partial(self.stream_tokens, top_k=top_k)
        return Asked(
            num_resident=self._config.num_resident,
            slots=requested_slots(self._config, slots, profile),
            stream_gb=self._config.stream_gb,
            top_k=top_k,
            streams=lambda residents, slots: streams(residents, slots) <= longest_step(self._cfg, self._runner.model_config),
            demand=str(demand),
            cache_tokens=demand.tokens_of_rank(self._groups),
            converts=_converts(self._runner.model_config),
        )

    def stream_tokens(self, num_resident: int, slots: int, top_k: int) -> int:
        """The number of tokens from which a step streams, given residents and slots per layer."""
        longest = longest_step(self._cfg, self._runner.model_config)
        return stream_tokens(self._config, num_resident, slots, self._num_places, top_k, self._rates, longest)

    def of_all(self, layers: Sequence[ExpertLayer], extra: int, resident: int | None = None) -> list[RankBudget]:
        """The budgets of all ranks. ``layers`` are the target's. ``extra`` is the VRAM in bytes of experts still to be placed.
        ``resident`` is the number of residents per layer once the target is loaded."""
        own = self._own(layers, extra, resident)
        return self._world.all_gather_object(own) if self._world.world_size > 1 else [own]

    def draft_bytes(self, layers: Sequence[ExpertLayer]) -> int:
        """The expected VRAM in bytes of the draft model on this rank: the size of its files, or one target layer per draft
        layer of the checkpoint. ``correct`` adjusts for the actual size."""
        cfg = self._cfg
        if not self._on_gpu or cfg.speculative_algorithm in (None, "NGRAM"):
            return 0
        if not from_the_checkpoint(cfg):
            model = cfg.speculative_draft_model_path
            files = Path(model).glob("*.safetensors") if model else ()
            return sum(file.stat().st_size for file in files) // cfg.tp_size
        whole = sizes_of(layers, self._num_places).resident[-1] // max(1, len(layers))
        return whole * max(1, getattr(self._runner.model_config.hf_text_config, "num_nextn_predict_layers", None) or 1)

    def _own(self, layers: Sequence[ExpertLayer], extra: int, resident: int | None) -> RankBudget:
        info, server_args = self._memory.info(), get_server_args()
        sizes, loaded = sizes_of(layers, self._num_places), resident is not None
        with_slots = [layer for layer in layers if not (loaded and cannot_share(layer)) and not self._no_slots_in(layer)]
        free, cache, of_requests, least = _NO_LIMIT, 0, 0, 0
        if self._on_gpu:
            free = self._free() - extra
            if resident is not None:
                free += sizes.resident[resident] + (sizes.offloaded[resident] if has_one_memory() else 0)
            cache, of_requests, least = self._cache_bytes
        host_cache = hicache(self._cfg, server_args)
        return RankBudget(
            name=self._name(),
            free=free,
            cache=cache,
            cache_of_requests=of_requests,
            least_cache=least,
            experts=sizes,
            buffer=max(map(buffer_bytes, layers), default=0),
            gpu=get_device().gpu_id,
            node=self._cfg.node_rank,
            host=info.host_available,
            host_cache=int(host_cache.get("hicache_bytes", 0) or host_cache.get("hicache_ratio", 0) * cache),
            host_held=0 if resident is None else sizes.offloaded[resident],
            computes_from_slots=bool(with_slots),
            buffer_beside_slots=max(map(buffer_bytes, beside_slots(layers, with_slots)), default=0),
            one_memory=self._on_gpu and has_one_memory(),
        )

    def _no_slots_in(self, layer: ExpertLayer) -> bool:
        return self._on_gpu and no_slots_in(layer.holders[0]) is not None

    def _free(self) -> int:
        """VRAM that SGLang leaves for experts and KV cache (``KVCacheConfigurator._profile_available_bytes``)."""
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        info, runner = self._memory.info(), self._runner
        free = info.host_available if has_one_memory() else info.device_free
        slack = runner.pre_model_load_memory * (1 - get_schedule().mem_fraction_static)
        if post_capture_kv_sizing_planned(get_server_args()):  # SGLang then reserves nothing for graphs and activations
            slack = max(slack, pre_capture_activation_reserve_mb(get_device_memory_capacity(runner.device)) / 1024)
        images = mm_runtime_reservation_gb(
            is_multimodal=runner.model_config.is_multimodal, mm_feature_transport=get_mm().mm_feature_transport
        )
        return free - int((slack + images) * _GIB)

    @functools.cached_property
    def _demand(self) -> Demand:
        return demand_of(self._cfg, get_server_args(), self._runner.model_config)

    @property
    def _groups(self) -> int:
        return self._cfg.attn_dp_size if self._cfg.attn_dp_size > 1 else self._cfg.dp_size

    @functools.cached_property
    def _cache_bytes(self) -> tuple[int, int, int]:
        """Bytes of the requested cache, of the part of it that does not shrink with fewer tokens, and of the smallest cache.
        The first two include each request's token table (4 bytes per token)."""
        requests = self._demand.requests_of_rank(self._groups)
        table = 4 * requests * self._demand.context
        few = round_up(_LEAST_TOKENS, self._cfg.page_size or 1)
        try:
            need = CacheNeed(self._runner, self._model)
            whole = need.nbytes(self._demand.tokens_of_rank(self._groups), requests)
            return whole + table, need.nbytes(few, requests) + table, need.nbytes(few, 1)
        except Exception as error:  # SGLang's code may raise any type on a model without weights
            why = f"SGLang cannot size the KV cache before the weights are read: {type(error).__name__}: {error}"
            if self._config.num_resident is None:
                raise FlagError([f"{flag_name('num_resident')} {AUTO}: {why}; give a number"]) from error
            logger.warning("Expert offload: %s", why)
            return 0, 0, 0

    @functools.cached_property
    def _rates(self) -> Any:
        return rates_of_streams(self._cfg) if self._on_gpu else None

    def _name(self) -> str:
        parallel = get_parallel()
        out = f"rank {parallel.tp_rank}"
        out += f" of pipeline stage {parallel.pp_rank}" if parallel.pp_size > 1 else ""
        out += f" of replica {parallel.dp_rank or 0}" if self._cfg.dp_size > 1 and self._cfg.attn_dp_size == 1 else ""
        return f"GPU {get_device().gpu_id} ({out})" if self._on_gpu else out


def beside_slots(layers: Sequence[ExpertLayer], with_slots: Sequence[ExpertLayer]) -> list[ExpertLayer]:
    """The layers that cannot stream into slots, however many there are: those without slots, and one alone in its pool, because
    a step copies the experts of one layer while it computes another."""
    alike = Counter(layer.layouts for layer in with_slots)
    return [layer for layer in layers if layer not in with_slots or alike[layer.layouts] == 1]


def _converts(model_config: Any) -> bool:
    """Whether SGLang quantises the experts of an unquantised checkpoint. Most methods do so after loading all of them
    (``DefaultModelLoader.load_weights_and_postprocess``)."""
    configs = (model_config.hf_config, model_config.hf_text_config)
    stated = any(getattr(config, "quantization_config", None) is not None for config in configs)
    return model_config.quantization is not None and not stated


def sizes_of(layers: Sequence[ExpertLayer], num_places: int) -> ExpertSizes:
    """The sizes of this rank's layers, placed or not."""
    return expert_sizes(map(_experts_of, layers), num_places)


def _experts_of(layer: ExpertLayer) -> LayerExperts:
    shard, plain = layer.shard, layer.plain_bytes // layer.num_experts
    return LayerExperts(layer.layouts, shard.routed, shard.ep_rank, shard.ep_size, plain)
