"""``--expert-offload-config``, the flags that it replaces, and names that are misspelt."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from sglang_uvm_offload.flags import (
    ARGUMENTS,
    FLAGS,
    OPTIONS,
    REPLACED,
    FlagError,
    config_flag,
    flag_name,
    no_such_flag,
    spelled,
)
from sglang_uvm_offload.requested_config import MAX_CONFIG_BYTES, of_arguments, parse

CONFIG = "--expert-offload-config"
VALUES = {
    "warmup_tokens": 77,
    "draft_num_resident": 3,
    "save_profile": "p.npz",
    "trace": "t.npz",
    "stats": "s.json",
    "stream_buffer_gb": 0.5,
    "stream_tokens": "inf",
    "lookup_tables": "host",
    "tma": "off",
}
"""One for each option, none of them the default."""


def problems(**given: object) -> list[str]:
    with pytest.raises(FlagError) as caught:
        of_arguments({"num_resident": "4", **given})
    return caught.value.problems


@pytest.mark.parametrize("form", ["text", "file", "path", "mapping"])
def test_options_arrive_in_every_form(form, tmp_path):
    (tmp_path / "options.json").write_text(json.dumps(VALUES))
    forms = {"text": json.dumps(VALUES), "file": f"@{tmp_path}/options.json", "path": tmp_path / "options.json"}
    assert VALUES.keys() == OPTIONS.keys()
    assert of_arguments({"num_resident": "4", "config": forms.get(form, VALUES)}) == parse({"num_resident": 4, **VALUES})


def test_json_has_its_own_types_and_null_is_the_default():
    given = '{"tma": false, "save_profile": false, "stream_tokens": 512, "stream_buffer_gb": 1, "trace": null}'
    config = of_arguments({"num_resident": 4, "profile": "p.npz", "config": given})
    assert (config.tma, config.save_profile, config.stream_tokens, config.stream_gb) == (False, None, 512, 1.0)
    assert config.trace is None


@pytest.mark.parametrize("config", [None, False, {}, "{}"])
def test_no_options_are_the_defaults(config):
    assert of_arguments({"num_resident": 4, "config": config}) == parse({"num_resident": 4})


@pytest.mark.parametrize(
    ("config", "start", "word"),
    [
        ('{"stream_tokens": "x"}', f"{CONFIG} stream_tokens 'x'", "must be auto, inf, or a whole number of tokens"),
        ('{"warmup_tokens": true}', f"{CONFIG} warmup_tokens True", "must be a whole number of tokens, 1 to 1000000000000"),
        ('{"stream_buffer_gb": NaN}', f"{CONFIG} stream_buffer_gb nan", "must be auto, or GiB from 0 to 1024"),
        ('{"trace": ["a"]}', f"{CONFIG} trace ['a']", "must be the path of a file"),
        ('{"trace": true}', f"{CONFIG} trace True", "must be the path of a file"),
        ('{"tma": "no"}', f"{CONFIG} tma 'no'", "must be one of on, off"),
        ('{"lookup_tables": {}}', f"{CONFIG} lookup_tables {{}}", "must be one of vram, host"),
        ('{"warmup": 8}', f"{CONFIG} 'warmup': no such option", "did you mean warmup_tokens?"),
        ('{"stream-token": 8}', f"{CONFIG} 'stream-token': no such option", "did you mean stream_tokens?"),
        ('{"x": 8}', f"{CONFIG} 'x': no such option", "there are warmup_tokens, draft_num_resident, "),
        ('{"adapt": "off"}', f"{CONFIG} 'adapt': no such option", "did you mean --expert-offload-adapt?"),
        ('{"tma": "on", "tma": "off"}', f'{CONFIG} \'{{"tma"', "contains 'tma' twice"),
        ("[1]", f"{CONFIG} '[1]'", "not a JSON object; give an object such as '{\"warmup_tokens\": 8192}'"),
        (5, f"{CONFIG} '5'", "not a JSON object"),
        ("warmup_tokens", f"{CONFIG} 'warmup_tokens'", "not JSON: Expecting value: line 1 column 1 (char 0)"),
        ('{"tma": "on"', f'{CONFIG} \'{{"tma"', "line 1 column 13 (char 12)"),
        ("", f"{CONFIG} ''", "not JSON"),
        ("[" * 100_000, f"{CONFIG} '[[[", "recursion"),
        ('{"warmup_tokens": ' + "9" * 5000 + "}", f"{CONFIG} '{{", "digits"),
        ("@/nowhere/options.json", f"{CONFIG} '@/nowhere/options.json'", "cannot read the file: No such file or directory"),
        ("@", f"{CONFIG} '@'", "cannot read the file"),
    ],
)
def test_what_is_wrong_with_an_option_is_one_line(config, start, word):
    (problem,) = problems(config=config)
    assert problem.startswith(start)
    assert word in problem
    assert len(problem) < 500


def test_a_file_of_options_is_bounded(tmp_path):
    path = tmp_path / "options.json"
    path.write_text(" " * MAX_CONFIG_BYTES + "{}")
    (problem,) = problems(config=f"@{path}")
    assert "larger than 1 MiB" in problem


def test_problems_of_options_come_with_those_of_flags():
    found = problems(adapt="never", config='{"warmup": 1, "tma": 5, "stream_tokens": -1}', memory_headroom=2)
    assert [problem.split(":")[0] for problem in found] == [
        f"{CONFIG} 'warmup'",
        "--expert-offload-memory-headroom 2",
        "--expert-offload-adapt 'never'",
        f"{CONFIG} stream_tokens -1",
        f"{CONFIG} tma 5",
    ]
    assert of_arguments({"num_resident": -1, "config": "{", "memory_headroom": 2}) is None, "off, whatever else"


def test_options_without_residents_are_refused():
    with pytest.raises(FlagError, match="--expert-offload-config tma 'off': no effect without --expert-offload-num-resident"):
        of_arguments({"config": {"tma": "off"}})


@pytest.mark.parametrize("name", [name for name in REPLACED if name in OPTIONS])
def test_a_flag_of_before_keeps_its_effect_and_says_once_what_replaces_it(name, caplog):
    given = str(VALUES[name])
    assert of_arguments({"num_resident": "4", name: given}) == parse({"num_resident": "4", name: VALUES[name]})
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == f"{spelled(name)}: replaced by {config_flag(**{name: given})}"


def test_a_replaced_flag_and_its_option_may_agree_but_not_differ():
    assert of_arguments({"num_resident": 4, "warmup_tokens": "77", "config": {"warmup_tokens": 77}}).warmup_tokens == 77
    (problem,) = problems(warmup_tokens="78", config={"warmup_tokens": 77})
    assert problem == "--expert-offload-warmup-tokens '78' and --expert-offload-config warmup_tokens 77: give only the second"


@pytest.mark.parametrize("name", ["backend", "draft_policy", "prefetch_num", "prefetch_depth"])
def test_a_flag_without_effect_is_named_and_ignored(name, caplog):
    assert of_arguments({"num_resident": 4, name: "4"}) == parse({"num_resident": 4})
    (record,) = caplog.records
    assert record.getMessage() == f"{spelled(name)} '4': no longer has an effect; replaced by {REPLACED[name]}"


def test_a_headroom_of_unknown_unit_is_refused():
    (problem,) = problems(memory_headroom="0.1")
    replaced = "replaced by --expert-offload-headroom-gb, in GiB; use that instead"
    assert problem == f"--expert-offload-memory-headroom '0.1': {replaced}"


KNOWN = {spelled(name) for name in ARGUMENTS} | {"--model-path"}


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--expert-offload-num-residents", "did you mean --expert-offload-num-resident?"),
        ("--expert-offload-num=4", "did you mean --expert-offload-num-resident?"),
        ("--expert-offload-profil", "did you mean --expert-offload-profile?"),
        ("--expert_offload_num_resident", "did you mean --expert-offload-num-resident?"),
        ("--expert-offload-warmup-token", "did you mean --expert-offload-config warmup_tokens?"),
        ("--expert-offload-s", "did you mean --expert-offload-slots or --expert-offload-config save_profile or "),
        ("--expert-offload-qqq", "there are --expert-offload-num-resident, "),
        ("--expert-offload", "there are --expert-offload-num-resident, "),
    ],
)
def test_a_name_that_is_none_of_ours_is_told_what_it_may_mean(word, meant):
    line = no_such_flag(word, KNOWN)
    assert line.startswith(f"{word.partition('=')[0]}: no such flag; ")
    assert meant in line


@pytest.mark.parametrize(
    "word",
    [
        "--expert-offload-slots",
        "--expert-offload-trace=x",
        "--expert",
        "--model-pat",
        "expert-offload-x",
        "--expert-offload-x y",
    ],
)
def test_other_words_are_no_concern_of_ours(word):
    assert no_such_flag(word, KNOWN) is None


def test_a_flag_of_options_is_for_a_shell():
    said = subprocess.run(f"printf '%s\\n' {config_flag(trace=Path('it is.npz'))}", shell=True, capture_output=True, text=True)
    assert said.stdout.splitlines() == [CONFIG, '{"trace": "it is.npz"}']
    assert flag_name("trace") == f"{CONFIG} trace"


def test_every_argument_is_a_flag_an_option_or_replaced():
    assert ARGUMENTS.keys() == {*FLAGS, "config", *REPLACED}
    assert not FLAGS.keys() & OPTIONS.keys()
    assert {name for name, by in REPLACED.items() if by == f"{CONFIG} {name}"} == REPLACED.keys() & OPTIONS.keys()
