"""What the router of one MoE layer picked in one step, as far as the dispatcher shows it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_uvm_offload.routing.counts import IdFormat, RoutingCounters


@dataclass(frozen=True, slots=True)
class LayerRouting:
    """Read once from the dispatcher's output; counting and recording share it. Tensors are on the device that computes."""

    form: str
    """The dispatcher's name for this kind of output, for messages."""
    ids: torch.Tensor | None = None
    """``[rows, top_k]``, the ids of fused shared experts last; None where the runner routes inside its kernel."""
    id_format: IdFormat = IdFormat.PLAIN
    first_expert: int = 0
    """The id of local expert 0: expert-parallel ids are local, but for runners that keep the model's own numbering."""
    tokens_per_expert: torch.Tensor | None = None
    """int32 ``[num_experts]``: what local experts received from all ranks, where tokens were exchanged before; then ``ids``
    are those that this rank sent."""

    def count(self, counters: RoutingCounters, index: int) -> bool:
        """Count it for the layer at ``index`` of ``counters``. False if there is nothing to count."""
        if self.tokens_per_expert is not None:
            counters.count_histogram(index, self.tokens_per_expert)
        elif self.ids is not None:
            counters.count(index, self.ids, self.first_expert, self.id_format)
        else:
            return False
        return True
