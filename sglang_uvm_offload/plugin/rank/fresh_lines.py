"""This plugin's log lines start on a line of their own while SGLang draws a progress bar, as it reads weights and captures
graphs: what a hook finds out there would land in the bar's line."""

from __future__ import annotations

import logging

from tqdm import tqdm


class FreshLines(logging.Handler):
    """Clears this process's progress bars. It runs before the handlers of the root logger, which write the record; each bar
    draws itself again with its next step."""

    def emit(self, record: logging.LogRecord) -> None:
        for bar in list(tqdm._instances):
            bar.clear()


def install() -> None:
    """For the log of this plugin alone, once a process."""
    logger = logging.getLogger("sglang_uvm_offload")
    if not any(isinstance(handler, FreshLines) for handler in logger.handlers):
        logger.addHandler(FreshLines())
