"""Writing a server's statistics to a file when it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import sglang
from sglang.srt.runtime_context import get_parallel, get_server_args

from sglang_uvm_offload.files import atomic
from sglang_uvm_offload.files.autosave import Saver
from sglang_uvm_offload.plugin import compat
from sglang_uvm_offload.plugin.launch import output_files
from sglang_uvm_offload.plugin.launch.output_files import STATS_FILE, STATS_FORMAT
from sglang_uvm_offload.residency.status import RankStatus

_SHOWN = ("tp_size", "pp_size", "ep_size", "dp_size", "enable_dp_attention")


def stats_saver(path: Path | None, status: Callable[[], RankStatus]) -> Saver | None:
    """The saver of the statistics of this rank's replica, None on a rank whose replica another rank writes for. It saves only
    what waits for the device: at the end, on SIGTERM, and for an operator."""
    parallel = get_parallel()
    replica = 0 if compat.attn_dp_enabled() else get_parallel().dp_rank or 0
    if path is None or parallel.tp_rank or parallel.pp_rank:
        return None
    own = path if not replica else path.with_name(f"{path.stem}-dp{replica}{path.suffix}")
    return Saver("statistics", lambda wait: _pending(own, status()) if wait else None)


def _pending(path: Path, status: RankStatus) -> Callable[[], None]:
    args = get_server_args()
    content = json.dumps(_server_info(args, status)).encode() + b"\n"
    protected = output_files.model_folders(args)
    return lambda: atomic.replace(path, lambda file: file.write(content), STATS_FILE, protected)


def _server_info(args: Any, status: RankStatus) -> dict[str, Any]:
    """As ``/server_info`` shows it, so that ``sglang-uvm-offload report`` reads both."""
    flags = ("expert_offload_num_resident", "expert_offload_resident_selection")
    state = {name: getattr(args, name, None) for name in (*_SHOWN, *flags)}
    return {
        "format": STATS_FORMAT,
        "version": sglang.__version__,
        "model_path": args.model_path,
        "internal_states": [{**state, "expert_offload": msgspec.to_builtins(status)}],
    }
