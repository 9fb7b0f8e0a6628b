"""Which of a released checkpoint's tensors are routed experts, by the names and shapes of its files."""

from __future__ import annotations

import pytest

from sglang_uvm_offload.sizing.checkpoint import from_tensors
from sglang_uvm_offload.sizing.checkpoint_shape import CheckpointShape
from sglang_uvm_offload.sizing.safetensors_header import CheckpointError, TensorInfo

EXPERTS, HIDDEN, SIZE = 8, 64, 32
CONFIG = {
    **{"num_hidden_layers": 2, "hidden_size": HIDDEN, "vocab_size": 128, "num_experts": EXPERTS, "num_experts_per_tok": 2},
    **{"num_attention_heads": 4, "moe_intermediate_size": SIZE, "max_position_embeddings": 64},
}
Tensors = dict[str, tuple[int, ...]]


def numbered(gate: str | None, up: str, down: str) -> Tensors:
    """Each expert's projections, ``{}`` for its number."""
    shapes = {gate: (SIZE, HIDDEN), up: (SIZE, HIDDEN), down: (HIDDEN, SIZE)}
    return {name.format(expert): shape for expert in range(EXPERTS) for name, shape in shapes.items() if name is not None}


def stacked(*gate_up: str, down: str) -> Tensors:
    width = 2 * SIZE // len(gate_up)
    return dict.fromkeys(gate_up, (EXPERTS, width, HIDDEN)) | {down: (EXPERTS, HIDDEN, SIZE)}  # type: ignore[return-value]


def usual(module: str) -> Tensors:
    return numbered(*(f"{module}.{{}}.{name}.weight" for name in ("gate_proj", "up_proj", "down_proj")))


def w123(module: str) -> Tensors:
    return numbered(*(f"{module}.{{}}.{name}.weight" for name in ("w1", "w3", "w2")))


# The list of layers, and a layer's experts, as SGLang's loaders (sglang/srt/models) take them from released checkpoints.
RELEASED: dict[str, tuple[str, Tensors]] = {
    "step3p5.py": ("model.layers", stacked("moe.gate_proj.weight", "moe.up_proj.weight", down="moe.down_proj.weight")),
    "granitemoe.py": (
        "model.layers",
        stacked("block_sparse_moe.input_linear.weight", down="block_sparse_moe.output_linear.weight"),
    ),
    "gemma4_mm.py": ("model.language_model.layers", stacked("experts.gate_up_proj", down="experts.down_proj")),
    "mllama4.py": (
        "language_model.model.layers",
        stacked("feed_forward.experts.gate_up_proj", down="feed_forward.experts.down_proj"),
    ),
    "nemotron_h.py": (
        "backbone.layers",
        numbered(None, "mixer.experts.{}.up_proj.weight", "mixer.experts.{}.down_proj.weight"),
    ),
    "minimax_m2.py": ("model.layers", w123("block_sparse_moe.experts")),
    "kimi_linear.py": ("model.layers", w123("block_sparse_moe.experts")),
    "lfm2_moe.py": ("model.layers", w123("feed_forward.experts")),
    "qwen3_5.py": ("model.language_model.layers", stacked("mlp.experts.gate_up_proj", down="mlp.experts.down_proj")),
    "qwen3_next.py": ("model.layers", usual("mlp.experts")),
    "kimi_k25.py": ("language_model.model.layers", usual("mlp.experts")),
    "qwen3_omni_moe.py": ("thinker.model.layers", usual("mlp.experts")),
    "deepseek_v4.py": ("layers", w123("ffn.experts")),
    "mixtral.py": ("model.layers", w123("block_sparse_moe.experts")),
    "other layers: blocks": ("transformer.blocks", w123("ffn.experts")),
    "other layers: h": ("transformer.h", usual("moe.experts")),
}
BESIDE: Tensors = {
    "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "input_layernorm.weight": (HIDDEN,),
    "mlp.gate.weight": (EXPERTS, HIDDEN),
    "mlp.shared_experts.gate_proj.weight": (SIZE, HIDDEN),
    "linear_attn.conv1d.weight": (EXPERTS, 1, 4),
}
"""Of a first dimension as long as the experts, too."""


def shape_of(layers: str, inside: Tensors, dtype: str = "BF16", more: tuple[TensorInfo, ...] = ()) -> CheckpointShape:
    tensors = [
        TensorInfo(f"{layers}.{layer}.{name}", dtype, shape) for layer in range(2) for name, shape in (inside | BESIDE).items()
    ]
    return from_tensors("m", CONFIG, [*tensors, *more], from_headers=True)


@pytest.mark.parametrize("loader", RELEASED)
def test_experts_are_found_by_the_names_of_released_checkpoints(loader):
    layers, inside = RELEASED[loader]
    shape = shape_of(layers, inside)
    nbytes = 2 * sum(TensorInfo("", "U8", shape).nbytes for shape in inside.values())
    assert [layer.expert_bytes for layer in shape.layers] == [nbytes, nbytes]
    projections = 2 if loader == "nemotron_h.py" else 3
    parts = [(part.name, part.nbytes, part.split) for part in shape.layers[0].experts]
    assert parts == [("w13.weight", 2 * (projections - 1) * SIZE * HIDDEN, True), ("w2.weight", 2 * SIZE * HIDDEN, True)]
    assert shape.expert_parameters == projections * SIZE * HIDDEN
    assert shape.notes == ()


