"""Whatever writes experts in SGLang is followed by the callback, and nothing that writes them was forgotten."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.utils.weight_checker import WeightChecker

from sglang_uvm_offload.plugin.weight_writes import WRITERS, watch_writes

pytestmark = pytest.mark.sglang

HIDDEN, INTERMEDIATE, EXPERTS = 8, 4, 3


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each call. SGLang's functions are hooked as its registry does it, until the test ends."""
    calls: list[int] = []

    def add(target: str, hook: Callable[..., Any], kind: HookType) -> None:
        holder, name = pkgutil.resolve_name(target.rpartition(".")[0]), target.rpartition(".")[2]
        monkeypatch.setattr(holder, name, getattr(holder, name))  # puts it back in the end
        HookRegistry._apply_target(target, [(kind, hook, None)])

    watch_writes(lambda: calls.append(len(calls)), add)
    return calls


def layer() -> Any:
    """A layer as it is when weights arrive, built without a server."""
    made = FusedMoE.__new__(FusedMoE)
    torch.nn.Module.__init__(made)
    plain = {
        "layer_id": 0,
        "quant_config": None,
        "uses_expert_location": False,
        "_expert_storage_rank": 0,
        "_num_local_routed": EXPERTS,
        "_num_global_routed": EXPERTS,
        "_has_fused_shared": False,
        "moe_tp_rank": 0,
        "moe_tp_size": 1,
        "use_presharded_weights": False,
        "use_padded_loading": False,
        "use_triton_kernels": False,
        "use_flashinfer_trtllm_moe": False,
        "quant_method": SimpleNamespace(load_up_proj_weight_first=False),
        "scheme": None,
        "moe_runner_config": SimpleNamespace(is_gated=True),
    }
    made.__dict__.update(plain)
    made.w13_weight = torch.nn.Parameter(torch.zeros(EXPERTS, 2 * INTERMEDIATE, HIDDEN), requires_grad=False)
    return made


def test_a_loaded_expert_is_noted(written: list[int]) -> None:
    given = layer()
    given.weight_loader(given.w13_weight, torch.ones(INTERMEDIATE, HIDDEN), "w13_weight", "w1", 1)
    assert given.w13_weight.sum(dim=(1, 2)).tolist() == [0, INTERMEDIATE * HIDDEN, 0]
    assert len(written) == 1


def test_noise_in_the_weights_is_noted_and_reading_them_is_not(written: list[int]) -> None:
    model = torch.nn.Module()
    model.experts = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    checker = WeightChecker.__new__(WeightChecker)
    checker._get_model = lambda: model
    checker.handle("snapshot", role="target")
    assert not written
    checker.handle("reset_tensors", role="target")
    assert model.experts.any()
    assert len(written) == 1


@pytest.mark.parametrize("target", WRITERS)
def test_each_writer_is_noted_also_where_it_fails(written: list[int], target: str) -> None:
    """Called without anything that it needs, each of these fails at once."""
    with pytest.raises((TypeError, AttributeError)):
        pkgutil.resolve_name(target)()
    assert len(written) == 1


READ_ONLY = {
    *("init_weights_update_group", "destroy_weights_update_group", "receive_weights_from_distributed", "get_weights_by_name"),
    *("save_remote_model", "save_sharded_model", "flush_cache_after_weight_update", "record_weight_version_after_update"),
    "check_weights",  # by WeightChecker
}
"""What only reads weights, or only calls a ``WeightUpdater``."""


@pytest.mark.parametrize("kind", [WeightUpdater, SchedulerWeightUpdaterManager])
def test_every_way_to_update_weights_is_watched(kind: type) -> None:
    of_updater = {target.rpartition(".")[2] for target in WRITERS}
    methods = {name for name, value in vars(kind).items() if callable(value) and not name.startswith("_")}
    fields = set(kind.__dataclass_fields__)  # type: ignore[attr-defined]
    calling = {"update_weights_from_distributed"}  # load_weights_from_distributed
    assert methods - fields - READ_ONLY - calling <= of_updater


LOADING = {
    "model_loader/loader.py",
    "model_loader/expert_pack_loader.py",
    "model_executor/model_runner_components/weight_updater.py",
    "layers/moe/kt_ep_wrapper.py",  # KTransformers, which is refused
}


def test_no_other_file_of_sglang_loads_weights_into_a_model() -> None:
    """The loader's are for a model's start and for ``WeightUpdater``; checkpoint_engine is called by it."""
    root = Path(find_spec("sglang").submodule_search_locations[0]) / "srt"  # type: ignore[union-attr, index]
    loading = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if path.relative_to(root).parts[0] != "models" and re.search(r"\.load_weights\([^)]", path.read_text())
    }
    assert loading <= LOADING, loading - LOADING
