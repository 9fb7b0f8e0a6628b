"""The saved profile: history and live counts together, from ranks that each hold a part, whatever was there before."""

import dataclasses
import errno
import fcntl
import multiprocessing
import os

import numpy as np
import pytest
from builders.profiles import saved

from sglang_uvm_offload.files.atomic import WriteRefused
from sglang_uvm_offload.files.autosave import Saver
from sglang_uvm_offload.routing import profile as profile_module
from sglang_uvm_offload.routing import profile_file
from sglang_uvm_offload.routing.counts import RoutingCounts
from sglang_uvm_offload.routing.profile import Profile, ProfileError, RoutedModel
from sglang_uvm_offload.routing.profile_file import ProfileFile, add_slot_share

MODEL = RoutedModel("m", "M", (1, 2), 4, 2)
WHOLE = ([1, 2], "all")


def ones(layers=2, experts=4, steps=(1, 2), times=1):
    return RoutingCounts(np.full((layers, 2, 2, experts), times, dtype=np.int64), steps)


def save(file, seen):
    write = file.pending(seen)
    assert write is not None
    write()


def saves(path, run="now"):
    """Each of four ranks saves its part."""
    for file, seen in parts(path, run):
        save(file, seen)


def decode(path):
    return Profile.load(path).seen.counts[:, 1, 1].tolist()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "p.npz"


def test_what_was_counted_is_saved_once(path):
    file = ProfileFile(path, Profile.empty(MODEL), "now", *WHOLE)
    assert file.pending(ones(steps=(0, 0))) is None
    save(file, ones())
    read = Profile.load(path)
    assert (read.model, read.run, read.seen.steps) == (MODEL, "now", (1, 2))
    assert (read.seen.counts == 1).all()
    assert file.pending(ones()) is None
    save(file, ones(steps=(1, 3), times=2))
    assert (Profile.load(path).seen.counts == 2).all()


def test_history_counts_on_with_bounded_weight(path, monkeypatch):
    monkeypatch.setattr(profile_module.Profile.limited, "__defaults__", (10,))
    history = Profile(MODEL, ones(steps=(5, 100), times=50))
    save(ProfileFile(path, history, "now", *WHOLE), ones())
    seen = Profile.load(path).seen
    assert seen.steps == (6, 12)
    assert seen.counts[0, :, 0, 0].tolist() == [51, 6]


def parts(path, run, history=None):
    """Four ranks: two pipeline stages with two expert-parallel ranks each. Both of these hold expert 1."""
    history = history or Profile.empty(MODEL)
    return [
        (ProfileFile(path, history, run, [layer], f"{layer} {first}"), of_experts(first, first + 2, times=10 * layer + first))
        for layer in (1, 2)
        for first in (0, 1)
    ]


def of_experts(first, end, times, steps=(1, 2)):
    counts = np.zeros((1, 2, 2, 4), dtype=np.int64)
    counts[..., first:end] = times
    return RoutingCounts(counts, steps)


EXPECTED = [[10, 21, 11, 0], [20, 41, 21, 0]]


def test_ranks_put_their_parts_into_one_file_also_if_it_is_empty(path):
    path.touch()
    saves(path)
    assert decode(path) == EXPECTED
    assert Profile.load(path).seen.steps == (1, 2)


def test_parts_of_an_earlier_run_do_not_stay_and_the_history_does(path):
    save(ProfileFile(path, Profile.empty(MODEL), "then", *WHOLE), ones(times=1000, steps=(500, 500)))
    file, seen = parts(path, "now", history=Profile(MODEL, ones(times=7)))[0]
    save(file, seen)
    assert decode(path) == [[17, 17, 7, 7], [7, 7, 7, 7]], "also of ranks that have not saved yet"
    assert Profile.load(path).seen.steps == (2, 4)


def test_splits_of_the_history_and_of_the_file_are_saved(path):
    """``replay --slots --into`` may put one into the file of a server that runs, before it first saves or later."""
    history = Profile(MODEL, ones(times=7)).with_slot_shares({0.25: 1.0, 0.5: 1.0})
    save(ProfileFile(path, Profile.empty(MODEL), "then", *WHOLE), ones())
    add_slot_share(path, 0.5, 0.75)
    file, seen = parts(path, "now", history)[0]
    save(file, seen)
    assert Profile.load(path).slot_shares == {0.25: 1.0, 0.5: 0.75}
    add_slot_share(path, 0.5, 0.25)
    save(file, RoutingCounts(seen.counts, (3, 3)))
    read = Profile.load(path)
    assert (read.run, read.seen.steps) == ("now", (4, 5))
    assert read.slot_shares == {0.25: 1.0, 0.5: 0.25}


def test_splits_of_another_models_file_are_not_taken_over(path):
    saved(path, Profile.empty(dataclasses.replace(MODEL, num_experts=8)).with_slot_shares({0.5: 0.75}))
    save(ProfileFile(path, Profile.empty(MODEL), "now", *WHOLE), ones())
    assert Profile.load(path).slot_shares == {}


def test_a_split_is_added_to_a_profile_alone_and_counts_stay(path):
    saved(path, Profile(MODEL, ones(), "then"))
    add_slot_share(path, 0.5, 0.75)
    read = Profile.load(path)
    assert (read.run, read.slot_shares, read.seen.steps) == ("then", {0.5: 0.75}, (1, 2))
    assert (read.seen.counts == 1).all()
    path.write_bytes(b"weights")
    with pytest.raises(ProfileError):
        add_slot_share(path, 0.5, 0.75)
    assert path.read_bytes() == b"weights"


