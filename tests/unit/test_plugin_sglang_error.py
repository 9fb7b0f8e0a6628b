"""An exception of SGLang's in one line, also where it has no text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.server_args import prepare_server_args

from sglang_uvm_offload.plugin.sglang_error import described

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def server_args() -> Any:
    return prepare_server_args(["--model-path", "m", "--tp-size", "8", "--enable-eplb", "--device", "cpu"])


def several_lines(cfg: Any) -> None:
    if cfg.enable_eplb and not cfg.enable_lora:
        limit = 4
        if (
            cfg.tp_size  # a comment
            > limit
        ):
            raise AssertionError  # not assert: pytest gives that one a text


def raised(cfg: Any) -> None:
    if cfg.tp_size == 8:
        raise NotImplementedError


def with_text(cfg: Any) -> None:
    raise ValueError(f"tp {cfg.tp_size}\n  is too large")


def outside(cfg: Any) -> None:
    [].pop()


def error_of(function: Callable[[Any], None], server_args: Any) -> str:
    try:
        function(resolving_view(server_args))
    except Exception as error:  # noqa: BLE001
        return described(error, server_args)
    raise AssertionError


def test_a_text_is_told_in_one_line(server_args: Any) -> None:
    assert error_of(with_text, server_args) == "ValueError: tp 8 is too large"
    assert error_of(outside, server_args) == "IndexError: pop from empty list"


def test_without_a_text_the_statement_is_told_and_the_flags_that_it_and_its_conditions_read(server_args: Any) -> None:
    found = error_of(several_lines, server_args)
    assert found.startswith("AssertionError at ")
    assert "test_plugin_sglang_error.py:" in found
    assert found.endswith(": raise AssertionError (here: --enable-eplb, --tp-size 8)")


def test_a_bare_raise_is_told_by_its_condition(server_args: Any) -> None:
    assert error_of(raised, server_args).endswith(": raise NotImplementedError (here: --tp-size 8)")


def test_an_exception_without_a_line_is_told_by_its_type(server_args: Any) -> None:
    assert described(KeyError(), server_args) == "KeyError at no line of source"
