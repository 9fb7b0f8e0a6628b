"""Flags: what is well-formed, and every problem at once in the words of the flags."""

import math
from pathlib import Path

import numpy as np
import pytest

from sglang_uvm_offload.config import expert_problems
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.requested_config import parse
from sglang_uvm_offload.resident_ids import ResidentIds

FIRST = {"resident_selection": "first_n"}
MANUAL = {"resident_selection": "manual"}


def problems(**flags):
    with pytest.raises(FlagError) as caught:
        parse(flags)
    return caught.value.problems


def wrong(flag, right, *values, **others):
    """Cases of one flag whose ``values`` are each refused with ``right``."""
    return [({"num_resident": 4, **others, flag: value}, flag_name(flag), right) for value in values]


@pytest.mark.parametrize(
    ("flags", "flag", "word"),
    [
        *wrong("num_resident", "whole number of experts (-1: off)", "4.5", "", "9999999", "²", True, [4], "-2"),
        *wrong("adapt", "in YAML, quote on and off", "false"),
        *wrong("adapt", "must be one of off, warmup, continuous", True),
        *wrong("prefetch", "none, frequency, speculative", "guess"),
        *wrong("resident_selection", "first_n, frequency", "hot"),
        *wrong("slots", "auto, or a whole number of slots", "some", "-1", "1.5", 2.0, True, "1000000"),
        *wrong("headroom_gb", "a number of GiB from 0 to 1024", -1.0, float("nan"), True),
        *wrong("warmup_tokens", "1 to 1000000000000", 4096.5, 0, 10**12 + 1),
        *wrong("draft_num_resident", "0 to 999999", -1, 10**6),
        *wrong("stream_buffer_gb", "auto, or GiB from 0 to 1024", "some", -1),
        *wrong("stream_tokens", "auto, inf, or a whole number of tokens", "1.5", -2),
        *wrong("lookup_tables", "must be one of vram, host", False),
        *wrong("tma", "must be one of on, off", "no"),
        *wrong("profile", "must be one or more file paths, separated by commas", " , ", {"a": 1}, ["a", 7]),
        *wrong("stats", "must be the path of a file", "", 7, "t\0", "\ud800"),
        *wrong("save_profile", "must be the path of a file", " ", True, b"a"),
        *wrong("resident_ids", "a list of ids", 7, {"a": 1}, **MANUAL),
        *wrong("resident_ids", "names no expert", [], "", " , ", **MANUAL),
        *wrong("resident_ids", "neither an expert id", "a", "-3", "1-2-3", "0-9999999", "1.5", [0, -1], [0, 1.5], **MANUAL),
        *wrong("resident_ids", "is reversed; give 2-5", "5-2", **MANUAL),
        *wrong("resident_ids", "list 1 has True", [[0], [True]], **MANUAL),
        *wrong("resident_ids", "one list of expert ids per MoE layer", [[0], 1], **MANUAL),
        *wrong("resident_ids", "names 9 experts a layer, but --expert-offload-num-resident 4 allows 4", "0-8", **MANUAL),
        *wrong("resident_ids", "names 10 experts over 2 layers, but --expert-offload-num-resident 4 allows 8", [range(9), [0]]),
        *wrong("resident_ids", "manual or --expert-offload-adapt continuous", "0-3", **FIRST),
        *wrong("resident_selection", "manual: needs --expert-offload-resident-ids", "manual"),
        *wrong("profile", "no effect without --expert-offload-resident-selection frequency", "p,q", **FIRST),
        *wrong("profile", "nothing is saved", "p", resident_ids="1", save_profile=False),
        *wrong("adapt", "a --expert-offload-profile; for residents that never change, use first_n or manual", "off"),
        *wrong("prefetch", "which --expert-offload-adapt off forbids", "frequency", adapt="off", **FIRST),
        *wrong("num_resident", "manual needs a number", "auto", resident_ids="1", **MANUAL),
        *wrong("num_resident", "without one needs --expert-offload-adapt continuous", "auto", resident_ids="1"),
        *(
            ({name: value}, flag_name(name), "no effect without --expert-offload-num-resident")
            for name, value in (("stats", "s.json"), ("slots", 8), ("resident_selection", "first_n"), ("draft_num_resident", 0))
        ),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(flags, flag, word):
    (problem,) = problems(**flags)
    assert problem.startswith(flag)
    assert word in problem


def test_all_problems_are_listed_at_once():
    found = problems(num_resident="9" * 5000, warmup_tokens=0, headroom_gb=-1, prefetch="guess", profile=7, resident_ids="0-3")
    assert len(found) == 5, "not also that a manual selection reads no profile"
    assert "--expert-offload-profile 7: must be " in "\n".join(found)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"save_profile": Path("p.npz"), "trace": Path("t.npz")}, {"save_profile": "p.npz", "trace": "t.npz"}),
        ({"profile": ["a.npz", Path("b.npz")]}, {"profile": "a.npz,b.npz"}),
        ({"profile": [], "trace": False, "stats": None, "slots": False}, {}),
        ({"adapt": False, **FIRST, "tma": False}, {"adapt": "off", **FIRST, "tma": "off"}),
        (dict.fromkeys(("adapt", "warmup_tokens", "headroom_gb", "slots", "resident_ids", "draft_num_resident")), {}),
        ({"warmup_tokens": "77", "headroom_gb": "0.5", "tma": True}, {"warmup_tokens": 77, "headroom_gb": 0.5, "tma": "on"}),
        ({"stream_tokens": math.inf, "stream_buffer_gb": 0}, {"stream_tokens": "inf", "stream_buffer_gb": "0"}),
        ({"resident_ids": {2, 0}}, {"resident_ids": "0,2"}),
        ({"warmup_tokens": np.int64(77), "headroom_gb": np.float32(0.5), "slots": np.int32(8), "tma": np.bool_(False)},
         {"warmup_tokens": 77, "headroom_gb": 0.5, "slots": "8", "tma": "off"}),
        ({"resident_ids": range(0, 4, 2)}, {"resident_ids": "0,2"}),
        ({"resident_ids": np.array([0, 2])}, {"resident_ids": "0,2"}),
        ({"resident_ids": np.array([[0, 1], [2, 5]])}, {"resident_ids": [[0, 1], [2, 5]]}),
    ],
)  # fmt: skip
def test_values_in_pythons_own_types_mean_what_their_text_does(given, text):
    assert parse({"num_resident": 4, **given}) == parse({"num_resident": "4", **text})


