"""Checkpoints whose routing replays a measured trace: what they hold, and how their routers pick."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from builders import walks
from checkpoints import MEASURED, WALKED, WalkedCheckpoints
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer

from benchmarks import trace_checkpoint
from benchmarks.routing_overlay import OverlayError, lay_over
from benchmarks.trace_checkpoint import MODELS, Refused
from benchmarks.trace_walk import ALIASES, TEXT_TOKENS, Walk, WalkError, cut
from benchmarks.trace_weights import TraceWeights
from scripts.config_tensors import tensors_of
from sglang_uvm_offload.plan.safetensors_header import read_folder
from sglang_uvm_offload.routing.trace import Trace


def some_trace(tokens: int = 6, layers: int = 5, k: int = 3, experts: int = 8, requests: int = 2) -> Trace:
    rng = np.random.default_rng(1)
    ids = rng.permuted(np.broadcast_to(np.arange(experts), (tokens * requests, layers, experts)), axis=-1)[..., :k]
    return Trace(ids, np.full(requests, tokens), experts)


class TestLayingOver:
    def test_a_model_of_the_same_sizes_routes_as_the_trace_did(self) -> None:
        trace = some_trace()
        assert (lay_over(trace.ids, 8, 5, 8, 3) == trace.ids).all()

    def test_each_group_of_experts_follows_its_own_measured_layer(self) -> None:
        trace = some_trace(layers=4)
        laid = lay_over(trace.ids, 8, 2, 16, 6)
        assert (laid[:, 0] == np.concatenate([trace.ids[:, 0], trace.ids[:, 1] + 8], axis=-1)).all()
        assert (laid[:, 1] == np.concatenate([trace.ids[:, 2], trace.ids[:, 3] + 8], axis=-1)).all()

    def test_measured_layers_are_used_again_where_they_run_out(self) -> None:
        trace = some_trace(layers=3)
        laid = lay_over(trace.ids, 8, 5, 8, 3)
        assert (laid[:, 3] == trace.ids[:, 0]).all()

    def test_experts_are_shared_out_evenly_and_named_once(self) -> None:
        trace = some_trace()
        laid = lay_over(trace.ids, 8, 2, 32, 6)
        assert (np.bincount(laid[0, 0] // 8, minlength=4) == [2, 2, 1, 1]).all()
        assert (np.diff(np.sort(laid, axis=-1), axis=-1) > 0).all()

    def test_frequencies_are_the_traces_even_where_it_orders_experts_by_id(self, trace: Trace) -> None:
        by_id = Trace(np.sort(trace.ids, axis=-1), trace.seq_len, trace.num_experts)
        ids = lay_over(by_id.ids, 32, 6, 128, 8)
        laid = Trace(ids, trace.seq_len, 128)
        measured = walks.hit_rate(by_id)
        assert np.abs(walks.hit_rate(laid)[::4] - measured).max() < 0.01
        assert walks.lift(laid, 1) == pytest.approx(walks.lift(by_id, 1), rel=0.05)

    @pytest.mark.parametrize(("experts", "top_k"), [(12, 3), (4, 2), (16, 1), (16, 7)])
    def test_what_cannot_be_laid_over_is_refused(self, experts: int, top_k: int) -> None:
        with pytest.raises(OverlayError, match=f"{experts} experts|{top_k} experts a token"):
            lay_over(some_trace().ids, 8, 1, experts, top_k)


class TestWalk:
    def test_its_stretches_are_the_begins_of_requests(self, trace: Trace) -> None:
        walk = cut(trace, 200, stretch=64)
        assert walk.seq_len.tolist() == [64, 64, 64, 8]
        begins = np.cumsum(trace.seq_len) - trace.seq_len
        cut_from = []
        for start, length in zip(np.cumsum(walk.seq_len) - walk.seq_len, walk.seq_len, strict=True):
            stretch = walk.ids[start : start + length]
            cut_from += [begin for begin in begins if (trace.ids[begin : begin + length] == stretch).all()]
        assert len(set(cut_from)) == len(cut_from) == 4

    def test_what_cannot_be_routed_is_refused(self) -> None:
        trace = some_trace()
        with pytest.raises(WalkError, match="13 positions are more than the 12 tokens"):
            cut(trace, 13)
        with pytest.raises(WalkError, match="8 tokens of the trace's 2 requests, 4 of each"):
            cut(trace, 9, stretch=4)
        for wrong, message in ((-1, "1 have fewer and 0"), (trace.ids[0, 0, 1], "0 have fewer and 1")):
            ids = trace.ids.copy()
            ids[0, 0, 0] = wrong
            with pytest.raises(WalkError, match=message):
                cut(Trace(ids, trace.seq_len, 8), 12)

    def test_a_prompt_leads_to_the_begin_of_its_stretch(self, trace: Trace) -> None:
        walk = Walk(cut(trace, 200, stretch=64))
        for request, start in enumerate([0, 64, 128, 192]):
            prompt = np.array(walk.prompt_ids(request, 5))
            assert walk.position_of(prompt).tolist() == [(start - 5 + i) % 200 for i in range(5)]
        assert walk.position_of(np.array(walk.prompt_ids(4, 1)))[0] not in (199, 63, 127, 191)
        assert walk.prompt_ids(1, 64) == walk.prompt_ids(1, 64)
        assert walk.prompt_ids(1, 64) != walk.prompt_ids(1, 128)[64:]

    def test_every_token_of_the_vocabulary_stands_somewhere(self, trace: Trace) -> None:
        walk = Walk(cut(trace, 200))
        positions = walk.position_of(np.arange(walk.vocabulary))
        assert positions.min() == 0
        assert positions.max() == 199
        assert (walk.tokens(np.arange(200), 3) - TEXT_TOKENS == np.arange(200) * ALIASES + 3).all()
        assert (walk.position_of(walk.tokens(np.arange(200), 3)) == np.arange(200)).all()


class TestFiles:
    @pytest.mark.slow
    @pytest.mark.parametrize(("shape", "quant"), [*WALKED, ("tiny-glm", "fp8"), ("tiny-deepseek", "fp8")])
    def test_a_config_tells_the_very_tensors_that_the_checkpoint_holds(
        self, walked: WalkedCheckpoints, shape: str, quant: str | None
    ) -> None:
        folder = walked(shape, quant)
        config = json.loads((folder / "config.json").read_text())
        held = {tensor.name: tensor for tensor in read_folder(folder)}
        assert {tensor.name: tensor for tensor in tensors_of(config)} == held

    @pytest.mark.slow
    @pytest.mark.parametrize(("shape", "quant"), [*WALKED, ("tiny-glm", "fp8")])
    def test_nothing_but_the_embedding_writes_the_code(self, walked: WalkedCheckpoints, shape: str, quant: str | None) -> None:
        tensors = tensors_in(walked(shape, quant))
        writing = {name: tensor for name, tensor in tensors.items() if name.endswith(("o_proj.weight", "down_proj.weight"))}
        scales = [tensors[f"{name}_scale_inv"] for name in writing if f"{name}_scale_inv" in tensors]
        assert len(writing) > 2 * 32
        assert len(scales) >= (2 * 32 if quant else 0)
        assert all(tensor.isfinite().all() and tensor.min() > 0 for tensor in scales)
        for tensor in writing.values():
            rows = tensor.float().abs().amax(dim=1)
            assert rows[:256].max() == 0
            assert rows[256:].min() > 0

    @pytest.mark.parametrize(("shape", "quant"), WALKED[:2])
    def test_no_two_experts_are_alike(self, walked: WalkedCheckpoints, shape: str, quant: str | None) -> None:
        prints = set()
        tensors = tensors_in(walked(shape, quant))
        experts = [name for name in tensors if ".experts." in name]
        for name in experts:
            tensor = tensors[name].abs().float() if name.endswith("_scale_inv") else tensors[name]
            prints.add(hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).digest())
        assert len(prints) == len(experts)

    def test_large_checkpoints_are_written_in_several_files(
        self, walked: WalkedCheckpoints, trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(trace_checkpoint, "SHARD_BYTES", 4 << 20)
        folder = trace_checkpoint.write(MODELS["tiny-qwen3"], trace, tmp_path / "out", layers=1)
        files = sorted(folder.glob("*.safetensors"))
        assert len(files) > 2
        assert max(file.stat().st_size for file in files) < 6 << 20
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert {name: folder / file for name, file in index["weight_map"].items()} == {
            name: file for file in files for name in load_file(file)
        }

    def test_text_of_positions_is_read_as_their_tokens(self, walked: WalkedCheckpoints) -> None:
        folder = walked("tiny-qwen3", None)
        walk, tokenizer = Walk.load(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
        assert tokenizer.get_vocab_size(with_added_tokens=False) == TEXT_TOKENS + walk.positions * ALIASES
        prompt = [*walk.prompt_ids(0, 40), 1 + ord("h"), 1 + ord("i"), *walk.prompt_ids(1, 9)]
        assert tokenizer.encode(tokenizer.decode(prompt)).ids == prompt


class TestSizes:
    @pytest.mark.parametrize(
        ("free", "told"), [(10**15, "40.0 GB that a checkpoint may have"), (10**8, "0.1 GB that the disk has free")]
    )
    def test_what_does_not_fit_is_refused(
        self, trace: Trace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, told: str
    ) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
        with pytest.raises(Refused, match=rf"would have \d+\.\d GB, more than the {told}"):
            trace_checkpoint.write(MODELS["qwen3-30b-a3b"], trace, tmp_path / "out")
        assert not (tmp_path / "out").exists()
        trace_checkpoint.check_bytes(MODELS["qwen3-30b-a3b"].sized(trace, 16), 5000, None, 10**15)

    @pytest.mark.slow
    def test_what_is_wrong_ends_the_command_before_anything_is_written(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        (tmp_path / "no.npz").write_text("no trace")
        for arguments, message in (
            (
                [MEASURED, "--positions", "500"],
                "--positions 500: each takes a dimension of the stream, and of 512 at most 384",
            ),
            ([MEASURED, "--layers", "0"], "--layers 0: at least 1 are needed"),
            ([tmp_path / "no.npz"], "no.npz: not a readable npz file"),
        ):
            trace, *options = arguments
            command = [sys.executable, "-m", "benchmarks.trace_checkpoint", "tiny-qwen3", trace, out, *options]
            ended = subprocess.run([str(part) for part in command], capture_output=True, text=True)
            assert ended.returncode == 2
            assert message in ended.stderr
            assert not out.exists()

    def test_a_folder_with_files_is_left_alone(self, trace: Trace, tmp_path: Path) -> None:
        (tmp_path / "mine").touch()
        with pytest.raises(Refused, match="already exists"):
            trace_checkpoint.write(MODELS["tiny-qwen3"], trace, tmp_path)
        assert [file.name for file in tmp_path.iterdir()] == ["mine"]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["qwen3-30b-a3b", "deepseek-v3"])
def test_routers_of_the_large_shapes_pick_the_walks_experts_in_bfloat16(trace: Trace, shape: str) -> None:
    model = MODELS[shape].sized(trace, 5)
    walk = trace_checkpoint.walk_for(model, trace, None, 128)
    weights = TraceWeights(model.configured(walk.vocabulary, None), walk)
    layer = weights.layers - 1
    tensors = {info.name: info for info in tensors_of(model.configured(walk.vocabulary, None)) if ".experts." not in info.name}
    gate = weights.router(tensors[f"model.layers.{layer}.mlp.gate.weight"])
    code = torch.eye(walk.positions, weights.hidden) * weights.amplitude
    stream = code + torch.randn(code.shape, generator=torch.Generator().manual_seed(0)) * 3 * (
        torch.arange(weights.hidden) >= weights.code
    )
    normed = stream / stream.pow(2).mean(-1, keepdim=True).sqrt()
    logits = (normed.bfloat16() @ gate.T).float()
    bias = tensors.get(f"model.layers.{layer}.mlp.gate.e_score_correction_bias")
    scores = logits if bias is None else logits.sigmoid() + weights(bias)[bias.name]
    picked = scores.topk(model.shape.top_k).indices
    assert (picked.sort().values.numpy() == np.sort(walk.routing.ids[:, layer - weights.first_routed])).all()


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors
