"""Guesses of the next layers' experts: the order is that of SGLang's routers, and the input is scaled where it can be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.layers.layernorm import GemmaRMSNorm, RMSNorm
from sglang.srt.layers.moe import topk
from sglang.srt.layers.moe.topk import TopKConfig

from sglang_uvm_offload.cpu.memory import EmulatedMemory
from sglang_uvm_offload.expert_location import ExpertLocation
from sglang_uvm_offload.experts.layer import ExpertLayer
from sglang_uvm_offload.layer_shard import LayerShard
from sglang_uvm_offload.plugin.rank.lookahead import Lookahead, NextExperts, find_routers, ranked

pytestmark = pytest.mark.sglang

E, WIDTH, TOP_K = 16, 8, 4
GROUPED: dict[str, Any] = {"use_grouped_topk": True, "num_expert_group": 4, "topk_group": 2}


def chosen(config: TopKConfig, logits: torch.Tensor) -> torch.Tensor:
    """By SGLang's own routing, which its kernels are tested against."""
    given: dict[str, Any] = {"hidden_states": logits, "gating_output": logits, "topk": TOP_K, "renormalize": True}
    groups: dict[str, Any] = {"num_expert_group": config.num_expert_group, "topk_group": config.topk_group}
    bias: dict[str, Any] = {"correction_bias": config.correction_bias}
    if config.use_grouped_topk and config.correction_bias is not None:
        _, ids = topk.biased_grouped_topk_impl(**given, **bias, **groups)
    elif config.use_grouped_topk:
        _, ids = topk.grouped_topk_gpu(**given, **groups)
    else:
        _, ids = topk.fused_topk_torch_native(**given, **bias, scoring_func=config.scoring_func)
    return ids


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scoring_func": "sigmoid"},
        *({"scoring_func": scoring, "correction_bias": True} for scoring in ("softmax", "sigmoid", "sqrtsoftplus")),
        {**GROUPED, "topk_group": 4, "correction_bias": True},
        {**GROUPED, "correction_bias": True},
        GROUPED,
    ],
    ids=str,
)
def test_the_first_guesses_are_what_the_router_chooses(options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, bias = torch.randn(64, E, generator=generator), torch.randn(E, generator=generator)
    config = TopKConfig(TOP_K, **{**options, "correction_bias": bias if options.get("correction_bias") else None})
    guessed = ranked(logits, config, TOP_K + 1)
    assert guessed.shape == (64, TOP_K + 1)
    expected = chosen(config, logits).long().sort(dim=-1).values
    assert torch.equal(guessed[:, :TOP_K].sort(dim=-1).values, expected)
    assert torch.equal(guessed[:, :TOP_K], ranked(logits, config, TOP_K)), "more guesses come behind"


class Block(torch.nn.Module):
    """A MoE layer as SGLang's models have it."""

    def __init__(self, experts: int = E, gate: torch.nn.Module | None = None):
        super().__init__()
        self.gate = gate or torch.nn.Linear(WIDTH, experts, bias=False)
        self.experts = torch.nn.Module()
        self.topk = torch.nn.Module()
        self.topk.topk_config = TopKConfig(TOP_K)


class Decoder(torch.nn.Module):
    def __init__(self, block: torch.nn.Module, norm: type[torch.nn.Module] = RMSNorm):
        super().__init__()
        self.input_layernorm = RMSNorm(WIDTH)
        self.post_attention_layernorm: Any = norm(WIDTH)
        torch.nn.init.uniform_(self.post_attention_layernorm.weight, 0.5, 2)
        self.mlp = block


class Model(torch.nn.Module):
    def __init__(self, *decoders: Decoder):
        super().__init__()
        self.layers: Any = torch.nn.ModuleList(decoders)

    @property
    def moe_layers(self) -> list[torch.nn.Module]:
        return [decoder.mlp.experts for decoder in self.layers]

    def lookahead(self, experts: int = E) -> Lookahead:
        return Lookahead(self, self.moe_layers, experts, TOP_K)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


HIDDEN = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1))


