"""Loads go first: for a load a request waits, and for a store nobody does.

    no load   --a load is submitted-->   loads   --STEP_SECONDS after the last of them-->   no load

Between two slices a store pauses while there are loads. Else the two share the link (a load then takes a seventh
longer), and the engine, about to compute what the load was for, shares Python and the driver with the store: that step
took 16 to 23 ms of the host, and 8 without (vLLM 0.26, one H200).

A store has patience, and loads without pause must not use up the blocks that it holds: it pauses PATIENCE_SECONDS in
all, and gets back REGAINED seconds of that in each second. Then both go on at once.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

STEP_SECONDS = 0.015  # from when a load is submitted: up to 4 until vLLM computes, 8 to launch that, 1 for the token
PATIENCE_SECONDS = 0.4  # four loads of 32,768 tokens of Llama 3.1 8B
REGAINED = 0.1
NAP_SECONDS = 0.5e-3


class LoadsFirst:
    """The loads of one copier before its stores, which pause `patience` seconds in all: with 0 never."""

    def __init__(
        self,
        patience: float = PATIENCE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._most, self._clock, self._sleep = patience, clock, sleep
        self._loads = 0
        self._loader = 0  # the thread that submitted the last one
        self._until = 0.0
        self._patience = patience
        self._asked_at = clock()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """While a load is submitted. One thread submits loads."""
        self._loads += 1
        self._loader = threading.get_ident()
        try:
            yield
        finally:
            self._until = self._clock() + STEP_SECONDS
            self._loads -= 1

    def pause(self) -> None:
        """Before a slice of a store. A thread that submits both does not wait for itself."""
        now = self._clock()
        self._patience = min(self._most, self._patience + (now - self._asked_at) * REGAINED)
        while self._patience > 0 and self._has_loads(now):
            self._sleep(NAP_SECONDS)
            before, now = now, self._clock()
            self._patience -= now - before
        self._asked_at = now

    def _has_loads(self, now: float) -> bool:
        return (self._loads > 0 or now < self._until) and self._loader != threading.get_ident()
