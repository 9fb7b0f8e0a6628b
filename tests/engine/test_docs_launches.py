"""Every launch in the documents, as it stands there, is one that SGLang and this plugin would serve.

``doctor`` prepares each launch with SGLang's own code and all checks of the plugin, over the stand-in CUDA with as many GPUs as
any page names; nothing is loaded. The models are tiny ones of the named models' architectures: that the real ones fit is
predicted by the tables of ``docs/tuning.md``, which ``test_docs.py`` makes again.
"""

from __future__ import annotations

import json
import shutil

import pytest
from builders import pages
from builders.profiles import saved, some
from checkpoints import Checkpoints
from nursery import Nurseries

from sglang_uvm_offload.flags import flag_name
from sglang_uvm_offload.routing.profile import RoutedModel

LAUNCHES = [*pages.of_kind("sglang serve"), *pages.of_kind("python -m sglang.launch_server")]
DOCTORS = pages.of_kind("sglang-uvm-offload doctor")
MODEL = {"family": "qwen3_moe", "experts": 256, "heads": 8, "layers": 1}
MODELS = {
    "MODEL": MODEL,
    "zai-org/GLM-4.5-Air": {"family": "glm4_moe"},
    "openai/gpt-oss-120b": {"family": "gpt_oss"},
}
EXAMINE = """
import contextlib, io, json, os
from sglang_uvm_offload.cli.main import main
from sglang_uvm_offload.plugin.launch import estimate, ranks
estimate.host_available = ranks.host_available = lambda: 1 << 40
os.chdir({folder!r})
ends = []
for words in {launches}:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            code = main(["doctor", "--", *words])
        except SystemExit as exit:
            code = exit.code
    ends.append((code, said.getvalue()))
print("RESULT", json.dumps(ends))
"""
End = tuple[int, str]


STANDS_FOR = ["--model-path", "MODEL", flag_name("num_resident"), "8"]
"""What ``...`` means: what the reader has already."""


def arguments(words: list[str]) -> list[str]:
    """The arguments of a launch, or those after the doctor's ``--``."""
    given = pages.launched(words) or words[words.index("--") + 1 :]
    return [part for word in given for part in (STANDS_FOR if word == "..." else [word])]


@pytest.fixture(scope="module")
def ends(checkpoints: Checkpoints, sglang_on_standin: Nurseries, tmp_path_factory: pytest.TempPathFactory) -> dict[str, End]:
    """The exit code and the output of each, in a folder that holds what the pages name."""
    folder = tmp_path_factory.mktemp("documents")
    for name, options in MODELS.items():
        made = shutil.copytree(checkpoints(**options), folder / name)
        config = json.loads((made / "config.json").read_text())
        (made / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32768}))
    profile = some(model=RoutedModel("MODEL", "Qwen3MoeForCausalLM", (0,), MODEL["experts"], 4))
    saved(folder / "MODEL.npz", profile)
    every = [*LAUNCHES, *DOCTORS]
    program = EXAMINE.format(folder=str(folder), launches=[arguments(words) for words in every])
    ran = sglang_on_standin.run(program, STANDIN_GPUS="8", STANDIN_VRAM=str(141 << 30))
    assert ran.code == 0, ran.err[-4000:]
    return dict(zip(map(" ".join, every), json.loads(ran.out.rpartition("RESULT ")[2]), strict=True))


NEWEST = pytest.mark.since("0.5.23", "it has no such flag")
EACH = [
    pytest.param(words, id=" ".join(words), marks=[NEWEST] if "--enable-paged-experts" in words else [])
    for words in [*LAUNCHES, *DOCTORS]
]


@pytest.mark.parametrize("words", EACH)
def test_a_launch_of_the_documents_would_be_served(words: list[str], ends: dict[str, End]) -> None:
    code, said = ends[" ".join(words)]
    problems = [line.split(maxsplit=1)[1] for line in said.splitlines() if line.startswith("  PROBLEM")]
    if flag_name("num_resident") in arguments(words):
        assert not problems
        assert code == 0
        assert said.splitlines()[-1] == "ready to serve this launch"
    else:  # no offloading or another way to offload, shown to compare: SGLang takes it, and the doctor finds that
        (problem,) = problems
        assert problem.startswith(f"{flag_name('num_resident')}: not set or -1, so SGLang would serve")
