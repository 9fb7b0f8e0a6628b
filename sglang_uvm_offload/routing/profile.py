"""A profile: a model's routing counts, saved by one run of the server for the next.

The file is an ``npz`` with the ``counts`` and ``steps`` of a ``RoutingCounts`` over all MoE layers and routed experts of the
model, and ``about``: UTF-8 JSON that names the format and the model, and may hold the best split of VRAM between residents and
slots. A profile may come from anywhere, so it is checked as untrusted input.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from sglang_uvm_offload.expert_location import ExpertLocation, by_place
from sglang_uvm_offload.files import atomic as atomic_file
from sglang_uvm_offload.files import npz
from sglang_uvm_offload.files.kinds import mistaken
from sglang_uvm_offload.files.reading import printable
from sglang_uvm_offload.routing.counts import Phase, RoutingCounts
from sglang_uvm_offload.units import Share

FORMAT = "sglang-uvm-offload profile"
VERSION = 1
"""Raise it with every change that an older plugin must not overwrite, such as a new field: older plugins leave files of higher
versions alone."""
LAYOUT = "sglang FusedMoE, experts by the checkpoint's ids"
"""How SGLang numbers the counted experts. Under another numbering, the same ids would mean other experts."""
MAX_BYTES = 128 << 20
"""The size limit of ``counts``: over 400 layers of 8192 experts."""
MAX_ABOUT_BYTES = 1 << 20
MAX_COUNT = 1 << 53
MAX_SLOT_SHARES = 256
MAX_RANKS = 1 << 14
HISTORY_STEPS = 1 << 16
"""The maximum weight of earlier runs, in steps of each phase, so that the profile follows the traffic."""


_Steps = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Steps = tuple[int, int]
"""Prefill and decode steps."""


class _Mark(Struct):
    """The JSON fields that every version of the format has."""

    format: Any = None
    version: Any = None
    layout: Any = None


class _About(_Mark, kw_only=True, omit_defaults=True):
    """The JSON of a profile. Files that older plugins wrote lack the fields that have defaults here."""

    run: str
    name: str
    architecture: str
    moe_layers: list[Annotated[int, Meta(ge=0)]]
    num_experts: Annotated[int, Meta(ge=0)]
    top_k: Annotated[int, Meta(ge=0)] | None = None
    ranks: Annotated[dict[str, tuple[_Steps, _Steps]], Meta(max_length=MAX_RANKS)] = {}
    slot_shares: Annotated[list[tuple[Share, Share]], Meta(max_length=MAX_SLOT_SHARES)] = []
    began_at: Annotated[float, Meta(ge=0, lt=MAX_COUNT)] = 0.0


_Decoded = TypeVar("_Decoded", _Mark, _About)


class ProfileError(ValueError):
    """The file is not a usable profile. The message gives the reason."""


class NewerProfileError(ProfileError):
    """The file has a newer format than this version of the plugin can read."""


@dataclass(frozen=True)
class RoutedModel:
    """The model of a profile. ``name`` is the checkpoint's name. ``moe_layers`` lists the decoder layers with a router; a layer
    with several routers appears once for each (ERNIE 4.5 VL has one for text and one for images)."""

    name: str
    architecture: str
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int | None

    def rows(self, layers: Sequence[int]) -> list[int]:
        """The row of each of ``layers`` in arrays over ``moe_layers``. A layer that is named again gets its next router's row.
        Raises ``ValueError`` for a layer without a (further) row."""
        left: dict[int, list[int]] = {}
        for row, layer in enumerate(self.moe_layers):
            left.setdefault(layer, []).append(row)
        try:
            return [left[layer].pop(0) for layer in layers]
        except LookupError:
            raise ValueError(f"{list(layers)} are not among the MoE layers {list(self.moe_layers)}") from None

    def differences(self, other: RoutedModel) -> list[str]:
        """Describe each field of ``other`` that differs from this model's."""
        fields = (field.name for field in dataclasses.fields(self))
        return [
            f"{field} {getattr(other, field)}, not {getattr(self, field)}"
            for field in fields
            if getattr(self, field) != getattr(other, field)
        ]


