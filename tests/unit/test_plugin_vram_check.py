"""The refusal of a number of residents that cannot fit: on which GPU, and what is said of it."""

from __future__ import annotations

import logging
import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders.launch import resolved
from builders.profiles import some

from sglang_uvm_offload.cuda.device import DriverError
from sglang_uvm_offload.plugin.checks import vram_check
from sglang_uvm_offload.plugin.checks.vram_check import shortages
from sglang_uvm_offload.plugin.launch import auto_resident, expert_bytes
from sglang_uvm_offload.plugin.launch.planned_launch import Rank
from sglang_uvm_offload.requested_config import parse
from sglang_uvm_offload.routing.profile import Profile
from sglang_uvm_offload.sizing.checkpoint import load
from sglang_uvm_offload.sizing.inputs import Assumptions, Parallel, Reserve, Workload
from sglang_uvm_offload.sizing.launch import Launch
from sglang_uvm_offload.sizing.least_memory import LeastMemory
from sglang_uvm_offload.sizing.machine import GIB, preset
from sglang_uvm_offload.sizing.model_files import ModelFiles
from sglang_uvm_offload.sizing.rank_memory import Case

pytestmark = pytest.mark.sglang

MODEL = Path(__file__).parents[1] / "fixtures" / "models" / "qwen3-235b-a22b.json"
FREE = 90 * GIB


