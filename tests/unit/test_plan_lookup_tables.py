"""Tables of which a token reads a few rows: what memory they take, where, and what a plan says of them."""

from __future__ import annotations

import dataclasses
import shlex
from functools import cache

import pytest
from builders.true_shape import config_folder

from sglang_uvm_offload.flags import config_flag, spelled
from sglang_uvm_offload.memory.host_ram import BOOKKEEPING_SHARE
from sglang_uvm_offload.plan.case import Case
from sglang_uvm_offload.plan.engine_shape import shape_of
from sglang_uvm_offload.plan.inputs import Parallel, Workload
from sglang_uvm_offload.plan.lookup_tables import FILE, MANAGED, PINNED, REGISTERED, VRAM, LookupTable, kind_of
from sglang_uvm_offload.plan.machine import GIB, preset
from sglang_uvm_offload.plan.model_shape import ModelShape
from sglang_uvm_offload.plan.outcome import Plan
from sglang_uvm_offload.plan.planner import plan, render
from sglang_uvm_offload.requested_config import of_arguments
from sglang_uvm_offload.residency.budget import Division

LAYERS = {"ple": 1, "engram": 14, "ngram": 0}
BYTES = {"ple": 40 * GIB, "engram": (1 << 28) * (256 + 8), "ngram": 12 * (10 << 20) * 256 * 2}
GROUPS = Parallel(tp=8, dp=4, dp_attention=True)
NONE = Division(0, 0, 0)


@cache
def model(kind: str = "") -> ModelShape:
    """Qwen3-30B-A3B with such a table."""
    without = shape_of(config_folder("Qwen/Qwen3-30B-A3B"))
    if not kind:
        return without
    tables = (LookupTable(kind, LAYERS[kind], BYTES[kind]),)
    return dataclasses.replace(without, tables=tables, total_bytes=without.total_bytes + BYTES[kind])


def case(kind: str, place: str = VRAM, parallel: Parallel | None = None, machine: str = "2xH200") -> Case:
    where = preset(machine)
    return Case(model(kind), where, Workload(4096), parallel or Parallel(tp=where.gpus), tables_in=place)


@cache
def planned(kind: str, place: str = VRAM, machine: str = "2xH200") -> Plan:
    return plan(case(kind, place, machine=machine))


@pytest.mark.parametrize(("kind", "sharers"), [("ple", (8, 8)), ("engram", (8, 8)), ("ngram", (8, 2))])
def test_ranks_divide_a_table_as_its_class_does(kind: str, sharers: tuple[int, int]) -> None:
    for parallel, number in zip((Parallel(tp=8), GROUPS), sharers, strict=True):
        assert case(kind, parallel=parallel).table_bytes(0) == BYTES[kind] // number


