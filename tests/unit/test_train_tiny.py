"""The tiny trained model: the text it learns from, the files of ``scripts/tiny``, and the tensors that are written."""

from __future__ import annotations

import ast
import hashlib
import json
from pathlib import Path

import pytest
import torch
import transformers

from scripts import train_tiny

TINY = Path(train_tiny.__file__).parent / "tiny"


def test_paragraphs_are_sentences_each_on_a_line_of_its_own() -> None:
    text = """\
Return the value that was given,
    or the default.

- a list of things that is no sentence.

>>> value = get(1)

Usage: f(x) -> the value of x at that time.

This one is asked
for too:
"""
    assert train_tiny.paragraphs(text) == "Return the value that was given, or the default.\nThis one is asked for too:"


def test_code_has_neither_docstrings_nor_comments() -> None:
    source = 'def f():\n    """Text."""\n    return 1  # one\nclass A:\n    def g(self):\n        "Text."\n'
    bare = ast.unparse(train_tiny.without_docstrings(ast.parse(source)))
    assert bare == "def f():\n    return 1\n\nclass A:\n\n    def g(self):\n        pass"


def test_the_model_in_the_checkout_is_the_one_that_its_page_is_about() -> None:
    page = (TINY / "README.md").read_text()
    assert f"`{hashlib.sha256((TINY / 'model.safetensors').read_bytes()).hexdigest()}`" in page
    assert json.loads((TINY / "config.json").read_text()) == train_tiny.config()


@pytest.mark.slow
def test_written_tensors_are_read_as_the_same_model(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = train_tiny.make_model().bfloat16()
    (tmp_path / "config.json").write_text(json.dumps(train_tiny.config()))
    train_tiny.save_weights(model, tmp_path)
    read = transformers.Glm4MoeForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    wrote = model.state_dict()
    assert read.keys() == wrote.keys()
    for name, tensor in wrote.items():
        assert torch.equal(read[name], tensor.to(read[name].dtype)), name
