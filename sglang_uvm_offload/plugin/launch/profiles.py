"""Which profiles of routing a launch starts from."""

from __future__ import annotations

from typing import Any

from sglang_uvm_offload.config import Settings
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.routing.merged_profile import load_for
from sglang_uvm_offload.routing.profile import Profile, model_name


def named(model_config: Any) -> tuple[str, str]:
    """The name and the architecture of a model, as in its profiles."""
    return model_name(model_config.model_path), (model_config.hf_config.architectures or [""])[0]


def chosen_profile(config: Settings, model_config: Any) -> Profile | None:
    """The profile to start from, None without one, or if the only one is still to be saved. Raises ``FlagError`` for files that
    cannot be used; ``BuiltModel.check`` compares their layers with the built model."""
    profile, problems = load_for(*named(model_config), config.profiles, config.save_profile)
    if problems:
        raise FlagError([f"{flag_name('profile')} {problem}" for problem in problems])
    return profile
