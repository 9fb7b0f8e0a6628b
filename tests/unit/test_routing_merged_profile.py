"""Profiles of several nodes, read as one: whatever locks exclude, whichever saved last, and however many start next time."""

import dataclasses
import multiprocessing
import re
import shutil

import numpy as np
import pytest
from builders.profiles import MODEL, rewritten, save, saved, some

from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.files import lock
from sglang_uvm_offload.files.atomic import WriteRefused
from sglang_uvm_offload.routing.counts import RoutingCounts
from sglang_uvm_offload.routing.merged_profile import LoadedProfiles, load_for, load_whole, node_file
from sglang_uvm_offload.routing.profile import Profile
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


def serve(path, run, began_at, nodes=2):
    """A run of a server that starts from the profile at ``path``, if there is one, and saves to it."""
    history = load_whole(path) if path.exists() else None
    for node, file in enumerate(files(path, run, began_at, history, nodes)):
        save(file, counted(node))


def both(runs=1):
    return runs * (counted(0).counts + counted(1).counts)


def load(*paths, saved=None):
    return load_for(MODEL.name, MODEL.architecture, paths, saved)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "p.npz"


def _saves(file, node):
    for times in range(1, 20):
        save(file, counted(node, times))


@pytest.mark.slow
def test_nodes_whose_locks_exclude_no_other_node_lose_nothing(path, monkeypatch):
    monkeypatch.setattr(lock, "taken", lambda handle, seconds: None)
    with multiprocessing.get_context("fork").Pool(2) as pool:
        pool.starmap(_saves, [(file, node) for node, file in enumerate(files(path, "now", 1.0))], chunksize=1)
    read = load_whole(path).seen
    assert (read.counts == 19 * both()).all()
    assert read.steps == (19, 38)


@pytest.mark.parametrize("first", [0, 1])
def test_history_counts_once_also_if_one_node_alone_has_saved(path, first):
    for number in range(3):
        serve(path, f"run {number}", 1.0 + number)
    read = load_whole(path)
    assert (read.seen.counts == both(3)).all()
    assert read.seen.steps == (3, 6)
    save(files(path, "now", 9.0, read)[first], counted(first))
    assert (load_whole(path).seen.counts == both(3) + counted(first).counts).all()


def test_files_of_nodes_that_are_no_more_do_not_count_again(path):
    serve(path, "then", 1.0)
    serve(path, "now", 2.0, nodes=1)
    assert node_file(path, 1).exists()
    assert (load_whole(path).seen.counts == both() + counted(0).counts).all()
    assert main(["profile", str(path), "--out", str(path.with_name("all.npz"))]) == 0
    shutil.move(path.with_name("all.npz"), path)
    assert (load_whole(path).seen.counts == both() + counted(0).counts).all()
    serve(path, "again", 3.0)
    assert (load_whole(path).seen.counts == both(2) + counted(0).counts).all()


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
        save(files(path, "now", 2.0, Profile(MODEL, counted(node)))[node], counted(node))
    of_one, of_other = (counted(node).counts for node in range(2))
    assert (load_whole(path).seen.counts == of_one + of_other + np.maximum(of_one, of_other)).all()


def test_a_node_file_counts_once_if_it_is_named_too_and_not_if_it_only_has_such_a_name(path):
    serve(path, "now", 1.0)
    named = [path, node_file(path, 1)]
    found = load(*named)
    assert found.problems == []
    assert (found.merged.seen.counts == both()).all()
    assert main(["profile", *map(str, named), "--out", str(path.with_name("all.npz"))]) == 0
    assert (Profile.load(path.with_name("all.npz")).seen.counts == both()).all()
    saved(path, some(1))
    saved(node_file(path, 1), dataclasses.replace(some(2), began_at=5.0))
    assert (load_whole(path).seen.counts == some(1).seen.counts).all()


def test_the_file_that_is_saved_may_be_absent_or_without_routing(path):
    assert load(path, saved=path) == LoadedProfiles()
    with pytest.raises(FileNotFoundError, match=r"p\.npz"):
        load_whole(path)
    saved(path, Profile.empty(MODEL).with_slot_shares({0.5: 0.25}))
    found = load(path, saved=path)
    assert (found.continued.slot_shares, found.problems) == ({0.5: 0.25}, [])
    assert "has no routing yet" in load(path).problems[0]


