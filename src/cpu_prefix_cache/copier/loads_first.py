"""Stores pause for loads: a request waits for a load, and none for a store.

    no load   --a load is submitted-->   loads   --STEP_SECONDS after the last of them-->   no load

Beside a store loads take a seventh longer, and the step that computes what they brought took 16 to 23 ms of the host
and not 8, because the store took Python and the driver from it (vLLM 0.26, one H200). Stores hold device blocks, so
they pause PATIENCE_SECONDS in all, of which each second gives back REGAINED. After that both share the link.
A store that a load waits for does not pause, nor do those before it; nor does one that exchanges blocks with a load,
until all of that is submitted.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STEP_SECONDS = 0.015  # from the submission of a load vLLM takes up to 4 ms to compute, 8 to launch, 1 for the token
PATIENCE_SECONDS = 0.4  # four loads of 32,768 tokens of Llama 3.1 8B
REGAINED = 0.1
NAP_SECONDS = 0.5e-3


class LoadsFirst:
    """Lets the stores of one copier pause for its loads, for `patience` seconds in all; 0: never."""

    def __init__(
        self,
        patience: float = PATIENCE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._most, self._clock, self._sleep = patience, clock, sleep
        self._loads = 0
        self._awaiting = 0
        self._counting = threading.Lock()
        self._loader = 0  # the thread that submitted the last one
        self._until = 0.0
        self._patience = patience
        self._asked_at = clock()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Entered while a load is submitted, by the one thread that submits loads."""
        self._loads += 1
        self._loader = threading.get_ident()
        try:
            yield
        finally:
            self._until = self._clock() + STEP_SECONDS
            self._loads -= 1

    @contextmanager
    def awaiting(self) -> Iterator[None]:
        """Entered by a thread while a load or compute waits for stores."""
        with self._counting:
            self._awaiting += 1
        try:
            yield
        finally:
            with self._counting:
                self._awaiting -= 1

    def pause(self) -> None:
        """Called before each slice of a store. A thread that submits both does not wait for itself."""
        now = self._clock()
        self._patience = min(self._most, self._patience + (now - self._asked_at) * REGAINED)
        while self._patience > 0 and (self._loads or now < self._until) and self._loader != threading.get_ident():
            if self._awaiting:
                break
            self._sleep(NAP_SECONDS)
            before, now = now, self._clock()
            self._patience -= now - before
        self._asked_at = now
