"""What the log of a launch says of its profiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders.profiles import MODEL, rewritten, saved, some

from sglang_uvm_offload.config import RequestedConfig
from sglang_uvm_offload.plugin.launch.profiles import announce
from sglang_uvm_offload.requested_config import parse
from sglang_uvm_offload.routing.counts import RoutingCounts
from sglang_uvm_offload.routing.merged_profile import load_for
from sglang_uvm_offload.routing.profile import Profile


def told(caplog: pytest.LogCaptureFixture, **flags: Any) -> list[tuple[str, str]]:
    config = parse({"num_resident": 4, **flags})
    assert isinstance(config, RequestedConfig)
    with caplog.at_level("INFO"):
        announce(load_for(MODEL.name, MODEL.architecture, config.profiles, config.save_profile), config)
    return [(record.levelname, record.getMessage().removeprefix("Expert offload: ")) for record in caplog.records]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "p.npz"


def counted(tokens: int) -> Profile:
    """In each of three layers, phases and eight experts as many."""
    counts = np.zeros((3, 2, 2, 8), dtype=np.int64)
    counts[:, :, 0] = tokens
    return Profile(MODEL, RoutingCounts(counts, (1, 1)))


def test_the_routings_of_all_profiles_choose_residents(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = saved(path.with_name("other.npz"), counted(1000))
    saved(path, counted(25))
    expected = f"profile {path}, {other}: {1025 * 3 * 2 * 8:,} routings choose residents"
    assert told(caplog, profile=f"{path},{other}") == [("INFO", expected)]
    assert "49,200" in expected


def test_a_profile_that_chooses_no_residents_names_the_flag(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved(path, counted(1))
    expected = f"profile {path}: 48 routings do not choose residents (--expert-offload-resident-selection first_n)"
    assert told(caplog, profile=path, resident_selection="first_n") == [("INFO", expected)]


def test_a_new_file_is_new_and_one_without_routing_has_none(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, profile=path) == [("INFO", f"profile {path}: new file; the server saves its routing there")]
    caplog.clear()
    saved(path, Profile.empty(MODEL))
    assert told(caplog, profile=path) == [("INFO", f"profile {path}: no routing yet; the server saves its routing there")]


def test_a_profile_of_a_newer_format_is_named_with_what_to_do(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rewritten(saved(path, some()), about={"version": 2})
    ((level, line),) = told(caplog, profile=path)
    assert level == "WARNING"
    assert line.startswith(
        f"profile {path}: has format 2; this version of sglang-uvm-offload reads format 1. The server starts"
    )
    assert "upgrade sglang-uvm-offload" in line


def test_without_a_profile_the_log_says_nothing_of_one(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert told(caplog, save_profile=path) == []
