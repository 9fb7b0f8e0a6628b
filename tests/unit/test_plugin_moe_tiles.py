"""Which tiles SGLang's own configurations give to the experts of a launch, and which of them are too narrow for PCIe."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from checkpoints import Checkpoints
from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe_triton_config
from sglang.srt.layers.quantization import BASE_QUANTIZATION_METHODS
from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
from sglang.srt.runtime_context import create_context, use_context
from sglang.srt.server_args import ServerArgs

from sglang_uvm_offload.plugin import doctor
from sglang_uvm_offload.plugin.checks import moe_tiles
from sglang_uvm_offload.plugin.checks.moe_tiles import Experts, narrow_tiles

pytestmark = pytest.mark.sglang

MIXTRAL = Experts(num_experts=8, width=3584, hidden=4096, top_k=2, dtype="fp8_w8a8", bits=8)
"""Mixtral 8x7B in FP8 on four ranks: SGLang has tuned files for several GPUs."""
QWEN = Experts(num_experts=128, width=768, hidden=2048, top_k=8, dtype=None, bits=16)
"""Qwen3-30B-A3B in bfloat16 on one rank."""


@pytest.fixture
def gpu(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Names the GPU by which SGLang looks for its files."""
    fused_moe_triton_config.get_moe_configs.cache_clear()
    args = ServerArgs(model_path=str(checkpoints("qwen3_moe")), device="cuda")
    with use_context(create_context(args, role="scheduler")):
        yield lambda name: monkeypatch.setattr(fused_moe_triton_config, "get_device_name", lambda: name)
    fused_moe_triton_config.get_moe_configs.cache_clear()


def chosen(experts: Experts, rows: int) -> tuple[dict[str, int], dict[str, int]]:
    """The tiles with which SGLang launches the two matrix products."""
    first, (second, _) = fused_moe_triton_config.try_get_optimal_moe_config(
        (experts.num_experts, 2 * experts.width, experts.hidden),
        (experts.num_experts, experts.hidden, experts.width),
        experts.top_k,
        experts.dtype,
        rows,
        block_shape=list(experts.block_shape) if experts.block_shape else None,
        per_channel_quant=experts.per_channel,
        return_down_config=True,
    )
    return first, second or first


def test_the_rows_of_a_tuned_file_with_narrow_tiles_are_named(gpu):
    gpu("NVIDIA GeForce RTX 4090")
    (line,) = narrow_tiles(MIXTRAL)
    named = line.split("64 bytes at ")[1].split(" tokens a step")[0]
    narrow = [rows for rows in moe_tiles.ROWS if chosen(MIXTRAL, rows)[0]["BLOCK_SIZE_K"] < 128]
    assert narrow
    assert [int(rows) for rows in named.split(", ")] == narrow
    assert "BLOCK_SIZE_K of E=8,N=3584,device_name=NVIDIA_GeForce_RTX_4090,dtype=fp8_w8a8.json" in line
    assert "benchmark/kernels/fused_moe_triton" in line
    assert "BLOCK_SIZE_K of 128 or more" in line


def test_a_tuned_file_with_wide_tiles_is_not_mentioned(gpu):
    gpu("NVIDIA H100 80GB HBM3")
    assert fused_moe_triton_config.get_moe_configs(128, 768, None) is not None
    assert narrow_tiles(QWEN) == []


def test_the_default_rule_is_judged_where_there_is_no_file(gpu):
    gpu("No Such GPU")
    (line,) = narrow_tiles(QWEN)
    assert "64 bytes at 256, 512, 1024, 1536, 2048, 3072, 4096 tokens a step" in line
    assert "SGLang's default rule, as there is no E=128,N=768,device_name=No_Such_GPU.json" in line
    assert "BLOCK_SIZE_K of 64 or more" in line
    assert narrow_tiles(replace(QWEN, dtype="fp8_w8a8", bits=8, block_shape=(128, 128))) == []


def test_half_a_byte_a_weight_needs_twice_the_tile(gpu):
    gpu("No Such GPU")
    (line,) = narrow_tiles(replace(QWEN, dtype="int4_w4a16", bits=4, block_shape=(0, 128)))
    assert "16 bytes at 256, " in line
    assert "32 bytes at 1, 2, 4, " in line
    assert "BLOCK_SIZE_K of 256 or more" in line


