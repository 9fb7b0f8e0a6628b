"""Checks a launch against this SGLang and this model, and finds every problem before anything loads."""

from __future__ import annotations

import contextlib
import logging
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang.srt.utils import get_device_memory_capacity

from sglang_uvm_offload.config import AUTO, OffloadConfig, RequestedConfig, expert_problems
from sglang_uvm_offload.flags import PREFIX, FlagError, flag_name
from sglang_uvm_offload.plugin import compat
from sglang_uvm_offload.plugin.checks import (
    combinations,
    flag_values,
    front_doors,
    load_formats,
    slot_settings,
    start_checks,
    tma,
    tracing,
    vram_check,
)
from sglang_uvm_offload.plugin.compat import model_config_of, resolving_view
from sglang_uvm_offload.plugin.launch import (
    auto_resident,
    devices,
    draft_source,
    expert_bytes,
    lookup_tables,
    output_files,
    stream_settings,
)
from sglang_uvm_offload.plugin.launch.local_checkpoint import damage
from sglang_uvm_offload.plugin.launch.planned_launch import longest_step, rates_of_streams
from sglang_uvm_offload.plugin.launch.profiles import chosen_profile
from sglang_uvm_offload.plugin.launch.routing_formats import RoutingFormat, routing_format
from sglang_uvm_offload.routing.profile import Profile
from sglang_uvm_offload.sizing.moe_shape import stated_experts

logger = logging.getLogger(__name__)

_N = flag_name("num_resident")

DIRECT_KERNEL_MODELS = {
    "AfmoeForCausalLM",
    "BeamForCausalLM",
    "DbrxForCausalLM",
    "DeepseekForCausalLM",
    "InklingForConditionalGeneration",
    "MuseSparkForConditionalGeneration",
    "QuantMixtralForCausalLM",
    "UnlimitedOCRForCausalLM",
    "XverseMoeForCausalLM",
}
"""Architectures whose code computes experts itself: it builds no ``FusedMoE`` layer, or passes that layer's weights to kernels
without its ``apply``. A test compares them with what all of SGLang's models call. What the test cannot see (a language model
that the config chooses) fails the launch once the model is built, before its weights are read (``built_model``)."""


@dataclass(frozen=True)
class CheckedLaunch:
    """A launch that can be served."""

    config: OffloadConfig
    settings: dict[str, Any]
    """SGLang's arguments that offloading sets, by field."""


def check(requested: RequestedConfig, server_args: Any) -> CheckedLaunch:
    """Every decision from what was requested to what is served, in their order. Raises ``FlagError`` with every reason why
    ``server_args`` cannot be served with offloading."""
    began_at = time.time()
    if wrong := flag_values.problems(server_args):
        raise FlagError(wrong)
    cfg, model = resolving_view(server_args), model_config_of(server_args)
    routing = routing_format(cfg, model, compat.as_given(server_args).moe_runner_backend)
    problems = [
        *combinations.problems(requested, cfg),
        *combinations.format_problems(cfg, model),
        *load_formats.problems(cfg),
        *compat.problems(cfg),
        *devices.problems(requested, cfg),
        *tracing.problems(requested, cfg),
        *output_files.problems(requested, server_args),
        *routing.problems(requested),
        *tma.problems(requested, cfg, model),
        *lookup_tables.problems(requested, model),
        *start_checks.problems(cfg, model),
        *(damaged := damage(cfg)),
    ]
    num_experts, reasons = _experts(requested, model, dense=expert_bytes.is_dense(cfg, model))
    redundant = cfg.ep_num_redundant_experts
    problems += reasons + draft_source.problems(requested, cfg, num_experts) + draft_source.policy_problems(requested, cfg)
    profile: Profile | None = None
    with _listed(problems):
        profile = chosen_profile(requested, model)
    settings: dict[str, Any] = {}
    with _listed(problems):
        settings |= _headroom(requested, cfg)
    possible = requested
    with _listed(problems):
        possible = slot_settings.possible(requested, cfg, model)
    residents, slots, buffers = possible.num_resident, possible.slots, None
    if num_experts is not None and not damaged:
        if residents is None:
            with _listed(problems):
                plan = auto_resident.fitting(possible, server_args, profile)
                residents, slots, buffers = plan.num_resident, plan.slots, plan.stream_buffers
        else:
            buffers, reasons = vram_check.checked(possible, server_args)
            problems += reasons
        if residents is not None:
            problems += expert_problems(requested.resident_ids, residents, slots or 0, num_experts, redundant)
    if problems:
        raise FlagError(problems)
    assert num_experts is not None
    assert residents is not None
    config = requested.resolved(
        num_resident=residents,
        slots=slots,
        stream_buffers=buffers,
        stream_tokens=stream_settings.stream_tokens(
            *(requested, residents, slots or 0, buffers, num_experts + redundant, model.hf_text_config),
            *(rates_of_streams(cfg), longest_step(cfg, model)),
        ),
        backend=_backend(requested, cfg),
        launch_id=uuid.uuid4().hex,
        began_at=began_at,
    )
    settings |= stream_settings.graph_settings(config, cfg)
    settings |= _autotuning(cfg, routing)
    if requested.num_resident is None:
        settings[f"{PREFIX}num_resident"] = str(config.num_resident)
    if requested.slots != config.slots:
        settings[f"{PREFIX}slots"] = str(config.slots)
    for line in (*combinations.ignored(server_args), *front_doors.lacking(cfg)):
        logger.warning("%s", line)
    slow = (*expert_bytes.conversions(cfg, model), *expert_bytes.crowded_nodes(residents, server_args))
    for line in (*slow, *expert_bytes.never_released(config, server_args)):
        logger.warning("Expert offload: %s", line)
    if not config.tma:
        logger.info("Expert offload: SGLang's Triton MoE kernels load no weights by TMA")
    if not routing.counted:
        logger.warning("Expert offload: no hit rate is measured: %s", routing.reason)
    return CheckedLaunch(config, settings)


