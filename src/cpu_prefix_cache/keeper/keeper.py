"""Keeper: what becomes of the slots of one region, for the engines that have joined.

    join      an engine has a number and a namespace: one for each model, revision and layout
    run       how much of a prompt is here? It is leased: nobody overwrites it until `release`
    take      slots for the chunks that are missing behind it: this engine writes them, and nobody else
    commit    they are written: found by all engines of the namespace. Written less, or none: the rest is free again
    name      the engine's weights are others from now on, and so is its namespace. Those that name the same meet
    leave     the engine is gone: its leases end, and what it was writing is free

A chunk that another engine is writing is not granted a second time: the answer is to try again. The chunk that a write
hangs below is pinned until its end.

Slots are the blocks of a BlockPool, keys those of engines behind their namespace. Each call is one of an `engine`.

A keeper that follows another one begins with the records that it finds (`records.py`). Until all engines of that one
have come back, or are gone, it hands out no slot: they may still write to any.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cpu_prefix_cache.index.forest import Forest
from cpu_prefix_cache.keeper.fair_lru import FairLru
from cpu_prefix_cache.keeper.protocol import KEY_BYTES
from cpu_prefix_cache.keeper.records import Records, Run
from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.stats import PoolStatistics
from cpu_prefix_cache.pool.block_pool import BlockPool, Pin


class Granted(NamedTuple):
    """Slots for the chunks of a prompt from number `first` on. Without slots it may be worth it to `try_again`: another
    engine is writing that chunk, or the keeper does not know yet which slots are free.
    """

    first: int
    slots: Sequence[int]
    try_again: bool = False


@dataclass(slots=True)
class _Write:
    keys: Sequence[bytes]
    slots: Sequence[int]
    parent: int
    pin: Pin | None
    touch: Any


@dataclass(slots=True)
class _Engine:
    namespace: bytes
    leases: dict[int, Pin] = field(default_factory=dict)
    writes: dict[int, _Write] = field(default_factory=dict)


class Keeper:
    """Decides over the slots that `records` have. Raises MisuseError for what an engine must not ask."""

    def __init__(self, num_slots: int, records: Records) -> None:
        self._records = records
        policies = list[FairLru]()

        def new_policy(forest: Forest) -> FairLru:
            policies.append(FairLru(forest, num_slots))
            return policies[-1]

        self._pool = BlockPool(num_slots, new_policy, thresholds=None)
        (self._policy,) = policies
        self._engines: dict[int, _Engine] = {}
        self._writing = set[bytes]()
        self.absent = set[int]()  # engines of the keeper before this one

    # Looking

    def statistics(self) -> PoolStatistics:
        return self._pool.statistics()

    def held(self, engine: int) -> int:
        """How many chunks are counted for this engine: it used them last."""
        return self._policy.held(engine)

    def __contains__(self, engine: int) -> bool:
        return engine in self._engines

    # Engines

    def recover(self) -> int:
        """Take in what the records have. The number of chunks that are found again."""
        runs = list(self._records.runs())
        self._pool.claim([(slot,) for run in runs for slot in run.slots])  # at once: one alone costs as much as a chunk
        for run in runs:
            self._take_in(run)
        return self._pool.statistics().cached

    def join(self, engine: int, namespace: bytes) -> None:
        if engine in self._engines:
            raise MisuseError(f"engine {engine} has joined already")
        self._engines[engine] = _Engine(namespace)
        self._policy.present.add(engine)
        self.absent.discard(engine)

    def name(self, engine: int, namespace: bytes) -> None:
        self._engines[engine].namespace = namespace

    def leave(self, engine: int) -> None:
        gone = self._engines[engine]
        for id in list(gone.leases):
            self.release(engine, id)
        for id in list(gone.writes):
            self.commit(engine, id, 0)
        del self._engines[engine]
        self._policy.present.discard(engine)

    # Requests

    def run(self, engine: int, id: int, keys: Sequence[bytes]) -> Sequence[int]:
        """The slots of the chunks that are here, from the first on. The request uses them, and has a lease on them."""
        asks = self._engines[engine]
        self._check_new(asks, id)
        path = self._path(_named(asks.namespace, keys))
        if path:
            self._policy.serve(engine)
            self._pool.touch(path[-1])
            asks.leases[id] = self._pool.pin(path[-1])
        return path

    def release(self, engine: int, id: int) -> None:
        """End a lease. Of a run that found nothing there is none."""
        pin = self._engines[engine].leases.pop(id, None)
        if pin is not None:
            self._pool.unpin(pin)

    def take(self, engine: int, id: int, keys: Sequence[bytes]) -> Granted:
        asks = self._engines[engine]
        self._check_new(asks, id)
        names = _named(asks.namespace, keys)
        path = self._path(names)
        first = len(path)
        if first == len(names):
            return Granted(first, ())
        if len(set(names)) < len(names):
            raise MisuseError("a chunk comes twice in one prompt")
        if len(self._pool.missing(names[first:])) < len(names) - first:
            raise MisuseError("a chunk of this prompt is that of another prompt, too")
        stop = next((at for at in range(first, len(names)) if names[at] in self._writing), len(names))
        if self.absent or stop == first:
            return Granted(first, (), try_again=True)
        parent = path[-1] if path else self._pool.root
        self._policy.serve(engine)
        touch = self._pool.touch(parent if first else None)
        with self._pool.pinned(*([parent] if first else [])) as pin:
            slots = self._pool.take(stop - first)
        for slot in slots:
            self._records.clear(slot)
        written = names[first : first + len(slots)]
        self._writing.update(written)
        asks.writes[id] = _Write(written, slots, parent, pin, touch)
        return Granted(first, slots)

    def commit(self, engine: int, id: int, count: int) -> None:
        """The first `count` chunks of a take are written, and no more will be."""
        writes = self._engines[engine].writes
        write = writes.get(id)
        if write is None and not count:
            return  # nothing was granted
        if write is None or not 0 <= count <= len(write.slots):
            raise MisuseError(f"engine {engine} commits {count} chunks of {id}, which it has not taken")
        self._policy.serve(engine)
        keys, slots = write.keys[:count], write.slots[:count]
        self._pool.commit(slots, keys, write.parent, write.touch)
        self._pool.abort(write.slots[count:])
        del writes[id]
        self._writing.difference_update(write.keys)
        above = None if write.pin is None else self._pool.key(write.parent)
        for slot, key in zip(slots, keys, strict=True):
            parent = None if above is None else above[:KEY_BYTES]
            self._records.write(slot, key[KEY_BYTES:], key[:KEY_BYTES], parent)
            above = key
        if write.pin is not None:
            self._pool.unpin(write.pin)

    def check_valid(self) -> None:
        """Assert every rule that is kept here. For tests."""
        self._pool.check_valid()
        self._policy.check_valid()
        writes = [write for engine in self._engines.values() for write in engine.writes.values()]
        assert self._writing == {key for write in writes for key in write.keys}, "a key is written by nobody, or twice"
        slots = [slot for write in writes for slot in write.slots]
        assert self._pool.statistics().writing == len(set(slots)) == len(slots), "a slot was lost, or has two writers"

    # Details

    def _check_new(self, asks: _Engine, id: int) -> None:
        if id in asks.leases or id in asks.writes:
            raise MisuseError(f"the number {id} is that of another question")

    def _path(self, names: Sequence[bytes]) -> Sequence[int]:
        """The slots of the chunks that are here, from the first on. Raises MisuseError for names of several prompts."""
        end = self._pool.resident_run(names, 0, len(names))
        deepest = self._pool.find(names[end - 1]) if end else None
        path = () if deepest is None else self._pool.path(deepest, end)
        if self._pool.keys_of(path) != names[:end]:
            raise MisuseError("a key is that of all tokens up to the end of its chunk; these are of several prompts")
        return path

    def _take_in(self, run: Run) -> None:
        """Chunks of an earlier keeper. What hangs below something that is gone is free."""
        parent = self._pool.root if run.parent is None else self._pool.find(run.parent + run.namespace)
        if parent is None:
            self._pool.abort(run.slots)
        else:
            self._pool.commit(run.slots, _named(run.namespace, run.keys), parent, self._pool.touch(None))


def _named(namespace: bytes, keys: Sequence[bytes]) -> list[bytes]:
    """Names in the forest, which go by their first byte to one of many dictionaries: so that of a key comes first."""
    return [key + namespace for key in keys]