def test_a_table_takes_vram_of_the_stage_of_its_layer_and_no_time_of_a_step() -> None:
    early, late = (case("engram", parallel=Parallel(tp=2, pp=2)).table_bytes(stage) for stage in range(2))
    assert (early, late) == (BYTES["engram"] // 2, 0)
    without, found = case(""), case("ple")
    assert found.rank(0, NONE).used_bytes == without.rank(0, NONE).used_bytes + BYTES["ple"] // 2
    assert without.ranks[0].free - found.ranks[0].free == BYTES["ple"] // 2
    assert found.costs == without.costs


def test_pinned_tables_are_rounded_up_to_powers_of_two_and_mapped_ones_are_not() -> None:
    """40 GiB on one rank take 64; on two ranks, each has 20 and takes 32."""
    for ranks in (1, 2):
        assert case("ple", PINNED, Parallel(tp=ranks)).table_host_bytes == 64 * GIB
    assert case("engram", REGISTERED).table_host_bytes == BYTES["engram"]
    assert case("ngram", MANAGED).table_host_bytes == BYTES["ngram"], "in whole blocks"
    assert case("ngram", MANAGED, GROUPS).table_host_bytes == 4 * BYTES["ngram"], "each group has its own"
    assert case("ple", PINNED, Parallel(tp=1, dp=2)).table_host_bytes == 128 * GIB, "each replica has its own"


@pytest.mark.parametrize(("kind", "place"), [("ple", PINNED), ("ple", FILE), ("engram", REGISTERED), ("ngram", MANAGED)])
def test_a_table_elsewhere_takes_no_vram(kind: str, place: str) -> None:
    without, found = case(""), case(kind, place)
    assert found.rank(0, NONE) == without.rank(0, NONE)
    more = found.host_need(NONE).total - without.host_need(NONE).total
    kept_of_pages = int(BOOKKEEPING_SHARE * found.table_host_bytes) if place == MANAGED else 0
    assert more == pytest.approx(found.table_host_bytes + kept_of_pages, abs=1)
    assert bool(more) == (place != FILE)


@pytest.mark.parametrize(("kind", "place"), [("ngram", PINNED), ("engram", PINNED), ("ple", REGISTERED), ("ple", MANAGED)])
def test_a_table_stays_in_vram_where_sglang_has_no_way_to_keep_it_there(kind: str, place: str) -> None:
    found = case(kind, place)
    assert found.table_bytes(0) > 0
    assert found.table_host_bytes == 0


def test_a_plan_shows_the_table_and_what_frees_its_vram() -> None:
    text = render(planned("ple"), explain=True)
    assert "  lookup tables " in text
    assert "the lookup tables take 40.00 GiB of VRAM over the ranks that share them; --ple-offload-embedding keeps them" in text
    assert "--no-ple-offload-embedding" in text, "SGLang's default is the other"
    text = render(planned("ple", PINNED), explain=True)
    assert "40.00 GiB, in pinned host RAM, which take 64.00 GiB of it" in text
    assert "of VRAM over" not in text
    assert planned("ple", PINNED).flags.count("--ple-offload-embedding") == 1
    assert "--ple-offload-backend file" in planned("ple", FILE).flags
    assert "; --expert-offload-config lookup_tables host keeps them in host RAM" in render(planned("ngram"))
    assert "; SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE=1 keeps them in host RAM" in render(planned("engram"))
    assert "lookup tables" not in render(planned(""), explain=True)
    assert not [flag for kind in ("ngram", "engram", "") for flag in planned(kind).flags if "ple" in flag]
    variable = "SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE=1"
    assert f"\n  {variable} python -m sglang.launch_server " in render(planned("engram", REGISTERED))
    assert [planned(*of).environment for of in (("engram",), ("ple", PINNED), ("ngram", MANAGED))] == [(), (), ()]


def test_the_flags_of_a_plan_with_tables_in_host_ram_turn_offloading_on_though_all_experts_fit() -> None:
    found = planned("ngram", MANAGED)
    assert found.num_resident == found.num_experts
    assert found.flags.count(config_flag(lookup_tables="host")) == 1
    flags = dict(shlex.split(flag) for flag in found.flags if " " in flag)
    requested = of_arguments({"num_resident": flags[spelled("num_resident")], "config": flags[spelled("config")]})
    assert requested is not None
    assert (requested.num_resident, requested.tables_in_host) == (found.num_experts, True)
    assert any("offloading is needed for lookup tables only" in note for note in found.notes)
    assert not any("num-resident" in flag for flag in planned("ngram").flags)


def test_only_a_file_frees_memory_that_gpu_and_host_share() -> None:
    for place in (VRAM, PINNED):
        (note,) = [each for each in planned("ple", place, machine="1xSPARK").notes if "lookup tables" in each]
        assert note.endswith("; --ple-offload-embedding --ple-offload-backend file keeps them in a file")
    assert not any("lookup tables" in each for each in planned("ple", FILE, machine="1xSPARK").notes)
    (note,) = [each for each in planned("ngram", machine="1xSPARK").notes if "lookup tables" in each]
    assert note.endswith("; nothing frees it")


def test_moving_the_table_is_a_remedy_where_it_makes_the_model_fit() -> None:
    """Two GPUs of 24 GiB hold their half of the other weights, and not 20 GiB of a table."""
    short = planned("ple", machine="2x4090")
    assert not short.fits
    assert "lookup tables in host RAM (--ple-offload-embedding)" in short.needs
    assert planned("ple", PINNED, machine="2x4090").fits
    little = dataclasses.replace(preset("2x4090"), host_bytes=60 * GIB)
    (problem,) = plan(dataclasses.replace(case("ple", PINNED), machine=little)).problems
    assert "64.00 GiB for lookup tables" in problem


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.1.ple.ple_embedding.ngram_embedding.shard_0.weight", "ple"),
        ("model.layers.3.engram.embed.weight", "engram"),
        ("model.ngram_embeddings.embedders.11.weight", "ngram"),
        ("model.oe_embeder.weight", "ngram"),
        ("model.embed_tokens.weight", None),
        ("model.layers.3.mlp.experts.5.gate_proj.weight", None),
    ],
)
def test_a_table_is_known_by_its_name(name, kind):
    assert kind_of(name) == kind
