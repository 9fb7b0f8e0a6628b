"""Profiles that several nodes, or several servers, have saved, read as one.

Ranks of one machine share a file, under a lock. No lock excludes other machines for certain (that of a folder is local on NFS),
so each further node of a server saves to a file of its own next to the first one's: what counts as one profile is put together
when it is read.
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
    """The file to which node ``node`` (from 0) of a server saves its part of the profile at ``path``."""
    return path.with_name(f"{path.stem}-node{node}{path.suffix}") if node else path


def node_files(path: Path) -> Iterator[Path]:
    """The files at ``path`` of nodes but the first, of whatever run."""
    name = re.compile(rf"{re.escape(path.stem)}-node[1-9][0-9]*{re.escape(path.suffix)}")
    if path.parent.is_dir():
        yield from sorted(each for each in path.parent.iterdir() if name.fullmatch(each.name))


def load_whole(path: Path) -> Profile:
    """The profile at ``path``, with what other nodes have counted in the same run. Files of an earlier run are left out, also
    that at ``path``: each begins with all that was counted before. Raises ``ProfileError`` and ``OSError`` as ``Profile.load``
    does."""
    others = [other for other in map(_of_node, node_files(path)) if other.history is not None]
    try:
        parts = [Profile.load(path), *others]
    except FileNotFoundError:  # the first node has a disk of its own, or no MoE layer
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
    """What all have counted, and the history, of which a node that began from a file of its own has only its part."""
    first = parts[0]
    history, new = (np.zeros_like(first.seen.counts) for _ in range(2))
    for part in parts:
        if different := first.model.differences(part.model):
            raise ProfileError(f"nodes of its run have counted different models: {'; '.join(different)}")
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
        raise ProfileError(f"merged counts or steps reach {most}, more than {MAX_COUNT}")


def without_nodes(paths: Sequence[Path]) -> list[Path]:
    """``paths`` but for files of further nodes of another one, with which they are read."""
    every = {other for path in paths for other in node_files(path)}
    return [path for path in paths if path not in every]


def merge(profiles: Sequence[Profile]) -> Profile:
    """The sum of all profiles; where several have a split of VRAM for one residency, that of the last. Raises ``ProfileError``
    if they are not of one model, or if a count gets too large."""
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
    """What a launch reads of the files that it names."""

    merged: Profile | None = None
    """The sum of all; None without any."""
    continued: Profile | None = None
    """What the server adds its own counts to: the file that it saves to, if that is among those it reads, else their sum."""
    problems: list[str] = field(default_factory=list)
    """For each file that cannot be used, the reason."""
    newer: list[str] = field(default_factory=list)
    """The same for those of a newer format."""


def load_for(name: str, architecture: str, paths: Sequence[Path], saved: Path | None = None) -> LoadedProfiles:
    """The files for the model ``name``. Files of one model name whose layers or experts differ are of different models.
    ``saved``: where the profile is saved; that file may be absent, or without routing."""
    merged: Profile | None = None
    found, paths = LoadedProfiles(), without_nodes(paths)
    for index, path in enumerate(paths):
        try:
            if (earlier := same_file(path, paths[:index])) is not None:
                raise ProfileError(f"is the same file as {earlier}: its routing would count twice")
            profile = load_whole(path)
            wanted = dataclasses.replace(profile.model, name=name, architecture=architecture)
            if different := wanted.differences(profile.model):
                raise ProfileError(f"is of another model: {'; '.join(different)}")
            if not any(profile.seen.steps) and path != saved:
                raise ProfileError("holds no routing yet")
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
    """The first of ``others`` that is the file at ``path``, also by links; None if none is, or if ``path`` cannot be
    examined."""
    for other in others:
        try:
            if os.path.samefile(path, other):
                return other
        except (OSError, ValueError):  # reading it gives the reason
            continue
    return None
