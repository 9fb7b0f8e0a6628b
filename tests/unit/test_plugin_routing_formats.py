"""What the launcher recognises of a runner's routing: as SGLang binds routers to runners, and with remedies that it accepts."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from builders.launch import launch
from builders.true_shape import config_folder
from sglang.srt.arg_groups.choices import MOE_RUNNER_BACKEND_CHOICES
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.arg_groups.moe_hook import handle_moe_kernel_config
from sglang.srt.configs.shared_experts import SharedExpertsConfig
from sglang.srt.layers.moe import topk
from sglang.srt.layers.moe.utils import MoeRunnerBackend, RoutingMethodType
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import ServerArgs

from sglang_uvm_offload.config import RequestedConfig
from sglang_uvm_offload.plugin.launch.routing_formats import _ELSE, COUNTED_RUNNERS, RoutingFormat, Shown, routing_format
from sglang_uvm_offload.requested_config import parse

pytestmark = pytest.mark.sglang

SELECTION, ADAPT = "--expert-offload-resident-selection", "--expert-offload-adapt"
RUNNERS = [name for name in MOE_RUNNER_BACKEND_CHOICES if name != "megamoe"]  # resolved to another runner before it is used
FIRST_N = {"resident_selection": "first_n"}
MANUAL = {"resident_selection": "manual", "resident_ids": "0"}


def config(**values: Any) -> RequestedConfig:
    parsed = parse({"num_resident": 4, **values})
    assert parsed is not None
    return parsed


def format_of(
    runner: str = "triton", given: str = "auto", stated: dict[str, Any] | None = None, **fields: Any
) -> RoutingFormat:
    return routing_format(*launch(stated, moe_runner_backend=runner, **fields), given)


@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize("runner", RUNNERS)
def test_each_runner_shows_what_sglang_gives_it(monkeypatch, runner, fp4):
    monkeypatch.setattr(topk, "get_model", lambda: SimpleNamespace(shared_experts=SharedExpertsConfig()))
    monkeypatch.setattr(topk, "get_lora", lambda: SimpleNamespace(enable_lora=False))
    router = topk.TopK(2, layer_id=0, is_draft=False, is_fp4_experts=fp4)
    router.bind_runner_backend(MoeRunnerBackend(runner), routing_method_type=RoutingMethodType.Renormalize)
    shown = {"STANDARD": Shown.IDS, "TRITON_KERNEL": Shown.TOKENS_PER_EXPERT, "BYPASSED": Shown.NOTHING}
    stated = {"quantization_config": {"quant_method": "fp8", "routed_experts_quant_method": "mxfp4"}} if fp4 else None
    assert format_of(runner, stated=stated).shown == shown[router.topk_config.output_format.name]


@pytest.mark.parametrize("quantization", [None, "fp8", *COUNTED_RUNNERS])
def test_the_remedies_are_accepted_by_sglang_and_counted(quantization):
    for runner in COUNTED_RUNNERS.get(quantization, _ELSE).split(" or "):
        with override_platform(is_sm100=True, is_blackwell=True):
            args = ServerArgs(model_path="m", quantization=quantization, moe_runner_backend=runner, device="cuda")
            handle_moe_kernel_config(args)
            assert resolving_view(args).moe_runner_backend == runner
            assert format_of(runner, quantization=quantization).counted


@pytest.mark.parametrize(
    ("flags", "refused", "instead"),
    [
        ({}, f"{SELECTION} frequency", f"{SELECTION} first_n or manual"),
        ({**FIRST_N, "adapt": "continuous"}, f"{ADAPT} continuous", f"{ADAPT} off or warmup"),
        ({**FIRST_N, "prefetch": "frequency"}, "--expert-offload-prefetch frequency", "leave it out"),
        ({**MANUAL, "adapt": "continuous"}, f"{ADAPT} continuous", f"{ADAPT} off or warmup"),
        ({**FIRST_N, "save_profile": "p.npz"}, "--expert-offload-config save_profile 'p.npz'", "leave it out"),
        ({**FIRST_N, "trace": "t.npz"}, "--expert-offload-config trace 't.npz'", "leave it out"),
    ],
)
def test_what_needs_counts_is_refused_by_name_where_there_are_none(flags, refused, instead):
    (problem,) = format_of("flashinfer_trtllm", given="flashinfer_trtllm").problems(config(**flags))
    assert problem == (
        f"{refused}: --moe-runner-backend flashinfer_trtllm routes in its kernel and shows no expert ids; choose "
        f"--moe-runner-backend triton or flashinfer_trtllm_routed, or {instead}"
    )
    assert not format_of("flashinfer_trtllm_routed").problems(config(**flags))


def test_every_flag_that_needs_counts_is_named_at_once():
    flags = config(adapt="continuous", save_profile="p.npz", trace="t.npz")
    assert len(format_of("flashinfer_trtllm").problems(flags)) == 4


@pytest.mark.parametrize("adapt", ["off", "warmup"])
@pytest.mark.parametrize("selection", [FIRST_N, MANUAL])
def test_residents_that_never_change_are_served_uncounted(selection, adapt):
    assert not format_of("flashinfer_mxfp4").problems(config(**selection, adapt=adapt))


def test_a_runner_that_sglang_chose_is_told_from_one_that_was_given():
    assert "flashinfer_trtllm (SGLang's choice for this model and GPU) routes" in format_of("flashinfer_trtllm").reason
    assert "flashinfer_trtllm routes" in format_of("flashinfer_trtllm", given="flashinfer_trtllm").reason


@pytest.mark.parametrize("quantization", ["modelopt_fp4", "modelopt_mixed"])
def test_nvfp4_layers_settle_auto_by_the_gpu(quantization):
    with override_platform(is_blackwell=True):
        found = format_of("auto", quantization=quantization)
        assert (found.runner, found.counted) == ("flashinfer_trtllm", False)
        assert format_of("auto", quantization="fp8").counted
    with override_platform(is_blackwell=False):
        assert format_of("auto", quantization=quantization).counted


def test_w4afp8_layers_under_deepep_are_not_counted():
    found = format_of("auto", quantization="w4afp8", moe_a2a_backend="deepep")
    (problem,) = found.problems(config())
    assert re.search(r"frequency: --moe-a2a-backend deepep computes W4AFP8 .* choose --moe-a2a-backend none, or", problem)
    assert format_of("auto", quantization="w4afp8").counted
    assert format_of("auto", quantization="fp8", moe_a2a_backend="deepep").counted


def test_tokens_per_expert_suffice_for_all_but_a_trace():
    found = format_of("triton_kernel", given="triton_kernel")
    assert not found.problems(config(adapt="continuous", save_profile="p.npz"))
    (problem,) = found.problems(config(trace="t.npz"))
    assert (
        "--expert-offload-config trace 't.npz': --moe-runner-backend triton_kernel shows the tokens of each expert" in problem
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"device": "cpu"},
        {"moe_a2a_backend": "flashinfer"},
        {"model_path": str(config_folder("moonshotai/Kimi-K3"))},
    ],
)
def test_a_runner_that_could_route_is_given_ids(fields):
    assert format_of("flashinfer_mxfp4", **fields).shown is Shown.IDS