@pytest.mark.parametrize("damage", [lambda whole: whole[:-100], lambda whole: b"", lambda whole: b"other"])
def test_a_damaged_file_is_named_also_if_it_is_saved_or_a_nodes(path, damage):
    serve(path, "now", 1.0)
    other = node_file(path, 1)
    other.write_bytes(damage(other.read_bytes()))
    (problem,) = load(path).problems
    assert problem.startswith(f"{path}: p-node1.npz next to it: ")
    other.unlink()
    path.write_bytes(damage(path.read_bytes()))
    assert len(load(path, saved=path).problems) == 1


def test_the_files_of_this_model_are_used_and_each_other_one_is_named(tmp_path):
    good = [saved(tmp_path / f"{n}.npz", some(n)) for n in (1, 2)]
    foreign = saved(tmp_path / "foreign.npz", some(model=dataclasses.replace(MODEL, name="Other", num_experts=4)))
    twin = saved(tmp_path / "twin.npz", some(model=dataclasses.replace(MODEL, moe_layers=(1, 2))))
    empty = saved(tmp_path / "empty.npz", Profile.empty(MODEL))
    (tmp_path / "link").symlink_to(good[0])
    bad = [foreign, twin, empty, tmp_path / "gone.npz", tmp_path / "link"]
    found = load(good[0], *bad, good[1])
    assert (found.merged.seen.counts == some(1).seen.counts + some(2).seen.counts).all()
    assert [problem.split(":")[0] for problem in found.problems] == [str(path) for path in bad]
    assert found.problems[0].endswith("is of another model: name Other, not GLM-4.5")
    assert "different models" in found.problems[1]
    assert found.problems[-1].endswith(f"link: is the same file as {good[0]}, so its routing would count twice")


def test_a_file_that_would_exceed_what_can_be_read_again_is_named_and_left_out(tmp_path):
    most = Profile(MODEL, RoutingCounts(np.full((3, 2, 2, 8), 1 << 53), (1, 1)))
    paths = [saved(tmp_path / f"{n}.npz", most) for n in (1, 2)]
    found = load(*paths)
    assert (found.merged.seen.counts == 1 << 53).all()
    assert [problem.split(": ")[0] for problem in found.problems] == [str(paths[1])]


@pytest.mark.parametrize("node", [0, 1])
def test_a_file_of_a_newer_format_is_named_and_left_alone_also_if_it_is_a_nodes(path, node):
    """``load_for`` gives the sum of the others. What the server counts is not saved next to it."""
    serve(path, "then", 1.0)
    other = saved(path.with_name("other.npz"), some(1))
    rewritten(node_file(path, node), about={"version": 2})
    found = load(other, path, saved=path)
    assert (found.merged.seen.counts == some(1).seen.counts).all()
    assert (found.continued, found.problems) == (None, [])
    (newer,) = found.newer
    assert newer.startswith(f"{path}: ")
    assert newer.endswith("has format 2; this version of sglang-uvm-offload reads format 1")
    for own, file in enumerate(files(path, "now", 2.0)):
        with pytest.raises(WriteRefused, match=re.escape(str(node_file(path, node)))):
            save(file, counted(own))


@pytest.mark.parametrize("missing", [0, 1])
def test_no_node_saves_next_to_a_nodes_file_that_was_not_read(path, missing):
    """The next start would take that for part of an earlier run, which the latest one has started from."""
    serve(path, "then", 1.0)
    node_file(path, missing).unlink()
    for own, file in enumerate(files(path, "now", 2.0)):
        with pytest.raises(WriteRefused, match="restart with --expert-offload-profile"):
            save(file, counted(own))
    assert (load_whole(path).seen.counts == counted(1 - missing).counts).all()


def test_a_run_is_later_than_what_it_starts_from_whatever_the_clock_says(path):
    serve(path, "then", 9.0)
    serve(path, "now", 2.0, nodes=1)
    assert (load_whole(path).seen.counts == both() + counted(0).counts).all()
