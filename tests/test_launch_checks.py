"""The headroom, as it is taken off what SGLang may use."""

from types import SimpleNamespace

import pytest

from sglang_uvm_offload.config import FlagError, OffloadConfig
from sglang_uvm_offload.plugin import launch_checks


@pytest.fixture(autouse=True)
def gpu_of_100_gib(monkeypatch):
    monkeypatch.setattr(launch_checks, "get_device_memory_capacity", lambda device: 100 * 1024)


def fraction(headroom_gb: float, device: str = "cuda", given: float | None = 0.9) -> float | None:
    config = OffloadConfig(num_resident="4", headroom_gb=headroom_gb)
    return launch_checks.fraction_with_headroom(config, SimpleNamespace(device=device, mem_fraction_static=given))


def test_headroom_is_taken_off_the_fraction_that_weights_and_cache_get():
    assert fraction(2.5) == pytest.approx(0.9 - 0.025)


@pytest.mark.parametrize(("headroom_gb", "device", "given"), [(0.0, "cuda", 0.9), (2.5, "cpu", 0.9), (2.5, "cuda", None)])
def test_nothing_changes_without_headroom_a_gpu_or_a_fraction(headroom_gb, device, given):
    assert fraction(headroom_gb, device, given) is None


def test_a_headroom_that_leaves_nothing_is_refused():
    with pytest.raises(FlagError, match=r"--expert-offload-headroom-gb 95.0: leaves nothing of --mem-fraction-static 0.9"):
        fraction(95.0)