def _adds_splits_and_saves(path, number):
    for step in range(1, 20):
        if number:
            add_slot_share(path, number / 8, step / 20)
        else:
            save(ProfileFile(path, Profile.empty(MODEL), "now", *WHOLE), ones(steps=(step, step), times=step))


def test_a_split_that_is_added_while_a_server_saves_is_not_lost(path):
    saved(path, Profile.empty(MODEL, "now"))
    with multiprocessing.get_context("fork").Pool(3) as pool:
        pool.starmap(_adds_splits_and_saves, [(path, number) for number in range(3)], chunksize=1)
    read = Profile.load(path)
    assert (read.slot_shares, read.seen.steps) == ({1 / 8: 19 / 20, 2 / 8: 19 / 20}, (19, 19))
    assert (read.seen.counts == 19).all()


def _saves(part):
    for times in range(1, 20):
        save(part[0], RoutingCounts(part[1].counts * times, (times, times)))


@pytest.mark.slow
def test_ranks_that_save_at_the_same_time_lose_nothing(path):
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.map(_saves, parts(path, "now"), chunksize=1)
    assert (Profile.load(path).seen.counts[:, 1, 1] == 19 * np.array(EXPECTED)).all()


def test_a_save_waits_no_longer_than_that_for_a_lock_that_another_keeps(path, monkeypatch):
    monkeypatch.setattr(profile_file, "LOCK_SECONDS", 0.05)
    file = ProfileFile(path, Profile.empty(MODEL), "now", *WHOLE)
    folder = os.open(path.parent, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with pytest.raises(TimeoutError, match="another process has kept the folder locked"):
        save(file, ones())
    os.close(folder)
    save(file, ones())
    assert Profile.load(path).seen.steps == (1, 2)


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.EBADF])
def test_a_save_needs_no_lock_where_there_are_none(path, monkeypatch, error):
    def absent(handle, how):
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(fcntl, "flock", absent)
    saves(path)
    assert decode(path) == EXPECTED
    assert [path.name for path in path.parent.iterdir()] == ["p.npz"]


def test_a_file_that_is_no_profile_is_not_replaced(path, caplog):
    """It may have come after the launch, which refuses it. The saver says so, and does not raise."""
    path.write_bytes(b"weights")
    file, seen = parts(path, "now")[0]
    Saver("profile", lambda wait: file.pending(seen)).finish()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert f"{path}: exists and is no routing profile" in caplog.text
    assert path.read_bytes() == b"weights"
    path.unlink()
    Saver("profile", lambda wait: file.pending(seen)).finish()
    assert Profile.load(path).run == "now", "what was refused once counts as saved"
    protected = ProfileFile(path, Profile.empty(MODEL), "now", *WHOLE, {path.parent: "the model's folder"})
    with pytest.raises(WriteRefused, match="the model's folder"):
        save(protected, ones())


def test_a_rank_adds_what_is_new_alone(path):
    (first, seen), (second, other), *_ = parts(path, "now")
    save(first, seen)
    save(second, other)
    save(first, RoutingCounts(seen.counts * 3, (3, 6)))
    assert Profile.load(path).seen.counts[0, 1, 1].tolist() == [30, 41, 11, 0]
    assert Profile.load(path).seen.steps == (3, 6)


def refused(file, seen, caplog):
    """Whether the saver says that the file is another server's, which it leaves as it is."""
    before = file._path.read_bytes()
    caplog.clear()
    Saver("profile", lambda wait: file.pending(seen)).finish()
    if "another server has saved its profile there since this one began" not in caplog.text:
        return False
    assert file._path.read_bytes() == before
    return True


@pytest.mark.works("Launch", "two servers that save one profile")
def test_of_two_servers_on_one_path_the_one_that_started_later_saves(path, caplog):
    """Whole: no rank of the other puts its part into it."""
    (first, seen), (second, other), *_ = parts(path, "then")
    save(first, seen)
    later = parts(path, "now")
    for file, counts in later[:2]:
        save(file, counts)
    assert refused(first, RoutingCounts(seen.counts * 3, (3, 6)), caplog)
    assert refused(second, other, caplog)
    for file, counts in later[2:]:
        save(file, counts)
    assert decode(path) == EXPECTED


def test_of_two_servers_that_start_at_once_the_one_that_saves_first_does(path, caplog):
    """Also where the other's model is another one."""
    one, two = parts(path, "one"), parts(path, "two")
    stranger = ProfileFile(path, Profile.empty(dataclasses.replace(MODEL, name="other")), "three", *WHOLE)
    for file, counts in one[:2]:
        save(file, counts)
    assert all(refused(file, counts, caplog) for file, counts in [*two, (stranger, ones())])
    for file, counts in one[2:]:
        save(file, counts)
    assert Profile.load(path).run == "one"
    assert decode(path) == EXPECTED
    path.unlink()
    save(*two[0])
    assert Profile.load(path).run == "two"


@pytest.mark.parametrize("became", ["gone", "older"])
def test_a_file_that_is_not_as_it_was_left_gets_every_rank_in_full(path, became):
    (first, seen), (second, other), *_ = parts(path, "now")
    save(first, seen)
    older = path.read_bytes()
    save(second, other)
    save(first, RoutingCounts(seen.counts * 2, (2, 4)))
    if became == "gone":
        path.unlink()
    else:
        path.write_bytes(older)
    save(first, RoutingCounts(seen.counts * 3, (3, 6)))
    save(second, RoutingCounts(other.counts * 3, (3, 6)))
    assert Profile.load(path).seen.counts[0, 1, 1].tolist() == [30, 63, 33, 0]
