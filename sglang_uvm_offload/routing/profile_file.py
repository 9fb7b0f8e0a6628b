"""The profile that a running server saves: one file per node, shared by all ranks that hold parts of the model."""

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
"""How long a save waits for another process's save."""
_TICK = 1e-3
"""A run begins at least this many seconds after its history, whatever the clock says, because readers use the latest run."""


_NO_SAVE = config_flag(save_profile=False)


class ProfileFile:
    """Saves this rank's counts, added to the history that the server continues.

    All ranks of a node share the file, and each adds its own layers and experts when it saves. Several ranks may count replicas
    of one expert, and experts may move between ranks. A save keeps what other ranks added in this run, and the VRAM splits,
    which only ``replay`` writes. It replaces counts of other runs only if the history includes them.
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
        """``path`` is the path of the whole profile. ``history`` holds what this server read, and may be empty. ``run`` is the
        launch id of this server and ``began_at`` its start, in seconds since 1970. ``layers`` are the decoder layers of this
        rank, whose name within the server is ``rank``. ``node`` is this rank's node, None for a server on a single node."""
        self._whole = path
        self.path = node_file(path, node or 0)
        """The file to which this rank saves."""
        self._protected = protected
        history = history.limited()
        before = None if node is None else history.seen.counts
        began_at = max(began_at, history.began_at + _TICK)
        self._history = dataclasses.replace(history, run=run, began_at=began_at, ranks={}, history=before)
        self._layers, self._rank = layers, rank
        self._saved = RoutingCounts(np.zeros(1, dtype=np.int64), (0, 0))

    def pending(self, seen: RoutingCounts) -> Callable[[], None] | None:
        """Return a function that saves ``seen``: this rank's counts since the start, ``[layers, phase, kind, num_experts]`` by
        the checkpoint's expert ids. None if they are saved already. The function raises ``WriteRefused`` if saving would lose
        counts in this file or in the files of other nodes."""
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
        """The profile to add to: the file's contents if they belong to this run and match this rank's last save, otherwise the
        history with the file's VRAM splits. Raises ``WriteRefused``."""
        own = (self._whole, self.path)
        there = {path: self._known(path) for path in dict.fromkeys((*own, *node_files(self._whole)))}
        for path, profile in there.items():
            if profile is not None and (path in own or profile.history is not None):
                self._check(path, profile)
        found = there[self.path]
        if found is None:
            return self._history
        included = found.ranks.get(self._rank, self._saved.steps)  # differs if someone put an older file back
        of_run = found if found.run == self._history.run and included == self._saved.steps else self._history
        return of_run.with_slot_shares(found.slot_shares)

    def _known(self, path: Path) -> Profile | None:
        """The profile at ``path``, None if there is none. Raises ``WriteRefused`` if this version cannot read it."""
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
        """Raise ``WriteRefused`` if ``found``, the file at ``path``, has counts of another run that the history lacks."""
        if found.run == self._history.run or found.digest in self._history.sources:
            return
        if different := self._history.model.differences(found.model):
            why = f"has the routing of another model ({'; '.join(different)})"
            remedy = f"choose another path, or save nowhere ({_NO_SAVE})"
        else:
            why = "has routing that this server did not start from, or that another server has saved since"
            restart = f"restart with --expert-offload-profile {self._whole} to continue from it"
            remedy = f"{restart}, choose another path, or save nowhere ({_NO_SAVE})"
        raise atomic_file.WriteRefused(path, f"{why}, so the file is left alone; {remedy}")


def add_slot_share(path: Path, residency: float, share: float) -> None:
    """Add a VRAM split to the profile at ``path``, even while a server saves to it. Raises ``ProfileError`` if the file is not
    a profile or has no room for another split, and ``OSError`` if it cannot be read or written."""
    with _locked(path):
        profile = Profile.load(path).with_slot_shares({residency: share})
        atomic_file.replace(path, profile.write, PROFILE_FILE)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Exclude other processes of this machine, on file systems with locks. Locks the folder of ``path``, because the file
    itself gets replaced. Raises ``TimeoutError`` if another process holds the lock for ``LOCK_SECONDS``."""
    handle = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if lock.taken(handle, LOCK_SECONDS) is False:  # without locks, a rank's next save adds what a race lost
            reason = f"another process has held the folder's lock for {LOCK_SECONDS:g} s"
            raise TimeoutError(errno.ETIMEDOUT, reason, str(path.parent))
        yield
    finally:
        os.close(handle)