def _backend(requested: RequestedConfig, cfg: Any) -> str:
    if requested.backend != "auto":
        return requested.backend
    return "uvm" if cfg.device == "cuda" else "emulated"


@contextlib.contextmanager
def _listed(problems: list[str]) -> Iterator[None]:
    """Add the problems of a ``FlagError`` to ``problems``, and continue after the block."""
    try:
        yield
    except FlagError as error:
        problems += error.problems


def _experts(config: RequestedConfig, model: Any, dense: bool = False) -> tuple[int | None, list[str]]:
    """The routed experts per layer in the model's config, or None; and why they cannot be served. ``dense``: the checkpoint has
    no experts, whatever the defaults of its config class."""
    architectures = set(model.hf_config.architectures or [])
    out = [
        f"{name}: this model's code computes experts without SGLang's FusedMoE layer, so {_N} cannot serve it"
        for name in sorted(architectures & DIRECT_KERNEL_MODELS)
    ]
    num_experts = None if dense else stated_experts(model.hf_text_config)
    if num_experts is None and not out:
        given = AUTO if config.num_resident is None else config.num_resident
        out.append(f"{_N} {given}: the model ({', '.join(sorted(architectures))}) has no routed experts")
    return num_experts, out


def fraction_with_headroom(config: RequestedConfig, cfg: Any) -> float | None:
    """``mem_fraction_static`` minus the headroom, None for no change (a CPU has no VRAM)."""
    capacity_mib = get_device_memory_capacity(cfg.device) if cfg.device == "cuda" else None
    if not capacity_mib or not config.headroom_gb or cfg.mem_fraction_static is None:
        return None
    fraction = cfg.mem_fraction_static - config.headroom_gb * 1024 / capacity_mib
    if fraction <= 0:
        raise FlagError(
            [
                f"{flag_name('headroom_gb')} {config.headroom_gb}: leaves nothing of --mem-fraction-static "
                f"{cfg.mem_fraction_static} on a GPU of {capacity_mib / 1024:.1f} GiB"
            ]
        )
    return fraction


def _headroom(config: RequestedConfig, cfg: Any) -> dict[str, Any]:
    fraction = fraction_with_headroom(config, cfg)
    return {} if fraction is None else {"mem_fraction_static": fraction}


def _autotuning(cfg: Any, routing: RoutingFormat) -> dict[str, Any]:
    """FlashInfer's autotuner runs each tactic of its MoE kernels at start. It would time reads of offloaded experts over
    PCIe."""
    runners = (routing.runner, cfg.speculative_moe_runner_backend or "")
    if cfg.device != "cuda" or cfg.disable_flashinfer_autotune or not any(name.startswith("flashinfer") for name in runners):
        return {}
    logger.info("Expert offload: sets --disable-flashinfer-autotune, which would time reads of offloaded experts over PCIe")
    return {"disable_flashinfer_autotune": True}