def test_biases_and_scales_of_stacked_experts_are_found_by_their_projections_name():
    inside = stacked("mlp.experts.gate_up_proj", down="mlp.experts.down_proj")
    inside |= {"mlp.experts.gate_up_proj_bias": (EXPERTS, 2 * SIZE), "mlp.experts.down_proj_bias": (EXPERTS, HIDDEN)}
    inside |= {"mlp.experts.down_proj_scale": (EXPERTS, 1), "mlp.experts.gate_up_proj.weight_scale_inv": (EXPERTS, 1, 1)}
    parts = {part.name: part.split for part in shape_of("model.layers", inside).layers[0].experts}
    assert parts == {
        **{"w13.weight": True, "w13.bias": True, "w13.weight_scale_inv": True},
        **{"w2.weight": True, "w2.bias": False, "w2.scale": False},
    }


def test_suffixes_of_compressed_tensors_are_parts_of_the_same_projection():
    inside = {}
    for name in ("gate_proj", "up_proj", "down_proj"):
        for expert in range(EXPERTS):
            at = f"mlp.experts.{expert}.{name}"
            inside |= {f"{at}.weight_packed": (SIZE, SIZE), f"{at}.weight_scale": (SIZE, 4), f"{at}.weight_global_scale": (1,)}
    names = [part.name for part in shape_of("language_model.model.layers", inside, "U8").layers[0].experts]
    assert names == [f"{p}.{s}" for p in ("w13", "w2") for s in ("weight_global_scale", "weight_packed", "weight_scale")]


def test_experts_for_images_are_numbered_after_those_for_text():
    """ERNIE 4.5 VL (sglang/srt/models/ernie45_vl.py), whose config states two numbers of experts."""
    tensors = []
    for layer in range(2):
        for expert in range(2 * EXPERTS):
            width = SIZE if expert < EXPERTS else SIZE // 2
            tensors += [
                TensorInfo(f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight", "BF16", (width, HIDDEN))
                for name in ("gate_proj", "up_proj", "down_proj")
            ]
    change = {"num_experts": None, "moe_num_experts": [EXPERTS, EXPERTS], "moe_intermediate_size": [SIZE, SIZE // 2]}
    shape = from_tensors("m", CONFIG | change, tensors, from_headers=True)
    assert shape.layers[0].expert_bytes == 2 * 3 * EXPERTS * HIDDEN * (SIZE + SIZE // 2)
    assert (shape.num_experts, shape.expert_size) == (EXPERTS, SIZE)


@pytest.mark.parametrize(
    "name", ["mtp.layers.0.", "mtp.0.", "model.mtp_layers.0.", "model.mtp_block.0.", "model.mtp.layers.0.", "model.layers.2."]
)
def test_draft_layers_have_numbers_of_their_own_or_come_after_the_others(name):
    draft = tuple(TensorInfo(name + each, "BF16", shape) for each, shape in usual("mlp.experts").items())
    shape = shape_of("model.layers", usual("mlp.experts"), more=draft)
    assert len(shape.layers) == 2
    assert [layer.expert_bytes for layer in shape.draft_layers] == [shape.layers[0].expert_bytes]


def test_towers_and_what_sglang_skips_are_no_decoder_layers():
    tower = TensorInfo("model.visual.blocks.0.attn.qkv.weight", "BF16", (8, 8))
    talker = TensorInfo("talker.model.layers.0.mlp.experts.0.up_proj.weight", "BF16", (4096, 4096))
    plain = shape_of("thinker.model.layers", usual("mlp.experts"))
    shape = shape_of("thinker.model.layers", usual("mlp.experts"), more=(tower, talker))
    assert shape.layers == plain.layers
    assert shape.other == plain.other + tower.nbytes


def test_a_tensor_that_is_only_named_for_experts_counts_and_is_named():
    strange = TensorInfo("model.layers.0.mlp.experts.table", "BF16", (3, 4))
    plain, shape = (shape_of("model.layers", usual("mlp.experts"), more=more) for more in ((), (strange,)))
    assert shape.layers[0].expert_bytes == plain.layers[0].expert_bytes
    assert shape.layers[0].replicated == plain.layers[0].replicated + strange.nbytes
    (note,) = shape.notes
    assert note.startswith(strange.name)


def test_a_layer_without_a_projection_of_some_expert_is_refused():
    inside = {name: shape for name, shape in usual("mlp.experts").items() if ".3.down_proj" not in name}
    with pytest.raises(CheckpointError, match="layer 0 holds w2 of 7 experts, and the config describes experts 0 to 7"):
        shape_of("model.layers", inside)


@pytest.mark.parametrize(
    ("name", "division"),
    [
        *((f"mixer.{each}.weight", "attention") for each in ("in_proj", "out_proj", "conv1d", "q_proj", "o_proj")),
        ("mixer.k_proj.weight", "keys_values"),
        ("mixer.shared_experts.up_proj.weight", "feed_forward"),
        ("mixer.gate.weight", "replicated"),
        ("mamba.in_proj.weight", "attention"),
        ("linear_attn.in_proj_qkvz.weight", "attention"),
        ("attention.query_key_value.weight", "attention"),
        ("self_attn.kv_a_proj_with_mqa.weight", "replicated"),
        ("attn.wq_b.weight", "attention"),
        ("feed_forward.w1.weight", "feed_forward"),
    ],
)
def test_weights_of_hybrid_layers_are_divided_as_their_kind_is(name, division):
    layer = shape_of("model.layers", usual("mlp.experts") | {name: (100, 100)}).layers[0]
    plain = shape_of("model.layers", usual("mlp.experts")).layers[0]
    assert getattr(layer, division) - getattr(plain, division) == (20000 if name not in BESIDE else 0)
