"""What the tensors of a checkpoint hold whose routing is a walk through a trace (``trace_walk``).

The residual stream is divided. Its first dimensions, the *code*, say at which position the token stands: a token's embedding
is large in the dimension of its position and 0 in the others. Whatever writes to the stream later (attention, MLPs, shared and
routed experts) writes zeros there, so the code reaches every layer as it was embedded, up to the positive factor of the norm.

* A router reads the code alone. For each position it scores the k experts of the trace highest, in the trace's order, by one
  product each, so no rounding or order of summation can change which are picked. A correction bias is too small to.
* The head reads the code too: the tokens of the next position are far ahead of all others. Which of these aliases is picked is
  up to the other dimensions, where experts and attention write: a wrong expert gives other tokens, but no other routing.

The other dimensions have random weights, scaled so that the experts' part is about twice as large as the embedding and the
attention's, at any depth: nothing overflows or drowns.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.trace_walk import ALIASES, TEXT_TOKENS, Walk
from scripts.make_checkpoint import block_fp8
from sglang_uvm_offload.plan.safetensors_header import TensorInfo

CODE_BLOCK = 128  # the code takes whole blocks of FP8, whose other rows then keep their precision
TOP_LOGIT = 4.0  # of the first expert of a token, where the stream has unit RMS
LAST_LOGIT = 0.6  # of the last one, as a share of the first one's; those that are not picked have 0
CORRECTION = 0.02  # at most; a sigmoid's scores of picked and other experts differ by more than 0.1

EMBEDDED = 0.5  # RMS of the embedding beside the code
ATTENDED = 0.8  # gain of attention and dense MLPs over all layers
EXPERTS = 7.0  # of routed experts: a token's k add up to about a fifth of what one of them writes
SPREAD = 2.0  # expected RMS beside the code after the last layer

NEXT_LOGIT = 30.0  # of the tokens of the next position
ALIAS_LOGIT = 2.0  # standard deviation of what tells aliases apart; bfloat16 resolves 0.125 at NEXT_LOGIT

SIGN = {torch.bfloat16: (torch.int16, -0x8000), torch.float8_e4m3fn: (torch.uint8, 0x80)}
_EXPERT = re.compile(r"\.experts\.\d+\.(\w+)\.weight$")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def code_size(positions: int) -> int:
    """Dimensions of the stream that ``positions`` take."""
    return -(-positions // CODE_BLOCK) * CODE_BLOCK


class TraceWeights:
    """Tensors for a ``config`` (as in config.json) whose routing is ``walk``; the same ``seed``, the same tensors."""

    def __init__(self, config: Mapping[str, Any], walk: Walk, seed: int = 0):
        self.walk = walk
        self.seed = seed
        self.hidden = int(config["hidden_size"])
        self.layers = int(config["num_hidden_layers"])
        self.first_routed = int(config.get("first_k_dense_replace") or 0)
        self.scaling = float(config.get("routed_scaling_factor") or 1.0)
        self.code = code_size(walk.positions)
        self.amplitude = math.sqrt(self.code)
        self.blocks: dict[str, ExpertBlocks] = {}

    def __call__(self, info: TensorInfo) -> dict[str, torch.Tensor]:
        """The tensor that ``info`` describes, with the scales of its blocks where it is FP8; none for the scales themselves."""
        name = info.name
        if name.endswith(".weight_scale_inv"):
            return {}
        if name == "model.embed_tokens.weight":
            return {name: self.embedding(info)}
        if name == "lm_head.weight":
            return {name: self.head(info)}
        if name.endswith(".mlp.gate.weight"):
            return {name: self.router(info)}
        if name.endswith(".e_score_correction_bias"):
            return {name: (self.random(name, *info.shape).sigmoid() * 2 - 1) * CORRECTION}
        if expert := _EXPERT.search(name):
            return self.block(expert[1], info).draw(f"{self.seed}/{name}", name)
        if name.endswith(".bias"):
            return {name: self.random(name, *info.shape, std=0.1).bfloat16()}
        if len(info.shape) == 1:
            return {name: self.norm(info)}
        return self.linear(info)

    def random(self, name: str, *size: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(size, generator=generator(f"{self.seed}/{name}")) * std

    def embedding(self, info: TensorInfo) -> torch.Tensor:
        table = self.random(info.name, *info.shape, std=EMBEDDED)
        table[:, : self.code] = 0
        rows = torch.arange(len(table))
        table[rows, torch.from_numpy(self.walk.position_of(rows.numpy()))] = self.amplitude
        return table.bfloat16()

    def head(self, info: TensorInfo) -> torch.Tensor:
        """Logits for the positions' tokens only: text and what fills up the vocabulary are never generated."""
        rest = self.hidden - self.code
        scale = math.sqrt((self.code + rest * SPREAD**2) / self.hidden)  # what the last norm divides by
        table = self.random(info.name, *info.shape, std=ALIAS_LOGIT * scale / (math.sqrt(rest) * SPREAD))
        table[:, : self.code] = 0
        rows = torch.arange(TEXT_TOKENS, TEXT_TOKENS + self.walk.positions * ALIASES)
        before = (torch.from_numpy(self.walk.position_of(rows.numpy())) - 1) % self.walk.positions
        table[rows, before] = NEXT_LOGIT * scale / self.amplitude
        table[:TEXT_TOKENS] = 0
        table[rows[-1] + 1 :] = 0
        return table.bfloat16()

    def router(self, info: TensorInfo) -> torch.Tensor:
        found = _LAYER.search(info.name)
        assert found is not None
        ids = torch.from_numpy(self.walk.routing.ids[:, int(found[1]) - self.first_routed]).long()  # [position, k]
        top_k = ids.shape[1]
        logits = TOP_LOGIT * (1 - (1 - LAST_LOGIT) * torch.arange(top_k) / max(1, top_k - 1))
        table = torch.zeros(info.shape)
        table[ids, torch.arange(len(ids))[:, None]] = logits / self.amplitude
        return table.bfloat16()

    def norm(self, info: TensorInfo) -> torch.Tensor:
        weight = 1 + self.random(info.name, *info.shape, std=0.1)
        if info.shape == (self.hidden,):
            weight[: self.code] = 1
        return weight.bfloat16()

    def linear(self, info: TensorInfo) -> dict[str, torch.Tensor]:
        out, into = info.shape
        writes = info.name.endswith((".o_proj.weight", ".down_proj.weight"))
        gain = ATTENDED / math.sqrt(self.layers) if writes else 1.0
        weight = self.random(info.name, out, into, std=gain / math.sqrt(into))
        if writes:
            weight[: self.code] = 0
        if info.dtype == "F8_E4M3":
            return block_fp8(info.name.removesuffix(".weight"), weight)
        return {info.name: weight.bfloat16()}

    def block(self, projection: str, info: TensorInfo) -> ExpertBlocks:
        """What the experts' ``projection`` is drawn from, made at its first use."""
        if projection not in self.blocks:
            out, into = info.shape
            down = projection == "down_proj"
            gain = EXPERTS / (math.sqrt(self.layers - self.first_routed) * self.scaling) if down else 1.0
            weight = self.random(f"experts.{projection}", out, into, std=gain / math.sqrt(into))
            if down:
                weight[: self.code] = 0
            self.blocks[projection] = ExpertBlocks(weight, fp8=info.dtype == "F8_E4M3")
        return self.blocks[projection]


