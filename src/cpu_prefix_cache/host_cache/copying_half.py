"""CopyingHalf: the copying half of a host cache in its engine's process: the host region, the copier, and its threads.

They belong to the process that made them: in a fork every call but a read raises MisuseError, and `close` does nothing.
"""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Self

from cpu_prefix_cache.host_cache.options import HostOptions
from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.plan import RankReport
from cpu_prefix_cache.model.planner import HybridChunkPlanner

if TYPE_CHECKING:
    import mmap

    from cpu_prefix_cache.host_cache.host_tier import TierBelow
    from cpu_prefix_cache.keeper.kept_cache import KeptCache
    from cpu_prefix_cache.keyed.keyed_cache import KeyedCache
    from cpu_prefix_cache.kv_layout import KVGroup
    from cpu_prefix_cache.prefix_cache import CPUPrefixCache

PROGRESS_SECONDS = 0.25


class CopyingHalf:
    """The base of every host cache. `cache` is the deciding half, `_tier` what is below it."""

    cache: "CPUPrefixCache | KeptCache | KeyedCache"
    _tier: "TierBelow | None"

    def _begin_copying(
        self,
        planner: HybridChunkPlanner,
        groups: "Sequence[KVGroup]",
        num_blocks: int,
        options: HostOptions,
        *,
        null_block: int | None,
        region: "mmap.mmap | None" = None,
    ) -> None:
        """Make `num_blocks` host blocks, in this region if there is one, and what copies between them and `groups`."""
        from cpu_prefix_cache.copier.choose import choose_copier
        from cpu_prefix_cache.copier.worker import CopyWorker
        from cpu_prefix_cache.memory.arena import HostArena

        tensors = [each.tensors for each in groups]
        on = tensors[0][0].device
        self._block_bytes = planner.host_block_bytes
        self._host_bytes = num_blocks * self._block_bytes
        self._arena = HostArena(num_blocks, self._block_bytes, pinned_for=on, region=region)
        copier = choose_copier(planner, tensors, self._arena.blocks, null_block=null_block, pinned=self._arena).copier
        self._copier = copier if options.wrap_copier is None else options.wrap_copier(copier, tensors)
        self._worker = CopyWorker(
            0,
            self._copier,
            self._arena,
            threads=on.type == "cuda" if options.threads is None else options.threads,
            load_seconds=options.load_seconds,
        )
        self._process, self._is_closed = os.getpid(), False

    def prepare(self, progress: Callable[[int, int], object] | None = None) -> None:
        """Wait until the host region is pinned, for an engine whose kernel launches pinning must not delay.

        Meanwhile `progress(ready_bytes, host_bytes)` is called some times a second, and at the end. Less may be ready
        then: where the machine has no more memory, the rest of the region is not used.
        """
        self._check_usable()
        is_over = False
        while not is_over:
            is_over = self._arena.wait_until_ready(PROGRESS_SECONDS)
            if progress is not None:
                progress(self._ready_bytes, self._host_bytes)
        self.cache.report(RankReport(0, ready_blocks=self._arena.ready_blocks))

    def close(self) -> None:
        """Wait for copies under way, end leases, write to the tier what only the host has, and give the region back.

        Calls after it raise MisuseError, but for another `close` and reads. In a fork it does nothing.
        """
        if not self._is_closed and self._process == os.getpid():
            self._close()  # may be interrupted, and called again
            self._is_closed = True
            del self._worker, self._copier  # which have views of the region
            if self._tier is not None:
                self._tier.let_go()

    def _close(self) -> None:
        self._worker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _ready_bytes(self) -> int:
        return self._arena.ready_blocks * self._block_bytes

    def _check_usable(self) -> None:
        kind = f"this {type(self).__name__}"
        if self._process != os.getpid():
            raise MisuseError(f"{kind} belongs to process {self._process}, and its memory is not in a fork: build one")
        if self._is_closed:
            raise MisuseError(f"{kind} was closed: its memory is given back; build a new one")
