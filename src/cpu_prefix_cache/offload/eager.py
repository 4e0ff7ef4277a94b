"""Eager: a chunk is stored as soon as its tokens are confirmed computed, and what is left when its request ends.

In a model that needs checkpoints a chunk is stored in the hope of one below it (rule 9).

While the host is still being prepared there may be no room for what has room a moment later. So what a request leaves
behind is tried again then (`retries.py`).
"""

from collections.abc import Sequence

from cpu_prefix_cache.messages.request import CheckpointAt, Progress
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.offload.retries import Retries
from cpu_prefix_cache.offload.stores import Chain, StorePlanner
from cpu_prefix_cache.offload.transfers import Transfer
from cpu_prefix_cache.pool.block_pool import BlockPool


class Eager:
    """Stores what is confirmed, request by request, oldest first. See Offload."""

    def __init__(self, pool: BlockPool, stores: StorePlanner, device_chunks: int) -> None:
        self._pool = pool
        self._stores = stores
        self._due: dict[str, Progress] = {}
        self._retries = Retries(pool, device_chunks, self._missing)
        self.work = 0
        self.lost = 0  # never: what is computed is stored
        self.remembered = 0

    def confirmed(self, progress: Progress, before: int) -> None:
        self._due[progress.id] = progress

    def checkpointed(self, progress: Progress, checkpoint: CheckpointAt) -> None:
        self._due[progress.id] = progress

    def forget(self, progress: Progress) -> None:
        """The request ended, and what it computed is not to be stored."""
        self._due.pop(progress.id, None)

    def ended(self, progress: Progress) -> None:
        self.forget(progress)
        self._store_ended(progress)

    preempted = ended

    def _store_ended(self, progress: Progress) -> None:
        refusals = self._stores.refusals
        self.work += store_confirmed(self._pool, self._stores, progress, ended=True)
        if self._stores.refusals > refusals:
            self._retries.add(progress)

    def _missing(self, progress: Progress) -> int:
        """How many of its chunks the host has not, and nobody is writing."""
        return progress.confirmed - self._stores.covered_run(progress.keys, 0, progress.confirmed)

    def used(self, chunks: int) -> None:
        """Nothing: it does not look at what waits on the device."""

    def has_room_for(self, blocks: int) -> bool:
        return True

    def plan(self, *, with_loads: bool) -> None:
        due, self._due = self._due, {}
        for progress in due.values():
            self.work += store_confirmed(self._pool, self._stores, progress)

    def catch_up(self) -> None:
        for progress in self._retries.that_fit():
            self._store_ended(progress)

    def landed(self, transfer: Transfer) -> None:
        """Nothing: it waits for no store."""

    def committed(self, keys: Sequence[bytes]) -> None:
        """Nothing: it asks the pool what is there."""

    def reset(self) -> None:
        self._due.clear()
        self._retries.clear()


def store_confirmed(pool: BlockPool, stores: StorePlanner, progress: Progress, *, ended: bool = False) -> int:
    """Store the confirmed chunks and checkpoints of a request that the host lacks. How many nodes were looked at.

    Begins at the first chunk missing, wherever it is: what the pool evicted since, or had no room for, is mended here.
    Checkpoints that were stored once are looked at again when the request has `ended`; chunks beyond its last place to
    resume from are not stored then (rule 9).
    """
    keys, stop = progress.keys, progress.confirmed
    start = present = pool.resident_run(keys, 0, stop)
    if ended:
        kept = max((checkpoint.depth for checkpoint in progress.checkpoints), default=0)
        while stop > max(start, kept) and pool.needs_checkpoint(stop):
            stop -= 1
    start = stores.covered_run(keys, start, stop)
    if start < stop:
        chain = Chain(keys[start - 1] if start else None, keys[start:stop])
        stores.plan(chain, progress.touch, owner=progress.id)
    checkpoints = progress.checkpoints if ended else tuple(progress.unsaved)
    for checkpoint in checkpoints:
        chunk = checkpoint.tail[-1]
        if stores.is_covered(chunk) and not stores.is_covered(checkpoint_key(chunk)):
            stores.plan(Chain(chunk, (), checkpoint), progress.touch, owner=progress.id)
    if checkpoints:
        progress.unsaved[:] = [
            each for each in progress.unsaved if not stores.is_covered(checkpoint_key(each.tail[-1]))
        ]
    return progress.confirmed - present + len(checkpoints)
