"""What a replay scores, and the hardware that it takes for granted."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from sglang_uvm_offload.replay.policies import EXPERT_BYTES, LINK_GBPS, SHIPPED
from sglang_uvm_offload.replay.simulator import Workload
from sglang_uvm_offload.routing.trace import Trace


@dataclass(frozen=True)
class Scope:
    """What a replay scores, and the hardware that it takes."""

    requests: int
    """Scored, and so are ``steps``."""
    steps: int
    warmup_requests: int
    warmup_steps: int
    layers: int
    """Those that route."""
    num_experts: int
    num_resident: int
    """Of each layer."""
    residency: float
    batch: int
    link_gbps: float
    link_assumed: bool
    expert_bytes: int
    expert_bytes_assumed: bool
    shipped: str = SHIPPED

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def scope(
    trace: Trace, residency: float, batch: int, warmup_fraction: float, link_gbps: float | None, expert_bytes: int | None
) -> Scope:
    """Of ``replay`` with these arguments; None for what is not known, and assumed. Raises ``ValueError`` as it does."""
    workload, parts = Workload.of(trace, batch, warmup_fraction), trace.split(warmup_fraction)
    return Scope(
        requests=len(parts[1]),
        steps=len(workload.scored),
        warmup_requests=len(parts[0]),
        warmup_steps=len(workload.warmup),
        layers=workload.shape[0],
        num_experts=workload.shape[1],
        num_resident=int(workload.capacity(residency)[0]),
        residency=residency,
        batch=batch,
        link_gbps=LINK_GBPS if link_gbps is None else link_gbps,
        link_assumed=link_gbps is None,
        expert_bytes=EXPERT_BYTES if expert_bytes is None else expert_bytes,
        expert_bytes_assumed=expert_bytes is None,
    )
