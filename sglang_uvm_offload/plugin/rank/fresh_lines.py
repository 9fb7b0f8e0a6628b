"""Starts the plugin's log lines on a new line while SGLang draws a progress bar for reading weights or capturing graphs.
Otherwise a hook's message would be appended to the bar."""

from __future__ import annotations

import logging

from tqdm import tqdm


class FreshLines(logging.Handler):
    """Clears this process's progress bars. It runs before the handlers of the root logger, which write the record; each bar
    draws itself again with its next step."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if tqdm._instances:
                with tqdm.get_lock():  # another thread may begin a bar
                    for bar in list(tqdm._instances):
                        bar.clear(nolock=True)
        except Exception:  # noqa: BLE001 -- as in all handlers: the thread that logs serves or moves experts, and goes on
            self.handleError(record)


def install() -> None:
    """Add the handler to the plugin's own logger, once per process."""
    logger = logging.getLogger("sglang_uvm_offload")
    if not any(isinstance(handler, FreshLines) for handler in logger.handlers):
        logger.addHandler(FreshLines())
