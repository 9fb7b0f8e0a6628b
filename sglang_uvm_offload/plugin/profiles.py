"""Profiles where they meet SGLang: whose routing is counted, which files fit it, and which ranks save."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from sglang.srt.runtime_context import get_parallel

from sglang_uvm_offload.config import FlagError, OffloadConfig, flag_name
from sglang_uvm_offload.manager import OffloadManager
from sglang_uvm_offload.moe_config import moe_shape
from sglang_uvm_offload.plugin import demand
from sglang_uvm_offload.profile import Profile, RoutedModel, load_for, model_name
from sglang_uvm_offload.profile_file import ProfileFile
from sglang_uvm_offload.saver import Saver

logger = logging.getLogger(__name__)


def routed_model(model_config: Any) -> RoutedModel | None:
    """What profiles of this model say that they are of, None for a model without routed experts."""
    shape = moe_shape(model_config.hf_text_config)
    if shape is None:
        return None
    architecture = (model_config.hf_config.architectures or [""])[0]
    return RoutedModel(model_name(model_config.model_path), architecture, shape.moe_layers, shape.num_experts, shape.top_k)


def profile_problems(config: OffloadConfig, model: RoutedModel | None) -> list[str]:
    """Why the profiles that were asked for cannot be used; empty where that is to be no reason to end the launch."""
    if config.profile_mismatch == "warmup" or model is None:
        return []
    return [f"{flag_name('profile')} {problem}" for problem in load_for(model, config.profile_paths)[1]]


def chosen_profile(config: OffloadConfig, model: RoutedModel | None) -> Profile | None:
    """The profile to start from. Raises ``FlagError`` for files that cannot be used, or logs why and goes without them."""
    if config.profile is None or model is None:
        return None
    profile, problems = load_for(model, config.profile_paths)
    if problems and config.profile_mismatch == "refuse":
        raise FlagError([f"{flag_name('profile')} {problem}" for problem in problems])
    for problem in problems:
        logger.warning("Expert offload: not used: profile %s", problem)
    return profile if any(profile.seen.steps) else None


def profile_saver(manager: OffloadManager, model: RoutedModel | None) -> Saver | None:
    """What saves the profile of this rank, None on a rank whose experts another one counts too."""
    if manager.config.save_profile is None or model is None:
        return None
    parallel = get_parallel()
    replica = not parallel.attn_dp_enabled and (parallel.dp_rank or 0) > 0
    layers = manager.target.layers
    if replica or parallel.moe_tp_group.rank_in_group or not layers:
        return None
    if unknown := [layer.layer_id for layer in layers if layer.layer_id not in model.moe_layers]:
        logger.warning("Expert offload: no profile is saved: the model's config does not tell that layers %s route", unknown)
        return None
    file = ProfileFile(
        Path(manager.config.save_profile),
        manager.profile or Profile.empty(model),
        demand.launch(),
        [layer.layer_id for layer in layers],
        [layer.routed_ids for layer in layers],
    )
    return Saver("profile", lambda wait: file.pending(manager.routing(wait)))
