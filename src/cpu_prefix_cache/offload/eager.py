"""Eager: a chunk is stored as soon as its tokens are confirmed computed, and what is left when its request ends.

In a model that needs checkpoints a chunk is stored in the hope of one below it (rule 9).

While the host is still being prepared there may be no room for what has room a moment later. So what a request leaves
behind is tried again then (`retries.py`).
"""

from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.offload.base import Offload
from cpu_prefix_cache.offload.retries import Retries
from cpu_prefix_cache.offload.running import Running
from cpu_prefix_cache.offload.stores import Chain, StorePlanner
from cpu_prefix_cache.pool.block_pool import BlockPool


class Eager(Offload):
    """Stores what is confirmed, request by request, oldest first. See Offload."""

    def __init__(self, pool: BlockPool, stores: StorePlanner) -> None:
        self._pool = pool
        self._stores = stores
        self._due: dict[str, Running] = {}
        self._retries = Retries(pool, stores.device_chunks, self._missing)
        self._work = 0

    @property
    def work(self) -> int:
        return self._work

    def confirmed(self, running: Running, before: int) -> None:
        self._due[running.id] = running

    def checkpointed(self, running: Running, checkpoint: CheckpointAt) -> None:
        self._due[running.id] = running

    def forget(self, running: Running) -> None:
        """The request ended, and what it computed is not to be stored."""
        self._due.pop(running.id, None)

    def ended(self, running: Running) -> None:
        self.forget(running)
        self._store_ended(running)

    def preempted(self, running: Running) -> None:
        self.ended(running)

    def _store_ended(self, running: Running) -> None:
        refusals = self._stores.refusals
        self._work += store_confirmed(self._pool, self._stores, running, ended=True)
        if self._stores.refusals > refusals:
            self._retries.add(running)

    def _missing(self, running: Running) -> int:
        """How many of its chunks the host has not, and nobody is writing."""
        return running.confirmed - self._stores.covered_run(running.keys, 0, running.confirmed)

    def plan(self, *, with_loads: bool) -> None:
        due, self._due = self._due, {}
        for running in due.values():
            self._work += store_confirmed(self._pool, self._stores, running)

    def catch_up(self) -> None:
        for running in self._retries.that_fit():
            self._store_ended(running)

    def reset(self) -> None:
        self._due.clear()
        self._retries.clear()


def store_confirmed(pool: BlockPool, stores: StorePlanner, running: Running, *, ended: bool = False) -> int:
    """Store the confirmed chunks and checkpoints of a request that the host lacks. How many nodes were looked at.

    Begins at the first chunk missing, wherever it is: what the pool evicted since, or had no room for, is mended here.
    Checkpoints that were stored once are looked at again when the request has `ended`; chunks beyond its last place to
    resume from are not stored then (rule 9).
    """
    keys, stop = running.keys, running.confirmed
    start = present = pool.resident_run(keys, 0, stop)
    if ended:
        kept = max((checkpoint.depth for checkpoint in running.checkpoints), default=0)
        while stop > max(start, kept) and stores.planner.needs_checkpoint(stop):
            stop -= 1
    start = stores.covered_run(keys, start, stop)
    if start < stop:
        chain = Chain(keys[start - 1] if start else None, keys[start:stop])
        stores.plan(chain, running.touch, owner=running.id)
    checkpoints = running.checkpoints if ended else tuple(running.unsaved)
    for checkpoint in checkpoints:
        chunk = checkpoint.tail[-1]
        if stores.is_covered(chunk) and not stores.is_covered(checkpoint_key(chunk)):
            stores.plan(Chain(chunk, (), checkpoint), running.touch, owner=running.id)
    if checkpoints:
        running.unsaved[:] = [each for each in running.unsaved if not stores.is_covered(checkpoint_key(each.tail[-1]))]
    return running.confirmed - present + len(checkpoints)
