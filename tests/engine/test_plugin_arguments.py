"""The flags inside real SGLang: every way to give them, and what is refused before anything loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from builders.profiles import some
from checkpoints import Checkpoints
from launches import launched
from nursery import Nursery
from paths import SAFETENSORS, hard_link, symbolic_link

from sglang_uvm_offload.routing.profile import Profile, RoutedModel, model_name

N = "--expert-offload-num-resident"


@pytest.fixture(scope="module")
def launch(checkpoints: Checkpoints, sglang: Nursery, tmp_path_factory: pytest.TempPathFactory):
    """All cases run in one process, because importing SGLang takes most of the time: ``launch[name]`` is what came out."""
    folder = tmp_path_factory.mktemp("launches")
    model = str(checkpoints("qwen3_moe"))
    cpu = ["--model-path", model, "--device", "cpu"]
    yaml = folder / "server.yaml"
    options_in_yaml = "expert-offload-config:\n  warmup_tokens: 77\n  tma: off\n"
    yaml.write_text(f"model-path: {model}\ndevice: cpu\nexpert-offload-num-resident: 4\n{options_in_yaml}")
    switched = folder / "switched.yaml"
    switches = "expert-offload-resident-selection: first_n\nexpert-offload-adapt: off\n"
    switched.write_text(yaml.read_text() + switches)
    ids = folder / "ids.json"
    ids.write_text("[[0], [15]]")
    dense = folder / "dense"
    dense.mkdir()
    config = json.loads((Path(model) / "config.json").read_text())
    (dense / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": 512,
                **{key: config[key] for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim")},
            }
        )
    )
    engine = {"model_path": model, "device": "cpu"}
    foreign, broken = folder / "foreign.npz", folder / "broken.npz"
    with foreign.open("wb") as file:
        Profile.empty(RoutedModel("Other", "Qwen3MoeForCausalLM", (0, 1, 2), 8, 2)).write(file)
    broken.write_bytes(foreign.read_bytes()[:-100])
    profiles = ["--expert-offload-profile", f"{foreign},{broken},{folder}/gone.npz"]
    manual = ["--expert-offload-resident-selection", "manual", "--expert-offload-resident-ids"]
    weights, links = folder / "weights" / "model.safetensors", folder / "links"
    weights.parent.mkdir()
    links.mkdir()
    weights.write_bytes(SAFETENSORS)
    other_weights = weights.with_stem("other")
    other_weights.write_bytes(SAFETENSORS)
    routed = RoutedModel(
        model_name(model), "Qwen3MoeForCausalLM", (0, 1, 2), config["num_experts"], config["num_experts_per_tok"]
    )
    own = folder / "own.npz"
    with own.open("wb") as file:
        some(model=routed).write(file)
    shipped, closed = Path(model) / "own.npz", folder / "closed.npz"
    shipped.write_bytes(own.read_bytes())
    closed.write_bytes(own.read_bytes())
    closed.chmod(0o444)
    read = "--expert-offload-profile"

    def options(**given: object) -> list[str]:
        return ["--expert-offload-config", json.dumps(given, default=str)]

    counts = [[1] * config["num_experts"]] * config["num_hidden_layers"]
    elsewhere = ["--init-expert-location", json.dumps({"logical_count": counts})]
    rearranged = ["--enable-eplb", "--ep-num-redundant-experts", "2", "--tp-size", "2", "--ep-size", "2"]
    cases = {
        "off": {"argv": cpu, "resolve": True},
        "command line": {"argv": [*cpu, N, "4", *options(warmup_tokens=77, tma=False)], "resolve": True},
        "yaml": {"argv": ["--config", str(yaml)], "resolve": True},
        "switches in yaml": {"argv": ["--config", str(switched)], "resolve": True},
        "engine": {
            "engine": {**engine, "expert_offload_num_resident": 4, "expert_offload_config": {"warmup_tokens": 77, "tma": False}}
        },
        "bad values": {"argv": [*cpu, N, "-2", *options(warmup_tokens=0)], "resolve": True},
        "bad choice": {"argv": [*cpu, N, "2", "--expert-offload-adapt", "never"]},
        "bad values, engine": {"engine": {**engine, "expert_offload_num_resident": "many"}, "resolve": True},
        "auto": {"argv": [*cpu, N, "auto", "--cpu-offload-gb", "2"], "resolve": True},
        "too many": {"argv": [*cpu, N, "17"], "resolve": True},
        "too many, engine": {"engine": {**engine, "expert_offload_num_resident": 17}, "resolve": True},
        "all of them": {"argv": [*cpu, N, "16"], "resolve": True},
        "dense": {"argv": ["--model-path", str(dense), "--device", "cpu", N, "4"], "resolve": True},
        "ids by layer": {"argv": [*cpu, N, "4", *manual, f"@{ids}"], "resolve": True},
        "ids of more than N": {"argv": [*cpu, N, "0", *manual, f"@{ids}"], "resolve": True},
        "ids too high": {"argv": [*cpu, N, "4", *manual, "0,16"], "resolve": True},
        "profiles": {"argv": [*cpu, N, "4", *profiles, "--cpu-offload-gb", "2"], "resolve": True},
        "files of others": {
            "argv": [*cpu, N, "17", *options(save_profile=symbolic_link(weights, links), trace=other_weights),
                     "--cpu-offload-gb", "2"],
            "resolve": True,
        },
        "a hard link": {"argv": [*cpu, N, "4", *options(trace=hard_link(weights, folder))], "resolve": True},
        "the model's folder": {
            "argv": [*cpu, N, "4", *options(save_profile=f"{model}/p.npz", trace=f"{links}/../../../nowhere/t")],
            "resolve": True,
        },
        "a trace in the place of a profile": {"argv": [*cpu, N, "4", read, str(own), *options(trace=own)], "resolve": True},
        "one file for both": {
            "argv": [*cpu, N, "4", *options(save_profile=f"{folder}/new", trace=f"{links}/../new")],
            "resolve": True,
        },
        "a new profile in no folder": {"argv": [*cpu, N, "4", read, "/nowhere/p.npz"], "resolve": True},
        "a new profile": {"argv": [*cpu, N, "4", read, f"{folder}/new", "--expert-offload-adapt", "off"], "resolve": True},
        "a damaged profile": {"argv": [*cpu, N, "4", read, str(broken)], "resolve": True},
        "a profile in the model's folder": {"argv": [*cpu, N, "4", read, str(shipped)], "resolve": True},
        "a read-only profile": {"argv": [*cpu, N, "4", read, str(closed)], "resolve": True},
        "replaced flags": {"argv": [*cpu, N, "4", "--expert-offload-warmup-tokens", "78", *options(warmup_tokens=77)],
                           "resolve": True},
        "broken options": {"argv": [*cpu, N, "-2", "--expert-offload-config", "{"], "resolve": True},
        "misspelt": {"argv": [*cpu, "--expert-offload-num-residents", "4", "--expert-offload-profil=p"]},
        "abbreviated": {"argv": [*cpu, "--expert-offload-num", "4"]},
        "a profile that grows": {"argv": [*cpu, N, "4", read, str(own)], "resolve": True},
        "experts elsewhere": {
            "argv": [*cpu, N, "4", *elsewhere, read, str(own), *options(trace=folder / "t.npz")],
            "resolve": True,
        },
        "experts elsewhere, manual": {"argv": [*cpu, N, "1", *elsewhere, *manual, "0"], "resolve": True},
        "experts rearranged": {"argv": [*cpu, N, "18", *rearranged], "resolve": True},
        "experts rearranged, manual": {"argv": [*cpu, N, "19", *rearranged, *manual, "0,17"], "resolve": True},
        "combinations": {
            "argv": [*cpu, N, "4", "--cpu-offload-gb", "2", "--load-format", "gguf", "--weight-cache-mode", "client"],
            "resolve": True,
        },
    }  # fmt: skip
    before = {path: path.read_bytes() for path in (own, broken, shipped, closed)}
    out = launched(cases, sglang)
    assert before == {path: path.read_bytes() for path in before}, "checks write nothing"
    shipped.unlink()
    assert weights.read_bytes() == other_weights.read_bytes() == SAFETENSORS
    return out


def test_a_plain_on_or_off_in_yaml_is_the_word(launch):
    """YAML reads it as true or false."""
    of = launch["switches in yaml"]
    assert of["exit"] is None, of["error"]
    assert of["flags"]["expert_offload_adapt"] == "off"


@pytest.mark.parametrize("way", ["command line", "yaml", "engine"])
def test_flags_arrive_by_every_way_and_survive_pickling(launch, way):
    flags = launch[way]["flags"]
    assert launch[way]["exit"] is None, launch[way]["error"]
    assert str(flags["expert_offload_num_resident"]) == "4"
    given = flags["expert_offload_config"]
    assert (given if isinstance(given, dict) else json.loads(given)) == {"warmup_tokens": 77, "tma": False}


def test_without_flags_offloading_is_off_and_nothing_is_refused(launch):
    assert launch["off"]["exit"] is None, launch["off"]["error"]
    assert not [name for name in launch["off"]["flags"] if name.startswith("expert_offload_")]


SERVED = [
    "all of them",
    "a profile that grows",
    "a new profile",
    "a profile in the model's folder",
    "a read-only profile",
    "experts elsewhere",
    "experts elsewhere, manual",
    "experts rearranged",
    "ids by layer",  # as many as they are: only the built model says which layers route
]


@pytest.mark.parametrize("case", SERVED)
def test_what_just_fits_is_served(launch, case):
    assert launch[case]["exit"] is None, launch[case]["error"]


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("bad values", [f"{N} '-2'", "--expert-offload-config warmup_tokens 0"]),
        ("a new profile in no folder", ["--expert-offload-profile '/nowhere/p.npz': there is no folder /nowhere"]),
        ("a damaged profile", ["broken.npz: not a readable npz file"]),
        ("replaced flags", ["--expert-offload-warmup-tokens '78' and --expert-offload-config warmup_tokens 77: give only"]),
        ("broken options", [f"{N} '-2'", "--expert-offload-config '{': not JSON: Expecting property name enclosed in"]),
        ("bad choice", ["--expert-offload-adapt", "never", "warmup"]),
        ("auto", [f"{N} auto: --device cpu has no VRAM", "give a number", "--cpu-offload-gb: cannot be combined"]),
        ("too many", [f"{N} 17", "16 routed experts a layer"]),
        ("dense", [f"{N} 4", "LlamaForCausalLM", "no routed experts"]),
        ("ids of more than N", ["--expert-offload-resident-ids '@", "names 2 experts over 2 layers", f"{N} 0 allows 0"]),
        ("ids too high", ["--expert-offload-resident-ids '0,16'", "expert 16 does not exist", "0-15"]),
        (
            "profiles",
            [
                "foreign.npz: is of another model: name Other",
                "broken.npz: not a readable npz file",
                "gone.npz: No such file or directory",
                "--cpu-offload-gb: cannot be combined",
            ],
        ),
        (
            "files of others",
            [
                f"{N} 17",
                "--cpu-offload-gb: cannot be combined",
                "links/p': exists and is not a routing profile of sglang-uvm-offload",
                "--expert-offload-config trace '",
                "other.safetensors': exists and is not a routing trace of sglang-uvm-offload",
            ],
        ),
        ("a hard link", ["--expert-offload-config trace '", "p': exists and is not a routing trace"]),
        ("the model's folder", ["p.npz': lies in the model's folder", "--expert-offload-config trace '", "there is no folder"]),
        ("a trace in the place of a profile", ["own.npz': is the file of --expert-offload-profile"]),
        ("one file for both", ["new': is the file of --expert-offload-config save_profile"]),
        (
            "experts rearranged, manual",
            [
                "--enable-eplb: cannot be combined with --expert-offload-resident-ids: ",
                f"{N} 19: the model has 16 routed experts a layer and 2 redundant ones",
                "expert 17 does not exist; the model's experts are 0-15",
            ],
        ),
        (
            "combinations",
            ["--cpu-offload-gb", "--load-format gguf", "--weight-cache-mode"],
        ),
    ],
)
def test_a_launch_that_cannot_be_served_ends_with_every_reason(launch, case, parts):
    assert launch[case]["exit"] == 2
    for part in parts:
        assert part in launch[case]["error"]


@pytest.mark.parametrize(("case", "meant"), [("misspelt", ["num-resident", "profile"]), ("abbreviated", ["num-resident"])])
def test_a_flag_that_is_not_spelled_out_ends_the_command_with_one_line(launch, case, meant):
    assert launch[case]["exit"] == 2
    lines = launch[case]["error"].splitlines()
    assert [line.partition("; ")[2] for line in lines] == [f"did you mean --expert-offload-{name}?" for name in meant]


@pytest.mark.parametrize("case", ["bad values, engine", "too many, engine"])
def test_engine_callers_get_a_value_error(launch, case):
    assert launch[case]["exit"] is None
    assert launch[case]["error"].startswith("FlagError: expert offloading cannot start")
    assert N in launch[case]["error"]
