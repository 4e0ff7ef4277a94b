"""Waiting in a test for what another thread, or process, does."""

import time
from collections.abc import Callable


def eventually(condition: Callable[[], object]) -> bool:
    """Whether this holds within five seconds."""
    for _ in range(1000):
        if condition():
            return True
        time.sleep(0.005)
    return False


def pause(until: float, complaint: str) -> None:
    """Leave the processor to what a loop waits for, at most `until` then."""
    assert time.monotonic() < until, complaint
    time.sleep(0.0005)


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s in vain"
        time.sleep(0.01)
