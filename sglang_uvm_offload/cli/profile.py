"""The ``profile`` command: shows and merges saved profiles."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import numpy as np

from sglang_uvm_offload.cli.terminal import complain, say
from sglang_uvm_offload.files import atomic as atomic_file
from sglang_uvm_offload.files.kinds import mistaken
from sglang_uvm_offload.routing.merged_profile import load_whole, merge, same_file, without_nodes
from sglang_uvm_offload.routing.profile import PROFILE_FILE, Profile, ProfileError, reason

RESIDENCIES = (0.25, 0.5, 0.75)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "profiles",
        nargs="+",
        type=Path,
        metavar="PROFILE.npz",
        help="files of --expert-offload-profile; those of further nodes are read with them",
    )
    parser.add_argument("--out", type=Path, metavar="MERGED.npz", help="write the merged profile to this file")
    parser.add_argument("--model", metavar="NAME", help="the model name to store in --out, if the model's folder was renamed")


def run(args: argparse.Namespace) -> int:
    problems = ["--model: needs --out"] if args.model is not None and args.out is None else []
    if args.model is not None and not args.model.isprintable():
        problems.append(f"--model {args.model!a}: has characters that cannot be printed")
    sources = {path: f"{path}, an input" for path in args.profiles}
    if args.out is not None and (refused := atomic_file.refusal(args.out, PROFILE_FILE, sources)):
        problems.append(f"--out {args.out}: {refused}")
    profiles = []
    paths = without_nodes(args.profiles)
    for index, path in enumerate(paths):
        if args.out is not None and (earlier := same_file(path, paths[:index])) is not None:
            problems.append(f"{path}: is the same file as {earlier}: its routing would count twice")
            continue
        try:
            profiles.append(load_whole(path))
        except (ProfileError, OSError) as error:
            problems.append(f"{path}: {mistaken(path, 'profile') or reason(error)}")
            continue
        say(f"{path}\n{describe(profiles[-1])}")
    if not problems and args.out is not None:
        try:
            merged = write(profiles, args.out, args.model, sources)
        except (ProfileError, OSError) as error:
            problems.append(f"--out {args.out}: {reason(error)}")
        else:
            say(f"{args.out}: written\n{describe(merged)}")
    for problem in problems:
        complain(problem)
    return 2 if problems else 0


def write(profiles: list[Profile], path: Path, name: str | None, sources: atomic_file.Protected) -> Profile:
    """Write the merged profile and return it."""
    merged = merge(profiles)
    if name is not None:
        merged = dataclasses.replace(merged, model=dataclasses.replace(merged.model, name=name))
    atomic_file.replace(path, merged.write, PROFILE_FILE, sources)
    return merged


def describe(profile: Profile) -> str:
    model, seen = profile.model, profile.seen
    routed = np.sort(seen.routed(), axis=1)[:, ::-1]
    total = max(int(routed.sum()), 1)
    splits = [f"{slots:.0%} with {share:.0%} of the experts in VRAM" for share, slots in sorted(profile.slot_shares.items())]
    best = [(share, routed[:, : round(share * model.num_experts)].sum() / total) for share in RESIDENCIES]
    return (
        f"  {model.name} ({model.architecture}): {len(model.moe_layers)} MoE layers of {model.num_experts} experts\n"
        f"  {seen.steps[0]} prefill and {seen.steps[1]} decode steps, {routed.sum()} routings\n"
        "  highest hit rate: "
        + ", ".join(f"{hit_rate:.1%} with {share:.0%} of each layer's experts" for share, hit_rate in best)
        + (f"\n  best share of the VRAM in slots, by replay: {', '.join(splits)}" if splits else "")
    )