def test_the_largest_values_that_messages_name_are_accepted():
    largest = {"warmup_tokens": 10**12, "headroom_gb": 1024, "stream_buffer_gb": "1024", "stream_tokens": "999999999"}
    assert parse({"num_resident": "999999", "slots": "999999", **largest}).slots == 999999


@pytest.mark.parametrize("off", [-1, "-1", False])
def test_minus_one_is_off_whatever_else_is_given(off):
    """So that one script turns offloading on and off by a number."""
    assert parse({"num_resident": off, "warmup_tokens": 100, "adapt": "continuous", "slots": "8"}) is None
    assert parse({}) is None
    assert parse({"num_resident": 0}).num_resident == 0, "none resident is not off"


# What flags mean beside others


@pytest.mark.parametrize(
    ("flags", "adapt", "coactivation"),
    [
        ({}, "warmup", True),
        ({"adapt": "continuous"}, "continuous", True),
        ({"prefetch": "speculative"}, "continuous", True),
        ({"prefetch": "frequency"}, "continuous", False),
        ({"adapt": "off", **FIRST}, "off", True),
        ({"adapt": "off", "profile": "a.npz, b.npz"}, "off", True),
    ],
)
def test_prefetching_means_following_the_traffic(flags, adapt, coactivation):
    config = parse({"num_resident": 4, **flags})
    assert (config.adapt, config.coactivation) == (adapt, coactivation)


@pytest.mark.parametrize(
    ("flags", "selection"),
    [
        ({}, "frequency"),
        ({"resident_ids": "1"}, "manual"),
        ({"resident_ids": "1", "adapt": "off"}, "manual"),
        ({"resident_ids": "1", "adapt": "continuous"}, "frequency"),
        ({"resident_ids": "1", "prefetch": "frequency"}, "frequency"),
        ({"resident_ids": "1", "adapt": "continuous", **FIRST}, "first_n"),
    ],
)
def test_ids_are_the_only_residents_unless_residents_follow_the_traffic(flags, selection):
    config = parse({"num_resident": 4, **flags})
    assert config.resident_selection == selection
    assert (config.resident_ids is not None) == ("resident_ids" in flags)


