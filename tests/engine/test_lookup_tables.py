"""Where SGLang keeps a model's lookup tables, by its own arguments, and what they hold, by its own class."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from arguments import Arguments
from builders.shapes import ask_at_once
from builders.true_shape import config_folder
from launches import launched
from nursery import Nursery
from sglang.srt.arg_groups.overrides import model_config_of
from sglang.srt.configs.deepseek_v41 import DeepseekV41Config

from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.config import RequestedConfig
from sglang_uvm_offload.flags import config_flag
from sglang_uvm_offload.plan.engine_shape import shape_of
from sglang_uvm_offload.plan.lookup_tables import FILE, PINNED, REGISTERED, VRAM
from sglang_uvm_offload.plan.machine import GIB
from sglang_uvm_offload.plan.model_shape import ModelShape
from sglang_uvm_offload.plugin.compat import resolving_view
from sglang_uvm_offload.plugin.launch import estimate, lookup_tables, ranks
from sglang_uvm_offload.plugin.launch.estimate import Estimate
from sglang_uvm_offload.requested_config import parse

pytestmark = pytest.mark.since("0.5.23", "models with such tables are newer")

FOLDER = Path(__file__).parents[1] / "fixtures" / "tables" / "Qwen--Qwen3.8-Flash-Next"
ROWS = 320_001_536
"""The rows of the published table (tests/fixtures/tables/README.md), each of 160 values."""
WORDS = ("--model-path", FOLDER, "--device", "cuda", "--skip-tokenizer-init", "--load-format", "dummy")
H200 = 143771
QWEN3 = config_folder("Qwen/Qwen3-30B-A3B")


LITE = FOLDER.parent / "meituan-longcat--LongCat-Flash-Lite"
FLAG = "--expert-offload-config lookup_tables"
NAMES = {"architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash"}
"""That SGLang itself gives the configuration."""


@pytest.fixture(scope="module")
def longcat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(LITE, tmp_path_factory.mktemp("longcat") / "model")
    (folder / "config.json").write_text(json.dumps(json.loads((LITE / "config.json").read_text()) | NAMES))
    return folder


@pytest.fixture(scope="module", autouse=True)
def asked_at_once(longcat: Path) -> None:
    launched = {"dtype": "bfloat16", "model_override_args": "{}"}
    ask_at_once([(folder, given) for folder in (FOLDER, longcat) for given in ({}, launched)])


@pytest.fixture(scope="module")
def shape() -> ModelShape:
    return shape_of(FOLDER)


def test_sglangs_class_has_the_published_table(shape: ModelShape) -> None:
    (table,) = shape.tables
    assert (table.kind, table.layer, table.nbytes) == ("ple", 1, ROWS * 160 * 2)
    assert table.nbytes < shape.total_bytes - shape.expert_bytes < table.nbytes + 20 * GIB
    assert shape.active_parameters < 10e9, "a token reads 16 rows"
    assert shape.total_parameters > ROWS * 160


def test_longcats_table_is_that_of_its_class(longcat: Path) -> None:
    """Twelve tables of 78 x 131,072 rows and a few."""
    shape = shape_of(longcat)
    (table,) = shape.tables
    assert (table.kind, table.layer) == ("ngram", 0)
    assert table.nbytes == pytest.approx(12 * 78 * 131072 * 256 * 2, rel=1e-5)
    assert shape.embedding == 131072 * 3072 * 2
    assert shape.total_parameters / 1e9 == pytest.approx(68.5, rel=0.005), "as stated by its publisher"


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ((), PINNED),
        (("--ple-offload-embedding",), PINNED),
        (("--ple-offload-embedding", "--ple-offload-backend", "file"), FILE),
        (("--no-ple-offload-embedding",), VRAM),
        (("--dtype", "float16"), VRAM),
    ],
)
def test_a_launch_keeps_the_table_where_sglangs_flags_say(
    cuda_arguments: Arguments, words: tuple[str, ...], place: str
) -> None:
    given = cuda_arguments(*WORDS, *words)
    assert lookup_tables.tables_in(resolving_view(given), model_config_of(given), in_host=True) == place


@pytest.fixture
def estimated(cuda_arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Estimate]:
    """Estimates a launch on two GPUs."""
    monkeypatch.setattr(estimate, "get_device_memory_capacity", lambda device: H200)
    monkeypatch.setattr(estimate, "free_by_gpu", lambda of: {rank.gpu: H200 << 20 for rank in of})
    monkeypatch.setattr(ranks, "visible_gpus", lambda: [("NVIDIA H200", H200 << 20)])

    def of(path: Path, requested: RequestedConfig, *words: object, host: int = 1 << 40) -> Estimate:
        monkeypatch.setattr(estimate, "host_available", lambda: host)
        return estimate.estimate(requested, cuda_arguments("--model-path", path, *WORDS[2:], "--tp-size", 2, *words))

    return of


IN_VRAM = "the lookup tables take {} of VRAM over the ranks that share them; {} keeps them in host RAM"


@pytest.mark.parametrize(
    ("words", "in_vram", "pinned"),
    [
        ((), False, True),
        (("--no-ple-offload-embedding",), True, False),
        (("--ple-offload-backend", "file"), False, False),
    ],
)
def test_a_launch_is_estimated_with_its_table(
    estimated: Callable[..., Estimate], words: tuple[str, ...], in_vram: bool, pinned: bool
) -> None:
    """On two ranks, each of which pins 64 GiB for its 48, beside 169 GiB of experts."""
    found = estimated(FOLDER, asked("vram"), *words)
    assert found.doubts == []
    assert (IN_VRAM.format("95.37 GiB", "--ple-offload-embedding") in found.facts) == in_vram
    short = estimated(FOLDER, asked("vram"), *words, host=260 * GIB).doubts
    assert ["128.00 GiB for lookup tables" in doubt for doubt in short] == [True] * pinned


def asked(tables: str) -> RequestedConfig:
    requested = parse({"num_resident": 128, "lookup_tables": tables, "stream_tokens": "inf"})
    assert requested is not None
    return requested


@pytest.mark.parametrize("given", ["vram", "host"])
def test_longcats_tables_are_estimated_where_the_flag_keeps_them(
    estimated: Callable[..., Estimate], longcat: Path, given: str
) -> None:
    """On two ranks, beside 32 GiB of experts."""
    found = estimated(longcat, asked(given))
    assert found.doubts == []
    assert (IN_VRAM.format("58.50 GiB", f"{FLAG} host") in found.facts) == (given == "vram")
    short = estimated(longcat, asked(given), host=60 * GIB).doubts
    assert ["58.50 GiB for lookup tables" in doubt for doubt in short] == [True] * (given == "host")


REFUSED = f"{FLAG} host: the model ({{}}) has no LongCat-style n-gram embedding; {{}}"


def test_the_flag_is_refused_for_a_model_without_such_tables(longcat: Path, sglang: Nursery) -> None:
    def case(folder: Path) -> dict[str, Any]:
        words = ["--model-path", str(folder), "--device", "cpu", *WORDS[4:], "--expert-offload-num-resident", "4"]
        return {"argv": [*words, "--expert-offload-config", '{"lookup_tables": "host"}'], "resolve": True}

    ended = launched({"qwen3": case(QWEN3), "longcat": case(longcat)}, sglang)
    assert REFUSED.format("Qwen3MoeForCausalLM", "remove it") in ended["qwen3"]["error"]
    assert FLAG not in ended["longcat"]["error"]
    assert ended["longcat"]["exit"] is None


def test_the_flag_names_sglangs_own_where_it_has_one(cuda_arguments: Arguments) -> None:
    (problem,) = lookup_tables.problems(asked("host"), model_config_of(cuda_arguments(*WORDS)))
    own = "use SGLang's own flag for its tables, --ple-offload-embedding"
    assert problem == REFUSED.format("Qwen4ExpForConditionalGeneration", own)
    assert lookup_tables.problems(asked("vram"), model_config_of(cuda_arguments(*WORDS))) == []


def test_plan_takes_the_flag(longcat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LongCat-Flash-Lite in bf16 fits a GPU of 80 GB without half of its weights."""
    assert main(["plan", str(longcat), "--machine", "1xH100", "--lookup-tables", "host", "--explain"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "lookup tables 58.50 GiB, in managed host RAM, which take 58.50 GiB of it" in shown
    assert config_flag(lookup_tables="host") in shown
    assert main(["plan", str(FOLDER), "--machine", "2xH200", "--lookup-tables", "host"]) == 2
    assert "--lookup-tables host: the model has no n-gram embedding" in capsys.readouterr().err


def test_an_engram_table_is_where_its_variables_say(cuda_arguments: Arguments, monkeypatch: pytest.MonkeyPatch) -> None:
    """By SGLang's class of configs; a launch of such a model needs its tokenizer."""
    values = {"engram_layer_ids": [1, 14], "engram_num_embeddings": [384006168, 384016682], "engram_head_dim": 256}
    model = SimpleNamespace(hf_config=DeepseekV41Config(architectures=["DeepseekV41ForCausalLM"], **values))
    cfg = resolving_view(cuda_arguments(*WORDS))
    assert lookup_tables.tables_in(cfg, model, in_host=True) == VRAM
    monkeypatch.setenv("SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE", "1")
    assert lookup_tables.tables_in(cfg, model, in_host=True) == REGISTERED
    monkeypatch.setenv("SGLANG_OPT_DSV41_ENGRAM_PEER_SHARDS", "1")
    assert lookup_tables.tables_in(cfg, model, in_host=True) == VRAM


def test_plan_takes_sglangs_flags_for_the_models_that_sglang_takes_them_for(capsys: pytest.CaptureFixture[str]) -> None:
    """And assumes SGLang's default without them."""
    for words, place in (
        ([], "in pinned host RAM, which take 128.00 GiB of it"),
        (["--ple-offload-backend", "file"], "in a file"),
        (["--no-ple-offload-embedding"], "in VRAM"),
    ):
        assert main(["plan", str(FOLDER), "--machine", "2xH200", "--explain", *words]) in (0, 1)
        assert f"lookup tables 95.37 GiB, {place}" in " ".join(capsys.readouterr().out.split())
    other = str(Path(__file__).parents[1] / "fixtures" / "models" / "gpt-oss-120b.json")
    assert main(["plan", other, "--machine", "8xH20", "--ple-offload-embedding"]) == 2
    assert "--ple-offload-embedding: SGLang accepts it for Qwen4ExpForConditionalGeneration only" in capsys.readouterr().err
    assert main(["plan", other, "--machine", "8xH20", "--no-ple-offload-embedding"]) == 0
