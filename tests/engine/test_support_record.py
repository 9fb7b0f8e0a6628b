"""The record of what is served is of the tests of this folder that there are (``unit/test_support.py``: of that folder's)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support_marks import unrecorded

from benchmarks import support as table_of


def test_the_record_is_of_these_tests(request: pytest.FixtureRequest):
    marks: Any = request.config.pluginmanager.get_plugin("support")
    if any("::" in argument for argument in request.config.args):
        pytest.skip("single tests were chosen")
    assert unrecorded(marks.collected, json.loads(table_of.TESTS.read_text())["rows"]) == []
