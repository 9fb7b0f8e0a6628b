"""What the runners of a built model cannot do though a flag asks for it: as SGLang binds routers to runners, with remedies that
it accepts."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.arg_groups.model_override_base import resolving_view
from sglang.srt.arg_groups.moe_hook import handle_moe_kernel_config
from sglang.srt.configs.shared_experts import SharedExpertsConfig
from sglang.srt.layers.moe import topk
from sglang.srt.layers.moe.utils import MoeA2ABackend, MoeRunnerBackend, RoutingMethodType
from sglang.srt.runtime_context import override_platform
from sglang.srt.server_args import ServerArgs

from sglang_uvm_offload.plugin import compat
from sglang_uvm_offload.plugin.rank import built_runners
from sglang_uvm_offload.plugin.rank.built_runners import COUNTED_RUNNERS, DRAFT_RUNNER, ELSE_COUNTED
from sglang_uvm_offload.plugin.slots import runners
from sglang_uvm_offload.requested_config import parse

pytestmark = pytest.mark.sglang

SELECTION, ADAPT = "--expert-offload-resident-selection", "--expert-offload-adapt"
FIRST_N = {"resident_selection": "first_n"}
EVERYTHING = {"adapt": "continuous", "save_profile": "p.npz", "trace": "t.npz"}


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What SGLang knows of the process that builds the model."""
    given, alone = SimpleNamespace(moe_runner_backend="auto"), SimpleNamespace(enable_lora=False)
    monkeypatch.setattr(topk, "get_model", lambda: SimpleNamespace(shared_experts=SharedExpertsConfig()))
    monkeypatch.setattr(topk, "get_lora", lambda: alone)
    monkeypatch.setattr(runners, "get_lora", lambda: alone)
    monkeypatch.setattr(built_runners, "get_server_args", lambda: given)
    monkeypatch.setattr(built_runners, "get_parallel", lambda: SimpleNamespace(tp_rank=0))
    return given


def model(*backends: str, fp4: bool = False) -> torch.nn.Module:
    """A model of one layer for each of the backends."""
    routers = [topk.TopK(2, layer_id=0, is_draft=False, is_fp4_experts=fp4) for _ in backends]
    for router, backend in zip(routers, backends, strict=True):
        router.bind_runner_backend(MoeRunnerBackend(backend), routing_method_type=RoutingMethodType.Renormalize)
    return torch.nn.ModuleList(routers)


class Method:
    def __init__(self, backend: str | None):
        self.backend = backend and MoeRunnerBackend(backend)

    def get_moe_runner_backend(self, layer: Any) -> Any:
        return self.backend


def layers(*backends: str | None) -> list[Any]:
    return [SimpleNamespace(quant_method=Method(backend)) for backend in backends]


def problems(*backends: str, quantization: str | None = None, fp4: bool = False, **flags: Any) -> list[str]:
    config = parse({"num_resident": 4, **flags})
    assert config is not None
    return built_runners.problems(config, model(*backends, fp4=fp4), layers(*backends), quantization)


@pytest.mark.parametrize(
    ("flags", "refused", "instead"),
    [
        ({}, f"{SELECTION} frequency", f"{SELECTION} first_n or manual"),
        ({**FIRST_N, "adapt": "continuous"}, f"{ADAPT} continuous", f"{ADAPT} off or warmup"),
        ({**FIRST_N, "prefetch": "frequency"}, "--expert-offload-prefetch frequency", "remove it"),
        ({**FIRST_N, "save_profile": "p.npz"}, "--expert-offload-config save_profile 'p.npz'", "remove it"),
        ({**FIRST_N, "trace": "t.npz"}, "--expert-offload-config trace 't.npz'", "remove it"),
    ],
)
def test_what_needs_the_routing_is_refused_by_name_where_a_kernel_hides_it(process, flags, refused, instead):
    process.moe_runner_backend = "flashinfer_trtllm"
    (problem,) = problems("triton", "flashinfer_trtllm", "flashinfer_trtllm", **flags)
    assert problem == (
        f"{refused}: --moe-runner-backend flashinfer_trtllm routes in its kernel and exposes no expert ids; use "
        f"--moe-runner-backend triton or flashinfer_trtllm_routed, or {instead}"
    )
    assert problems("flashinfer_trtllm_routed", **flags) == []


def test_all_flags_are_named_at_once_with_the_runner_that_sglang_chose():
    found = problems("flashinfer_mxfp4", quantization="mxfp4", **EVERYTHING)
    assert len(found) == 4
    chosen = "flashinfer_mxfp4 (SGLang's choice for this model and GPU) routes"
    assert all(chosen in each and "use --moe-runner-backend triton_kernel or marlin, or" in each for each in found)


@pytest.mark.parametrize("adapt", ["off", "warmup"])
@pytest.mark.parametrize("selection", [FIRST_N, {"resident_selection": "manual", "resident_ids": "0"}])
def test_residents_that_never_change_need_no_routing(selection, adapt):
    assert problems("flashinfer_mxfp4", **selection, adapt=adapt) == []


def test_a_model_that_keeps_its_ids_is_served_by_any_runner():
    assert problems("flashinfer_mxfp4", fp4=True, **EVERYTHING) == []


def test_tokens_per_expert_suffice_for_all_but_a_trace():
    (problem,) = problems("triton_kernel", **EVERYTHING)
    assert "trace 't.npz': --moe-runner-backend triton_kernel exposes the tokens of each expert" in problem


