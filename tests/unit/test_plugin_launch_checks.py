"""What a launch sets or refuses: the headroom, autotuning, devices and combinations; and where a server may not write its
files, at launch and later."""

import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from builders.configs import served_config
from builders.launch import arguments, launch
from builders.locations import located
from builders.profiles import saved, some
from huggingface_hub import constants
from paths import direct, link_to_the_folder, symbolic_link, with_dots
from sglang.srt.configs.load_config import LoadFormat
from sglang.srt.model_loader.loader import DefaultModelLoader

from sglang_uvm_offload.cuda.build import BuildFailure
from sglang_uvm_offload.plugin import compat
from sglang_uvm_offload.plugin.checks import combinations, launch_checks
from sglang_uvm_offload.plugin.launch import devices, output_files
from sglang_uvm_offload.plugin.rank import recording, savers
from sglang_uvm_offload.requested_config import parse
from sglang_uvm_offload.routing.profile import Profile
from sglang_uvm_offload.routing.trace import Trace

pytestmark = pytest.mark.sglang


@pytest.fixture(autouse=True)
def gpu_of_100_gib(monkeypatch):
    monkeypatch.setattr(launch_checks, "get_device_memory_capacity", lambda device: 100 * 1024)


@pytest.mark.parametrize(
    ("headroom_gb", "device", "given", "left"),
    [(2.5, "cuda", 0.9, 0.875), (0.0, "cuda", 0.9, None), (2.5, "cpu", 0.9, None), (2.5, "cuda", None, None)],
)
def test_headroom_is_taken_off_the_fraction_that_weights_and_cache_get(headroom_gb, device, given, left):
    config = parse({"num_resident": 4, "headroom_gb": headroom_gb})
    found = launch_checks._headroom(config, launch(device=device, mem_fraction_static=given)[0])
    assert found == ({} if left is None else {"mem_fraction_static": pytest.approx(left)})


def models(model_path: object, **others: object) -> Any:
    return arguments(**{"model_path": str(model_path), "tokenizer_path": str(model_path), **others})


def file_problems(args: Any, **files: object) -> list[str]:
    config = parse({"num_resident": 4, **{name: str(path) for name, path in files.items()}})
    return output_files.problems(config, args)


@pytest.mark.parametrize("way", [direct, with_dots, symbolic_link, link_to_the_folder])
def test_a_file_in_a_snapshot_of_the_hugging_face_cache_is_the_models(tmp_path: Path, way) -> None:
    """The file is a link to one beside the snapshot."""
    snapshot, blobs, work = (tmp_path / "models--o--m" / "snapshots" / "1"), tmp_path / "models--o--m" / "blobs", tmp_path / "w"
    for folder in (snapshot, blobs, work):
        folder.mkdir(parents=True)
    (blobs / "a").touch()
    (snapshot / "model.safetensors").symlink_to("../../blobs/a")
    for path in (way(snapshot / "model.safetensors", work), blobs / "a", tmp_path / "models--o--m" / "new"):
        (problem,) = file_problems(models(snapshot), save_profile=path)
        assert problem.startswith(f"--expert-offload-config save_profile '{path}': lies in the model's folder")