def by_hand(model: Model, layer: int, there: int, folded: bool) -> torch.Tensor:
    """From the residual stream that the layer's own input is the normalised form of."""
    here, then = (model.layers[index].post_attention_layernorm.weight for index in (layer, there))
    hidden = HIDDEN / here * then if folded else HIDDEN
    return (hidden @ model.layers[there].mlp.gate.weight.T).argsort(dim=-1, descending=True)[:, :5]


@torch.no_grad()
def test_each_layer_guesses_for_the_next_two_with_the_norm_of_theirs() -> None:
    model = Model(*(Decoder(Block()) for _ in range(4)))
    lookahead = model.lookahead()
    assert lookahead.guessing is not None
    assert lookahead.guessing.most == 5
    assert lookahead.guessing.folded.tolist() == [[False, False], [True, False], [True, True], [True, True]]
    for layer, expected in ((0, [1, 2]), (2, [3]), (3, [])):
        guesses = list(lookahead.guesses(layer, HIDDEN, 3))
        assert [(there, distance) for there, distance, _ in guesses] == [(there, there - layer) for there in expected]
        for there, _, experts in guesses:
            assert torch.equal(experts, by_hand(model, layer, there, folded=True))
    model.layers[1].post_attention_layernorm.weight.copy_(torch.rand(WIDTH) + 0.5)  # an update of the weights
    assert torch.equal(next(lookahead.guesses(0, HIDDEN, 3))[2], by_hand(model, 0, 1, folded=True))


@torch.no_grad()
def test_an_input_is_left_as_it_is_where_another_norm_may_be_before_the_router() -> None:
    between = Decoder(Block())
    between.pre_feedforward_layernorm = RMSNorm(WIDTH)
    model = Model(Decoder(Block()), between, Decoder(Block()), Decoder(Block(), GemmaRMSNorm), Decoder(Block()))
    lookahead = model.lookahead()
    assert lookahead.guessing is not None
    assert lookahead.guessing.folded.tolist() == [[False, False], [False, False], [False, True], [False, False], [False, True]]
    for there, distance, experts in lookahead.guesses(0, HIDDEN, 3):
        assert torch.equal(experts, by_hand(model, 0, there, folded=distance == 2))


def test_a_channel_that_the_norm_closed_says_nothing() -> None:
    model = Model(*(Decoder(Block()) for _ in range(2)))
    with torch.no_grad():
        model.layers[0].post_attention_layernorm.weight[3] = 0
        hidden = HIDDEN.clone()
        hidden[:, 3] = 0
        (_, _, experts), *_ = model.lookahead().guesses(0, hidden, 3)
        model.layers[1].mlp.gate.weight[:, 3] = 0
        (_, _, without), *_ = model.lookahead().guesses(0, HIDDEN, 3)
    assert torch.equal(experts, without)


