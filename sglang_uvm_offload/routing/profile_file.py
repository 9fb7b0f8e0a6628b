"""The profile that a running server saves: one file a node, however many ranks hold parts of the model."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from sglang_uvm_offload.files import atomic as atomic_file
from sglang_uvm_offload.files import lock
from sglang_uvm_offload.flags import config_flag
from sglang_uvm_offload.routing.counts import RoutingCounts
from sglang_uvm_offload.routing.merged_profile import node_file
from sglang_uvm_offload.routing.profile import PROFILE_FILE, Profile, ProfileError

LOCK_SECONDS = 10.0
"""How long a save waits for that of another process."""


OF_ANOTHER_SERVER = (
    "another server has saved its profile there since this one began; let each server save to a path of its own (one can start "
    f"from several: --expert-offload-profile A,B), or only one: {config_flag(save_profile=False)}"
)


class ProfileFile:
    """Saves this rank's counts, added to the history that the server started from.

    Ranks of a node with other layers or other experts add theirs to the same file, each when it saves: several may have counted
    replicas of one expert, and experts may change ranks. What other ranks added in this run is kept; counts of an earlier run
    are replaced. Splits of the VRAM, which no server finds, are kept. What another server has saved since this one began is not
    replaced.
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
        self._path = node_file(path, node or 0)
        self._protected = protected
        history = history.limited()
        before = None if node is None else history.seen.counts
        self._history = dataclasses.replace(history, run=run, began_at=began_at, ranks={}, history=before)
        self._layers, self._rank = layers, rank
        self._saved = RoutingCounts(np.zeros(1, dtype=np.int64), (0, 0))
        self._runs = {run}
        """The runs whose counts a save may replace: this one, and that of the file as it is now."""
        with suppress(ProfileError, OSError):
            self._runs.add(Profile.load(self._path).run)

    def pending(self, seen: RoutingCounts) -> Callable[[], None] | None:
        """A function that saves ``seen`` (this rank's counts since the start, ``[layers, phase, kind, num_experts]`` by the
        checkpoint's expert), None if that is saved already."""
        if seen.steps == self._saved.steps:
            return None
        return lambda: self._save(seen)

    def _save(self, seen: RoutingCounts) -> None:
        past = self._history.seen.steps
        steps = (past[0] + seen.steps[0], past[1] + seen.steps[1])
        with _locked(self._path):
            found = self._of_this_run()
            new = seen.counts - self._saved.counts if self._rank in found.ranks else seen.counts
            profile = found.with_counts(self._rank, seen.steps, self._layers, new, steps)
            atomic_file.replace(self._path, profile.write, PROFILE_FILE, self._protected)
        self._saved = seen

    def _of_this_run(self) -> Profile:
        """The file's contents if they are of this run, up to this rank's last save; else the history, with the file's splits if
        it is of this model. Raises ``WriteRefused`` if the file is another server's."""
        try:
            found = Profile.load(self._path)
            if found.run not in self._runs:
                raise atomic_file.WriteRefused(self._path, OF_ANOTHER_SERVER)
            if found.model != self._history.model:
                return self._history
            included = found.ranks.get(self._rank, self._saved.steps)  # another one where an older file was put back
            of_run = found if found.run == self._history.run and included == self._saved.steps else self._history
            return of_run.with_slot_shares(found.slot_shares)
        except (ProfileError, FileNotFoundError):
            return self._history


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