@pytest.mark.parametrize(
    ("flags", "profiles", "saved"),
    [
        ({"profile": "p", **FIRST}, ["p"], "p"),
        ({"profile": "p", "save_profile": False}, ["p"], None),
        ({"profile": "p", "save_profile": "q"}, ["p"], "q"),
        ({"profile": ["p", "a,b.npz"]}, ["p", "a,b.npz"], None),
        ({"profile": "p,q", "save_profile": "q"}, ["p", "q"], "q"),
        ({"save_profile": "q"}, [], "q"),
    ],
)
def test_a_profile_is_saved_where_it_is_read_unless_an_option_says_where(flags, profiles, saved):
    config = parse({"num_resident": 4, **flags})
    assert config.profiles == tuple(map(Path, profiles))
    assert config.save_profile == (saved and Path(saved))


@pytest.mark.parametrize(
    ("number", "given", "slots"),
    [(4, None, 0), (4, "auto", 0), (4, "12", 12), ("auto", None, None), ("auto", "auto", None), ("auto", "0", 0)],
)
def test_slots_are_a_number_or_a_part_of_what_fits(number, given, slots):
    assert parse({"num_resident": number, "slots": given}).slots == slots


# Ids, and the model


@pytest.mark.parametrize(("text", "ids"), [("0-3,7", {0, 1, 2, 3, 7}), (" 4 , 5 - 6 ,,", {4, 5, 6}), ("3,3,3-3", {3})])
def test_ids_are_read(text, ids):
    assert ResidentIds.parse(text).of_layer(17) == ids


@pytest.mark.parametrize("form", ["text", "path", "list"])
def test_ids_of_each_layer_may_be_in_a_file_or_a_list(form, tmp_path):
    path = tmp_path / "ids.json"
    path.write_text("[[0, 1, 2], [5]]")
    given = {"text": f"@{path}", "path": path, "list": [[0, 1, 2], [5]]}[form]
    ids = parse({"num_resident": 2, **MANUAL, "resident_ids": given}).resident_ids
    assert [ids.of_layer(0), ids.of_layer(1)] == [{0, 1, 2}, {5}], "N is an average over the layers"
    assert ids.number_problems(2) + ids.expert_problems(6) + ids.layer_problems((3, 5)) == []
    (problem,) = ids.layer_problems((1, 2, 5))
    assert problem.startswith("--expert-offload-resident-ids '")
    assert problem.endswith("lists 2 layers, but each of the model's 3 MoE layers needs a list: 1, 2, 5")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot read"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[[" + b"1" * 5000 + b"]]", "not JSON"),
        (b"{}", "one list of expert ids"),
        (b"[]", "one list of expert ids"),
        (b"[[0], [-1]]", "list 1 has -1"),
        (b'[["' + b"x" * 100_000 + b'"]]', "has 'xxx"),
        (b"[[1000000]]", "0 to 999999"),
        (b" " * ((16 << 20) + 1), "larger than 16 MiB"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_corrupt_ids_file_is_refused_with_the_reason(tmp_path, content, reason):
    path = tmp_path / "ids.json"
    if content is not None:
        path.write_bytes(content)
    (problem,) = problems(num_resident=4, **MANUAL, resident_ids=f"@{path}")
    assert reason in problem
    assert str(path) in problem
    assert len(problem) < 1000


def test_numbers_that_do_not_fit_the_model_are_refused():
    ids = parse({"num_resident": "auto", "adapt": "continuous", "resident_ids": "0-3"}).resident_ids
    (problem,) = expert_problems(ids, 2, 0, 8)
    assert problem.startswith("--expert-offload-resident-ids '0-3': names 4 experts")
    assert not expert_problems(ids, 4, 0, 8)
    (problem,) = expert_problems(ResidentIds.parse("8"), 9, 0, 8, redundant=2)
    assert "expert 8 does not exist; the model's experts are 0-7" in problem
    assert not expert_problems(None, 10, 1, 8, redundant=2), "redundant experts count as residents do"
    (problem,) = expert_problems(None, 11, 0, 8, redundant=2)
    assert problem == (
        "--expert-offload-num-resident 11: the model has 8 routed experts a layer and 2 redundant ones; give at most 10"
    )
    (problem,) = expert_problems(None, 4, 5, 8)
    assert problem.startswith("--expert-offload-slots 5: 4 residents leave only 4 of 8 experts a layer offloaded")
    assert not expert_problems(None, 8, 8, 8)
