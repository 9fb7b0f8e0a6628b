"""Loads the routing profiles of a launch, and logs what they are used for."""

from __future__ import annotations

import logging
from typing import Any

from sglang_uvm_offload.config import Settings
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.routing.merged_profile import LoadedProfiles, load_for
from sglang_uvm_offload.routing.profile import model_name

logger = logging.getLogger(__name__)


def named(model_config: Any) -> tuple[str, str]:
    """The name and the architecture of a model, as in its profiles."""
    return model_name(model_config.model_path), (model_config.hf_config.architectures or [""])[0]


def load_profiles(config: Settings, model_config: Any) -> LoadedProfiles:
    """Read the files of ``--expert-offload-profile``. Raises ``FlagError`` for unusable files, except those of a newer format.
    ``BuiltModel.problems`` compares their layers with the built model."""
    found = load_for(*named(model_config), config.profiles, config.save_profile)
    if found.problems:
        raise FlagError([f"{flag_name('profile')} {problem}" for problem in found.problems])
    return found


def announce(found: LoadedProfiles, config: Settings) -> None:
    """Log what the profiles are used for. Call once per launch."""
    for newer in found.newer:
        logger.warning(
            "Expert offload: profile %s. The server starts without it and leaves it alone; upgrade sglang-uvm-offload to use "
            "it, or choose another path to save a profile with this version.",
            newer,
        )
    files = ", ".join(map(str, config.profiles))
    if found.merged is not None and (routings := int(found.merged.seen.routed().sum())):
        by = "choose residents" if config.resident_selection == "frequency" else "do not choose residents"
        why = (
            ""
            if config.resident_selection == "frequency"
            else f" ({flag_name('resident_selection')} {config.resident_selection})"
        )
        logger.info("Expert offload: profile %s: %s routings %s%s", files, f"{routings:,}", by, why)
    elif config.save_profile in config.profiles and not found.newer:
        what = "new file" if found.merged is None else "no routing yet"
        logger.info("Expert offload: profile %s: %s; the server saves its routing there", config.save_profile, what)
