"""Flags: what is well-formed, and every problem at once in the words of the flags."""

import math
from pathlib import Path

import numpy as np
import pytest

from sglang_uvm_offload.config import expert_problems
from sglang_uvm_offload.flags import FlagError, flag_name
from sglang_uvm_offload.requested_config import parse
from sglang_uvm_offload.resident_ids import ResidentIds


def problems(**flags):
    with pytest.raises(FlagError) as caught:
        parse(flags)
    return caught.value.problems


def test_no_flags_mean_off():
    assert parse({}) is None


@pytest.mark.parametrize("n", ["12", 12])
def test_a_number_may_come_as_text_or_as_a_number(n):
    config = parse({"num_resident": n})
    assert config.num_resident == 12
    assert config.resident_selection == "frequency"
    assert config.warmup_tokens == 4096


@pytest.mark.parametrize(
    ("flags", "flag", "word"),
    [
        ({"num_resident": "4.5"}, "--expert-offload-num-resident", "whole number"),
        ({"num_resident": ""}, "--expert-offload-num-resident", "whole number"),
        ({"num_resident": "9999999"}, "--expert-offload-num-resident", "whole number"),
        ({"num_resident": "²"}, "--expert-offload-num-resident", "whole number"),
        ({"num_resident": True}, "--expert-offload-num-resident", "True"),
        (
            {"num_resident": "auto", "resident_selection": "manual", "resident_ids": "1"},
            "--expert-offload-num-resident auto",
            "manual needs a number",
        ),
        ({"num_resident": 4, "adapt": "off"}, "--expert-offload-adapt off", "--expert-offload-profile"),
        ({"num_resident": 4, "adapt": "false"}, "--expert-offload-adapt 'false'", "in YAML, put quotes around on and off"),
        ({"num_resident": 4, "adapt": True}, "--expert-offload-adapt True", "must be one of off, warmup, continuous"),
        (
            {"num_resident": 4, "lookup_tables": False},
            "--expert-offload-config lookup_tables False",
            "must be one of vram, host",
        ),
        ({"num_resident": 4, "tma": "no"}, "--expert-offload-config tma 'no'", "must be one of on, off"),
        ({"num_resident": 4, "profile": " , "}, "--expert-offload-profile", "must be the path of a file, or several"),
        ({"num_resident": 4, "profile": "p,q", "resident_selection": "first_n"}, "--expert-offload-profile 'p,q'", "frequency"),
        (
            {"num_resident": 4, "profile": "p", "resident_ids": "1", "save_profile": False},
            "--expert-offload-profile 'p'",
            "nothing is saved",
        ),
        ({"num_resident": 4, "save_profile": " "}, "--expert-offload-config save_profile ' '", "path of a file"),
        ({"num_resident": 4, "stats": ""}, "--expert-offload-config stats ''", "path of a file"),
        ({"num_resident": 4, "stats": 7}, "--expert-offload-config stats 7", "must be the path of a file"),
        ({"num_resident": 4, "trace": ["a"]}, "--expert-offload-config trace ['a']", "must be the path of a file"),
        ({"num_resident": 4, "save_profile": True}, "--expert-offload-config save_profile True", "must be the path of a file"),
        ({"num_resident": 4, "profile": {"a": 1}}, "--expert-offload-profile {'a': 1}", "separated by commas or in a list"),
        ({"num_resident": 4, "profile": ["a", 7]}, "--expert-offload-profile ['a', 7]", "separated by commas or in a list"),
        (
            {"num_resident": 4, "warmup_tokens": 4096.5},
            "--expert-offload-config warmup_tokens 4096.5",
            "whole number of tokens",
        ),
        ({"num_resident": [4]}, "--expert-offload-num-resident [4]", "whole number of experts"),
        *[
            ({"num_resident": 4, "resident_selection": "manual", "resident_ids": wrong}, "--expert-offload-resident-ids", right)
            for wrong, right in (
                (7, "a list of ids"),
                ({"a": 1}, "a list of ids"),
                ([], "names no expert"),
                ([0, -1], "'-1' is neither an expert id"),
                ([0, 1.5], "'1.5' is neither"),
                ([[0], [True]], "list 1 holds True"),
                ([[0], 1], "one list of expert ids for each MoE layer"),
                ([range(9), [0]], "names 10 experts over 2 layers, and --expert-offload-num-resident 4 allows 8"),
            )
        ],
        ({"stats": "s.json"}, "--expert-offload-config stats", "no effect without"),
        ({"num_resident": "-2"}, "--expert-offload-num-resident '-2'", "(-1: off)"),
        ({"num_resident": 4, "trace": "t\0"}, r"--expert-offload-config trace 't\x00'", "path of a file"),
        ({"num_resident": 4, "draft_num_resident": -1}, "--expert-offload-config draft_num_resident", "0 to 999999"),
        ({"num_resident": 4, "draft_num_resident": 10**6}, "--expert-offload-config draft_num_resident", "0 to 999999"),
        ({"num_resident": 4, "draft_num_resident": True}, "--expert-offload-config draft_num_resident", "True"),
        ({"num_resident": 4, "warmup_tokens": 0}, "--expert-offload-config warmup_tokens", "1 to 1000000000000"),
        ({"num_resident": 4, "warmup_tokens": 10**12 + 1}, "--expert-offload-config warmup_tokens", "1 to 1000000000000"),
        ({"num_resident": 4, "warmup_tokens": True}, "--expert-offload-config warmup_tokens", "True"),
        ({"num_resident": 4, "stream_buffer_gb": "some"}, "--expert-offload-config stream_buffer_gb", "some"),
        ({"num_resident": 4, "stream_buffer_gb": -1}, "--expert-offload-config stream_buffer_gb", "-1"),
        ({"num_resident": 4, "stream_buffer_gb": "nan"}, "--expert-offload-config stream_buffer_gb", "nan"),
        ({"num_resident": 4, "stream_tokens": "1.5"}, "--expert-offload-config stream_tokens", "1.5"),
        ({"num_resident": 4, "stream_tokens": -2}, "--expert-offload-config stream_tokens", "-2"),
        *[
            ({"num_resident": 4, "slots": wrong}, f"--expert-offload-slots {wrong!r}", "auto, or a whole number of slots")
            for wrong in ("some", "", "-1", -1, "1.5", 2.0, True, "²", "1000000")
        ],
        ({"num_resident": 4, "headroom_gb": -1.0}, "--expert-offload-headroom-gb", "-1.0"),
        ({"num_resident": 4, "headroom_gb": float("nan")}, "--expert-offload-headroom-gb", "nan"),
        (
            {"num_resident": 4, "prefetch": "frequency", "adapt": "off", "resident_selection": "first_n"},
            "--expert-offload-prefetch frequency",
            "which --expert-offload-adapt off forbids",
        ),
        ({"num_resident": 4, "prefetch": "guess"}, "--expert-offload-prefetch", "none, frequency, speculative"),
        ({"num_resident": 4, "resident_selection": "hot"}, "--expert-offload-resident-selection", "first_n, frequency"),
        ({"num_resident": 4, "resident_selection": "manual"}, "--expert-offload-resident-selection", "resident-ids"),
        (
            {"num_resident": 4, "resident_ids": "0-3", "resident_selection": "first_n"},
            "--expert-offload-resident-ids '0-3'",
            "manual or --expert-offload-adapt continuous",
        ),
        (
            {"num_resident": "auto", "resident_ids": "0-3"},
            "--expert-offload-num-resident auto",
            "without one needs --expert-offload-adapt continuous",
        ),
        ({"num_resident": 2, "resident_ids": "0-3", "adapt": "continuous"}, "--expert-offload-resident-ids", "allows 2"),
        ({"resident_selection": "first_n"}, "--expert-offload-resident-selection", "no effect without"),
        ({"draft_num_resident": 0}, "--expert-offload-config draft_num_resident", "no effect without"),
        ({"warmup_tokens": 100}, "--expert-offload-config warmup_tokens", "no effect without"),
        ({"slots": 8}, "--expert-offload-slots", "no effect without"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(flags, flag, word):
    (problem,) = problems(**flags)
    assert problem.startswith(flag)
    assert word in problem


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"save_profile": Path("p.npz"), "trace": Path("t.npz"), "stats": Path("s.json")},
         {"save_profile": "p.npz", "trace": "t.npz", "stats": "s.json"}),
        ({"profile": Path("a.npz")}, {"profile": "a.npz"}),
        ({"profile": ["a.npz", Path("b.npz")]}, {"profile": "a.npz,b.npz"}),
        ({"profile": [], "trace": False, "stats": None, "slots": False}, {}),
        ({"adapt": False, "resident_selection": "first_n", "tma": False},
         {"adapt": "off", "resident_selection": "first_n", "tma": "off"}),
        ({"tma": True}, {"tma": "on"}),
        (dict.fromkeys(("adapt", "warmup_tokens", "headroom_gb", "slots", "resident_ids", "draft_num_resident")), {}),
        ({"warmup_tokens": "77", "headroom_gb": "0.5", "draft_num_resident": "3"},
         {"warmup_tokens": 77, "headroom_gb": 0.5, "draft_num_resident": 3}),
        ({"warmup_tokens": np.int64(77), "headroom_gb": np.float32(0.5), "slots": np.int32(8), "tma": np.bool_(False)},
         {"warmup_tokens": 77, "headroom_gb": 0.5, "slots": "8", "tma": "off"}),
        ({"stream_tokens": math.inf, "stream_buffer_gb": 0}, {"stream_tokens": "inf", "stream_buffer_gb": "0"}),
    ],
)  # fmt: skip
def test_values_in_pythons_own_types_mean_what_their_text_does(given, text):
    assert parse({"num_resident": np.int64(4), **given}) == parse({"num_resident": "4", **text})


