"""The routing of one MoE layer in one step, as far as SGLang's dispatcher exposes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_uvm_offload.routing.counts import IdFormat, RoutingCounters


@dataclass(frozen=True, slots=True)
class LayerRouting:
    """The routing in a dispatcher's output, shared by counting and recording. Tensors are on the compute device."""

    form: str
    """The dispatcher's name for this kind of output, used in messages."""
    ids: torch.Tensor | None = None
    """``[rows, top_k]``, with the ids of fused shared experts last. None if the runner routes inside its kernel."""
    id_format: IdFormat = IdFormat.PLAIN
    first_expert: int = 0
    """The id of local expert 0. Nonzero only in expert-parallel runners that keep the model's numbering."""
    tokens_per_expert: torch.Tensor | None = None
    """int32 ``[num_experts]``: tokens that each local expert received from all ranks, if the dispatcher exchanged tokens.
    ``ids`` then holds what this rank sent."""
    lasting: bool = False
    """Whether ``ids`` has memory of its own that nothing overwrites."""

    def count(self, counters: RoutingCounters, index: int, *, in_place: bool = True) -> bool:
        """Count this routing for layer ``index`` of ``counters``. ``in_place``: whether the layer reads its experts in place
        rather than from a copy. Returns False if the dispatcher exposed nothing to count."""
        if self.tokens_per_expert is not None:
            counters.count_histogram(index, self.tokens_per_expert, in_place=in_place)
        elif self.ids is not None:
            counters.count(index, self.ids, self.first_expert, self.id_format, in_place=in_place, lasting=self.lasting)
        else:
            return False
        return True
