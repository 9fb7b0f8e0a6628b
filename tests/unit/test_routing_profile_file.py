"""The saved profile: history and live counts together, from ranks that each hold a part, whatever was there before."""

import dataclasses
import errno
import fcntl
import multiprocessing
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from builders.profiles import rewritten, save, saved

from sglang_uvm_offload.files.atomic import WriteRefused
from sglang_uvm_offload.files.autosave import Saver
from sglang_uvm_offload.routing import profile as profile_module
from sglang_uvm_offload.routing import profile_file
from sglang_uvm_offload.routing.counts import RoutingCounts
from sglang_uvm_offload.routing.merged_profile import load_for
from sglang_uvm_offload.routing.profile import Profile, ProfileError, RoutedModel
from sglang_uvm_offload.routing.profile_file import ProfileFile, add_slot_share

MODEL = RoutedModel("m", "M", (1, 2), 4, 2)
WHOLE = ([1, 2], "all")


def ones(layers=2, experts=4, steps=(1, 2), times=1):
    return RoutingCounts(np.full((layers, 2, 2, experts), times, dtype=np.int64), steps)


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


def test_the_parts_of_an_earlier_run_count_once_as_the_history(path):
    save(ProfileFile(path, Profile.empty(MODEL), "then", *WHOLE), ones(times=7))
    file, seen = parts(path, "now", history=Profile.load(path))[0]
    save(file, seen)
    assert decode(path) == [[17, 17, 7, 7], [7, 7, 7, 7]], "also of ranks that have not saved yet"
    assert Profile.load(path).seen.steps == (2, 4)


def test_splits_of_the_history_and_of_the_file_are_saved(path):
    """``replay --slots --into`` may put one into the file of a server that runs, before it first saves or later."""
    save(ProfileFile(path, Profile.empty(MODEL).with_slot_shares({0.25: 1.0}), "then", *WHOLE), ones())
    file, seen = parts(path, "now", Profile.load(path))[0]
    add_slot_share(path, 0.5, 0.75)
    save(file, seen)
    assert Profile.load(path).slot_shares == {0.25: 1.0, 0.5: 0.75}
    add_slot_share(path, 0.5, 0.25)
    save(file, RoutingCounts(seen.counts, (3, 3)))
    read = Profile.load(path)
    assert (read.run, read.seen.steps) == ("now", (4, 5))
    assert read.slot_shares == {0.25: 1.0, 0.5: 0.25}


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
    with pytest.raises(TimeoutError, match="another process has held the folder's lock"):
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
    assert f"{path}: exists and is not a routing profile" in caplog.text
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
    """Whether the saver says that others' routing lies there, which it leaves as it is."""
    before = file.path.read_bytes()
    caplog.clear()
    Saver("profile", lambda wait: file.pending(seen)).finish()
    if "has routing that this server did not start from, or that another server has saved since" not in caplog.text:
        return False
    assert file.path.read_bytes() == before
    return True


@pytest.mark.works("Launch", "two servers that save one profile")
def test_of_two_servers_on_one_path_the_one_that_started_later_saves(path, caplog):
    """Whole: no rank of the other puts its part into it."""
    (first, seen), (second, other), *_ = parts(path, "then")
    save(first, seen)
    later = parts(path, "now", Profile.load(path))
    for file, counts in later[:2]:
        save(file, counts)
    assert refused(first, RoutingCounts(seen.counts * 3, (3, 6)), caplog)
    assert refused(second, other, caplog)
    for file, counts in later[2:]:
        save(file, counts)
    assert decode(path) == [[20, 31, 11, 0], [20, 41, 21, 0]], "what it started from, and its own"


def test_of_two_servers_that_start_at_once_the_one_that_saves_first_does(path, caplog):
    one, two = parts(path, "one"), parts(path, "two")
    for file, counts in one[:2]:
        save(file, counts)
    assert all(refused(file, counts, caplog) for file, counts in two)
    for file, counts in one[2:]:
        save(file, counts)
    assert Profile.load(path).run == "one"
    assert decode(path) == EXPECTED
    path.unlink()
    save(*two[0])
    assert Profile.load(path).run == "two"