class Asking(torch.nn.Linear):
    def forward(self, hidden: torch.Tensor, more: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(hidden + more)


def test_layers_whose_router_is_not_found_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    hidden_elsewhere = Block()
    hidden_elsewhere.classifier, hidden_elsewhere.gate = hidden_elsewhere.gate, None
    asking = Block(gate=Asking(WIDTH, E))
    model = Model(*(Decoder(block) for block in (Block(), hidden_elsewhere, asking, Block())))
    assert [router is not None for router in find_routers(model, model.moe_layers)] == [True, False, False, True]
    lookahead = model.lookahead()
    assert [record.getMessage() for record in caplog.records] == [
        "--expert-offload-config trace: no guesses for MoE layers [1, 2]: their routers were not found"
    ]
    assert list(lookahead.guesses(0, HIDDEN, 3)) == []
    assert [there for there, *_ in lookahead.guesses(1, HIDDEN, 3)] == [3]


def test_a_model_without_routers_to_be_found_has_nothing_to_guess() -> None:
    assert Model(Decoder(Block())).lookahead().guessing is None, "one layer"
    assert Model(Decoder(Block()), Decoder(torch.nn.ModuleDict({"experts": torch.nn.Module()}))).lookahead().guessing is None


@pytest.mark.parametrize("hidden", [None, HIDDEN[:2], HIDDEN.to(torch.float8_e4m3fn), HIDDEN.to(torch.uint8)])
def test_an_input_that_is_none_of_a_routers_is_told_of_once(
    hidden: torch.Tensor | None, caplog: pytest.LogCaptureFixture
) -> None:
    lookahead = Model(*(Decoder(Block()) for _ in range(2))).lookahead()
    for _ in range(3):
        assert list(lookahead.guesses(0, hidden, 3)) == []
    (record,) = caplog.records
    assert "no guesses for MoE layer 0" in record.getMessage()


def test_a_router_of_another_shape_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Its experts compute nothing, or it follows a projection."""
    lookahead = Model(Decoder(Block()), Decoder(Block(E + 4))).lookahead()
    for _ in range(3):
        assert list(lookahead.guesses(0, HIDDEN, 3)) == []
    (record,) = caplog.records
    assert f"no guesses for MoE layer 1: its router's weight has shape [{E + 4}, {WIDTH}]" in record.getMessage()
    assert list(Model(Decoder(Block()), Decoder(Block())).lookahead().guesses(0, HIDDEN[:, :4], 3)) == []


def next_experts(model: Model, *shards: LayerShard) -> NextExperts:
    return NextExperts(model, model.moe_layers, [ExpertLayer(EmulatedMemory(), shard) for shard in shards], TOP_K)


@torch.no_grad()
@pytest.mark.parametrize("norm", [RMSNorm, GemmaRMSNorm], ids=["scaled", "as it is"])
def test_slots_guess_by_the_next_router_as_a_trace_does(norm: type[torch.nn.Module]) -> None:
    model = Model(Decoder(Block()), Decoder(Block(), norm), Decoder(Block()))
    ahead = next_experts(model, *(LayerShard(layer, E // 2, ep_rank=1, ep_size=2) for layer in range(3)))
    for _ in range(2):
        guess = ahead(2, HIDDEN)
        assert guess is not None
        assert guess.first_expert == E // 2, "of this rank"
        assert torch.equal(guess.experts(guess.logits()), by_hand(model, 1, 2, folded=norm is RMSNorm)[:, :TOP_K])
        model.layers[1].post_attention_layernorm.weight.copy_(torch.rand(WIDTH) + 0.5)  # an update of the weights


@torch.no_grad()
def test_a_graph_that_captured_a_guess_finds_the_ratio_of_the_norms_where_it_was() -> None:
    ahead = next_experts(Model(Decoder(Block()), Decoder(Block())), LayerShard(0, E), LayerShard(1, E))
    addresses = set()
    for _ in range(3):
        guess = ahead(1, HIDDEN)
        assert guess is not None
        guess.logits()
        addresses.add(ahead._ratios[1].data_ptr())
    assert len(addresses) == 1


@pytest.mark.parametrize(
    ("hidden", "shard"),
    [
        (HIDDEN.to(torch.int8), LayerShard(1, E)),
        (HIDDEN[:, 1:], LayerShard(1, E)),
        (HIDDEN.repeat(22, 1), LayerShard(1, E)),
        (HIDDEN, LayerShard(1, E - 1)),
        (HIDDEN, LayerShard(1, E, location=ExpertLocation(np.arange(E)[::-1], range(E)))),
    ],
    ids=["quantised", "of another width", "too many tokens", "other experts", "experts at other places"],
)
def test_slots_guess_nothing_from_what_the_router_does_not_take(hidden: torch.Tensor, shard: LayerShard) -> None:
    assert next_experts(Model(Decoder(Block()), Decoder(Block())), LayerShard(0, E), shard)(1, hidden) is None


def test_slots_say_which_routers_were_not_found(caplog: pytest.LogCaptureFixture) -> None:
    model = Model(Decoder(Block()), Decoder(Block(gate=Asking(WIDTH, E))))
    ahead = next_experts(model, LayerShard(3, E), LayerShard(4, E))
    assert "--expert-offload-prefetch: no lookahead for MoE layers [4]" in caplog.text
    assert ahead(1, HIDDEN) is None