def test_a_listed_file_may_have_a_comma_in_its_name():
    assert parse({"num_resident": 4, "profile": ["a,b.npz"]}).profiles == (Path("a,b.npz"),)


@pytest.mark.parametrize("ids", [[0, 2], (0, 2), {2, 0}, np.array([0, 2]), range(0, 4, 2), ["0", "2"]])
def test_ids_may_be_a_list(ids):
    found = parse({"num_resident": 4, "resident_selection": "manual", "resident_ids": ids}).resident_ids
    assert found.of_layer(17) == {0, 2}


@pytest.mark.parametrize("given", [list, np.array, Path])
def test_ids_of_each_layer_may_be_lists_or_a_file(given, tmp_path):
    (tmp_path / "ids.json").write_text("[[0, 1], [2, 5]]")
    ids = tmp_path / "ids.json" if given is Path else given([[0, 1], [2, 5]])
    found = parse({"num_resident": 4, "resident_selection": "manual", "resident_ids": ids}).resident_ids
    assert [found.of_layer(0), found.of_layer(1)] == [{0, 1}, {2, 5}]
    assert found.layer_problems((3,))[0].startswith("--expert-offload-resident-ids '")


@pytest.mark.parametrize("off", [-1, "-1", False])
def test_minus_one_is_off_whatever_else_is_given(off):
    """So that one script turns offloading on and off by a number."""
    assert parse({"num_resident": off, "warmup_tokens": 100, "adapt": "continuous", "slots": "8"}) is None
    assert parse({"num_resident": 0}).num_resident == 0, "none resident is not off"