def test_a_hub_ids_files_are_protected_before_they_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models--o--m").mkdir()
    path = tmp_path / "models--o--m" / "p.npz"
    assert not file_problems(models("o/m"), trace=path)
    assert file_problems(models("o/m", download_dir=str(tmp_path)), trace=path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert file_problems(models("o/m"), trace=path)
    assert not file_problems(models("o/m"), trace=tmp_path / "p.npz")


@pytest.mark.parametrize("kind", ["model", "draft model", "tokenizer"])
def test_every_folder_that_the_server_reads_from_is_protected(tmp_path: Path, kind: str) -> None:
    folders = {name: tmp_path / name for name in ("model", "draft model", "tokenizer")}
    for folder in folders.values():
        folder.mkdir()
    draft, tokenizer = (str(folders[name]) for name in ("draft model", "tokenizer"))
    args = models(folders["model"], speculative_draft_model_path=draft, tokenizer_path=tokenizer)
    (problem,) = file_problems(args, trace=folders[kind] / "t.npz")
    assert f"lies in the {kind}'s folder" in problem


def test_statistics_replace_statistics_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    args, path = models(tmp_path / "model"), tmp_path / "s.json"
    assert file_problems(args, stats=path) == []
    path.write_text(json.dumps({"format": output_files.STATS_FORMAT, "version": "0"}))
    assert file_problems(args, stats=path) == []
    path.write_text('{"results": []}')
    (problem,) = file_problems(args, stats=path)
    assert problem.startswith("--expert-offload-config stats ")
    assert "exists and is not a statistics file" in problem
    (problem,) = file_problems(args, trace=tmp_path / "t.npz", stats=tmp_path / "t.npz")
    assert "is the file of --expert-offload-config trace" in problem
    (problem,) = file_problems(args, stats=tmp_path / "model" / "s.json")
    assert "lies in the model's folder" in problem


@pytest.mark.parametrize(
    ("closed", "why"),
    [
        ("its mode", "p.npz is read-only"),
        ("its folder's mode", "folder is read-only"),
        ("the part of this node", "p-node1.npz is read-only"),
        ("a link into the model's folder", "lies in the model's folder"),
    ],
)
def test_a_profile_that_is_read_only_is_not_saved(tmp_path: Path, caplog, closed: str, why: str) -> None:
    caplog.set_level("INFO")
    folder, model = tmp_path / "folder", tmp_path / "model"
    folder.mkdir()
    model.mkdir()
    path = saved((model if "link" in closed else folder) / "p.npz", some())
    node = 1 if "part" in closed else 0
    if node:
        saved(folder / "p-node1.npz", some()).chmod(0o444)
    elif "link" in closed:
        path = symbolic_link(path, folder)
    else:
        (folder if "folder" in closed else path).chmod(0o555)
    args = models(model, **({"nnodes": 2, "node_rank": 1} if node else {}))
    config = output_files.unless_read_only(parse({"num_resident": 4, "profile": path}), args)
    folder.chmod(0o755)
    assert config.save_profile is None
    assert config.profiles == (path,)
    assert why in caplog.text
    assert output_files.problems(config, args) == []


def test_a_profile_that_is_not_there_yet_needs_its_folder(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    args = models(tmp_path / "model")
    for folder, found in (
        (tmp_path, []),
        (tmp_path / "gone", ["there is no folder"]),
        (tmp_path / "model", ["lies in the mo"]),
    ):
        config = parse({"num_resident": 4, "profile": folder / "p.npz"})
        assert output_files.unless_read_only(config, args) == config
        said = [
            line.removeprefix(f"--expert-offload-profile '{folder}/p.npz': ") for line in output_files.problems(config, args)
        ]
        assert [line[: len(each)] for line, each in zip(said, found, strict=True)] == found


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In a process that serves the model in this folder, as its only rank."""
    (tmp_path / "model").mkdir()
    group = SimpleNamespace(rank_in_group=0)
    parallel = SimpleNamespace(tp_rank=0, pp_rank=0, dp_rank=0, attn_dp_enabled=False, moe_tp_group=group, nnodes=1)
    for module in (savers, recording):
        monkeypatch.setattr(module, "get_parallel", lambda: parallel)
        monkeypatch.setattr(module, "get_server_args", lambda: models(tmp_path / "model"))
    monkeypatch.setattr(compat, "get_parallel", lambda: parallel)
    monkeypatch.setattr(recording, "get_schedule", lambda: SimpleNamespace(max_running_requests=2))
    monkeypatch.setattr(recording, "get_device", lambda: SimpleNamespace(device="cpu"))
    return tmp_path / "model"


def test_a_rank_saves_no_trace_in_the_models_folder(rank: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The path has become a link since the launch, which refuses it."""
    made = recording.Recording(rank.parent / "t.npz")
    model: Any = SimpleNamespace(layers=[None], locations=located(1, 8), num_logical=8)
    saver = made.begin(model, 2, torch.nn.Module(), [torch.nn.Module()])
    assert made.recorder is not None
    assert saver is not None
    made.recorder.end_step(["a"], [5])
    made.path.symlink_to(rank / "t.npz")
    saver.finish()
    assert "lies in the model's folder" in caplog.text
    assert not list(rank.iterdir())
    made.path.unlink()
    saver.finish()
    assert Trace.load(made.path).num_requests == 1


def test_a_rank_saves_no_profile_in_the_models_folder(rank: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, profile = rank.parent / "p.npz", some()
    layers = [SimpleNamespace(layer_id=number) for number in profile.model.moe_layers]
    manager = SimpleNamespace(
        config=served_config(save_profile=str(path)),
        target=SimpleNamespace(layers=layers),
        routing_by_expert=lambda wait: profile.seen,
    )
    saver = savers.profile_saver(manager, profile.model, None)  # type: ignore[arg-type]
    assert saver is not None
    path.symlink_to(rank / "p.npz")
    saver.finish()
    assert "lies in the model's folder" in caplog.text
    assert not list(rank.iterdir())
    path.unlink()
    saver.finish()
    assert Profile.load(path).seen.steps == profile.seen.steps


def test_ranks_of_several_nodes_agree_on_the_run_whatever_their_own_node_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flags of one node may lack the file: its ranks must not leave the others waiting."""
    asked: list[int] = []
    group = SimpleNamespace(broadcast_object=lambda launch, src: asked.append(src) or launch)
    monkeypatch.setattr(savers, "get_parallel", lambda: SimpleNamespace(nnodes=2))
    monkeypatch.setattr(savers, "get_world_group", lambda: group)
    manager = SimpleNamespace(config=served_config())
    assert savers.profile_saver(manager, some().model, None) is None  # type: ignore[arg-type]
    assert asked == [0]


def test_gpus_that_are_not_there_are_one_problem(monkeypatch):
    """--tp-size 8 --dp-size 8 without --enable-dp-attention asks for 64."""
    monkeypatch.setattr("sglang_uvm_offload.cuda.device.visible_gpus", lambda: [("NVIDIA H20", 1)] * 8)
    monkeypatch.setattr("sglang_uvm_offload.cuda.device.device_problems", lambda gpu: ["virtual"] if gpu < 8 else ["absent"])
    assert devices.gpu_problems(list(range(64))) == ["CUDA devices 8 to 63 do not exist: the driver shows 8", "virtual"]
    assert devices.gpu_problems(list(range(9))) == ["virtual", "absent"]


def test_a_library_that_cannot_be_built_is_a_problem_before_loading(monkeypatch):
    def build(arch: str) -> Path:
        raise BuildFailure(f"no nvcc for {arch}")

    monkeypatch.setattr("sglang_uvm_offload.cuda.device.device_problems", lambda gpu: [])
    monkeypatch.setattr("sglang_uvm_offload.cuda.canary.canary_problems", lambda gpus: [])
    monkeypatch.setattr("sglang_uvm_offload.cuda.device.device_arch", lambda gpu: "sm_90")
    monkeypatch.setattr("sglang_uvm_offload.cuda.build.build", build)
    assert devices.gpu_problems([0, 1]) == ["no nvcc for sm_90"]


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"load_format": "remote_instance"}, "--load-format remote_instance"),
        pytest.param(
            {"load_format": "expert_pack"},
            "--load-format expert_pack",
            marks=pytest.mark.refused("Format", "--load-format expert_pack"),
        ),
        ({"load_format": "layered"}, "--load-format layered"),
        ({"load_format": "flash_rl"}, "--load-format flash_rl"),
        ({"speculative_draft_load_format": "remote_instance"}, "--speculative-draft-load-format remote_instance"),
        (
            {"remote_instance_weight_loader_start_seed_via_transfer_engine": True},
            "--remote-instance-weight-loader-start-seed-via-transfer-engine",
        ),
        ({"enable_paged_experts": True}, "--enable-paged-experts"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused_by_name(values, name, record_property):
    found = combinations.problems(parse({"num_resident": 4}), launch(**values)[0])
    [problem] = found
    beginning, _, reason = problem.partition(": cannot be combined with --expert-offload-num-resident: ")
    assert beginning == name
    assert reason
    record_property("reason", reason)


@pytest.mark.refused("Launch", "SGLANG_OPT_SM120_NVFP4_PHASE_LAYOUT (Nemotron-H)")
def test_experts_that_change_their_memory_between_steps_are_refused(monkeypatch, record_property):
    monkeypatch.setenv("SGLANG_OPT_SM120_NVFP4_PHASE_LAYOUT", "0")
    assert combinations.problems(parse({"num_resident": 4}), launch()[0]) == []
    monkeypatch.setenv("SGLANG_OPT_SM120_NVFP4_PHASE_LAYOUT", "1")
    [problem] = combinations.problems(parse({"num_resident": 4}), launch()[0])
    name, _, reason = problem.partition(": cannot be combined with --expert-offload-num-resident: ")
    assert name == "SGLANG_OPT_SM120_NVFP4_PHASE_LAYOUT"
    record_property("reason", reason)


BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize("given", [{"quantization": "bitsandbytes"}, {"stated": {"quantization_config": BITSANDBYTES}}])
def test_a_quantisation_whose_experts_sglang_cannot_load_is_refused(given):
    (problem,) = combinations.format_problems(*launch(**given))
    assert problem.startswith("--quantization bitsandbytes: cannot be combined with --expert-offload-num-resident: ")
    assert combinations.format_problems(*launch(quantization="fp8")) == []


def test_no_model_with_experts_is_loaded_by_layers_or_as_flash_rl():
    """So these formats are refused. When this fails, look at what SGLang's models have become."""
    assert set(combinations.LOAD_FORMATS) <= {each.value for each in LoadFormat}
    folder = Path(inspect.getfile(DefaultModelLoader)).parents[1] / "models"
    sources = {path.stem: path.read_text() for path in folder.rglob("*.py")}
    says = re.compile(r"^\s*(def load_weights_to_module|@supports_quantized_rl_reload)", re.MULTILINE)
    found = {name for name, text in sources.items() if says.search(text)}
    assert {"torch_native_llama", "qwen2", "qwen3"} >= found != set()
    assert not any("FusedMoE" in sources[name] for name in found)


@pytest.mark.parametrize(
    "fields",
    [
        *({name: 2} for name in ("ep_size", "pp_size", "attn_dp_size", "attn_cp_size", "moe_dp_size")),
        {"moe_a2a_backend": "deepep"},
        {"speculative_algorithm": "NEXTN"},
    ],
)
def test_steps_that_no_rank_sees_whole_are_not_traced(fields):
    cfg = launch(**fields)[0]
    (problem,) = combinations.problems(parse({"num_resident": 4, "trace": "t.npz"}), cfg)
    assert ": cannot be combined with --expert-offload-config trace: " in problem
    assert combinations.problems(parse({"num_resident": 4}), cfg) == []


ELSEWHERE = {"enable_eplb": True, "ep_num_redundant_experts": 2, "init_expert_location": "map.json"}


def test_experts_that_lie_elsewhere_are_served_with_ids_profiles_and_traces():
    flags = {"num_resident": 4, "profile": "p", "save_profile": "q", "trace": "t", "adapt": "continuous"}
    assert combinations.problems(parse(flags), launch(**ELSEWHERE)[0]) == []
    named = {"num_resident": 4, "resident_selection": "manual", "resident_ids": "1,2"}
    assert combinations.problems(parse(named), launch(**{**ELSEWHERE, "enable_eplb": False})[0]) == []


@pytest.mark.refused("Parallel", "--enable-eplb with --expert-offload-resident-ids")
def test_experts_that_are_rearranged_cannot_be_named(record_property):
    named = {"num_resident": 4, "resident_selection": "manual", "resident_ids": "1,2"}
    (problem,) = combinations.problems(parse(named), launch(enable_eplb=True)[0])
    assert problem.startswith("--enable-eplb: cannot be combined with --expert-offload-resident-ids: ")
    record_property("reason", problem)


@pytest.mark.parametrize(
    ("runner", "drafts", "quantization", "disabled"),
    [
        ("flashinfer_trtllm", None, None, True),
        ("triton", "flashinfer_cutlass", None, True),
        ("auto", None, "modelopt_fp4", True),
        ("marlin", None, "modelopt_fp4", False),
        ("triton", None, "fp8", False),
    ],
)
def test_tactics_are_not_timed_over_pcie(caplog, runner, drafts, quantization, disabled):
    cfg = launch(moe_runner_backend=runner, speculative_moe_runner_backend=drafts)[0]
    with caplog.at_level("INFO"):
        settings = launch_checks._autotuning(cfg, quantization)
    assert settings == ({"disable_flashinfer_autotune": True} if disabled else {})
    assert ("setting --disable-flashinfer-autotune" in caplog.text) == disabled


def test_autotuning_that_is_off_or_on_a_cpu_is_left_alone():
    for fields in ({"disable_flashinfer_autotune": True}, {"device": "cpu"}):
        assert launch_checks._autotuning(launch(moe_runner_backend="flashinfer_trtllm", **fields)[0], None) == {}


def test_gpus_on_which_a_try_of_unified_memory_fails_are_refused(monkeypatch):
    monkeypatch.setattr("sglang_uvm_offload.cuda.device.device_problems", lambda gpu: [])
    monkeypatch.setattr("sglang_uvm_offload.cuda.canary.canary_problems", lambda gpus: [f"tried {gpus}"])
    assert devices.gpu_problems([2, 3]) == ["tried (2, 3)"]