@pytest.mark.parametrize(
    ("runner", "fp4", "adapters", "shown"),
    [
        ("triton_kernel", False, False, "TRITON_KERNEL"),
        ("flashinfer_trtllm", True, True, "BYPASSED"),
        ("flashinfer_mxfp4", False, True, "BYPASSED"),
        ("flashinfer_mxfp4", True, False, "STANDARD"),
        ("experimental_sgl_trtllm", True, False, "BYPASSED"),
        ("experimental_sgl_trtllm", False, True, "STANDARD"),
        ("auto", False, False, "STANDARD"),
    ],
)
def test_before_0_5_23_a_router_goes_by_the_launchs_runner(monkeypatch, runner, fp4, adapters, shown):
    """As in ``TopK.forward_cuda`` of 0.5.22."""
    monkeypatch.setattr(compat, "VERSION", (0, 5, 22))
    monkeypatch.setattr(compat, "get_lora", lambda: SimpleNamespace(enable_lora=adapters))
    monkeypatch.setattr("sglang.srt.layers.moe.utils.get_moe_runner_backend", lambda: MoeRunnerBackend(runner))
    router = topk.TopK(2, layer_id=0, is_draft=False, is_fp4_experts=fp4)
    assert compat.routing_shown(router) == (shown, runner)
    router.topk_config.output_format = topk.TopKOutputFormat.STANDARD
    assert compat.routing_shown(router) == ("STANDARD", runner), "a model that asks for ids"


@pytest.mark.parametrize("quantization", [None, "fp8", *COUNTED_RUNNERS])
def test_the_remedies_are_accepted_by_sglang_and_counted(quantization):
    for runner in COUNTED_RUNNERS.get(quantization, ELSE_COUNTED).split(" or "):
        with override_platform(is_sm100=True, is_blackwell=True):
            args = ServerArgs(model_path="m", quantization=quantization, moe_runner_backend=runner, device="cuda")
            handle_moe_kernel_config(args)
            assert resolving_view(args).moe_runner_backend == runner
        assert problems(runner) == []


def test_w4afp8_layers_that_exchange_tokens_are_not_counted(monkeypatch):
    monkeypatch.setattr(built_runners, "get_moe_a2a_backend", lambda: MoeA2ABackend.DEEPEP)
    config, (layer,) = parse({"num_resident": 4}), layers("cutlass")
    assert built_runners.problems(config, model("flashinfer_trtllm"), [layer], "fp8") == []
    layer.use_w4afp8 = True
    (problem,) = built_runners.problems(config, model("cutlass"), [layer], "w4afp8")
    assert re.search(r"frequency: --moe-a2a-backend deepep computes W4AFP8 .* use --moe-a2a-backend none, or", problem)


def test_slots_are_refused_or_left_out_where_no_layer_computes_from_them(caplog):
    caplog.set_level("INFO")
    reason = "--moe-runner-backend cutlass indexes experts by number inside its kernels"
    assert problems("cutlass", slots=3) == [f"--expert-offload-slots 3: {reason}; remove it"]
    assert problems("cutlass", "triton", slots=3) == problems("cutlass") == []
    assert problems("cutlass", num_resident="auto") == []
    assert f"--expert-offload-slots auto: no slots: {reason}" in caplog.text


def test_kernels_that_may_load_by_tma_are_named_where_it_is_off():
    (problem,) = problems("deep_gemm", "triton", "marlin", tma="off")
    assert problem.startswith("--expert-offload-config tma off: --moe-runner-backend deep_gemm may load experts with TMA")
    assert "use --moe-runner-backend triton" in problem
    assert problems("deep_gemm") == problems("triton", tma="off") == []
    (of_draft,) = built_runners.tma_problems(parse({"num_resident": 4, "tma": "off"}), layers(None), DRAFT_RUNNER)
    assert "--speculative-moe-runner-backend auto may load" in of_draft


@pytest.mark.parametrize(
    ("fields", "told"),
    [({}, True), ({"device": "cpu"}, False), ({"moe_a2a_backend": "deepep"}, False), ({"moe_runner_backend": "triton"}, False)],
)
def test_doctor_doubts_a_runner_that_routes_most_models_in_its_kernel(fields, told):
    cfg = SimpleNamespace(**{"device": "cuda", "moe_a2a_backend": "none", "moe_runner_backend": "flashinfer_trtllm"} | fields)
    said = built_runners.doubts(parse({"num_resident": 4}), cfg, "fp8")
    assert len(said) == told
    assert not said or (f"the launch fails because of {SELECTION} frequency; --moe-runner-backend triton or" in said[0])
    assert "the launch fails" not in "".join(built_runners.doubts(parse({"num_resident": 4, **FIRST_N}), cfg, "fp8"))


@pytest.mark.parametrize("blackwell", [True, False])
def test_doctor_doubts_what_sglang_chooses_for_nvfp4_on_blackwell(blackwell):
    cfg = SimpleNamespace(device="cuda", moe_a2a_backend="none", moe_runner_backend="auto")
    with override_platform(is_blackwell=blackwell):
        said = built_runners.doubts(parse({"num_resident": 4}), cfg, "modelopt_fp4")
        assert built_runners.doubts(parse({"num_resident": 4}), cfg, "fp8") == []
    assert [each.split()[1] for each in said] == ["flashinfer_trtllm"] * blackwell