def test_a_profile_makes_up_for_adaptation():
    flags = {"num_resident": 4, "profile": "a.npz, b.npz", "adapt": "off"}
    config = parse(flags)
    assert [str(path) for path in config.profiles] == ["a.npz", "b.npz"]


def test_all_problems_are_listed_at_once():
    found = problems(num_resident="x", warmup_tokens=0, headroom_gb=-1, prefetch="guess", tma="no")
    assert len(found) == 5


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("0-3,7", {0, 1, 2, 3, 7}),
        ("1,2,,3", {1, 2, 3}),
        (" 4 , 5 - 6 ,", {4, 5, 6}),
        ("3,3,3-3", {3}),
    ],
)
def test_ids_are_read(text, ids):
    assert ResidentIds.parse(text).of_layer(17) == ids


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "names no expert"),
        (" , ", "names no expert"),
        ("a", "neither"),
        ("-3", "neither"),
        ("1-2-3", "neither"),
        ("5-2", "backwards"),
        ("0-9999999", "neither"),
        ("1.5", "neither"),
    ],
)
def test_ids_that_cannot_be_read_say_why(text, reason):
    (problem,) = problems(num_resident=4, resident_selection="manual", resident_ids=text)
    assert reason in problem


def test_an_ids_file_holds_a_list_a_layer(tmp_path):
    path = tmp_path / "ids.json"
    path.write_text("[[0, 1], [5]]")
    ids = ResidentIds.parse(f"@{path}")
    assert [ids.of_layer(0), ids.of_layer(1)] == [{0, 1}, {5}]
    assert ids.number_problems(2) + ids.expert_problems(6) + ids.layer_problems((3, 5)) == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot read"),
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"{}", "one list of expert ids"),
        (b"[]", "one list of expert ids"),
        (b"[1, 2]", "one list of expert ids"),
        (b"[[0], [-1]]", "list 1 holds -1"),
        (b"[[true]]", "holds True"),
        (b"[[1.5]]", "holds 1.5"),
        (b"[[null]]", "holds None"),
        (b"[[1000000]]", "0 to 999999"),
        (b"[[" + b"1" * 5000 + b"]]", "not JSON"),
    ],
)
def test_a_corrupt_ids_file_is_refused_with_the_reason(tmp_path, content, reason):
    path = tmp_path / "ids.json"
    if content is not None:
        path.write_bytes(content)
    (problem,) = problems(num_resident=4, resident_selection="manual", resident_ids=f"@{path}")
    assert reason in problem
    assert str(path) in problem


