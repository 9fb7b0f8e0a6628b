"""The start-up table of one rank in the log."""

from __future__ import annotations

from sglang_uvm_offload.memory.protocol import MemoryInfo
from sglang_uvm_offload.residency.status import RankStatus
from sglang_uvm_offload.units import size


def residency_table(status: RankStatus, memory: MemoryInfo, kv_tokens: int) -> str:
    """The start-up table of one rank, from its status."""
    layers, experts = status.num_layers, status.num_experts
    rows = [
        ("", "experts", "bytes"),
        ("MoE layers", str(layers), ""),
        ("routed and fused shared experts", str(experts), size(status.resident_bytes + status.offloaded_bytes)),
        ("  resident in VRAM", str(status.resident_experts), size(status.resident_bytes)),
        *([("  in both, by blocks", str(status.partly_resident_experts), "")] if status.partly_resident_experts else []),
        ("  offloaded to host RAM", str(status.offloaded_experts), size(status.offloaded_bytes)),
        ("expert tensors left in plain VRAM", "", size(status.plain_bytes)),
    ]
    if (slots := status.slots) is not None:
        rows.append((f"{slots.a_layer} slots a layer", "", size(slots.nbytes)))
    if status.draft_layers:
        offloaded = status.draft_offloaded_bytes
        part = "in VRAM" if offloaded else "all resident"
        rows.append((f"draft model, {status.draft_layers} MoE layers, {part}", "", size(status.draft_bytes)))
        rows += [("  offloaded to host RAM", "", size(offloaded))] if offloaded else []
    if status.lookup_table_bytes:
        rows.append(("lookup tables in host RAM", "", size(status.lookup_table_bytes)))
    if (streaming := status.streaming) is not None:
        what = f"{streaming.buffers} stream buffer{'s' if streaming.buffers > 1 else ''}, for steps of {streaming.min_tokens}"
        rows.append((f"{what} tokens or more", "", size(streaming.nbytes)))
    rows += [
        ("VRAM free now", "", f"{size(memory.device_free)} of {size(memory.device_total)}"),
        ("host RAM free now", "", size(memory.host_available)),
        ("KV cache room", "", f"{kv_tokens} tokens"),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(f"  {a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}".rstrip() for a, b, c in rows)
