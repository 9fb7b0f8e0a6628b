"""Saved profiles of a small model."""

import json

import numpy as np

from sglang_uvm_offload.routing.counts import RoutingCounts
from sglang_uvm_offload.routing.profile import Profile, RoutedModel

MODEL = RoutedModel("GLM-4.5", "Glm4MoeForCausalLM", (1, 2, 5), 8, 2)


def some(seed=0, steps=(3, 40), model=MODEL, run="r"):
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 40, (len(model.moe_layers), 2, 2, model.num_experts))
    return Profile(model, RoutingCounts(counts, steps), run)


def saved(path, profile):
    with open(path, "wb") as file:
        profile.write(file)
    return path


def save(file, seen):
    """Saves ``seen``, counted since the start of the run, to ``file``, a ``ProfileFile``."""
    write = file.pending(seen)
    assert write is not None
    write()


def rewritten(path, **changes):
    """Rewrites the file at ``path`` with arrays replaced. ``about`` is updated, not replaced."""
    with np.load(path) as file:
        arrays = dict(file)
    about = json.loads(arrays["about"].tobytes())
    about.update(changes.pop("about", {}))
    arrays["about"] = np.frombuffer(json.dumps(about).encode(), dtype=np.uint8)
    arrays.update(changes)
    np.savez(path, **arrays)
    return path
