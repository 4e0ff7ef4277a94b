"""Demotion: which chunks of the host are written to the tier, and when.

    lazy     shortly before the host evicts them, by `Lazy`'s walk over the host's own order
    eager    also as soon as they have reached the host, so that a crash loses little
    flush    at the end, what is still to be written, from what would be evicted last

The host waits for no slow tier: no more than a share of it is being written at a time, and what it evicts meanwhile
leaves unsaved and is counted (`lost`). Nothing is written before the tier `is_open`, nor while writes are known to fail
(`is_failing`).
"""

from collections import deque
from collections.abc import Sequence

from cpu_prefix_cache.offload.engine_steps import EngineSteps
from cpu_prefix_cache.offload.lazy import Lazy
from cpu_prefix_cache.offload.stores import StorePlanner
from cpu_prefix_cache.pool.block_pool import BlockPool
from cpu_prefix_cache.tiers.host_ancestry import HostAncestry


class Demotion(Lazy):
    """`Lazy` over a host pool. `is_eager`: see above."""

    def __init__(self, host: BlockPool, stores: StorePlanner, steps: EngineSteps, *, is_eager: bool) -> None:
        self._ancestry = HostAncestry(host, stores)
        super().__init__(stores, steps, tuple, self._ancestry)
        self._is_eager = is_eager
        self._arrived: deque[bytes] = deque(maxlen=max(1, stores.device_chunks))  # the deepest keys of new chains
        self.is_open = self.is_failing = False

    def arrived(self, keys: Sequence[bytes]) -> None:
        """These chunks, each below the one before it, have reached the host; or a checkpoint, the last of them."""
        if self._is_eager:
            self._arrived.append(keys[-1])

    def flush(self, keys: Sequence[bytes]) -> None:
        """Store these chunks, checkpoints, and what they hang below, as `plan` is called."""
        self._arrived = deque(keys)

    @property
    def num_waiting(self) -> int:
        """How many chains wait to be written, and may be."""
        return 0 if self.is_failing else len(self._arrived)

    def reset(self) -> None:
        self._arrived.clear()
        super().reset()

    def invalidated(self) -> None:
        """The tier is left alone: what the host evicts meanwhile is counted, and forgotten."""
        self._ancestry.sweep()

    def plan(self) -> None:
        if self.is_open and not self.is_failing:
            self._store_arrived()
            super().plan()
        else:
            self._ancestry.sweep()

    def _store_arrived(self) -> None:
        held = self._stores.ledger.held_by_walk()
        budget = self._steps.report_steps * self._step_blocks()
        while self._arrived and held < budget:
            key = self._ancestry.independent(self._arrived[0])
            chain = None if key is None or self._stores.is_covered(key) else self._missing_chain(key)
            if chain is not None:
                if held and held + self._stores.device_blocks(chain) > budget:
                    return
                transfer, stop = self._stores.plan(chain, self._pool.touch(None))
                held += 0 if transfer is None else transfer.device_blocks
                if stop is not None and not stop.is_final:
                    return
            self._arrived.popleft()
