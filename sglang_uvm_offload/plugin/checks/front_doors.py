"""SGLang's servers other than its Python HTTP server. The Python server, also with HTTP/2 or with native gRPC, has all of this
plugin's routes; the others have their own routes and none of this plugin's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang.srt.environ import envs

_ACTIONS = "readvise, pause, resume and save"


def lacking(cfg: Any) -> Iterator[str]:
    """Which of status, actions and metrics this launch's server lacks, and where the others are."""
    metrics = "" if cfg.enable_metrics else ", with --enable-metrics"
    lacks = f"this server has no /expert_offload, so no status and no actions ({_ACTIONS})"
    if cfg.smg_grpc_mode or cfg.grpc_mode:
        port = cfg.smg_http_sidecar_port or cfg.port + 1
        yield (
            f"--smg-grpc-mode: {lacks}; the metrics are on /metrics of port {port}{metrics}; --grpc-port serves gRPC in "
            "addition to HTTP, which has everything"
        )
    elif envs.SGLANG_RUST_SERVER.get():  # its /server_info passes on only the scheduler fields that it knows
        yield (
            f"SGLANG_RUST_SERVER: {lacks}, not in /server_info either; the metrics are on /metrics{metrics}; without "
            "SGLANG_RUST_SERVER, SGLang's HTTP server has everything"
        )
