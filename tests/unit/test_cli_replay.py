"""The options of ``replay``: a value that makes no sense is refused before anything is replayed, in the words of the flag."""

import numpy as np
import pytest

from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.replay import simulator
from sglang_uvm_offload.routing.trace import Trace


@pytest.fixture
def saved(tmp_path):
    rng = np.random.default_rng(0)
    Trace(rng.integers(0, 4, (20, 2, 1)), np.array([10, 10]), 4).save(tmp_path / "trace.npz")
    return tmp_path / "trace.npz"


def replay(trace, *flags):
    return main(["replay", str(trace), "--residency", "0.5", "--policy", "lru", *flags])


@pytest.mark.parametrize(
    ("flag", "value", "right"),
    [
        ("--residency", "nan", "0..1"),
        ("--warmup-fraction", "-0.5", "0..1"),
        ("--batch", "0", "at least 1 and at most 4096"),
        ("--batch", "1000000000000", "at least 1 and at most 4096"),
        ("--expert-mib", "inf", "1e-06 to 1e+06"),
        ("--expert-mib", "nan", "1e-06 to 1e+06"),
        ("--expert-mib", "-4", "1e-06 to 1e+06"),
        ("--expert-mib", "1e-320", "1e-06 to 1e+06"),
        ("--link-gbps", "inf", "1e-06 to 1e+06"),
        ("--link-gbps", "nan", "1e-06 to 1e+06"),
        ("--link-gbps", "1e-320", "1e-06 to 1e+06"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_before_replaying(saved, monkeypatch, capsys, flag, value, right):
    monkeypatch.setattr(simulator, "replay", lambda *_: pytest.fail("replayed"))
    assert replay(saved, flag, value) == 2
    said = capsys.readouterr()
    assert not said.out
    assert flag in said.err
    assert value in said.err or str(float(value)) in said.err
    assert right in said.err
    assert len(said.err.splitlines()) == 1


def test_all_that_is_wrong_is_named_at_once(saved, capsys):
    assert replay(saved, "--batch", "0", "--link-gbps", "0") == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_the_bounds_themselves_are_fine(saved, capsys):
    assert replay(saved, "--batch", "4096", "--link-gbps", "1e-6", "--expert-mib", "1e6", "--json") == 0
    assert "Infinity" not in capsys.readouterr().out


def test_a_trace_too_large_for_this_machine_is_one_line(saved, monkeypatch, capsys):
    def out_of_memory(*_):
        raise MemoryError("Unable to allocate 1.00 TiB")

    monkeypatch.setattr(simulator, "replay", out_of_memory)
    assert replay(saved) == 2
    assert capsys.readouterr().err == f"cannot replay {saved}: Unable to allocate 1.00 TiB\n"
