"""Makes the tensors of a checkpoint whose routing walks a trace (``trace_walk``).

The residual stream is divided. Its first dimensions, the *code*, encode the token's position: its embedding is large in the
dimension of the position and 0 in the others. Attention, MLPs, shared and routed experts write zeros there, so the code reaches
every layer as embedded, up to the positive factor of the norm.

* A router reads only the code. For each position it scores the trace's k experts highest, in the trace's order. Each score is a
  single product, so neither rounding nor summation order can change the choice, and the correction bias is too small to.
* The head reads the code too, and puts the tokens of the next position far ahead of all others. The other dimensions, where
  experts and attention write, decide between these aliases. A wrong expert so changes tokens but not routing.

The other dimensions have random weights, scaled so that at any depth the experts contribute about twice as much as embedding
and attention: nothing overflows or vanishes.
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

CODE_BLOCK = 128  # the code takes whole FP8 blocks, so that other rows keep their precision
TOP_LOGIT = 4.0  # a token's first expert, with the stream at unit RMS
LAST_LOGIT = 0.6  # a token's last expert, as a share of the first one's; experts that are not picked have 0
CORRECTION = 0.02  # the maximum; sigmoid scores of picked and other experts differ by more than 0.1

EMBEDDED = 0.5  # RMS of the embedding beside the code
ATTENDED = 0.8  # gain of attention and dense MLPs over all layers
EXPERTS = 7.0  # routed experts: a token's k sum to about a fifth of what one of them writes
SPREAD = 2.0  # expected RMS beside the code after the last layer

NEXT_LOGIT = 30.0  # tokens of the next position
ALIAS_LOGIT = 2.0  # standard deviation between aliases; bfloat16 resolves 0.125 at NEXT_LOGIT

SIGN = {torch.bfloat16: (torch.int16, -0x8000), torch.float8_e4m3fn: (torch.uint8, 0x80)}
_EXPERT = re.compile(r"\.experts\.\d+\.(\w+)\.weight$")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def code_size(positions: int) -> int:
    """Returns how many dimensions of the stream ``positions`` take."""
    return -(-positions // CODE_BLOCK) * CODE_BLOCK


class TraceWeights:
    """Tensors for ``config`` (as in config.json) that route by ``walk``. The same ``seed`` gives the same tensors."""

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
        """Makes the tensor of ``info``, with its block scales if it is FP8. Returns nothing for the scales themselves."""
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
        """Gives logits to the positions' tokens only: byte-level and padding tokens are never generated."""
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
        """Returns what the experts' ``projection`` is drawn from, made on first use."""
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
    """Draws distinct matrices at memory speed from one random ``[out, in]``: each flips the signs of random rows and columns
    and multiplies each FP8 scale by 0.75 to 1.25. Zeros stay zeros."""

    def __init__(self, weight: torch.Tensor, fp8: bool):
        quantised = block_fp8("", weight) if fp8 else {".weight": weight.bfloat16()}
        self.scale = quantised.get(".weight_scale_inv")
        self.dtype = quantised[".weight"].dtype
        self.bits_dtype, self.sign = SIGN[self.dtype]
        self.bits = quantised[".weight"].view(self.bits_dtype)

    def draw(self, key: str, name: str) -> dict[str, torch.Tensor]:
        """Draws the matrix of ``key`` as tensor ``name``, with its scales."""
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