def test_an_ids_file_without_bounds_is_not_read(tmp_path):
    path = tmp_path / "ids.json"
    with path.open("wb") as file:
        file.truncate((16 << 20) + 1)
    (problem,) = problems(num_resident=4, resident_selection="manual", resident_ids=f"@{path}")
    assert "larger than 16 MiB" in problem


def test_more_ids_than_residents_are_refused_without_knowing_the_model(tmp_path):
    path = tmp_path / "ids.json"
    path.write_text("[[0, 1, 2], [9]]")
    manual = {"resident_selection": "manual", "resident_ids": f"@{path}"}
    assert parse({"num_resident": 2, **manual}) is not None, "N is an average over the layers"
    (problem,) = problems(num_resident=1, **manual)
    assert f"--expert-offload-resident-ids '@{path}': names 4 experts over 2 layers" in problem
    assert "--expert-offload-num-resident 1 allows 2" in problem
    (problem,) = problems(num_resident=8, resident_selection="manual", resident_ids="0-8")
    assert "'0-8': names 9 experts a layer, and --expert-offload-num-resident 8 allows 8" in problem


def test_ids_that_do_not_fit_the_model_are_refused(tmp_path):
    path = tmp_path / "ids.json"
    path.write_text("[[0, 1, 2], [9]]")
    from_file = ResidentIds.parse(f"@{path}")
    (problem,) = from_file.layer_problems((1, 2, 5))
    assert problem.startswith(f"--expert-offload-resident-ids '@{path}': lists 2 layers, but the model has 3 MoE layers")
    assert problem.endswith(": 1, 2, 5")
    assert from_file.layer_problems((1, 5)) == []
    assert "expert 9 does not exist; the model's experts are 0-7" in from_file.expert_problems(8)[0]
    assert from_file.expert_problems(10) == []
    assert "'0-8': expert 8" in ResidentIds.parse("0-8").expert_problems(8)[0]


@pytest.mark.parametrize(
    ("flags", "adapt", "coactivation"),
    [
        ({}, "warmup", True),
        ({"adapt": "continuous"}, "continuous", True),
        ({"prefetch": "speculative"}, "continuous", True),
        ({"prefetch": "frequency"}, "continuous", False),
        ({"prefetch": "frequency", "adapt": "continuous"}, "continuous", False),
        ({"resident_selection": "first_n", "adapt": "off"}, "off", True),
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
        ({"resident_ids": "1", "resident_selection": "manual"}, "manual"),
        ({"resident_ids": "1", "adapt": "off"}, "manual"),
        ({"resident_ids": "1", "adapt": "continuous"}, "frequency"),
        ({"resident_ids": "1", "prefetch": "frequency"}, "frequency"),
        ({"resident_ids": "1", "adapt": "continuous", "resident_selection": "first_n"}, "first_n"),
    ],
)
def test_ids_are_the_only_residents_unless_residents_follow_the_traffic(flags, selection):
    assert parse({"num_resident": 4, **flags}).resident_selection == selection


