"""Computes the bytes of a launch's experts from its checkpoint's headers, and checks that host RAM can hold the offloaded
ones."""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass
from typing import Any

from sglang.srt.utils import get_device_memory_capacity

from sglang_uvm_offload.config import OffloadConfig
from sglang_uvm_offload.cuda.numa import crowded
from sglang_uvm_offload.flags import flag_name
from sglang_uvm_offload.memory.host_ram import host_available
from sglang_uvm_offload.plugin.compat import as_given, model_config_of, resolving_view
from sglang_uvm_offload.plugin.launch.lookup_tables import tables_in
from sglang_uvm_offload.plugin.launch.planned_launch import has_one_memory, hicache, model_files, ranks
from sglang_uvm_offload.plugin.server_config import requested_of
from sglang_uvm_offload.sizing.checkpoint_shape import CheckpointShape
from sglang_uvm_offload.sizing.conversion import conversion
from sglang_uvm_offload.sizing.host_need import HostNeed
from sglang_uvm_offload.sizing.launch import stored_model
from sglang_uvm_offload.sizing.lookup_tables import MANAGED, PINNED, REGISTERED, TABLES_FLAG
from sglang_uvm_offload.sizing.safetensors_header import CheckpointError, NoExperts
from sglang_uvm_offload.sizing.verdict import ONE_MEMORY
from sglang_uvm_offload.units import size


@dataclass(frozen=True)
class ExpertBytes:
    """Totals over all ranks of all replicas on this machine."""

    resident: int
    offloaded: int
    loading: int
    """A lower bound of the peak host RAM while loading: the offloaded experts before conversion, plus the resident ones that do
    not fit in VRAM in that format."""


def stored(cfg: Any, model_config: Any) -> CheckpointShape | None:
    """The model as stored in its files; None if they are not on this machine or cannot be read."""
    try:
        return stored_model(model_files(cfg), cfg.load_format, str(model_config.dtype).removeprefix("torch."))
    except CheckpointError:
        return None


def is_dense(cfg: Any, model_config: Any) -> bool:
    """Whether the checkpoint has no expert tensors, whatever the defaults of its config class."""
    try:
        stored_model(model_files(cfg), cfg.load_format, str(model_config.dtype).removeprefix("torch."))
    except CheckpointError as error:  # whoever needs the model's bytes reports any other
        return isinstance(error, NoExperts)
    return False


def conversions(cfg: Any, model_config: Any) -> list[str]:
    """What the launch converts while loading."""
    model = stored(cfg, model_config)
    found = conversion(model_config.quantization, model.quantization) if model is not None else None
    return [str(found)] if found else []


def is_more_than_planned(server_args: Any) -> bool:
    """Whether host RAM holds more than the planner's case knows of: redundant experts, or a format that is dropped after
    loading."""
    cfg = resolving_view(server_args)
    return bool(cfg.ep_num_redundant_experts or conversions(cfg, model_config_of(server_args)))


def expert_bytes(num_resident: int, cfg: Any, model_config: Any) -> ExpertBytes | None:
    """The bytes of the launch's experts, None if only loading shows them."""
    model = stored(cfg, model_config)
    if model is None:
        return None
    converted = conversion(model_config.quantization, model.quantization)
    served = converted.applied(model, at_least=True) if converted else model
    loading = model if converted and converted.loads_whole else served
    places, local = model.num_experts + cfg.ep_num_redundant_experts, ranks(cfg)
    replicas = 1 if cfg.attn_dp_size > 1 else cfg.dp_size
    everywhere = cfg.tp_size * cfg.pp_size * replicas

    def here(form: CheckpointShape, rows: int) -> int:
        total = form.expert_bytes * places // form.num_experts * replicas
        return total * rows // places * len(local) // everywhere

    resident, offloaded = (here(served, rows) for rows in (num_resident, places - num_resident))
    most = here(loading, places - num_resident)
    if loading is not served and cfg.device == "cuda" and (vram := _vram(cfg)):
        most = max(most, here(loading, places) - (resident if has_one_memory() else vram))
    return ExpertBytes(resident, offloaded, most)


def _vram(cfg: Any) -> int:
    """An upper bound of the VRAM of all GPUs with ranks here; 0 if SGLang does not know their size."""
    return len({rank.gpu for rank in ranks(cfg)}) * int((get_device_memory_capacity(cfg.device) or 0) * (1 << 20))


