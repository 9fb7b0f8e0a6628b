"""Guesses which experts the next MoE layers will pick by running their routers on this layer's input, for slots and traces.

A router's input is the normalised residual stream times the weight of the preceding norm. If both layers' norms are found, the
input is scaled by the ratio of their weights, as if the later layer's norm had produced it.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.moe.topk import TopKConfig

from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.flags import flag_name
from sglang_uvm_offload.memory.slots import MAX_GUESSES, Guess
from sglang_uvm_offload.routing.recorder import Guessing

logger = logging.getLogger(__name__)

DISTANCES = 2
WIDER = 1.25
"""Guesses per token in a trace, as a multiple of top-k."""
_FLAG = flag_name("trace")
_ROUTERS = ("gate", "router")
_NORMS = {"input_layernorm", "post_attention_layernorm"}
_SCORES = {
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: torch.nn.functional.softplus(logits).sqrt(),
}


@dataclass(frozen=True)
class Router:
    """The router of one MoE layer."""

    gate: Any
    topk: TopKConfig
    norm: RMSNorm | None
    """The norm before the router, if its weight scales its output."""

    def takes(self, hidden: torch.Tensor, num_experts: int) -> bool:
        """Whether the router maps ``hidden[rows, width]`` to ``num_experts`` experts."""
        return bool(self.gate.weight.shape == (num_experts, hidden.shape[1]))


class NextExperts:
    """Guesses for the slots of one model (``streaming.model_slots.ModelSlots`` calls it): top-k experts per token."""

    def __init__(self, module: torch.nn.Module, layers: Sequence[torch.nn.Module], experts: Sequence[ExpertLayer], top_k: int):
        """``layers`` are SGLang's MoE layers in ``module`` in forward order, and ``experts`` their experts."""
        self._experts, self._top_k = experts, top_k
        self._routers = find_routers(module, layers)
        self._ratios: dict[int, torch.Tensor] = {}
        """The ratio of each layer's norm weight to the previous layer's. Captured graphs read these tensors, so their addresses
        must not change."""
        if unknown := [at.layer_id for at, router in zip(experts, self._routers, strict=True) if router is None]:
            flag = flag_name("prefetch")
            logger.warning("%s: no lookahead for MoE layers %s: their routers were not found", flag, unknown)

    def __call__(self, index: int, hidden: torch.Tensor) -> Guess | None:
        router, experts = self._routers[index], self._experts[index]
        if router is None or len(hidden) * self._top_k > MAX_GUESSES or not _is_routed(hidden):
            return None
        if not experts.location.is_trivial or not router.takes(hidden, experts.location.num_experts):
            return None
        return Guess(
            lambda: _logits(router.gate, self._scaled(index, hidden)),
            lambda logits: ranked(logits.float(), router.topk, self._top_k),
            experts.first_expert,
        )

    def _scaled(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        norms = norms_between(self._routers, index - 1, index)
        if norms is None:
            return hidden
        if index not in self._ratios:
            self._ratios[index] = _ratio(norms)
        elif not (hidden.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._ratios[index].copy_(_ratio(norms))  # an online update may have changed the norms
        return (hidden * self._ratios[index]).to(hidden.dtype)


class Lookahead:
    """The guesses of one model's layers, for a trace."""

    def __init__(self, module: torch.nn.Module, layers: Sequence[torch.nn.Module], num_experts: int, top_k: int):
        """``layers`` are SGLang's MoE layers in ``module`` in forward order, with up to ``num_experts`` experts each."""
        self._num_experts = num_experts
        self._routers = find_routers(module, layers)
        self._most = min(math.ceil(WIDER * top_k), num_experts)
        self._unused: set[int] = set()
        """Layers that were warned about: their input or their router is unusable."""
        if unknown := [index for index, router in enumerate(self._routers) if router is None]:
            logger.warning("%s: no guesses for MoE layers %s: their routers were not found", _FLAG, unknown)

    @property
    def guessing(self) -> Guessing | None:
        """What the guesses look like; None if there are none."""
        if not any(self._routers[1:]):
            return None
        distances = range(1, DISTANCES + 1)
        routers = self._routers
        folded = [[norms_between(routers, layer - back, layer) is not None for back in distances] for layer in self._layers]
        return Guessing(np.array(folded), self._most)

    @property
    def _layers(self) -> range:
        return range(len(self._routers))

    def guesses(self, layer: int, hidden: torch.Tensor | None, rows: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(layer, distance, experts ``[rows, guesses]``, likeliest first) for the layers after ``layer``, from its input
        ``hidden[rows, width]``. Yields nothing if that is not a router's input."""
        if not rows:
            return
        if hidden is None or len(hidden) < rows or not _is_routed(hidden):
            self._cannot(layer, "the input of its router is not available")
            return
        for there in self._layers[layer + 1 : layer + 1 + DISTANCES]:
            router = self._routers[there]
            if router is None:
                continue
            if not router.takes(hidden, self._num_experts):
                self._cannot(there, f"its router's weight has shape {list(router.gate.weight.shape)}")
                continue
            logits = _logits(router.gate, _scaled(hidden[:rows], norms_between(self._routers, layer, there)))
            yield there, there - layer, ranked(logits.float(), router.topk, self._most)

    def _cannot(self, layer: int, why: str) -> None:
        if layer not in self._unused:
            self._unused.add(layer)
            logger.warning("%s: no guesses for MoE layer %d: %s", _FLAG, layer, why)


def find_routers(module: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> list[Router | None]:
    """The router of each MoE layer in ``module``, looked up beside the layer, where most SGLang models keep it; None if it is
    not there."""
    found: dict[int, Router] = {}
    wanted = set(map(id, layers))
    for name, block in module.named_modules():
        for child in block.children():
            if id(child) in wanted and (router := _router_in(block, module.get_submodule(name.rpartition(".")[0]))):
                found[id(child)] = router
    return [found.get(id(layer)) for layer in layers]


def _router_in(block: torch.nn.Module, decoder: torch.nn.Module) -> Router | None:
    gate = next((gate for name in _ROUTERS if (gate := getattr(block, name, None)) is not None), None)
    config = getattr(getattr(block, "topk", None), "topk_config", None)
    if not _is_linear(gate) or not isinstance(config, TopKConfig) or config.scoring_func not in _SCORES:
        return None
    norms = {name for name, _ in decoder.named_children() if "norm" in name}
    # Models with more norms may place another one before the router.
    norm: Any = decoder.post_attention_layernorm if norms == _NORMS else None
    return Router(gate, config, norm if type(norm) is RMSNorm and norm.has_weight else None)


def _is_routed(hidden: torch.Tensor) -> bool:
    """Whether ``hidden`` may be a router's input, not a quantised copy."""
    return hidden.dtype in (torch.bfloat16, torch.float16, torch.float32)


def _is_linear(gate: Any) -> bool:
    """Whether the gate is a single matrix that takes only the hidden states."""
    if not isinstance(getattr(gate, "weight", None), torch.Tensor) or gate.weight.dim() != 2:
        return False
    others = list(inspect.signature(gate.forward).parameters.values())[1:]
    return all(other.default is not other.empty or other.kind is other.VAR_KEYWORD for other in others)


def norms_between(routers: Sequence[Router | None], here: int, there: int) -> tuple[RMSNorm, RMSNorm] | None:
    """The norms before both routers; None unless both are found."""
    mine, other = routers[here] if here >= 0 else None, routers[there]
    if mine is None or other is None or mine.norm is None or other.norm is None:
        return None
    return mine.norm, other.norm


def _scaled(hidden: torch.Tensor, norms: tuple[RMSNorm, RMSNorm] | None) -> torch.Tensor:
    """``hidden`` scaled from one norm to the other. Reads the weights every time, because online updates change them."""
    return hidden if norms is None else (hidden * _ratio(norms)).to(hidden.dtype)


def _ratio(norms: tuple[RMSNorm, RMSNorm]) -> torch.Tensor:
    """The weight of the later norm over the earlier one's: float32 ``[width]``."""
    here, there = (norm.weight.float() for norm in norms)
    return (there / here).nan_to_num(0, 0, 0)


def _logits(gate: Any, hidden: torch.Tensor) -> torch.Tensor:
    logits = gate(hidden)  # SGLang's own, with its bias and in its precision
    return logits[0] if isinstance(logits, tuple) else logits


def ranked(logits: torch.Tensor, config: TopKConfig, most: int) -> torch.Tensor:
    """The ``most`` preferred experts of each row, best first. Ranks by logits or, with a correction bias, by score plus bias,
    within the router's expert groups. A model's custom routing function is treated as ranking by logits."""
    bias = config.correction_bias
    if bias is None:
        scores = logits
    else:
        # With a correction bias, SGLang's grouped routing uses the sigmoid regardless of the config.
        scoring = "sigmoid" if config.use_grouped_topk else config.scoring_func
        scores = _SCORES[scoring](logits) + bias.float()
    if config.use_grouped_topk and config.num_expert_group != config.topk_group:
        scores = _of_best_groups(scores, config.num_expert_group, config.topk_group, 1 if bias is None else 2)
    return scores.topk(most, dim=-1).indices


def _of_best_groups(scores: torch.Tensor, groups: int, kept: int, judged_by: int) -> torch.Tensor:
    """``scores`` with -inf outside the ``kept`` best groups, ranked by the sum of their ``judged_by`` best experts."""
    grouped = scores.unflatten(-1, (groups, -1))
    best = grouped.topk(judged_by, dim=-1).values.sum(dim=-1).topk(kept, dim=-1).indices
    others = torch.ones(scores.shape[0], groups, dtype=torch.bool, device=scores.device).scatter_(1, best, False)
    return grouped.masked_fill(others[..., None], -math.inf).flatten(1)