@pytest.mark.parametrize(
    ("flags", "profiles", "saved"),
    [
        ({"profile": "p"}, ["p"], "p"),
        ({"profile": "p", "resident_selection": "first_n"}, ["p"], "p"),
        ({"profile": "p", "save_profile": False}, ["p"], None),
        ({"profile": "p", "save_profile": "q"}, ["p"], "q"),
        ({"profile": ["p", "q"]}, ["p", "q"], None),
        ({"profile": "p,q", "save_profile": "q"}, ["p", "q"], "q"),
        ({"save_profile": "q"}, [], "q"),
        ({"save_profile": False}, [], None),
    ],
)
def test_a_profile_is_saved_where_it_is_read_unless_an_option_says_where(flags, profiles, saved):
    config = parse({"num_resident": 4, **flags})
    assert config.profiles == tuple(map(Path, profiles))
    assert config.save_profile == (saved and Path(saved))


def test_ids_beside_residents_that_follow_the_traffic_are_kept():
    assert parse({"num_resident": 4, "prefetch": "frequency", "resident_ids": "1,2"}).resident_ids.of_layer(0) == {1, 2}


def test_ids_that_are_more_than_the_number_that_fits_are_refused_once_it_is_known():
    ids = parse({"num_resident": "auto", "adapt": "continuous", "resident_ids": "0-3"}).resident_ids
    (problem,) = expert_problems(ids, 2, 0, 8)
    assert problem.startswith("--expert-offload-resident-ids '0-3': names 4 experts")
    assert not expert_problems(ids, 4, 0, 8)


@pytest.mark.parametrize(
    ("number", "given", "slots"),
    [
        *[(4, given, 0) for given in (None, "auto", "0", 0, False)],
        (4, "12", 12),
        (4, 12, 12),
        (4, "999999", 999999),
        ("auto", None, None),
        ("auto", "auto", None),
        ("auto", "0", 0),
        ("auto", "3", 3),
    ],
)
def test_slots_are_a_number_or_a_part_of_what_fits(number, given, slots):
    assert parse({"num_resident": number, "slots": given}).slots == slots


def test_no_more_slots_than_experts_are_served():
    (problem,) = expert_problems(None, 4, 5, 8)
    assert problem.startswith("--expert-offload-slots 5: 4 residents leave 4 of 8 experts a layer offloaded")
    assert not expert_problems(None, 8, 8, 8)


def test_redundant_experts_count_as_residents_do():
    assert not expert_problems(None, 10, 1, 8, redundant=2)
    (problem,) = expert_problems(None, 11, 0, 8, redundant=2)
    assert problem == (
        "--expert-offload-num-resident 11: the model has 8 routed experts a layer and 2 redundant ones; give at most as many"
    )
    (problem,) = expert_problems(ResidentIds.parse("8"), 9, 0, 8, redundant=2)
    assert "expert 8 does not exist; the model's experts are 0-7" in problem


def test_the_largest_values_that_messages_name_are_accepted():
    largest = {"warmup_tokens": 10**12, "headroom_gb": 1024, "stream_buffer_gb": "1024", "stream_tokens": "999999999"}
    assert parse({"num_resident": "999999", **largest}) is not None


def test_what_an_ids_file_holds_is_shown_in_short(tmp_path):
    path = tmp_path / "ids.json"
    path.write_text(f'[["{"x" * 100_000}"]]')
    (problem,) = problems(num_resident=4, resident_selection="manual", resident_ids=f"@{path}")
    assert len(problem) < 1000


@pytest.mark.parametrize("name", ["profile", "save_profile", "trace", "resident_ids"])
def test_what_is_not_text_where_a_file_is_expected_is_named_with_the_other_problems(name):
    for value in (5, True, {"a": 1}, b"a"):
        with pytest.raises(FlagError) as caught:
            parse({"num_resident": 4, "warmup_tokens": 0, name: value})
        flag = flag_name(name)
        named, other = sorted(caught.value.problems, key=lambda problem: not problem.startswith(flag))
        assert named.startswith(f"{flag} {value!r}: must be ")
        assert other.startswith("--expert-offload-config warmup_tokens 0")


@pytest.mark.parametrize("name", ["profile", "save_profile", "trace"])
@pytest.mark.parametrize("value", ["a\0b", "\ud800", " "])
def test_what_no_file_can_be_called_is_refused(name, value):
    with pytest.raises(FlagError, match="must be the path of a file"):
        parse({"num_resident": 4, name: value})


def test_a_number_of_thousands_of_digits_is_refused_beside_ids():
    (problem,) = problems(num_resident="9" * 5000, resident_selection="manual", resident_ids="0-3")
    assert "0 to 999999" in problem
