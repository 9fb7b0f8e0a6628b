"""What a real server guesses of the next layers in a trace: what the checkpoint's weights say, computed by Transformers' model
of the same architecture; and its answers are those without a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from checkpoints import Checkpoints
from serving import PROMPTS, Answer, Engines, assert_offloaded
from tokenizers import Tokenizer

from scripts.harness.patience import patience
from sglang_uvm_offload.routing.trace import Trace

TOP_K, GUESSES, DENSE, MOE = 4, 5, 1, 4
TOKENS = 24
NEARLY = 2e-3
"""How far the scores of experts that the two models order differently may be apart; those next to each other are 0.05 apart."""


@pytest.fixture(scope="module")
def checkpoint(checkpoints: Checkpoints) -> Path:
    """Its router adds a correction to each expert's score, and its first layer does not route."""
    return checkpoints("glm4_moe", dtype="float32", layers=DENSE + MOE)


@pytest.fixture(scope="module")
def served(checkpoint: Path, engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Answer], Trace]:
    path = tmp_path_factory.mktemp("lookahead") / "trace.npz"
    sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
    ask: dict[str, Any] = {"sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    with engines.server(checkpoint, expert_offload_num_resident=4, expert_offload_trace=path) as server:
        answers = [Answer.of(server.post("/generate", {"text": prompt, **ask})) for prompt in PROMPTS]
        assert_offloaded(server.get("/server_info"))
        assert server.process is not None
        server.process.terminate()
        server.process.wait(patience(120))
    return answers, Trace.load(path)


def test_answers_are_those_without_a_trace(served: tuple[list[Answer], Trace], checkpoint: Path, engines: Engines) -> None:
    without = engines.run(checkpoint, max_new_tokens=TOKENS, expert_offload_num_resident=4).answers
    for mine, theirs in zip(served[0], without, strict=True):
        assert mine.output_ids == theirs.output_ids
        assert mine.output_logprobs == theirs.output_logprobs


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> transformers.Glm4MoeForCausalLM:
    return transformers.Glm4MoeForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@torch.no_grad()
def inputs(model: transformers.Glm4MoeForCausalLM, ids: list[int]) -> list[torch.Tensor]:
    """``[tokens, width]`` of each MoE layer's router."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_pre_hook(lambda _, given: found.append(given[0].view(len(ids), -1)))
        for layer in model.model.layers[DENSE:]
    ]
    model(input_ids=torch.tensor([ids]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return found


def scores(model: transformers.Glm4MoeForCausalLM, layer: int, hidden: torch.Tensor) -> torch.Tensor:
    """By which the MoE layer's router chooses."""
    gate = model.model.layers[DENSE + layer].mlp.gate
    return (hidden @ gate.weight.T).sigmoid() + gate.e_score_correction_bias


@torch.no_grad()
def test_guesses_are_what_the_next_routers_make_of_this_layers_input(
    served: tuple[list[Answer], Trace], model: transformers.Glm4MoeForCausalLM, checkpoint: Path
) -> None:
    answers, trace = served
    assert trace.guesses is not None
    assert trace.guesses.experts.shape == (len(PROMPTS) * (TOKENS - 1), MOE, 2, GUESSES)
    assert trace.guesses.folded.tolist() == [[False, False], [True, False], *[[True, True]] * (MOE - 2)]
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    norms = [layer.post_attention_layernorm.weight for layer in model.model.layers[DENSE:]]
    requests = np.cumsum(trace.seq_len)[:-1]
    parts = zip(np.split(trace.ids, requests), np.split(trace.guesses.experts, requests), strict=True)
    compared = 0
    for prompt, answer, (chosen, guessed) in zip(PROMPTS, answers, parts, strict=True):
        begin = tokenizer.encode(prompt).ids
        assert len(begin) == answer.meta["prompt_tokens"]
        hidden = [each[len(begin) :] for each in inputs(model, begin + answer.output_ids[:-1])]
        own = np.stack([scores(model, layer, hidden[layer]).topk(TOP_K).indices.numpy() for layer in range(MOE)], axis=1)
        # From the first token on that one of the two models routes to another of two experts of nearly one score, they differ.
        alike = int((np.sort(own) == np.sort(chosen)).all(axis=(1, 2)).cumprod().sum())
        compared += alike
        hidden, guessed = [each[:alike] for each in hidden], guessed[:alike]
        for layer in range(MOE):
            for distance in (1, 2):
                if distance > layer:
                    assert (guessed[:, layer, distance - 1] == -1).all()
                    continue
                scaled = hidden[layer - distance] / norms[layer - distance] * norms[layer]
                by, mine = scores(model, layer, scaled), torch.from_numpy(guessed[:, layer, distance - 1]).long()
                assert torch.allclose(by.gather(1, mine), by.topk(GUESSES).values, rtol=0, atol=NEARLY), (layer, distance)
    assert compared >= TOKENS