def problems(num_resident: int, server_args: Any) -> list[str]:
    """The shortage of host RAM, as far as the checkpoint's headers and the flags show it."""
    return shortage(num_resident, host_need(num_resident, server_args), host_available())


def host_need(num_resident: int, server_args: Any) -> HostNeed:
    """A lower bound for a launch that the planner cannot count: its experts, if their headers show them, and the hierarchical
    caches whose size a flag gives."""
    cfg = resolving_view(server_args)
    known = expert_bytes(num_resident, cfg, model_config_of(server_args))
    cache = hicache(cfg, as_given(server_args)).get("hicache_bytes", 0) if cfg.pp_size == 1 else 0
    nbytes, place = table_bytes(server_args)
    tables = nbytes if place in (PINNED, REGISTERED, MANAGED) else 0
    experts = 0 if known is None else max(0, known.loading)
    return HostNeed(experts, cache * len(ranks(cfg)), tables=tables, tables_are_managed=place == MANAGED)


def never_released(config: OffloadConfig, server_args: Any) -> list[str]:
    """Why experts can never leave VRAM while the server gives up its memory: host RAM must then hold all of them, and slots."""
    cfg = resolving_view(server_args)
    if not cfg.enable_memory_saver or cfg.device != "cuda" or has_one_memory():
        return []
    known = expert_bytes(config.slots, cfg, model_config_of(server_args))
    if known is None:
        return []
    slots, every = known.resident, known.resident + known.offloaded
    need = dataclasses.replace(host_need(config.num_resident, server_args), experts=every + slots)
    if need.total <= (available := host_available()):
        return []
    left = size(max(0, available - need.total + need.experts))
    return [
        f"--enable-memory-saver: release_memory_occupation can never free the VRAM of experts here: host RAM must hold all of "
        f"them meanwhile, {size(need.experts)}, and {left} is left of {size(available)} after {need.beside_experts()}; they "
        "stay in VRAM, unless you add host RAM"
    ]


def table_bytes(server_args: Any) -> tuple[int, str]:
    """The lookup tables of the ranks on this machine, without what PyTorch rounds them up by, and where they are kept."""
    cfg, model_config, requested = resolving_view(server_args), model_config_of(server_args), requested_of(server_args)
    model, place = stored(cfg, model_config), tables_in(cfg, model_config, bool(requested and requested.tables_in_host))
    if model is None or cfg.device != "cuda":
        return 0, place
    replicas = 1 if cfg.attn_dp_size > 1 else cfg.dp_size
    everywhere = cfg.tp_size * cfg.pp_size * replicas
    return sum(table.nbytes for table in model.tables) * replicas * len(ranks(cfg)) // everywhere, place


def crowded_nodes(num_resident: int, server_args: Any) -> list[str]:
    """A line for each NUMA node that is smaller than what its GPUs' ranks keep in managed memory on it."""
    cfg = resolving_view(server_args)
    known = expert_bytes(num_resident, cfg, model_config_of(server_args)) if cfg.device == "cuda" else None
    if known is None:
        return []
    by_gpu, local = Counter[int](), ranks(cfg)
    nbytes, place = table_bytes(server_args)
    for rank in local:
        by_gpu[rank.gpu] += (known.offloaded + (nbytes if place == MANAGED else 0)) // len(local)
    return crowded(by_gpu)


def shortage(num_resident: int, need: HostNeed, available: int, gpus: int = 0) -> list[str]:
    """Why ``available`` bytes of host RAM cannot hold what the launch needs. ``gpus``: bytes that GPUs take of the same memory.
    What is not known yet is checked while loading, tensor by tensor."""
    if not (need.managed or need.cache) or need.total <= available:
        return []
    left = size(max(0, available - need.total + need.experts))
    of = f"of {size(available)} after {need.beside_experts()}" + (f" and {size(gpus)} for the GPU" if gpus else "")
    remedy = "keep more resident, or add host RAM"
    if need.cache:
        remedy = f"give a smaller --hicache-size or --hicache-ratio, {remedy}"
    if need.tables_are_managed:
        remedy = f"leave out {TABLES_FLAG}, {remedy}"
    return [
        f"{flag_name('num_resident')} {num_resident}: the offloaded experts need {size(need.experts)} of host RAM, and "
        f"{left} is left {of}; {ONE_MEMORY if gpus else remedy}"
    ]
