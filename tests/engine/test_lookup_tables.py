"""Where SGLang keeps a model's lookup tables, by its own arguments, and what they hold, by its own class."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from arguments import Arguments
from builders.true_shape import write

from sglang_uvm_offload.plugin import doctor
from sglang_uvm_offload.plugin.compat import model_config_of, resolving_view
from sglang_uvm_offload.plugin.launch import expert_bytes, lookup_tables, planned_launch
from sglang_uvm_offload.requested_config import parse
from sglang_uvm_offload.sizing.checkpoint_shape import CheckpointShape
from sglang_uvm_offload.sizing.engine_shape import shape_by_engine
from sglang_uvm_offload.sizing.lookup_tables import FILE, PINNED, REGISTERED, VRAM
from sglang_uvm_offload.sizing.machine import GIB
from sglang_uvm_offload.sizing.safetensors_header import TensorInfo

pytestmark = pytest.mark.since("0.5.23", "models with such tables are newer")

FOLDER = Path(__file__).parents[1] / "fixtures" / "tables" / "Qwen--Qwen3.8-Flash-Next"
ROWS = 320_001_536
"""Of the published table (tests/fixtures/tables/README.md), each of 160 values."""
WORDS = ("--model-path", FOLDER, "--device", "cuda", "--skip-tokenizer-init", "--load-format", "dummy")
H200 = 143771


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> CheckpointShape:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return shape_by_engine(FOLDER)


def test_sglangs_class_has_the_published_table(shape: CheckpointShape) -> None:
    (table,) = shape.tables
    assert (table.kind, table.layer, table.nbytes) == ("ple", 1, ROWS * 160 * 2)
    assert table.nbytes < shape.total_bytes - shape.expert_bytes < table.nbytes + 20 * GIB
    assert shape.active_parameters < 10e9, "a token reads 16 rows"
    assert shape.total_parameters > ROWS * 160


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
    assert lookup_tables.tables_in(resolving_view(given), model_config_of(given)) == place
