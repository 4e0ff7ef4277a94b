"""Landing: where bytes of a read arrive that may be given up, before they go to host memory.

A disk that hangs cannot be told to leave a block alone that it is to fill. So whoever must have the block back, at some
time, has it filled from here: a read that comes late finds that nobody wants it, and its bytes go nowhere.
"""

import mmap
import threading
from collections.abc import Sequence


class Landing:
    """Memory of `num_bytes` for each thread, in whole pages as direct file I/O needs them, from its first read on."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes, self._own = num_bytes, threading.local()

    def views(self, count: int, block_bytes: int) -> Sequence[memoryview]:
        """Views of so many blocks, which the next call of this thread gives again."""
        memory: memoryview | None = getattr(self._own, "memory", None)
        if memory is None:
            memory = self._own.memory = memoryview(mmap.mmap(-1, self._num_bytes))
        return [memory[at * block_bytes : (at + 1) * block_bytes] for at in range(count)]
