"""Landing: reads that may be given up, where their bytes arrive before they go to host memory, and when they stall.

A disk that hangs cannot be told to leave a block alone that it is to fill. So whoever must have the block back, at some
time, has it filled from here: a read that comes late finds that nobody wants it, and its bytes go nowhere.
"""

import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class Landing:
    """Memory of `num_bytes` for each of so many `threads`, in whole pages as direct file I/O needs them, from its first
    read on. Reads stall after `seconds` in which none was whole, and while all threads are in reads that were given up.
    """

    def __init__(self, num_bytes: int, seconds: float, threads: int) -> None:
        self._num_bytes, self._own = num_bytes, threading.local()
        self._seconds, self._last, self._threads = seconds, 0.0, threads
        self._under_way: dict[int, threading.Event] = {}  # by thread: what is set when nobody waits for its read

    def views(self, count: int, block_bytes: int) -> Sequence[memoryview]:
        """Views of so many blocks, which the next call of this thread gives again."""
        memory: memoryview | None = getattr(self._own, "memory", None)
        if memory is None:
            memory = self._own.memory = memoryview(mmap.mmap(-1, self._num_bytes))
        return [memory[at * block_bytes : (at + 1) * block_bytes] for at in range(count)]

    @contextmanager
    def under_way(self, ended: threading.Event) -> Iterator[None]:
        """This thread reads for a transfer, which has `ended` when that is set."""
        thread = threading.get_ident()
        self._under_way[thread] = ended
        try:
            yield
        finally:
            del self._under_way[thread]

    def moved(self) -> None:
        """A read was whole."""
        self._last = time.monotonic()

    def stall(self, since: float) -> bool:
        transfers = list(self._under_way.values())
        no_thread_is_left = len(transfers) == self._threads and all(ended.is_set() for ended in transfers)
        return no_thread_is_left or time.monotonic() >= max(self._last, since) + self._seconds
