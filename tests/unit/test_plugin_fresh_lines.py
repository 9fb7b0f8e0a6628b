"""What the plugin logs while a progress bar is drawn."""

from __future__ import annotations

import errno
import io
import logging
import os

import pytest
from tqdm import tqdm

from sglang_uvm_offload.plugin.rank import fresh_lines

pytestmark = pytest.mark.sglang


@pytest.fixture
def shown():
    """A screen to which the log goes."""
    screen, logger = io.StringIO(), logging.getLogger("sglang_uvm_offload")
    writing = logging.StreamHandler(screen)
    before = list(logger.handlers)
    logging.getLogger().addHandler(writing)
    fresh_lines.install()
    yield screen
    logging.getLogger().removeHandler(writing)
    logger.handlers = before


def test_a_log_line_does_not_land_in_the_line_of_a_bar(shown):
    bar = tqdm(desc="Capturing", total=3, file=shown, ncols=60, mininterval=0)
    bar.update()
    logging.getLogger("sglang_uvm_offload.cuda.overlap").warning("slots: a reason")
    (line,) = [line for line in shown.getvalue().split("\n") if "a reason" in line]
    overwritten = line.split("\r")
    assert overwritten[-1] == "slots: a reason"
    assert overwritten[-2].isspace(), "the bar before it is gone"
    bar.update()
    assert "2/3" in shown.getvalue(), "the bar goes on"
    bar.close()


def test_without_a_bar_only_the_line_is_written(shown):
    logging.getLogger("sglang_uvm_offload.cuda.overlap").warning("slots: a reason")
    assert shown.getvalue() == "slots: a reason\n"


class Full(io.StringIO):
    """A file on a disk without room."""

    full = False

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(text)


def test_a_bar_that_cannot_be_cleared_costs_neither_the_line_nor_the_caller(shown, monkeypatch):
    """The threads that log compute steps and move experts."""
    monkeypatch.setattr(logging, "raiseExceptions", False)  # logging would print a traceback to stderr
    file = Full()
    with tqdm(desc="Capturing", total=3, file=file):
        file.full = True
        logging.getLogger("sglang_uvm_offload.cuda.overlap").warning("slots: a reason")
        file.full = False
    assert shown.getvalue() == "slots: a reason\n"
