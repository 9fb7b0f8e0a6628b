"""Checks a launch against the installed SGLang and the model, and reports all problems before anything loads."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.utils import get_device_memory_capacity

from sglang_uvm_offload.config import AUTO, RequestedConfig, expert_problems
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.plan.moe_shape import stated_experts
from sglang_uvm_offload.plugin import compat
from sglang_uvm_offload.plugin.checks import combinations, sglang_gaps
from sglang_uvm_offload.plugin.compat import resolving_view
from sglang_uvm_offload.plugin.launch import devices, draft_source, lookup_tables, output_files
from sglang_uvm_offload.plugin.launch.local_checkpoint import damage
from sglang_uvm_offload.plugin.launch.profiles import announce, load_profiles
from sglang_uvm_offload.plugin.launch.ranks import chooses_runners_by_layer
from sglang_uvm_offload.routing.merged_profile import LoadedProfiles

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
"""Architectures that compute experts themselves: they build no ``FusedMoE`` layer, or bypass its ``apply`` and pass its weights
to kernels. A test compares this set with what each of SGLang's models calls. The test cannot see a language model that the
config selects; such a launch fails in ``built_model``, after the model is built and before its weights are read."""


@dataclass(frozen=True)
class CheckedLaunch:
    """A launch that may start."""

    config: RequestedConfig
    settings: dict[str, Any]
    """The SGLang arguments that offloading overrides, by field."""


def check(requested: RequestedConfig, server_args: Any) -> CheckedLaunch:
    """Raise ``FlagError`` with all reasons known before startup why ``server_args`` cannot be served with offloading. The ranks
    check memory once the model is built."""
    began_at = time.time()
    cfg = resolving_view(server_args)
    if wrong := sglang_gaps.bad_numbers(cfg):
        raise FlagError(wrong)
    model = model_config_of(server_args)
    requested = output_files.unless_read_only(requested, server_args)
    problems = [
        *combinations.problems(requested, cfg),
        *combinations.format_problems(cfg, model),
        *compat.problems(cfg),
        *devices.problems(cfg),
        *output_files.problems(requested, server_args),
        *lookup_tables.problems(requested, model),
        *sglang_gaps.problems(cfg, model),
        *damage(cfg),
    ]
    num_experts, reasons = _experts(requested, model)
    redundant = cfg.ep_num_redundant_experts
    problems += reasons + draft_source.problems(requested, cfg)
    profiles = LoadedProfiles()
    with _listed(problems):
        profiles = load_profiles(requested, model)
    settings: dict[str, Any] = {}
    with _listed(problems):
        settings |= _headroom(requested, cfg)
    backend = "uvm" if cfg.device == "cuda" else "emulated"
    config = dataclasses.replace(requested, backend=backend, launch_id=uuid.uuid4().hex, began_at=began_at)
    if config.num_resident is None and cfg.device != "cuda":
        problems.append(f"{_N} {AUTO}: --device {cfg.device} has no VRAM to size for; give a number")
    if num_experts is not None and config.num_resident is not None:
        problems += expert_problems(config.resident_ids, config.num_resident, config.slots or 0, num_experts, redundant)
    if problems:
        raise FlagError(problems)
    settings |= _autotuning(cfg, cfg.quantization or model.quantization)
    for line in combinations.ignored(server_args):
        logger.warning("%s", line)
    announce(profiles, config)
    if not config.tma:
        logger.info("Expert offload: SGLang's Triton MoE kernels do not use TMA loads for weights")
    return CheckedLaunch(config, settings)


@contextlib.contextmanager
def _listed(problems: list[str]) -> Iterator[None]:
    """Collect the problems of a ``FlagError`` in ``problems`` and continue after the block."""
    try:
        yield
    except FlagError as error:
        problems += error.problems


def _experts(config: RequestedConfig, model: Any) -> tuple[int | None, list[str]]:
    """The routed experts per layer in the model's config, or None, and why they cannot be served. The built model may differ
    (``BuiltModel``), but this reports a mistyped number or a dense model early, also in ``doctor``."""
    architectures = set(model.hf_config.architectures or [])
    out = [
        f"{name}: this model's code computes experts without SGLang's FusedMoE layer, so {_N} cannot serve it"
        for name in sorted(architectures & DIRECT_KERNEL_MODELS)
    ]
    num_experts = stated_experts(model.hf_text_config)
    if num_experts is None and not out:
        given = AUTO if config.num_resident is None else config.num_resident
        out.append(f"{_N} {given}: the model ({', '.join(sorted(architectures))}) has no routed experts")
    return num_experts, out


def _headroom(config: RequestedConfig, cfg: Any) -> dict[str, Any]:
    """``mem_fraction_static`` minus the headroom; empty on a CPU, which has no VRAM."""
    capacity_mib = get_device_memory_capacity(cfg.device) if cfg.device == "cuda" else None
    if not capacity_mib or not config.headroom_gb or cfg.mem_fraction_static is None:
        return {}
    fraction = cfg.mem_fraction_static - config.headroom_gb * 1024 / capacity_mib
    if fraction <= 0:
        raise FlagError(
            [
                f"{flag_name('headroom_gb')} {config.headroom_gb}: uses up all of --mem-fraction-static "
                f"{cfg.mem_fraction_static} on a GPU with {capacity_mib / 1024:.1f} GiB; lower the headroom"
            ]
        )
    return {"mem_fraction_static": fraction}


def _autotuning(cfg: Any, quantization: str | None) -> dict[str, Any]:
    """FlashInfer's autotuner times each tactic of its MoE kernels at startup. With offloaded experts it would time PCIe reads.
    NVFP4 layers may select these kernels on their own."""
    runners = (cfg.moe_runner_backend, cfg.speculative_moe_runner_backend or "")
    tunes = chooses_runners_by_layer(cfg, quantization) or any(name.startswith("flashinfer") for name in runners)
    if cfg.device != "cuda" or cfg.disable_flashinfer_autotune or not tunes:
        return {}
    logger.info("Expert offload: setting --disable-flashinfer-autotune: autotuning would time PCIe reads of offloaded experts")
    return {"disable_flashinfer_autotune": True}
