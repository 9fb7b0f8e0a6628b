"""Which ranks save the profile of a server, and into which of its layers."""

from __future__ import annotations

from sglang.srt.distributed.parallel_state import get_world_group
from sglang.srt.runtime_context import get_parallel, get_server_args

from sglang_uvm_offload.files.autosave import Saver
from sglang_uvm_offload.plugin import compat
from sglang_uvm_offload.plugin.launch import output_files
from sglang_uvm_offload.residency.manager import OffloadManager
from sglang_uvm_offload.routing.profile import Profile, RoutedModel
from sglang_uvm_offload.routing.profile_file import ProfileFile


def profile_saver(manager: OffloadManager, model: RoutedModel) -> Saver | None:
    """The saver of this rank's profile, None on a rank whose counts another rank saves."""
    parallel = get_parallel()
    launch = manager.config.launch_id, manager.config.began_at
    if parallel.nnodes > 1:  # each has a launcher of its own, which named the run, and whose flags may differ
        launch = get_world_group().broadcast_object(launch, src=0)
    if manager.config.save_profile is None:
        return None
    run, began_at = launch
    args = get_server_args()
    replica = not compat.attn_dp_enabled() and (get_parallel().dp_rank or 0) > 0
    layers = manager.target.layers
    if replica or parallel.moe_tp_group.rank_in_group or not layers:
        return None
    file = ProfileFile(
        manager.config.save_profile,
        manager.placement.profile or Profile.empty(model),
        run,
        [layer.layer_id for layer in layers],
        f"pp{parallel.pp_rank} tp{parallel.tp_rank}",
        output_files.model_folders(args),
        began_at,
        args.node_rank if parallel.nnodes > 1 else None,
    )
    return Saver("profile", lambda wait: file.pending(manager.routing_by_expert(wait)))
