"""Checkpoints whose routing replays a measured trace, as SGLang serves them: they route as the trace, and answers depend on
experts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from checkpoints import WALKED, WalkedCheckpoints
from safetensors.torch import load_file, save_file
from serving import Engines

from benchmarks.trace_walk import TEXT_TOKENS, Walk

PROMPT = 4
NEW_TOKENS = 33


# One with scales each time, the others at night.
BY_SHAPE = [pytest.param(*walked, marks=() if walked[1] else pytest.mark.nightly) for walked in WALKED]


@pytest.mark.parametrize(("shape", "quant"), BY_SHAPE)
def test_decoding_routes_as_the_trace_and_every_expert_shows_in_the_tokens(
    walked: WalkedCheckpoints, engines: Engines, shape: str, quant: str | None, tmp_path: Path
) -> None:
    folder = walked(shape, quant)
    walk = Walk.load(folder)
    texts = walk.texts()
    prompts = [walk.prompt_ids(request, PROMPT) for request in range(5)]

    def text(tokens: list[int]) -> str:
        return "".join(texts[token - TEXT_TOKENS] for token in tokens)

    def serve(checkpoint: Path) -> tuple[list[np.ndarray], np.ndarray]:
        asked = [text(prompt) for prompt in prompts]
        result = engines.run(checkpoint, asked, together=True, max_new_tokens=NEW_TOKENS, record_experts=True)
        assert [answer.text for answer in result.answers] == [text(answer.output_ids) for answer in result.answers]
        tokens = [np.array(prompt + answer.output_ids) for prompt, answer in zip(prompts, result.answers, strict=True)]
        return tokens, np.array(result.expert_counts)

    tokens, counts = serve(folder)
    for served in tokens:
        positions = walk.position_of(served)
        assert (positions[1:] == (positions[:-1] + 1) % walk.positions).all()
    routed = walk.experts_of(np.concatenate([served[:-1] for served in tokens]))  # the last token generated is not routed
    layers, experts = routed.shape[1], walk.routing.num_experts
    expected = np.stack([np.bincount(routed[:, layer].ravel(), minlength=experts) for layer in range(layers)])
    assert (counts[-layers:] == expected).all()

    wrong, _ = serve(with_one_expert_flipped(folder, tmp_path / "flipped", int(expected[-1].argmax())))
    for right, other in zip(tokens, wrong, strict=True):
        assert (walk.position_of(right) == walk.position_of(other)).all()
    assert any((right != other).any() for right, other in zip(tokens, wrong, strict=True))


def with_one_expert_flipped(folder: Path, out: Path, expert: int) -> Path:
    """A copy in which one expert of the last layer gives the opposite of what it gave."""
    shutil.copytree(folder, out)
    [file] = out.glob("*.safetensors")
    tensors = load_file(file)
    layer = json.loads((folder / "config.json").read_text())["num_hidden_layers"] - 1
    name = f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"
    tensors[name] = (-tensors[name].float()).to(tensors[name].dtype)
    save_file(tensors, str(file), metadata={"format": "pt"})
    return out
