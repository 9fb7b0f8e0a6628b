"""Profiles in SGLang: which files fit the model, and which ranks save."""

from __future__ import annotations

from typing import Any

from sglang.srt.distributed.parallel_state import get_world_group
from sglang.srt.runtime_context import get_parallel, get_server_args

from sglang_uvm_offload.config import OffloadConfig
from sglang_uvm_offload.files.autosave import Saver
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.plugin import compat, output_files
from sglang_uvm_offload.residency.manager import OffloadManager
from sglang_uvm_offload.routing.profile import Profile, RoutedModel, load_for, model_name
from sglang_uvm_offload.routing.profile_file import ProfileFile


def named(model_config: Any) -> tuple[str, str]:
    """The name and the architecture of a model, as in its profiles."""
    return model_name(model_config.model_path), (model_config.hf_config.architectures or [""])[0]


def chosen_profile(config: OffloadConfig, model_config: Any) -> Profile | None:
    """The profile to start from, None without one. Raises ``FlagError`` for files that cannot be used; ``BuiltModel.check``
    compares their layers with the built model."""
    profile, problems = load_for(*named(model_config), config.profiles)
    if problems:
        raise FlagError([f"{flag_name('profile')} {problem}" for problem in problems])
    return profile


def profile_saver(manager: OffloadManager, model: RoutedModel) -> Saver | None:
    """The saver of this rank's profile, None on a rank whose counts another rank saves."""
    if manager.config.save_profile is None:
        return None
    parallel = get_parallel()
    run = manager.config.launch_id
    if parallel.nnodes > 1:  # each has a launcher of its own, which named the run
        run = get_world_group().broadcast_object(run, src=0)
    replica = not compat.attn_dp_enabled() and compat.dp_rank() > 0
    layers = manager.target.layers
    if replica or parallel.moe_tp_group.rank_in_group or not layers:
        return None
    file = ProfileFile(
        manager.config.save_profile,
        manager.profile or Profile.empty(model),
        run,
        [layer.layer_id for layer in layers],
        f"pp{parallel.pp_rank} tp{parallel.tp_rank}",
        output_files.model_folders(get_server_args()),
    )
    return Saver("profile", lambda wait: file.pending(manager.logical_routing(wait)))
