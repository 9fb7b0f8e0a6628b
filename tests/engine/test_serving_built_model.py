"""Ids by layer are checked against the built model, even where its config misleads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Checkpoints
from serving import Engines, assert_offloaded, assert_same_answers

from scripts.harness.server import EngineFailed

# Not in order, and none of them where first_n starts.
IDS = [[4, 15, 9, 12], [10, 5], [7, 8, 13, 14, 11, 6]]


def manual(folder: Path, lists: list[list[int]], num_resident: int = 4) -> dict[str, Any]:
    """The flags with these ids, by layer."""
    path = folder / "ids.json"
    path.write_text(json.dumps(lists))
    return {
        "expert_offload_num_resident": num_resident,
        "expert_offload_resident_selection": "manual",
        "expert_offload_resident_ids": f"@{path}",
    }


def copied(checkpoint: Path, folder: Path, **config: Any) -> Path:
    """A checkpoint whose config says ``config`` too."""
    shutil.copytree(checkpoint, folder / "model")
    path = folder / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder / "model"


@pytest.mark.nightly
def test_ids_by_layer_are_for_the_layers_that_are_built(checkpoints: Checkpoints, engines: Engines, tmp_path: Path) -> None:
    """The config has words of other families, which this one's model does not read: by them one layer routes to 4 experts."""
    checkpoint = checkpoints("qwen3_moe")
    misleading = copied(checkpoint, tmp_path, n_routed_experts=4, first_k_dense_replace=2)
    on = engines.run(misleading, **manual(tmp_path, IDS))
    assert_offloaded(on.server_info)
    assert on.offload["resident_ids"] == [sorted(ids) for ids in IDS]
    assert_same_answers(on, engines.baseline(checkpoint))


def test_ids_by_layer_are_for_the_layers_of_the_transformers_fallback(
    checkpoints: Checkpoints, engines: Engines, tmp_path: Path
) -> None:
    checkpoint = checkpoints("dots1")
    on = engines.run(checkpoint, **manual(tmp_path, IDS[:2]))
    assert_offloaded(on.server_info)
    assert on.offload["resident_ids"] == [sorted(ids) for ids in IDS[:2]]
    assert_same_answers(on, engines.baseline(checkpoint))


def test_ids_that_do_not_fit_the_built_model_end_the_launch_before_its_weights_are_read(
    checkpoints: Checkpoints, engines: Engines, tmp_path: Path
) -> None:
    """A list for each decoder layer of a model of which one is dense, and an expert that only the config knows."""
    checkpoint = copied(checkpoints("dots1"), tmp_path, num_experts=99)
    with pytest.raises(EngineFailed) as failed:
        engines.run(checkpoint, **manual(tmp_path, [[0], [1], [16]]))
    flag = f"--expert-offload-resident-ids '@{tmp_path}/ids.json': "
    assert f"{flag}expert 16 does not exist; the model's experts are 0-15" in failed.value.log
    assert f"{flag}lists 3 layers, but each of the model's 2 MoE layers needs a list: 0, 1" in failed.value.log
    assert failed.value.log.count(flag) == 2
    assert "Load weight end" not in failed.value.log
