"""What a person reads: the table at start, and sizes in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_uvm_offload.uvm import MemoryInfo


def size(nbytes: float) -> str:
    """``nbytes`` in GiB, or in MiB below one of them."""
    return f"{nbytes / 2**30:.2f} GiB" if abs(nbytes) >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def residency_table(status: Mapping[str, Any], memory: MemoryInfo, kv_tokens: int) -> str:
    """The start-up table of one rank, from ``OffloadManager.status``."""
    layers, experts = status["num_layers"], status["num_experts"]
    rows = [
        ("", "experts", "bytes"),
        ("MoE layers", str(layers), ""),
        ("routed and fused shared experts", str(experts), size(status["resident_bytes"] + status["offloaded_bytes"])),
        ("  resident in VRAM", str(status["resident_experts"]), size(status["resident_bytes"])),
        ("  offloaded to host RAM", str(status["offloaded_experts"]), size(status["offloaded_bytes"])),
        ("expert tensors left in plain VRAM", "", size(status["plain_bytes"])),
    ]
    if status["stranded_bytes"]:
        rows.append(("VRAM that offloaded experts may keep after moves", "", "about " + size(status["stranded_bytes"])))
    if status["draft_layers"]:
        rows.append((f"draft model, {status['draft_layers']} MoE layers, all resident", "", size(status["draft_bytes"])))
    rows += [
        ("VRAM free now", "", f"{size(memory.device_free)} of {size(memory.device_total)}"),
        ("host RAM free now", "", size(memory.host_available)),
        ("KV cache room", "", f"{kv_tokens} tokens"),
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(f"  {a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}".rstrip() for a, b, c in rows)
