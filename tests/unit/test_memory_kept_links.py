"""What was measured of links is kept by GPUs, and found for those that a launch has."""

from __future__ import annotations

import pytest
from builders import links

from sglang_uvm_offload.memory import kept_links

GPUS = [f"{number:032x}" for number in range(8)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "sglang-uvm-offload/links"


def keep(gpus, rate):
    kept_links.keep(gpus, links.measured(len(gpus), scattered=rate))


def read(gpus, ranks):
    found = kept_links.kept(gpus, ranks)
    return found and found.link.together.scattered


def test_a_later_measurement_of_the_same_gpus_replaces_the_earlier_one(cache):
    keep(GPUS[:2], 40.0)
    keep(GPUS[:2][::-1], 41.0)
    assert read(GPUS, 2) == 41.0
    assert [file.suffix for file in cache.iterdir()] == [".json"]


@pytest.mark.parametrize(("ranks", "rate"), [(8, 35.0), (7, 35.0), (6, 35.0), (4, 45.0), (3, 45.0), (1, 52.0), (16, 35.0)])
def test_the_nearest_number_of_ranks_is_taken_and_of_two_the_larger(ranks, rate):
    for number, of in ((8, 35.0), (4, 45.0), (1, 52.0)):
        keep(GPUS[:number], of)
    assert read(GPUS, ranks) == rate


def test_other_gpus_say_nothing():
    keep(GPUS[:4], 35.0)
    assert read(GPUS[4:], 4) is None
    assert read(GPUS[:3], 3) is None
    assert read([], 1) is None


def test_of_the_same_number_the_newest_is_taken(monkeypatch):
    for at, gpus, rate in ((2.0, GPUS[:2], 50.0), (3.0, GPUS[2:4], 40.0), (1.0, GPUS[4:6], 30.0)):
        monkeypatch.setattr(kept_links.time, "time", lambda at=at: at)
        keep(gpus, rate)
    assert read(GPUS, 2) == 40.0


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"gpus": [], "at": 0, "link": null}'])
def test_a_damaged_file_is_as_none(cache, text):
    keep(GPUS[:1], 50.0)
    (file,) = cache.iterdir()
    file.write_text(text)
    assert read(GPUS, 1) is None


@pytest.mark.parametrize("rate", ["0", "-1", "1e9"])
def test_a_rate_that_no_link_has_is_as_none(cache, rate):
    keep(GPUS[:1], 50.0)
    (file,) = cache.iterdir()
    assert "50.0" in file.read_text()
    file.write_text(file.read_text().replace("50.0", rate))
    assert read(GPUS, 1) is None


def test_without_any_place_nothing_is_kept(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    assert read(GPUS, 1) is None
    with pytest.raises(OSError, match="set XDG_CACHE_HOME"):
        keep(GPUS[:1], 50.0)
