"""Decides which ranks save a server's profile and statistics, and what each of them saves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import sglang
from sglang.srt.distributed.parallel_state import get_world_group
from sglang.srt.runtime_context import get_parallel, get_server_args

from sglang_uvm_offload.files import atomic
from sglang_uvm_offload.files.autosave import Saver
from sglang_uvm_offload.plugin import compat
from sglang_uvm_offload.plugin.launch.output_files import STATS_FILE, STATS_FORMAT, model_folders
from sglang_uvm_offload.plugin.server_config import config_of
from sglang_uvm_offload.residency.manager import OffloadManager
from sglang_uvm_offload.residency.status import RankStatus
from sglang_uvm_offload.routing.profile import Profile, RoutedModel
from sglang_uvm_offload.routing.profile_file import ProfileFile

_SHOWN = ("tp_size", "pp_size", "ep_size", "dp_size", "enable_dp_attention")


def profile_saver(manager: OffloadManager, model: RoutedModel, history: Profile | None) -> Saver | None:
    """The saver of this rank's counts; None on a rank whose counts another rank saves. ``history``: the profile to which the
    server adds its counts; None to start a new one."""
    parallel = get_parallel()
    launch = manager.config.launch_id, manager.config.began_at
    if parallel.nnodes > 1:  # each node has its own launcher, with its own name for the run and perhaps other flags
        launch = get_world_group().broadcast_object(launch, src=0)
    if manager.config.save_profile is None:
        return None
    run, began_at = launch
    args = get_server_args()
    replica = not compat.attn_dp_enabled() and (parallel.dp_rank or 0) > 0
    layers = manager.target.layers
    if replica or parallel.moe_tp_group.rank_in_group or not layers:
        return None
    file = ProfileFile(
        manager.config.save_profile,
        history or Profile.empty(model),
        run,
        [layer.layer_id for layer in layers],
        f"pp{parallel.pp_rank} tp{parallel.tp_rank}",
        model_folders(args),
        began_at,
        args.node_rank if parallel.nnodes > 1 else None,
    )
    return Saver("profile", lambda wait: file.pending(manager.routing_by_expert(wait)), path=file.path)


def stats_saver(path: Path | None, status: Callable[[], RankStatus]) -> Saver | None:
    """The saver of this replica's statistics; None on all ranks of the replica but the first. It saves only when the snapshot
    may wait for the device: at the end, on SIGTERM, and for an operator."""
    parallel = get_parallel()
    replica = 0 if compat.attn_dp_enabled() else parallel.dp_rank or 0
    if path is None or parallel.tp_rank or parallel.pp_rank:
        return None
    own = path if not replica else path.with_name(f"{path.stem}-dp{replica}{path.suffix}")
    return Saver("statistics", lambda wait: _pending(own, status()) if wait else None, path=own)


def _pending(path: Path, status: RankStatus) -> Callable[[], None]:
    args = get_server_args()
    content = json.dumps(_server_info(args, status)).encode() + b"\n"
    protected = model_folders(args)
    return lambda: atomic.replace(path, lambda file: file.write(content), STATS_FILE, protected)


def _server_info(args: Any, status: RankStatus) -> dict[str, Any]:
    """The statistics in the form of ``/server_info``, so that ``sglang-uvm-offload report`` reads both."""
    config = config_of(args)
    assert config is not None
    state = {name: getattr(args, name, None) for name in (*_SHOWN, "expert_offload_num_resident")}
    state["expert_offload_resident_selection"] = config.resident_selection
    return {
        "format": STATS_FORMAT,
        "version": sglang.__version__,
        "model_path": args.model_path,
        "internal_states": [{**state, "expert_offload": msgspec.to_builtins(status)}],
    }
