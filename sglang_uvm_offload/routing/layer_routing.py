"""The routing of one MoE layer in one step, as far as the dispatcher exposes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_uvm_offload.routing.counts import IdFormat, RoutingCounters


@dataclass(frozen=True, slots=True)
class LayerRouting:
    """Read once from the dispatcher's output; counting and recording share it. Tensors are on the compute device."""

    form: str
    """The dispatcher's name for this kind of output, for messages."""
    ids: torch.Tensor | None = None
    """``[rows, top_k]``, the ids of fused shared experts last; None if the runner routes inside its kernel."""
    id_format: IdFormat = IdFormat.PLAIN
    first_expert: int = 0
    """The id of local expert 0. Expert-parallel ids are local, except in runners that keep the model's numbering."""
    tokens_per_expert: torch.Tensor | None = None
    """int32 ``[num_experts]``: tokens that local experts received from all ranks, if the dispatcher exchanged tokens; ``ids``
    are then those that this rank sent."""
    lasting: bool = False
    """Whether ``ids`` have memory of their own, to which nothing writes any more."""

    @property
    def local_ids(self) -> torch.Tensor | None:
        """``ids``, if they are plain ones of local experts, for all that the layer computes; else None."""
        plain = self.id_format is IdFormat.PLAIN and self.first_expert == 0 and self.tokens_per_expert is None
        return self.ids if plain else None

    def count(self, counters: RoutingCounters, index: int, *, in_place: bool = True) -> bool:
        """Count it for the layer at ``index`` of ``counters``, which reads its experts ``in_place`` or from a copy. False if
        there is nothing to count."""
        if self.tokens_per_expert is not None:
            counters.count_histogram(index, self.tokens_per_expert, in_place=in_place)
        elif self.ids is not None:
            counters.count(index, self.ids, self.first_expert, self.id_format, in_place=in_place, lasting=self.lasting)
        else:
            return False
        return True
