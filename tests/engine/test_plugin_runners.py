"""The MoE runners that SGLang itself chooses on Blackwell: ranks refuse what needs another one once the model is built, before
a weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import Checkpoints
from launches import BLACKWELL, launched
from nursery import Nurseries
from standin.auto import environment_of_ranks
from standin.engine import run_engine
from standin.run import Standin
from standin.serving import GPU

from scripts.harness.patience import patience

N, SELECTION = "--expert-offload-num-resident", "--expert-offload-resident-selection"
CHOSEN = "--moe-runner-backend flashinfer_trtllm"


def test_what_the_runner_cannot_do_ends_the_start_once_for_all_ranks(
    tmp_path: Path, checkpoints: Checkpoints, standin: Standin
) -> None:
    given = {"num_resident": 4, "slots": 2, "config": f'{{"trace": "{tmp_path}/t.npz", "tma": "off"}}'}
    engine = {"model_path": str(checkpoints("qwen3_moe")), **GPU, "moe_runner_backend": "auto", "tp_size": 2}
    engine |= {"disable_custom_all_reduce": True} | {f"expert_offload_{name}": value for name, value in given.items()}
    folder = tmp_path / "run"
    env = environment_of_ranks(standin, folder) | BLACKWELL
    with pytest.raises(AssertionError, match="the engine's log ends"):
        run_engine({"engine": engine, "prompts": [], "max_new_tokens": 1}, folder, env, seconds=patience(900))
    log = (folder / "log.txt").read_text()
    for said in (
        f"{SELECTION} frequency: {CHOSEN} (SGLang's choice for this model and GPU) routes in its kernel and exposes no",
        f"--expert-offload-config trace '{tmp_path}/t.npz': {CHOSEN} (SGLang's choice",
        f"--expert-offload-slots 2: {CHOSEN} indexes experts by number inside its kernels; remove it",
        f"--expert-offload-config tma off: {CHOSEN} may load experts with TMA",
    ):
        assert log.count(said) == 1, log[-3000:]
    assert log.count("expert offloading cannot start") == 1
    assert log.count("Load weight begin") == 2, "both ranks built the model"
    assert "Load weight end" not in log
    assert "checkpoint shards" not in log, "no file was opened"


@pytest.fixture(scope="module")
def launch(checkpoints: Checkpoints, sglang_on_standin: Nurseries) -> dict[str, Any]:
    begin = ["--model-path", str(checkpoints("qwen3_moe")), "--device", "cuda", "--sampling-backend", "pytorch"]
    begin += ["--grammar-backend", "none", N, "4"]
    runners = {"chosen": [], "routed": [f"{CHOSEN}_routed"], "triton": ["--moe-runner-backend triton"]}
    cases = {name: [*begin, *" ".join(runner).split()] for name, runner in runners.items()}
    return launched({name: {"argv": argv, "resolve": True} for name, argv in cases.items()}, sglang_on_standin, **BLACKWELL)


@pytest.mark.parametrize(("case", "disabled"), [("chosen", True), ("routed", True), ("triton", False)])
def test_flashinfer_tunes_nothing_over_pcie(launch: dict[str, Any], case: str, disabled: bool) -> None:
    assert launch[case]["exit"] is None, launch[case]["error"]
    assert launch[case]["flags"]["disable_flashinfer_autotune"] == disabled
