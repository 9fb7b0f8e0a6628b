"""The profile that a running server saves: one file a node, however many ranks hold parts of the model."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from sglang_uvm_offload.files import atomic as atomic_file
from sglang_uvm_offload.files import lock
from sglang_uvm_offload.flags import config_flag
from sglang_uvm_offload.routing.counts import RoutingCounts
from sglang_uvm_offload.routing.merged_profile import node_file, node_files
from sglang_uvm_offload.routing.profile import PROFILE_FILE, NewerProfileError, Profile, ProfileError

LOCK_SECONDS = 10.0
"""How long a save waits for that of another process."""
_TICK = 1e-3
"""Seconds by which a run begins later than its history, whatever the clock says: of several nodes' files, the latest count."""


_NO_SAVE = config_flag(save_profile=False)


class ProfileFile:
    """Saves this rank's counts, added to the history that the server continues.

    Ranks of a node with other layers or other experts add theirs to the same file, each when it saves: several may have counted
    replicas of one expert, and experts may change ranks. A save keeps what other ranks added in this run, and the splits of the
    VRAM, which no server finds. It replaces counts of other runs only if the history includes them.
    """

    def __init__(
        self,
        path: Path,
        history: Profile,
        run: str,
        layers: Sequence[int],
        rank: str,
        protected: atomic_file.Protected = atomic_file.NOTHING,
        began_at: float = 0.0,
        node: int | None = None,
    ):
        """``history`` may be empty. ``run`` is the launch id of this server, which ``began_at`` that time. ``layers`` are the
        decoder layers of this rank, which no other one calls ``rank``. ``path`` is that of the whole profile, and ``node`` that
        of this rank, None where there is one."""
        self._whole = path
        self.path = node_file(path, node or 0)
        """The file that this rank saves to."""
        self._protected = protected
        history = history.limited()
        before = None if node is None else history.seen.counts
        began_at = max(began_at, history.began_at + _TICK)
        self._history = dataclasses.replace(history, run=run, began_at=began_at, ranks={}, history=before)
        self._layers, self._rank = layers, rank
        self._saved = RoutingCounts(np.zeros(1, dtype=np.int64), (0, 0))

    def pending(self, seen: RoutingCounts) -> Callable[[], None] | None:
        """A function that saves ``seen`` (this rank's counts since the start, ``[layers, phase, kind, num_experts]`` by the
        checkpoint's expert), None if that is saved already. It raises ``WriteRefused`` if the counts in the file, or in those
        of other nodes, would be lost."""
        if seen.steps == self._saved.steps:
            return None
        return lambda: self._save(seen)

    def _save(self, seen: RoutingCounts) -> None:
        past = self._history.seen.steps
        steps = (past[0] + seen.steps[0], past[1] + seen.steps[1])
        with _locked(self.path):
            found = self._continued()
            new = seen.counts - self._saved.counts if self._rank in found.ranks else seen.counts
            profile = found.with_counts(self._rank, seen.steps, self._layers, new, steps)
            atomic_file.replace(self.path, profile.write, PROFILE_FILE, self._protected)
        self._saved = seen

    def _continued(self) -> Profile:
        """The file's contents if they are of this run, up to this rank's last save; else the history, with the file's
        splits."""
        own = (self._whole, self.path)
        there = {path: self._known(path) for path in dict.fromkeys((*own, *node_files(self._whole)))}
        for path, profile in there.items():
            if profile is not None and (path in own or profile.history is not None):
                self._check(path, profile)
        found = there[self.path]
        if found is None:
            return self._history
        included = found.ranks.get(self._rank, self._saved.steps)  # another one where an older file was put back
        of_run = found if found.run == self._history.run and included == self._saved.steps else self._history
        return of_run.with_slot_shares(found.slot_shares)

    def _known(self, path: Path) -> Profile | None:
        """The profile at ``path``, None if there is none. Raises ``WriteRefused`` for one that this version cannot read."""
        try:
            return Profile.load(path) if path.stat().st_size else None
        except FileNotFoundError:
            return None
        except NewerProfileError as error:
            remedy = f"upgrade sglang-uvm-offload, choose another path, or save nowhere ({_NO_SAVE})"
            raise atomic_file.WriteRefused(path, f"{error}, so the file is left alone; {remedy}") from error
        except ProfileError as error:
            problem = (
                atomic_file.refusal(path, PROFILE_FILE)
                or f"{error}; the file is left alone: move it away, or choose another path"
            )
            raise atomic_file.WriteRefused(path, problem) from error

    def _check(self, path: Path, found: Profile) -> None:
        """Raises ``WriteRefused`` if counts of another run in the file at ``path`` are not in the history."""
        if found.run == self._history.run or found.digest in self._history.sources:
            return
        if different := self._history.model.differences(found.model):
            why = f"holds the routing of another model ({'; '.join(different)})"
            remedy = f"choose another path, or save nowhere ({_NO_SAVE})"
        else:
            why = "holds routing that this server did not start from, or that another server has saved since"
            restart = f"restart with --expert-offload-profile {self._whole} to continue that"
            remedy = f"{restart}, or choose another path, or save nowhere ({_NO_SAVE})"
        raise atomic_file.WriteRefused(path, f"{why}, and is left alone; {remedy}")


def add_slot_share(path: Path, residency: float, share: float) -> None:
    """Add a split of the VRAM to the profile at ``path``, which a server may be saving to. Raises ``ProfileError`` if it is no
    profile, or full, and ``OSError`` if it cannot be read or written."""
    with _locked(path):
        profile = Profile.load(path).with_slot_shares({residency: share})
        atomic_file.replace(path, profile.write, PROFILE_FILE)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Excludes other processes of this machine, where there are locks. The lock is on the folder of ``path``, because the file
    itself is replaced. Raises ``TimeoutError`` if another process keeps it for ``LOCK_SECONDS``."""
    handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if lock.taken(handle, LOCK_SECONDS) is False:  # without locks, what one rank of several loses, its next save adds again
            reason = f"another process has kept the folder locked for {LOCK_SECONDS:g} s"
            raise TimeoutError(errno.ETIMEDOUT, reason, str(path.parent))
        yield
    finally:
        os.close(handle)