def refusals(
    num_resident: int,
    parallel: Parallel,
    free: dict[int, int],
    fraction: float = 0.9,
    stream_gb: float | None = None,
    slots: int | None = None,
) -> list[str]:
    config = parse({"num_resident": num_resident, "slots": slots})
    assert config is not None
    reserve = Reserve(fraction, free_vram_bytes=min(free.values()), stream_gb=stream_gb)
    case = Case(load(MODEL), preset("8xH20"), Workload(4096), parallel, reserve, Assumptions())
    per_replica = parallel.tp * parallel.pp
    ranks = [
        Rank(gpu // per_replica, gpu % per_replica // parallel.tp, gpu % parallel.tp, gpu) for gpu in range(parallel.ranks)
    ]
    return shortages(config, LeastMemory(case, 64), ranks, free)


def even(gpus: int, **others: int) -> dict[int, int]:
    return dict.fromkeys(range(gpus), FREE) | {int(gpu.removeprefix("gpu")): nbytes for gpu, nbytes in others.items()}


def test_a_number_is_refused_from_where_it_certainly_does_not_fit():
    assert refusals(128, Parallel(tp=8), even(8)) == []
    (line,) = refusals(128, Parallel(tp=4), even(4))
    most = int(line.split("give at most ")[1].split(",")[0])
    assert refusals(most, Parallel(tp=4), even(4)) == []
    assert 0 < most < 128
    nearly = next(n for n in range(most, 129) if refusals(n, Parallel(tp=4), even(4)))
    assert nearly <= most + 6, "the bounds are close"


def test_the_line_has_the_flag_the_value_the_gpu_the_need_and_the_remedy():
    (line,) = refusals(128, Parallel(tp=4), even(4, gpu2=FREE - GIB))
    assert line.startswith("--expert-offload-num-resident 128: does not fit on GPU 2 (rank 2): at least ")
    assert "for 128 of 128 experts a layer" in line
    assert "a KV cache of 64 tokens, without which SGLang does not start" in line
    assert "of 89.00 GiB free VRAM are available, by --mem-fraction-static 0.9 minus --expert-offload-headroom-gb 1; " in line
    assert "give at most " in line
    assert "auto" in line.split("; ")[-1]


def test_stream_buffers_that_were_asked_for_are_needed_too():
    parallel, free = Parallel(tp=4), even(4)
    least = bisect_left(range(129), 1, key=lambda n: len(refusals(n, parallel, free, stream_gb=4)))
    assert refusals(least, parallel, free) == [], "auto does without"
    (line,) = refusals(least, parallel, free, stream_gb=4)
    assert "of other weights" not in line
    assert "for other weights, 2.25 GiB for stream buffers (--expert-offload-stream-buffer-gb 4), " in line
    most = int(line.split("give at most ")[1].split(",")[0])
    assert refusals(most, parallel, free, stream_gb=4) == []


def test_slots_take_as_much_as_residents():
    parallel, free = Parallel(tp=4), even(4)
    most = int(refusals(128, parallel, free)[0].split("give at most ")[1].split(",")[0])
    assert refusals(most - 20, parallel, free, slots=20) == []
    (line,) = refusals(most - 20, parallel, free, slots=40)
    assert line.startswith(f"--expert-offload-num-resident {most - 20} and --expert-offload-slots 40: does not fit on GPU 0")
    assert f"for {most + 20} of 128 experts a layer" in line
    assert line.endswith(f"give at most {most}, or auto (residents and slots together)")


def test_a_busy_gpu_of_one_replica_does_not_count_for_the_other():
    parallel = Parallel(tp=4, dp=2)
    (line,) = refusals(60, parallel, even(8, gpu5=20 * GIB))
    assert "on GPU 5 (rank 1 of replica 1)" in line
    assert "no number fits" not in refusals(60, parallel, even(8, gpu5=50 * GIB))[0]
    assert refusals(60, parallel, even(8)) == []


def test_a_gpu_of_another_replica_changes_nothing_of_what_is_granted():
    """SGLang takes the least free VRAM of the ranks that serve together. The last stage is short first."""
    parallel = Parallel(pp=4, dp=2)
    refused = bisect_left(range(129), 1, key=lambda n: len(refusals(n, parallel, even(8), 0.5)))
    lines = [refusals(refused, parallel, free, 0.5)[0] for free in (even(8), even(8, gpu4=FREE - 3 * GIB // 2))]
    assert "GPU 3" in lines[0]
    assert lines[0].split("; give")[0] == lines[1].split("; give")[0]


def test_the_stage_that_is_short_is_named():
    (line,) = refusals(128, Parallel(tp=2, pp=2), even(4))
    assert "of pipeline stage" in line


@pytest.mark.parametrize("free", [2 * GIB, 0])
def test_where_no_number_fits_larger_gpus_are_the_remedy(free):
    (line,) = refusals(1, Parallel(tp=8), even(8, gpu0=free))
    assert line.endswith("; no number fits: use more or larger GPUs")


LAUNCH = Launch(
    ModelFiles(str(MODEL)),
    **{"parallel": Parallel(tp=8), "vram_bytes": 96 * GIB, "free_vram_bytes": 96 * GIB, "host_bytes": 4096 * GIB},
    **{"mem_fraction_static": 0.5, "headroom_gb": 1.0, "model_context": 32768},
)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """Checks a number, or chooses one for ``auto``, on eight GPUs; returns what was warned of."""
    view = resolved()

    def check(
        num_resident: object, launch: Launch = LAUNCH, free: object = None, slots: object = None, profile: Profile | None = None
    ) -> list[str]:
        def free_by_gpu(ranks: list[Rank]) -> dict[int, int]:
            if free is not None:
                raise DriverError("no driver")
            return even(8)

        # What headers show of a launch that no plan counts: over real arguments, in tests/engine/test_memory_account.py.
        monkeypatch.setattr(expert_bytes, "is_more_than_planned", lambda args: False)
        monkeypatch.setattr(expert_bytes, "problems", lambda config, args: [])
        for module in (vram_check, auto_resident):
            monkeypatch.setattr(module, "resolving_view", lambda args: view)
            monkeypatch.setattr(module, "ranks", lambda cfg: [Rank(0, 0, gpu, gpu) for gpu in range(8)])
            monkeypatch.setattr(module, "planned_launch", lambda config, args, **_: launch)
            monkeypatch.setattr(module, "free_by_gpu", free_by_gpu)
        config = parse({"num_resident": num_resident, "slots": slots})
        assert config is not None
        caplog.clear()
        with caplog.at_level(logging.INFO):
            if config.num_resident is None:
                plan = auto_resident.fitting(config, None, profile)
                check.chosen = plan.num_resident, plan.slots, plan.stream_buffers  # type: ignore[attr-defined]
            else:
                buffers, found = vram_check.checked(config, None)
                assert found == []
                check.chosen = config.num_resident, config.slots, buffers  # type: ignore[attr-defined]
        return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]

    return check


@pytest.mark.parametrize("number", [20, "auto"])
def test_the_cost_of_drafts_is_a_warning(launched, number):
    assert launched(number) == []
    (line,) = launched(number, replace(LAUNCH, draft_tokens=4))
    assert line.startswith(f"--expert-offload-num-resident {number}: drafts are predicted to cost more than they bring")


def test_what_keeps_a_number_from_being_checked_is_a_warning(launched):
    assert launched(20, free="unknown") == ["--expert-offload-num-resident 20 is not checked against VRAM: no driver"]
    (line,) = launched(20, replace(LAUNCH, parallel=Parallel(tp=8, ep=3)))
    assert "--ep-size 3: must divide --tp-size 8" in line


def test_drafts_that_the_checkpoint_lacks_are_a_warning(launched):
    (line,) = launched(20, replace(LAUNCH, speculative=True, at_least=True))
    assert line == "--expert-offload-num-resident 20: the checkpoint has no draft layers of its own to count"


def test_the_choice_is_logged_with_the_stream_buffers_that_it_leaves_room_for(launched, caplog):
    launched("auto")
    (line,) = [record.getMessage() for record in caplog.records if "experts a layer fit in VRAM" in record.getMessage()]
    assert re.search(r"next to [\d.]+ GiB of other weights, 1.12 GiB of stream buffers and [\d.]+ GiB of KV cache for ", line)
    launched("auto", replace(LAUNCH, stream_gb=0))
    assert "stream" not in caplog.text


def divided(launched: Any, caplog: pytest.LogCaptureFixture, **given: object) -> tuple[int, int, list[str]]:
    """The residents and the slots of ``auto``, and the log lines of the division."""
    launched("auto", **given)
    lines = [line for record in caplog.records if (line := record.getMessage()).startswith("--expert-offload-slots")]
    return *launched.chosen[:2], lines


def test_auto_divides_the_rows_and_the_log_says_by_what(launched, caplog):
    few = replace(LAUNCH, mem_fraction_static=0.3)
    whole, none, nothing = divided(launched, caplog, launch=few)
    assert (none, nothing) == (0, [])
    residents, slots, (line,) = divided(launched, caplog, launch=few, slots="auto")
    assert slots == int(0.75 * (residents + slots))
    assert abs(residents + slots - whole) <= 2
    assert line == (
        f"--expert-offload-slots: of {residents + slots} rows a layer in VRAM, {slots} are slots and {residents} residents "
        "(75%, the default with 128 experts)"
    )
    assert f"auto: {residents + slots} of 128 experts a layer fit in VRAM" in caplog.text
    residents, slots, (line,) = divided(launched, caplog, launch=few, slots=20)
    assert (slots, line[-10:]) == (20, "(as given)")


def test_auto_divides_by_the_profiles_split_of_the_nearest_residency(launched, caplog):
    few = replace(LAUNCH, mem_fraction_static=0.3)
    profile = some().with_slot_shares({0.01: 1.0, 0.5: 0.25})
    residents, slots, (line,) = divided(launched, caplog, launch=few, slots="auto", profile=profile)
    assert slots == (residents + slots) // 4
    assert line.endswith("residents (25%, by the profile, for 50% in VRAM)")
    assert divided(launched, caplog, launch=few, slots=20, profile=profile)[1] == 20
    without = divided(launched, caplog, launch=few, slots="auto", profile=some())
    assert without[2][0].endswith("(75%, the default with 128 experts)")


def test_the_log_says_where_host_ram_keeps_auto_from_its_share(launched, caplog):
    few = replace(LAUNCH, mem_fraction_static=0.3, host_bytes=320 * GIB)
    residents, slots, (line,) = divided(launched, caplog, launch=few, slots="auto")
    assert 0 < slots < int(0.75 * (residents + slots))
    assert line.endswith("(75%, the default with 128 experts; reduced to what fits)")


@pytest.mark.parametrize("number", [20, "auto"])
def test_the_launch_gets_as_many_stream_buffers_as_fit(launched, number):
    launched(number)
    assert launched.chosen[2] == 2
    launched(number, replace(LAUNCH, stream_gb=0))
    assert launched.chosen[2] == 0
    if number != "auto":  # which chooses fewer residents rather
        launched(number, replace(LAUNCH, mem_fraction_static=0.15))
        assert launched.chosen[2] == 0


def test_a_size_of_buffers_below_one_is_refused_before_anything_loads(launched, monkeypatch):
    launched(20)
    monkeypatch.setattr(vram_check, "planned_launch", lambda config, args, **_: replace(LAUNCH, stream_gb=0.1))
    config = parse({"num_resident": 20, "stream_buffer_gb": 0.1})
    assert config is not None
    _, (line,) = vram_check.checked(config, None)
    assert line == "--expert-offload-stream-buffer-gb 0.1: one buffer takes 576.0 MiB; give that, auto, or 0"


def test_a_number_beyond_the_experts_is_left_to_the_check_that_names_them(launched):
    assert launched(129) == []