class ExpertBlocks:
    """Matrices that all differ, drawn as fast as memory is written: one random ``[out, in]``, with the signs of whole rows and
    columns drawn for each, and with each scale of FP8 drawn from 0.75 to 1.25 times its own. Zeros stay zeros."""

    def __init__(self, weight: torch.Tensor, fp8: bool):
        quantised = block_fp8("", weight) if fp8 else {".weight": weight.bfloat16()}
        self.scale = quantised.get(".weight_scale_inv")
        self.dtype = quantised[".weight"].dtype
        self.bits_dtype, self.sign = SIGN[self.dtype]
        self.bits = quantised[".weight"].view(self.bits_dtype)

    def draw(self, key: str, name: str) -> dict[str, torch.Tensor]:
        """The matrix of ``key`` as ``name``, with its scales."""
        chance = generator(key)
        rows, columns = (
            torch.randint(2, (size,), generator=chance, dtype=self.bits_dtype) * self.sign for size in self.bits.shape
        )
        drawn = {name: (self.bits ^ rows[:, None]).bitwise_xor_(columns).view(self.dtype)}
        if self.scale is not None:
            drawn[f"{name}_scale_inv"] = self.scale * (0.75 + 0.5 * torch.rand(self.scale.shape, generator=chance))
        return drawn


def generator(key: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(key.encode()))
