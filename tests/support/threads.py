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


def wait_until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s in vain"
        time.sleep(0.01)
