"""Waiting in a test for what another thread does."""

import time
from collections.abc import Callable


def eventually(condition: Callable[[], object]) -> bool:
    """Whether this holds within five seconds."""
    for _ in range(1000):
        if condition():
            return True
        time.sleep(0.005)
    return False
