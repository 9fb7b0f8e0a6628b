"""SGLang's servers other than its HTTP server in Python. With that one, also as HTTP/2 and beside native gRPC, everything is
served; the others have routes of their own, and none of this plugin's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.srt.environ import envs

_ACTIONS = "readvise, pause, resume and save"


def lacking(cfg: Any) -> Iterator[str]:
    """What of status, actions and metrics the server of this launch does not have, and where the others are."""
    metrics = "" if cfg.enable_metrics else ", with --enable-metrics"
    lacks = f"this server has no /expert_offload, so no status and no actions ({_ACTIONS})"
    if cfg.smg_grpc_mode or cfg.grpc_mode:
        port = cfg.smg_http_sidecar_port or cfg.port + 1
        yield (
            f"--smg-grpc-mode: {lacks}; the metrics are on /metrics of port {port}{metrics}; --grpc-port serves gRPC beside "
            "HTTP, which has all"
        )
    elif envs.SGLANG_RUST_SERVER.get():  # of the state of schedulers, its /server_info passes on what it knows by name
        yield (
            f"SGLANG_RUST_SERVER: {lacks}, not in /server_info either; the metrics are on /metrics{metrics}; without "
            "SGLANG_RUST_SERVER, SGLang's HTTP server has all"
        )
