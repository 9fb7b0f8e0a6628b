"""What a launch with offloading cannot have: SGLang's own argument code, up to where a model would load, with one flag each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from checkpoints import Checkpoints
from launches import launched
from nursery import Nursery

N = "--expert-offload-num-resident"
REFUSED: dict[tuple[str, str], list[str]] = {
    ("Launch", "--enable-paged-experts"): ["--enable-paged-experts", "--paged-experts-num-resident", "8"],
    ("Launch", "--cpu-offload-gb"): ["--cpu-offload-gb", "2"],
    ("Launch", "--offload-group-size (OffloaderV2)"): ["--offload-group-size", "4", "--offload-num-in-group", "1"],
    ("Launch", "KTransformers"): ["--kt-weight-path", "/weights", "--kt-method", "AMXINT4"],
    ("Launch", "--enable-pdmux"): ["--enable-pdmux"],
    ("Launch", "--use-ray"): ["--use-ray"],
    ("Launch", "--enable-nvidia-megakernel"): ["--enable-nvidia-megakernel"],
    ("Launch", "--weight-cache-mode"): ["--weight-cache-mode", "client"],
    ("Launch", "--load-format remote_instance"): [
        *["--load-format", "remote_instance", "--remote-instance-weight-loader-seed-instance-ip", "127.0.0.1"],
        *["--remote-instance-weight-loader-seed-instance-service-port", "30000"],
        *["--remote-instance-weight-loader-send-weights-group-ports", "[30001]"],
    ],
    ("Format", "bitsandbytes"): ["--load-format", "bitsandbytes", "--quantization", "bitsandbytes"],
    ("Format", "GGUF"): ["--load-format", "gguf"],
    ("Parallel", "two-batch overlap"): ["--enable-two-batch-overlap"],
    ("Parallel", "elastic EP"): ["--elastic-ep-backend", "mooncake"],
    ("Parallel", "DWDP"): ["--tp-size", "2", "--dwdp-size", "2"],
}


IGNORED = {
    "one": ["--kt-num-gpu-experts", "4"],
    "several": ["--kt-method", "AMXINT8", "--kt-cpuinfer", "8", "--offload-num-in-group", "2"],
    "none": [],
}


@pytest.fixture(scope="module")
def launch(checkpoints: Checkpoints, sglang: Nursery) -> dict[str, Any]:
    begin = ["--model-path", str(checkpoints("qwen3_moe")), "--device", "cpu", N, "4"]
    given = {what: more for (_, what), more in REFUSED.items()} | IGNORED
    return launched({what: {"argv": [*begin, *more], "resolve": True} for what, more in given.items()}, sglang)


NEWEST = pytest.mark.since("0.5.23", "it has no such flag")
SINCE = {"--enable-paged-experts": [NEWEST], "--enable-nvidia-megakernel": [NEWEST]}
BY_ROW = [
    pytest.param(what, more[0], marks=[pytest.mark.refused(group, what), *SINCE.get(what, [])])
    for (group, what), more in REFUSED.items()
]


@pytest.mark.parametrize(("what", "flag"), BY_ROW)
def test_a_launch_ends_with_the_flag_and_a_reason(
    what: str, flag: str, launch: dict[str, Any], record_property: Callable[[str, object], None]
) -> None:
    ended = launch[what]
    assert ended["exit"] == 2, ended["error"][-3000:]
    told = [line for line in ended["error"].splitlines() if "cannot be combined with" in line and not line.startswith("usage")]
    assert told, ended["error"][-3000:]
    name, _, reason = told[0].partition(f": cannot be combined with {N}: ")
    assert flag in name or flag == "--tp-size"
    assert reason
    record_property("reason", reason)


@pytest.mark.parametrize(
    ("case", "told"),
    [
        ("one", ["--kt-num-gpu-experts 4: no effect without --kt-weight-path"]),
        (
            "several",
            [
                "--kt-method AMXINT8, --kt-cpuinfer 8: no effect without --kt-weight-path",
                "--offload-num-in-group 2: no effect without --offload-group-size",
            ],
        ),
        ("none", []),
    ],
)
def test_flags_of_other_offloading_without_effect_are_told(case: str, told: list[str], launch: dict[str, Any]) -> None:
    assert launch[case]["exit"] is None, launch[case]["error"]
    assert launch[case]["error"].count("no effect without") == len(told), launch[case]["error"]
    for line in told:
        assert line in launch[case]["error"]
