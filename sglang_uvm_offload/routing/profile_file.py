"""The profile that a running server saves: one file, however many ranks hold parts of the model."""

from __future__ import annotations

import dataclasses
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from sglang_uvm_offload.files import atomic as atomic_file
from sglang_uvm_offload.routing.counts import RoutingCounts
from sglang_uvm_offload.routing.profile import PROFILE_FILE, Profile, ProfileError


class ProfileFile:
    """Saves this rank's counts, on top of the history that the server started from.

    Ranks that hold other layers or other experts put their parts into the same file, each when it saves: what another rank
    wrote in this run stays, what is left of an earlier run does not.
    """

    def __init__(
        self,
        path: Path,
        history: Profile,
        run: str,
        layers: Sequence[int],
        experts: Sequence[range],
        protected: atomic_file.Protected = atomic_file.NOTHING,
    ):
        """``history`` is empty where there is none. ``run`` names this start of the server. ``layers`` are the decoder layers
        of this rank, ``experts`` the model's ids of the experts that it holds of each."""
        self._path = path
        self._protected = protected
        self._history = dataclasses.replace(history.limited(), run=run)
        self._layers, self._experts = layers, experts
        model = history.model
        self._whole = sorted(layers) == list(model.moe_layers) and all(len(ids) == model.num_experts for ids in experts)
        self._saved: tuple[int, int] = (0, 0)

    def pending(self, seen: RoutingCounts) -> Callable[[], None] | None:
        """What saves ``seen`` (this rank's counts since the start), None where that is saved already."""
        if seen.steps == self._saved:
            return None
        return lambda: self._save(seen)

    def _save(self, seen: RoutingCounts) -> None:
        past = self._history.part(self._layers, self._experts, seen.counts.shape[-1])
        steps = (past.steps[0] + seen.steps[0], past.steps[1] + seen.steps[1])
        total = RoutingCounts(past.counts + seen.counts, steps)
        if self._whole:
            self._replace(self._history.with_part(self._layers, self._experts, total))
        else:
            with _locked(self._path.parent):
                self._replace(self._others().with_part(self._layers, self._experts, total))
        self._saved = seen.steps

    def _others(self) -> Profile:
        """What the file holds of this run, else the history."""
        try:
            found = Profile.load(self._path)
        except (ProfileError, FileNotFoundError):
            return self._history
        return found if found.run == self._history.run and found.model == self._history.model else self._history

    def _replace(self, profile: Profile) -> None:
        atomic_file.replace(self._path, profile.write, PROFILE_FILE, self._protected)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Alone among processes of this machine. The lock is on the folder, because the file itself is replaced."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