@dataclass(frozen=True, eq=False)
class Profile:
    """Counts of a model's routing. ``seen`` has shape ``[moe_layers, phase, kind, num_experts]``. ``run`` is the launch id of
    the server that counted them, or the latest part of them."""

    model: RoutedModel
    seen: RoutingCounts
    run: str = ""
    ranks: Mapping[str, Steps] = field(default_factory=dict)
    """The ranks of that run whose counts are included, with the steps that each had counted at its last save."""
    slot_shares: Mapping[float, float] = field(default_factory=dict)
    """The best share of VRAM to give to slots, by residency (the share of a layer's experts in VRAM, as residents or in
    slots), as ``replay --slots --into`` measured it. Both are 0 to 1."""
    began_at: float = 0.0
    """When that run began, in seconds since 1970; 0 if unknown."""
    history: np.ndarray | None = None
    """Set in the files of a server with several nodes: the counts in ``seen`` that the run started from. The files of the
    other nodes include them too."""

    sources: frozenset[str] = frozenset()
    """The digests of all files whose counts are included."""

    @property
    def digest(self) -> str:
        """Identifies the counts and the run that saved them. VRAM splits do not change it."""
        digest = hashlib.sha256(f"{self.run} {self.seen.steps} ".encode())
        digest.update(self.seen.counts.tobytes())
        return digest.hexdigest()

    @classmethod
    def empty(cls, model: RoutedModel, run: str = "") -> Profile:
        shape = (len(model.moe_layers), 2, 2, model.num_experts)
        return cls(model, RoutingCounts(np.zeros(shape, dtype=np.int64), (0, 0)), run)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read and check a file. Raises ``ProfileError`` if this version cannot read it as a profile (``NewerProfileError`` for
        a newer format), and ``OSError`` if it cannot be opened."""
        try:
            limits = {"about": MAX_ABOUT_BYTES, "counts": MAX_BYTES, "steps": 16}
            about, counts, steps, *history = npz.read(path, limits, optional={"history": MAX_BYTES})
        except npz.NpzError as error:
            _check_format(path)  # a newer one may have other arrays
            raise ProfileError(mistaken(path, "profile") or str(error)) from error
        read = _about(about)
        model = RoutedModel(read.name, read.architecture, tuple(read.moe_layers), read.num_experts, read.top_k)
        seen = _checked(model, counts, steps)
        before = None if not history else _checked(model, history[0], steps).counts
        profile = cls(model, seen, read.run, read.ranks, dict(read.slot_shares), read.began_at, before)
        return dataclasses.replace(profile, sources=frozenset({profile.digest}))

    def write(self, file: IO[bytes]) -> None:
        """Write to a binary file. Use with ``atomic_file.replace``."""
        about = _About(
            format=FORMAT,
            version=VERSION,
            layout=LAYOUT,
            run=self.run,
            **dataclasses.asdict(self.model),
            ranks=dict(self.ranks),
            slot_shares=sorted(self.slot_shares.items()),
            began_at=self.began_at,
        )
        encoded = np.frombuffer(msgspec.json.encode(about), dtype=np.uint8)
        arrays: dict[str, Any] = {} if self.history is None else {"history": self.history}
        np.savez(file, about=encoded, counts=self.seen.counts, steps=np.array(self.seen.steps, dtype=np.int64), **arrays)

    def with_slot_shares(self, shares: Mapping[float, float]) -> Profile:
        """This profile with ``shares`` added, replacing its own for equal residencies. Raises ``ProfileError`` for too many."""
        together = {**self.slot_shares, **shares}
        if len(together) > MAX_SLOT_SHARES:
            raise ProfileError(f"VRAM splits for {len(together)} residencies, more than {MAX_SLOT_SHARES}")
        return dataclasses.replace(self, slot_shares=together)

    def part(self, rows: Sequence[int], locations: Sequence[ExpertLocation], width: int) -> RoutingCounts:
        """The counts for a rank that holds the experts at ``locations`` of the MoE layers ``rows`` (from ``RoutedModel.rows``),
        in the rank's own expert order and ``width`` experts wide."""
        return RoutingCounts(by_place(self.seen.counts[list(rows)], locations, width), self.seen.steps)

    def with_counts(self, rank: str, counted: Steps, layers: Sequence[int], new: np.ndarray, steps: Steps) -> Profile:
        """This profile with ``new`` (int64 ``[layers, phase, kind, num_experts]``) added to the counts of ``layers``. It covers
        at least ``steps`` steps, and everything that ``rank`` counted in its first ``counted`` steps."""
        counts = self.seen.counts.copy()
        counts[self.model.rows(layers), :, :, : new.shape[-1]] += new
        steps = (max(self.seen.steps[0], steps[0]), max(self.seen.steps[1], steps[1]))
        return dataclasses.replace(self, seen=RoutingCounts(counts, steps), ranks={**self.ranks, rank: counted})

    def limited(self, steps: int = HISTORY_STEPS) -> Profile:
        """This profile scaled to at most ``steps`` steps of each phase, at the same rates."""
        counts, scaled = self.seen.counts.copy(), list(self.seen.steps)
        for phase in Phase:
            if scaled[phase] > steps:
                counts[:, phase] = counts[:, phase] * (steps / scaled[phase])
                scaled[phase] = steps
        return dataclasses.replace(self, seen=RoutingCounts(counts, (scaled[0], scaled[1])), history=None)