def serve(path, run, times, *more, saved=None):
    """A server of one rank, which reads the profiles ``path`` and ``more``, counts and ends."""
    saved = saved or path
    found = load_for(MODEL.name, MODEL.architecture, [path, *more], saved)
    assert found.problems == []
    saver = Saver("profile", lambda wait: file.pending(ones(times=times)))
    file = ProfileFile(saved, found.continued or Profile.empty(MODEL), run, *WHOLE)
    saver.finish()
    return saver


def test_every_restart_adds_to_what_all_before_have_counted(path):
    for number in range(4):
        assert serve(path, f"run {number}", times=10**number).error is None
        assert (Profile.load(path).seen.counts == int("1" * (number + 1))).all()
        assert Profile.load(path).seen.steps == (number + 1, 2 * (number + 1))


def test_a_server_that_reads_further_profiles_adds_them_to_a_file_of_its_own_at_most_once(path):
    """One that it reads too has its own counts alone: the next start adds them up. Any other one is whole."""
    other, whole = path.with_name("other.npz"), path.with_name("whole.npz")
    saved(other, Profile(MODEL, ones(times=100), "elsewhere"))
    for number in range(3):
        serve(other, f"run {number}", 1, path, saved=path)
        assert (Profile.load(path).seen.counts == number + 1).all()
    serve(other, "last", 1, path, saved=whole)
    assert (Profile.load(whole).seen.counts == 100 + 3 + 1).all()


OTHER = dataclasses.replace(MODEL, name="Other", num_experts=8)
BEFORE = {
    "a file that the launch did not read": (lambda path: saved(path, Profile(MODEL, ones(), "then")), "restart with"),
    "a file of another model": (lambda path: saved(path, Profile.empty(OTHER, "then")), "name Other, not m"),
    "a damaged profile": (lambda path: rewritten(saved(path, Profile.empty(MODEL)), steps=np.zeros(3)), "move it away"),
    "a newer format": (lambda path: rewritten(saved(path, Profile.empty(MODEL)), about={"version": 2}), "upgrade"),
    "a newer format of other arrays": (lambda path: newer(path), "has format 9; this version of sglang-uvm-offload reads"),
    "no profile": (lambda path: path.write_bytes(b"weights"), "exists and is not a routing profile"),
}


def newer(path):
    np.savez(path, about=np.frombuffer(b'{"format": "sglang-uvm-offload profile", "version": 9}', dtype=np.uint8))


@pytest.mark.parametrize("comes", ["before the start", "before the first save", "later"])
@pytest.mark.parametrize("there", BEFORE)
def test_a_file_that_the_server_did_not_start_from_stays_as_it_is(path, caplog, there, comes):
    """The log has the reason and the remedy once, and so has the status; once the file is gone, all that was counted is
    saved."""
    plant, remedy = BEFORE[there]
    if comes == "before the start":
        plant(path)
    file = ProfileFile(path, Profile.empty(MODEL), "now", *WHOLE)
    if comes == "later":
        save(file, ones())
    if comes != "before the start":
        plant(path)
    before, seen = path.read_bytes(), ones(steps=(4, 4), times=4)
    saver = Saver("profile", lambda wait: file.pending(seen))
    for _ in range(3):
        saver.finish()
    assert path.read_bytes() == before
    assert (saver.failures, saver.saved_at) == (3, None)
    assert str(path) in saver.error
    assert remedy in saver.error
    assert caplog.text.count(saver.error) == 1
    path.rename(path.with_name("away"))
    saver.finish()
    assert saver.error is None
    assert (Profile.load(path).seen.counts == 4).all()


def test_counts_that_the_rank_which_read_them_has_not_changed_are_replaced_also_in_a_file_that_was_copied(path, tmp_path):
    save(ProfileFile(path, Profile.empty(MODEL), "then", *WHOLE), ones())
    copied = Path(shutil.copy(path, tmp_path / "copied.npz"))
    assert serve(path, "now", 1, saved=copied).error is None
    assert (Profile.load(copied).seen.counts == 2).all()


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
