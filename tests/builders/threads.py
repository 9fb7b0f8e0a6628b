"""A process that cannot start another thread."""

import threading
from contextlib import contextmanager


@contextmanager
def no_further_thread():
    """Makes Python threads fail to start, as at ``pids.max``: no stack of half the address space can be mapped."""
    before = threading.stack_size(1 << 47)
    try:
        yield
    finally:
        threading.stack_size(before)