def reason(error: ProfileError | OSError) -> str:
    """Why a profile could not be read or written, without the path: an ``OSError`` may name a temporary file."""
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)


def model_name(path: str) -> str:
    """The name of a checkpoint that is given as a folder, a folder of the Hugging Face cache, or a hub id. Unprintable
    characters become ``?``, so that a profile saved under that name can be loaded."""
    parts = Path(path).parts
    cached = next((part for part in parts if part.startswith("models--")), None)
    name = cached.split("--")[-1] if cached else parts[-1] if parts else path
    return printable(name)


def is_profile(path: Path) -> bool:
    """Whether the file is a profile, whatever its version and model."""
    try:
        (about,) = npz.read(path, {"about": MAX_ABOUT_BYTES})
        return _decoded(about, _Mark).format == FORMAT
    except (npz.NpzError, ProfileError):
        return False


PROFILE_FILE = atomic_file.Kind("routing profile", is_profile)


def _check_format(path: str | os.PathLike[str]) -> None:
    """Raises ``NewerProfileError`` for a profile of a newer format."""
    with contextlib.suppress(npz.NpzError):
        (about,) = npz.read(path, {"about": MAX_ABOUT_BYTES})
        _about(about)


def _about(about: np.ndarray) -> _About:
    mark = _decoded(about, _Mark)
    if mark.format != FORMAT:
        raise ProfileError(f"is not a {FORMAT}")
    if type(mark.version) is int and mark.version > VERSION:
        raise NewerProfileError(f"has format {mark.version}; this version of sglang-uvm-offload reads format {VERSION}")
    if mark.version != VERSION:
        raise ProfileError(f"has format {mark.version!r}; this version of sglang-uvm-offload reads format {VERSION}")
    if mark.layout != LAYOUT:
        raise ProfileError(f"counts experts as {mark.layout!r}; this SGLang numbers them as {LAYOUT!r}")
    found = _decoded(about, _About)
    for name in (found.name, found.architecture):
        if not name.isprintable():  # untrusted text that goes to terminals and logs
            raise ProfileError(f"names the model {name!a}, which has unprintable characters")
    return found


def _decoded(about: np.ndarray, kind: type[_Decoded]) -> _Decoded:
    try:
        return msgspec.json.decode(about.astype(np.uint8).tobytes(), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProfileError(f"its about array is not the JSON of a profile: {error}") from error


def _checked(model: RoutedModel, counts: np.ndarray, steps: np.ndarray) -> RoutingCounts:
    expected = (len(model.moe_layers), 2, 2, model.num_experts)
    if counts.shape != expected or counts.dtype != np.int64:
        raise ProfileError(f"counts are {counts.dtype} {list(counts.shape)}, not int64 {list(expected)}")
    if steps.shape != (2,) or steps.dtype != np.int64:
        raise ProfileError(f"steps are {steps.dtype} {list(steps.shape)}, not int64 [2]")
    for name, values in (("counts", counts), ("steps", steps)):
        if values.size and (int(values.min()) < 0 or int(values.max()) > MAX_COUNT):
            raise ProfileError(f"{name} must be 0..{MAX_COUNT}, but are {values.min()}..{values.max()}")
    return RoutingCounts(counts, (int(steps[0]), int(steps[1])))