def test_a_file_of_the_second_product_is_judged_by_itself(gpu, tmp_path, monkeypatch):
    folder = tmp_path / "configs" / "triton_0_0_0"
    folder.mkdir(parents=True)
    wide, narrow = ({"BLOCK_SIZE_M": 16, "BLOCK_SIZE_K": size} for size in (64, 32))
    (folder / "E=128,N=768,device_name=Mine.json").write_text(json.dumps({"1": wide, "64": wide}))
    monkeypatch.setenv("SGLANG_MOE_CONFIG_DIR", str(tmp_path))
    gpu("Mine")
    assert narrow_tiles(QWEN) == [], "it shares the first one's file"
    fused_moe_triton_config.get_moe_configs.cache_clear()
    (folder / "E=128,N=768,device_name=Mine_down.json").write_text(json.dumps({"1": narrow, "64": wide}))
    (line,) = narrow_tiles(QWEN)
    assert "64 bytes at 1 tokens a step (BLOCK_SIZE_K of E=128,N=768,device_name=Mine_down.json)" in line


def launched(model: Any, **values: Any) -> Experts | None:
    args = ServerArgs(**{"model_path": str(model), "device": "cuda", **values})
    with use_context(create_context(args, role="scheduler")):
        return moe_tiles.launched_experts(args)


def test_the_shape_is_that_of_one_rank(checkpoints: Checkpoints):
    whole = launched(checkpoints("qwen3_moe"))
    assert whole == Experts(num_experts=16, width=128, hidden=256, top_k=4, dtype=None, bits=16)
    assert launched(checkpoints("qwen3_moe"), tp_size=2) == replace(whole, width=64)
    assert launched(checkpoints("qwen3_moe"), tp_size=2, ep_size=2) == replace(whole, num_experts=8)
    fp8 = launched(checkpoints("qwen3_moe", quant="fp8"))
    assert (fp8.dtype, fp8.bits, fp8.block_shape) == ("fp8_w8a8", 8, (128, 128))


@pytest.mark.parametrize(
    "values",
    [{"device": "cpu"}, {"moe_a2a_backend": "deepep"}, {"moe_runner_backend": "marlin"}],
    ids=lambda values: str(values),
)
def test_where_the_triton_runner_does_not_serve_nothing_is_known(checkpoints: Checkpoints, values):
    assert launched(checkpoints("qwen3_moe"), **values) is None


def quantization(name: str, **stated: Any) -> Any:
    return BASE_QUANTIZATION_METHODS[name].from_config({"quant_method": name, **stated})


def compressed(**weights: Any) -> Any:
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", **weights}
    group = {"targets": ["Linear"], "weights": scheme}
    return quantization("compressed-tensors", format="float-quantized", ignore=[], config_groups={"group_0": group})


BLOCKS = {"activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, "lm_head": False}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (quantization("w8a8_int8"), ("int8_w8a8", 8, None, True)),
        (quantization("w8a8_fp8"), ("fp8_w8a8", 8, None, True)),
        (quantization("modelopt_fp8", quant_algo="FP8"), ("fp8_w8a8", 8, None, False)),
        (quantization("blockwise_int8", **BLOCKS), ("int8_w8a8", 8, (128, 128), False)),
        (quantization("moe_wna16", **GPTQ), ("int4_w4a16", 4, (0, 32), False)),
        (compressed(strategy="channel"), ("fp8_w8a8", 8, None, True)),
        (compressed(strategy="block", block_structure=[128, 128]), ("fp8_w8a8", 8, (128, 128), False)),
    ],
)
def test_each_known_quantisation_is_looked_up_as_sglang_does(given, expected):
    found = replace(QWEN, **{"block_shape": None, "per_channel": False, **moe_tiles._weights(torch.bfloat16, given)})
    assert (found.dtype, found.bits, found.block_shape, found.per_channel) == expected


@pytest.mark.parametrize(
    "given",
    [
        Mxfp4Config.from_config({"quant_method": "mxfp4"}),
        quantization("mxfp8", **BLOCKS),
        compressed(type="int"),
        compressed(num_bits=4),
    ],
)
def test_of_other_quantisations_nothing_is_said(given):
    assert moe_tiles._weights(torch.bfloat16, given) is None


def test_what_fails_inside_sglang_does_not_fail_the_doctor(monkeypatch):
    def fails(_: Any) -> list[str]:
        raise AttributeError("'NoneType' object has no attribute 'replace'")

    launch = object.__new__(doctor.Launch)
    launch.args, launch.warned = None, []
    monkeypatch.setattr(doctor.start_rehearsal, "warnings", lambda args: [])
    monkeypatch.setattr(moe_tiles, "warnings", lambda args: ["narrow"])
    assert launch.warnings() == ["narrow"]
    monkeypatch.setattr(moe_tiles, "warnings", fails)
    assert launch.warnings() == []
