"""A tier's slots in a file, to be measured. Plain calls are os.preadv and os.pwritev, with O_DIRECT if the slab has it.

A file that goes through the system's cache is on the disk at the end of a write, and out of the cache after each run.
"""

import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from cpu_prefix_cache.slab.folder import Folder
from cpu_prefix_cache.slab.namespace import namespace_of
from cpu_prefix_cache.slab.settings import FileTier
from cpu_prefix_cache.slab.slab import Slab
from cpu_prefix_cache.slab.tier import RankPart
from cpu_prefix_cache.slab.tier_copier import TierCopier
from cpu_prefix_cache.tools.bench.slot_rates import SlotsUnderTest, TimedRun, planner_for


class FileUnderTest(SlotsUnderTest):
    """A slab of `num_bytes` in slots of `slot_bytes` under the folder `path`.

    Raises ConfigurationError when the path or the disk does not have what it needs.
    """

    def __init__(self, path: str, num_bytes: int, slot_bytes: int) -> None:
        slots, planner = max(1, num_bytes // slot_bytes), planner_for(slot_bytes)
        named = namespace_of(planner, model="bench", revision="none", dtype="none", hash="sha256", ranks=1)
        folder = Folder(FileTier(path, num_bytes, keep_others=True), named, RankPart(slots), slot_bytes)
        self._slab = Slab(folder)
        self.blocks_file = str(Path(self._slab.folder) / "blocks")
        super().__init__(slots, slot_bytes, partial(TierCopier, self._slab), self.blocks_file)

    @property
    def is_direct(self) -> bool:
        return self._slab.is_direct

    def plain_write(self) -> TimedRun:
        return self._plain(os.pwritev)

    def plain_read(self) -> TimedRun:
        return self._plain(os.preadv)

    def close(self) -> None:
        super().close()
        self._slab.close()

    def remove(self) -> None:
        shutil.rmtree(Path(self.blocks_file).parents[1])

    def _plain(self, call: Callable[[int, list[memoryview], int], int]) -> TimedRun:
        flags = os.O_RDWR | (os.O_DIRECT if self.is_direct else 0)
        file = os.open(self.blocks_file, flags)
        try:
            return self._timed(lambda: self._in_threads(lambda slot, view: call(file, [view], slot * self.slot_bytes)))
        finally:
            os.close(file)

    def _timed(self, act: Callable[[], object]) -> TimedRun:
        if self.is_direct:
            return super()._timed(act)

        def out_of_the_cache() -> None:
            act()
            self._leave_cache()

        return super()._timed(out_of_the_cache)

    def _leave_cache(self) -> None:
        file = os.open(self.blocks_file, os.O_RDWR)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
