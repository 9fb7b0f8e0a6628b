"""The bytes of a checkpoint's tensors in a server's memory, by the dtype that it loads them as."""

import pytest

from sglang_uvm_offload.sizing.checkpoint import load
from sglang_uvm_offload.sizing.loaded import as_loaded
from sglang_uvm_offload.sizing.safetensors_header import TensorInfo


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "loaded"),
    [
        ("mlp.up_proj.weight", "F32", (8, 8), "BF16"),
        ("mlp.up_proj.weight", "F16", (8, 8), "BF16"),
        ("mlp.up_proj.weight", "F8_E4M3", (8, 8), "F8_E4M3"),
        ("mlp.up_proj.weight_scale_inv", "F32", (8, 8), "F32"),
        ("mlp.experts.gate_up_proj_blocks", "U8", (8, 8, 2, 16), "U8"),
        ("mlp.gate.weight", "F32", (8, 8), "F32"),
        ("mlp.gate.e_score_correction_bias", "F32", (8,), "F32"),
    ],
)
def test_weights_follow_the_dtype_and_scales_do_not(name, dtype, shape, loaded):
    tensor = TensorInfo(name, dtype, shape)
    assert [each.dtype for each in as_loaded([tensor], "bfloat16")] == [loaded]
    assert as_loaded([tensor], None) == [tensor]


def test_experts_in_float32_take_half_as_much_as_they_do_on_disk(checkpoints):
    folder = checkpoints("qwen3_moe", dtype="float32")
    assert load(folder, "float16").expert_bytes * 2 == load(folder, "float32").expert_bytes == load(folder).expert_bytes
