"""A short wait before Python shuts down, so that gloo's threads are done with its objects.

After the process group was destroyed, gloo's worker threads may still hold the last tensors.
Dropping one needs Python's lock, and a thread that waits for that lock while Python shuts
down aborts the whole process, after a run in which nothing went wrong.
"""

from __future__ import annotations

import atexit
import time
from functools import cache

_LONG_ENOUGH = 0.05  # seconds; the threads need far less once nothing else runs


@cache
def wait_for_threads_at_exit() -> None:
    """Arrange the wait, once per process."""
    atexit.register(time.sleep, _LONG_ENOUGH)
