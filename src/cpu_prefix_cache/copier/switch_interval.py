"""A shorter switch interval of Python while copies are submitted.

A thread that wants Python's lock from one that computes without a pause gets it after `sys.getswitchinterval()`, 5 ms.
A copy thread wants it for each slice, which is on the link for half a millisecond: 140 slices, 80 ms on the link, took
490 ms, and with an interval of 0.2 ms 83 (benchmarks/copies/switch_interval.py, two processors).
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

INTERVAL_SECONDS = 0.0002
ROUNDING_SECONDS = 3e-6  # Python keeps whole microseconds, and rounds down

_lock = threading.Lock()
_inside = 0
_before = 0.0


@contextmanager
def short_switch_interval() -> Iterator[None]:
    """The interval is INTERVAL_SECONDS at most until the last thread leaves. What others set meanwhile is kept."""
    global _inside, _before
    with _lock:
        _inside += 1
        if _inside == 1:
            if not _is_ours():  # others may have read ours, and set it again since
                _before = sys.getswitchinterval()
            if _before > INTERVAL_SECONDS:
                sys.setswitchinterval(INTERVAL_SECONDS)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0 and _before > INTERVAL_SECONDS and _is_ours():
                sys.setswitchinterval(_before)


def _is_ours() -> bool:
    return abs(sys.getswitchinterval() - INTERVAL_SECONDS) < ROUNDING_SECONDS
