"""Reads the profiles of several nodes, or of several servers, as one.

Ranks on one machine share a file, under a lock. No lock reliably excludes other machines (the lock of a folder is local on
NFS), so every node but the first saves to a file of its own next to the first node's file. Reading puts them together.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sglang_uvm_offload.routing.counts import RoutingCounts
from sglang_uvm_offload.routing.profile import MAX_COUNT, NewerProfileError, Profile, ProfileError, reason


def node_file(path: Path, node: int) -> Path:
    """The file to which node ``node`` (counted from 0) saves its part of the profile at ``path``."""
    return path.with_name(f"{path.stem}-node{node}{path.suffix}") if node else path


def node_files(path: Path) -> Iterator[Path]:
    """The existing files of all nodes but the first for the profile at ``path``, from any run."""
    name = re.compile(rf"{re.escape(path.stem)}-node[1-9][0-9]*{re.escape(path.suffix)}")
    if path.parent.is_dir():
        yield from sorted(each for each in path.parent.iterdir() if name.fullmatch(each.name))


def load_whole(path: Path) -> Profile:
    """The profile at ``path``, including what other nodes counted in the same run. Files of earlier runs are left out, even
    the one at ``path``, because each run starts from everything that was counted before it. Raises ``ProfileError`` and
    ``OSError`` like ``Profile.load``."""
    others = [other for other in map(_of_node, node_files(path)) if other.history is not None]
    try:
        parts = [Profile.load(path), *others]
    except FileNotFoundError:  # the first node has its own disk, or no MoE layer
        if not others:
            raise
        parts = others
    run = max(parts, key=lambda part: part.began_at).run
    whole = _joined([part for part in parts if part.run == run])
    return dataclasses.replace(whole, sources=_sources(parts))


def _of_node(path: Path) -> Profile:
    try:
        return Profile.load(path)
    except ProfileError as error:
        raise type(error)(f"{path.name} next to it: {error}") from error


def _sources(profiles: Iterable[Profile]) -> frozenset[str]:
    return frozenset().union(*(profile.sources for profile in profiles))


def _joined(parts: Sequence[Profile]) -> Profile:
    """The history and everything that the nodes counted. A node with its own disk knows only its own part of the history."""
    first = parts[0]
    history, new = (np.zeros_like(first.seen.counts) for _ in range(2))
    for part in parts:
        if different := first.model.differences(part.model):
            raise ProfileError(f"the nodes of this run counted different models: {'; '.join(different)}")
        before = history if part.history is None else part.history
        new += np.maximum(part.seen.counts - before, 0)
        history = np.maximum(history, before)
        first = first.with_slot_shares({**part.slot_shares, **first.slot_shares})
    counts = history + new
    _check_counts(counts)
    prefill, decode = (max(part.seen.steps[phase] for part in parts) for phase in (0, 1))
    return dataclasses.replace(first, seen=RoutingCounts(counts, (prefill, decode)), ranks={}, history=None)


def _check_counts(counts: np.ndarray, *steps: int) -> None:
    if (most := max(*steps, int(counts.max(initial=0)), 0)) > MAX_COUNT:
        raise ProfileError(f"the merged counts or steps reach {most}, more than {MAX_COUNT}")


def without_nodes(paths: Sequence[Path]) -> list[Path]:
    """``paths`` without the node files of other paths in the list, which are read along with those."""
    every = {other for path in paths for other in node_files(path)}
    return [path for path in paths if path not in every]


def merge(profiles: Sequence[Profile]) -> Profile:
    """The sum of all profiles. If several have a VRAM split for the same residency, the last one wins. Raises ``ProfileError``
    if the models differ or a count gets too large."""
    first = profiles[0]
    merged = first
    counts, steps = first.seen.counts, first.seen.steps
    for other in profiles[1:]:
        if different := first.model.differences(other.model):
            raise ProfileError(f"profiles of different models cannot be merged: {'; '.join(different)}")
        counts = counts + other.seen.counts
        steps = (steps[0] + other.seen.steps[0], steps[1] + other.seen.steps[1])
        _check_counts(counts, *steps)
        merged = merged.with_slot_shares(other.slot_shares)
    shares, began_at = merged.slot_shares, max(profile.began_at for profile in profiles)
    return Profile(first.model, RoutingCounts(counts, steps), "", {}, shares, began_at, sources=_sources(profiles))


@dataclass
class LoadedProfiles:
    """The result of reading all profiles of a launch."""

    merged: Profile | None = None
    """The sum of all readable profiles; None if there is none."""
    continued: Profile | None = None
    """What the server adds its own counts to: the file that it saves to, if it reads that file too, otherwise the sum."""
    problems: list[str] = field(default_factory=list)
    """Why files cannot be used, one line for each."""
    newer: list[str] = field(default_factory=list)
    """The same for files of a newer format."""


def load_for(name: str, architecture: str, paths: Sequence[Path], saved: Path | None = None) -> LoadedProfiles:
    """Read the profiles at ``paths`` for the model ``name``. Profiles with the same name but other layers or experts count as
    other models. ``saved``: the path that the server saves to. That file may be missing, or have no routing yet."""
    merged: Profile | None = None
    found, paths = LoadedProfiles(), without_nodes(paths)
    for index, path in enumerate(paths):
        try:
            if (earlier := same_file(path, paths[:index])) is not None:
                raise ProfileError(f"is the same file as {earlier}, so its routing would count twice")
            profile = load_whole(path)
            wanted = dataclasses.replace(profile.model, name=name, architecture=architecture)
            if different := wanted.differences(profile.model):
                raise ProfileError(f"is of another model: {'; '.join(different)}")
            if not any(profile.seen.steps) and path != saved:
                raise ProfileError("has no routing yet")
            merged = merge([profile] if merged is None else [merged, profile])
            if path == saved:
                found.continued = profile
        except FileNotFoundError as error:
            if path != saved:
                found.problems.append(f"{path}: {reason(error)}")
        except NewerProfileError as error:
            found.newer.append(f"{path}: {reason(error)}")
        except (ProfileError, OSError) as error:
            found.problems.append(f"{path}: {reason(error)}")
    found.merged = merged
    if saved not in paths:
        found.continued = merged
    return found


def same_file(path: Path, others: Iterable[Path]) -> Path | None:
    """The first of ``others`` that is the same file as ``path``, also through links. None if there is none, or if ``path``
    cannot be examined."""
    for other in others:
        try:
            if os.path.samefile(path, other):
                return other
        except (OSError, ValueError):  # reading the file reports the reason
            continue
    return None
