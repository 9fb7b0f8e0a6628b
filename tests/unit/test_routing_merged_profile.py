"""Profiles of several nodes, read as one: whatever locks exclude, whichever saved last, and however many start next time."""

import dataclasses
import multiprocessing
import shutil

import numpy as np
import pytest
from builders.profiles import MODEL, rewritten, saved, some

from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.routing import profile_file
from sglang_uvm_offload.routing.counts import RoutingCounts
from sglang_uvm_offload.routing.merged_profile import load_for, load_whole, node_file
from sglang_uvm_offload.routing.profile import Profile, ProfileError
from sglang_uvm_offload.routing.profile_file import ProfileFile

LAYERS = list(MODEL.moe_layers)


def counted(node, times=1, steps=(1, 2)):
    """By a rank of ``node``, which has half of the experts of each layer, and a replica of another one."""
    counts = np.zeros((len(LAYERS), 2, 2, MODEL.num_experts), dtype=np.int64)
    counts[..., 3 * node : 3 * node + 5] = (10 + node) * times
    return RoutingCounts(counts, (steps[0] * times, steps[1] * times))


def files(path, run, began_at, history=None, nodes=2):
    history = history or Profile.empty(MODEL)
    return [
        ProfileFile(path, history, run, LAYERS, f"tp{node}", began_at=began_at, node=node if nodes > 1 else None)
        for node in range(nodes)
    ]


def save(file, seen):
    write = file.pending(seen)
    assert write is not None
    write()


def serve(path, run, began_at, nodes=2, profile=None):
    """A run of a server that starts from the profile at ``path``, if there is one, and saves to it."""
    history = load_whole(path) if profile is None and path.exists() else profile
    for node, file in enumerate(files(path, run, began_at, history, nodes)):
        save(file, counted(node))


def both(runs=1):
    return runs * (counted(0).counts + counted(1).counts)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "p.npz"


def _saves(file, node):
    for times in range(1, 20):
        save(file, counted(node, times))


@pytest.mark.slow
def test_nodes_whose_locks_exclude_no_other_node_lose_nothing(path, monkeypatch):
    monkeypatch.setattr(profile_file, "_wait_for_lock", lambda handle, folder: None)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.starmap(_saves, [(file, node) for node, file in enumerate(files(path, "now", 1.0))], chunksize=1)
    read = load_whole(path).seen
    assert (read.counts == 19 * both()).all()
    assert read.steps == (19, 38)


def test_history_counts_once(path):
    for number in range(3):
        serve(path, f"run {number}", 1.0 + number)
    read = load_whole(path).seen
    assert (read.counts == both(3)).all()
    assert read.steps == (3, 6)


@pytest.mark.parametrize("first", [0, 1])
def test_a_server_that_ends_once_one_node_has_saved_loses_no_history(path, first):
    serve(path, "then", 1.0)
    save(files(path, "now", 2.0, load_whole(path))[first], counted(first))
    assert (load_whole(path).seen.counts == both() + counted(first).counts).all()


def test_files_of_nodes_that_are_no_more_do_not_count_again(path):
    serve(path, "then", 1.0)
    serve(path, "now", 2.0, nodes=1)
    assert node_file(path, 1).exists()
    assert (load_whole(path).seen.counts == both() + counted(0).counts).all()
    assert main(["profile", str(path), "--out", str(path.with_name("all.npz"))]) == 0
    shutil.move(path.with_name("all.npz"), path)
    assert (load_whole(path).seen.counts == both() + counted(0).counts).all()


@pytest.mark.parametrize("missing", [0, 1])
def test_what_is_there_is_read_on_a_node_with_a_disk_of_its_own(path, missing):
    """Each then begins from its own part, and the parts in one folder are the whole."""
    serve(path, "then", 1.0)
    node_file(path, missing).unlink()
    own = 1 - missing
    read = load_whole(path)
    assert (read.seen.counts == counted(own).counts).all()
    save(files(path, "now", 2.0, read)[own], counted(own))
    assert (load_whole(path).seen.counts == 2 * counted(own).counts).all()


def test_parts_that_began_from_their_own_disks_are_the_whole_in_one_folder(path):
    for node in range(2):
        alone = Profile(MODEL, counted(node))
        save(files(path, "now", 2.0, alone)[node], counted(node))
    of_one, of_other = (counted(node).counts for node in range(2))
    assert (load_whole(path).seen.counts == of_one + of_other + np.maximum(of_one, of_other)).all()


def test_a_file_that_only_has_such_a_name_is_left_out(path):
    saved(path, some(1))
    saved(node_file(path, 1), dataclasses.replace(some(2), began_at=5.0))
    assert (load_whole(path).seen.counts == some(1).seen.counts).all()


def test_a_node_file_that_is_named_too_does_not_count_twice(path, capsys):
    serve(path, "now", 1.0)
    named = [path, node_file(path, 1)]
    profile, problems = load_for(MODEL.name, MODEL.architecture, named)
    assert problems == []
    assert (profile.seen.counts == both()).all()
    assert main(["profile", *map(str, named), "--out", str(path.with_name("all.npz"))]) == 0
    assert (Profile.load(path.with_name("all.npz")).seen.counts == both()).all()


def test_a_damaged_node_file_is_named(path):
    serve(path, "now", 1.0)
    node_file(path, 1).write_bytes(b"weights")
    _, (problem,) = load_for(MODEL.name, MODEL.architecture, [path])
    assert problem.startswith(f"{path}: p-node1.npz next to it: not a readable npz file")


@pytest.mark.parametrize("began_at", ["now", -1, float("nan"), True])
def test_a_time_that_is_none_is_refused(path, began_at):
    with pytest.raises(ProfileError, match="began_at must be seconds"):
        Profile.load(rewritten(saved(path, some()), about={"began_at": began_at}))


def test_a_history_of_other_experts_is_refused(path):
    with pytest.raises(ProfileError, match="counts are int64"):
        Profile.load(rewritten(saved(path, some()), history=np.zeros((1, 2, 2, 3), dtype=np.int64)))


def test_the_file_that_is_saved_may_be_absent_or_without_routing(path):
    assert load_for(MODEL.name, MODEL.architecture, [path], path) == (None, [])
    saved(path, Profile.empty(MODEL).with_slot_shares({0.5: 0.25}))
    profile, problems = load_for(MODEL.name, MODEL.architecture, [path], path)
    assert (profile.slot_shares, problems) == ({0.5: 0.25}, [])
    (problem,) = load_for(MODEL.name, MODEL.architecture, [path])[1]
    assert "holds no routing yet" in problem


@pytest.mark.parametrize("damage", [lambda whole: whole[:-100], lambda whole: b"", lambda whole: b"other"])
def test_the_file_that_is_saved_is_refused_if_it_is_damaged(path, damage):
    whole = saved(path, some()).read_bytes()
    path.write_bytes(damage(whole))
    assert len(load_for(MODEL.name, MODEL.architecture, [path], path)[1]) == 1
    saved(path, some())
    assert "is of another model" in load_for("other", MODEL.architecture, [path], path)[1][0]


def test_without_any_file_the_one_that_was_named_is_missing(path):
    with pytest.raises(FileNotFoundError, match=r"p\.npz"):
        load_whole(path)
