"""Eager: a chunk is stored as soon as its tokens are confirmed computed, and what is left when its request ends.

In a model that needs checkpoints a chunk is stored in the hope of one below it (rule 9).

What does not fit its codec is left alone, and what hangs below it, until it is computed again: else all of it would be
copied again for each chunk that a request adds.

A host region takes seconds to prepare, and meanwhile there may be no room for what has room a moment later. So what a
request leaves behind is stored when the host has grown, the oldest first; nothing is evicted for it before the host has
grown to its end. Where a rank is short of memory it never does, so no more is kept than the device has.
"""

from collections.abc import Hashable, Sequence

from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.offload.ancestry import Ancestry
from cpu_prefix_cache.offload.chain import Chain
from cpu_prefix_cache.offload.offload import Offload
from cpu_prefix_cache.offload.running import Running
from cpu_prefix_cache.offload.stores import StorePlanner


class Eager(Offload):
    """Stores what is confirmed, request by request, oldest first. Never looks at the device's order of eviction.

    `Lazy` builds on it, and overrides what it goes by.
    """

    def __init__(self, stores: StorePlanner, parents: Ancestry | None = None) -> None:
        super().__init__(stores, parents)
        self._due: dict[Hashable, Running] = {}
        self._unfit: dict[bytes, None] = {}  # the first of each store, in their order; as many as the device holds
        self._left: dict[Hashable, Running] = {}  # ended before the host had room for them
        self._left_chunks = 0  # of these
        self._left_at = 0  # host blocks that were ready when these were tried last

    # Reported

    def confirmed(self, running: Running, before: int) -> None:
        self._due[running.id] = running
        for key in running.keys[before : running.confirmed] if self._unfit else ():
            self._unfit.pop(key, None)

    def checkpointed(self, running: Running, checkpoint: CheckpointAt) -> None:
        self._due[running.id] = running

    def ended(self, running: Running) -> None:
        self._due.pop(running.id, None)
        self._store_ended(running)

    def preempted(self, running: Running) -> None:
        self._due.pop(running.id, None)
        self._store_ended(running)

    def unfit(self, keys: Sequence[bytes]) -> None:
        self._unfit[keys[0]] = None
        if len(self._unfit) > self._stores.device_chunks:
            del self._unfit[next(iter(self._unfit))]

    def reset(self) -> None:
        self._due.clear()
        self._unfit.clear()
        self._left.clear()
        self._left_chunks = 0

    # Asked

    def plan(self) -> None:
        due, self._due = self._due, {}
        for running in due.values():
            self._store_confirmed(running)

    def catch_up(self) -> None:
        """Store what found no room while the host was being prepared, as far as there is some now."""
        pool = self._pool
        if self._left_at == pool.ready:
            return
        self._left_at = pool.ready
        for running in list(self._left.values()):
            missing = running.confirmed - self._stores.covered_run(running.keys, 0, running.confirmed)
            if pool.ready < pool.capacity and missing * pool.shape.blocks_per_chunk > len(pool.free):
                break
            self._drop(running.id)
            self._store_ended(running)

    def _store_ended(self, running: Running) -> None:
        refusals = self._stores.refusals
        self._store_confirmed(running, ended=True)
        if self._stores.refusals > refusals and self._pool.ready < self._pool.capacity:
            self._drop(running.id)
            self._left[running.id] = running
            self._left_chunks += running.confirmed
            while self._left_chunks > self._stores.device_chunks:
                self._drop(next(iter(self._left)))

    def _drop(self, id: Hashable) -> None:
        """It waits for room no more."""
        if (running := self._left.pop(id, None)) is not None:
            self._left_chunks -= running.confirmed

    def _store_confirmed(self, running: Running, *, ended: bool = False) -> None:
        """Store the confirmed chunks and checkpoints of a request that the host lacks.

        Begins at the first chunk missing, wherever it is: what the pool evicted since, or had no room for, is mended
        here. Checkpoints that were stored once are looked at again when the request has `ended`; chunks beyond its last
        place to resume from are not stored then (rule 9).
        """
        keys, stop = running.keys, running.confirmed
        present = self._pool.resident_run(keys, 0, stop)
        if self._unfit:
            stop = next((at for at in range(present, stop) if keys[at] in self._unfit), stop)
        if ended:
            kept = max((checkpoint.depth for checkpoint in running.checkpoints), default=0)
            while stop > max(present, kept) and self._stores.planner.needs_checkpoint(stop):
                stop -= 1
        start = self._stores.covered_run(keys, present, stop)
        if start < stop:
            chain = Chain(keys[start - 1] if start else None, keys[start:stop])
            self._stores.plan(chain, running.touch, owner=running.id)
        checkpoints = running.checkpoints if ended else tuple(running.unsaved)
        for checkpoint in checkpoints:
            chunk = checkpoint.tail[-1]
            if self._stores.is_covered(chunk) and not self._is_settled(checkpoint):
                self._stores.plan(Chain(chunk, (), checkpoint), running.touch, owner=running.id)
        if checkpoints:
            running.unsaved[:] = [each for each in running.unsaved if not self._is_settled(each)]
        self.work += running.confirmed - present + len(checkpoints)

    def _is_settled(self, checkpoint: CheckpointAt) -> bool:
        key = checkpoint_key(checkpoint.tail[-1])
        return key in self._unfit or self._stores.is_covered(key)
