"""A model's configuration is found wherever SGLang finds its files: in a folder, in the Hugging Face cache, or on the Hub, of
which no weights are fetched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from builders.hub import cached, serving
from builders.true_shape import checkpoint

from scripts.harness.patience import patience

FIND = """
import json, sys
from sglang_uvm_offload.plan.model_files import ModelFiles
found = {place: ModelFiles(*words) for place, words in json.loads(sys.argv[1]).items()}
print(json.dumps({place: (files.folder is not None, str(files.config)) for place, files in found.items()}))
"""


def test_a_configuration_is_found_wherever_the_files_are(tmp_path: Path) -> None:
    model = checkpoint("Qwen/Qwen3-30B-A3B", tmp_path / "model")
    home, other = tmp_path / "home", tmp_path / "other"
    cached(home / "hub", "in/cache", model)
    cached(home / "hub", "of/revision", model, revision="old")
    cached(other, "in/other", model)
    for name in ("in/other", "half/there", "of/revision"):
        cached(home / "hub", name, model, files="*.json")
    whole: dict[str, list[str | None]] = {
        "folder": [str(model)],
        "cache": ["in/cache"],
        "revision in the cache": ["of/revision", "old"],
        "download dir": ["in/other", None, str(other)],
    }
    to_download: dict[str, list[str | None]] = {
        "Hub": ["on/hub"],
        "revision on the Hub": ["on/hub", "old"],
        "config in the cache": ["half/there"],
    }
    with serving({"on/hub": model, "on/hub@old": model, "half/there": model}) as hub:
        command = [sys.executable, "-c", FIND, json.dumps(whole | to_download)]
        env = {**os.environ, **hub.env(home)}
        ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=patience(120))
        assert ended.returncode == 0, ended.stderr
        assert hub.bytes_of_weights() == 0
    found = json.loads(ended.stdout)
    assert {place for place, (is_whole, _) in found.items() if is_whole} == whole.keys()
    for place, (_, config) in found.items():
        file = Path(config) / "config.json" if place == "folder" else Path(config)
        assert file.read_text() == (model / "config.json").read_text(), place
