"""A process that may have no further thread."""

import threading
from contextlib import contextmanager


@contextmanager
def no_further_thread():
    """As with ``pids.max`` reached, for Python's threads: the kernel gives no stack of half the address space."""
    before = threading.stack_size(1 << 47)
    try:
        yield
    finally:
        threading.stack_size(before)
