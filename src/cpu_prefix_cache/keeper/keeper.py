"""Keeper: what becomes of the slots of one region, for the engines that have joined.

    join      an engine has a number and a namespace: one for each model, revision and layout
    run       after how much of a prompt can a request resume? It is leased: nobody overwrites it until `release`
    take      slots for the chunks that are missing behind what is here, and for the checkpoint after the last of them:
              this engine writes them, and nobody else
    commit    they are written: found by all engines of the namespace. Written less, or none: the rest is free again
    name      the engine's weights are others from now on, and so is its namespace. Those that name the same meet
    leave     the engine is gone: its leases end, and what it was writing is free

What another engine is writing is not granted a second time: the answer is to try again. That is so for a chunk, and
for each piece of a checkpoint. The chunk that a write hangs below is pinned until its end.

Slots are the blocks of a BlockPool, keys those of engines behind their namespace. Each call is one of an `engine`.
All models of one pool have one shape (`shape.py`), so the pool itself knows where they resume.

A keeper that follows another one begins with the records that it finds (`records.py`). Until all engines of that one
have come back, or are gone, it hands out no slot: they may still write to any.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from cpu_prefix_cache.index.forest import Forest
from cpu_prefix_cache.keeper.answers import Granted, Leased
from cpu_prefix_cache.keeper.fair_lru import FairLru
from cpu_prefix_cache.keeper.protocol import KEY_BYTES
from cpu_prefix_cache.keeper.records import Records
from cpu_prefix_cache.keeper.recovery import named, recover
from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.stats import PoolStatistics
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.pool.block_pool import BlockPool, Pin
from cpu_prefix_cache.pool.checkpoints import PieceNeed
from cpu_prefix_cache.pool.coordinator import KVCacheCoordinator


@dataclass(slots=True)
class _Checkpoint:
    """One that is being written: `pieces` are those that no other checkpoint has, with their slots."""

    node: int
    name: bytes
    pieces: Sequence[tuple[Any, Sequence[int]]]


@dataclass(slots=True)
class _Write:
    names: Sequence[bytes]
    chunks: Sequence[int]
    parent: int
    pin: Pin | None
    touch: Any
    checkpoint: _Checkpoint | None = None

    @property
    def writing(self) -> list[Hashable]:
        """Names of chunks and of a checkpoint, and keys of pieces: nobody else writes these meanwhile."""
        if self.checkpoint is None:
            return list(self.names)
        return [*self.names, checkpoint_key(self.checkpoint.name), *(key for key, _ in self.checkpoint.pieces)]


@dataclass(slots=True)
class _Engine:
    namespace: bytes
    leases: dict[int, Pin] = field(default_factory=dict)
    writes: dict[int, _Write] = field(default_factory=dict)


class Keeper:
    """Decides over the slots that `records` have, for engines whose models are shaped as that of `planner`. Raises
    MisuseError for what an engine must not ask, and ConfigurationError for fewer slots than a chunk takes.
    """

    def __init__(self, num_slots: int, records: Records, planner: HybridChunkPlanner) -> None:
        self.planner = planner
        self._records = records
        policies = list[FairLru]()

        def new_policy(forest: Forest) -> FairLru:
            policies.append(FairLru(forest, num_slots, lambda: self._pool.num_cached))
            return policies[-1]

        self._pool = BlockPool(
            num_slots,
            new_policy,
            blocks_per_chunk=planner.host_blocks_per_chunk,
            needs_checkpoint=planner.needs_checkpoint if planner.has_checkpoints else None,
            thresholds=None,
        )
        self._coordinator = KVCacheCoordinator(planner, self._pool)
        (self._policy,) = policies
        self._engines: dict[int, _Engine] = {}
        self._writing = set[Hashable]()
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
        """Take in what the records have. The number of slots that are found again."""
        recover(self._records, self._coordinator)
        return self._pool.num_cached

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
            self.commit(engine, id, 0, False)
        del self._engines[engine]
        self._policy.present.discard(engine)

    # Requests

    def run(self, engine: int, id: int, keys: Sequence[bytes]) -> Leased:
        """The part of a prompt that is here. The request uses it, and has a lease on all that it takes to resume."""
        asks = self._engines[engine]
        self._check_new(asks, id)
        names = named(asks.namespace, keys)
        path = self._path(names)
        depth, node = self._resumed(names, path)
        if node is None:
            return Leased(len(path), 0, ())
        self._policy.serve(engine)
        self._pool.touch(node)
        asks.leases[id] = self._pool.pin(node)
        pieces = self._pool.checkpoints.pieces(node) if node in self._pool.checkpoints else ()
        return Leased(len(path), depth, (*self._pool.blocks_of(path[:depth]), *chain.from_iterable(pieces)))

    def release(self, engine: int, id: int) -> None:
        """End a lease. Of a run that found nothing there is none."""
        pin = self._engines[engine].leases.pop(id, None)
        if pin is not None:
            self._pool.unpin(pin)

    def take(self, engine: int, id: int, keys: Sequence[bytes], has_checkpoint: bool = False) -> Granted:
        """`has_checkpoint`: the engine could write the checkpoint after the last of these chunks, too. Where there is
        no room for both, nothing is granted (rule 4).
        """
        asks = self._engines[engine]
        self._check_new(asks, id)
        names = named(asks.namespace, keys)
        path = self._path(names)
        first = len(path)
        needs = self._missing_checkpoint(names) if has_checkpoint else None
        if first == len(names) and needs is None:
            return Granted(first, ())
        self._check_one_prompt(names, first)
        stop = next((at for at in range(first, len(names)) if names[at] in self._writing), len(names))
        if stop < len(names):
            needs = None
        is_written = needs is not None and self._is_written(names[-1], needs)
        if self.absent or stop == first < len(names) or is_written:
            return Granted(first, (), try_again=True)
        parent = path[-1] if path else self._pool.root
        self._policy.serve(engine)
        touch = self._pool.touch(self._resumed(names, path)[1])
        with self._pool.pinned(*([parent] if first else [])) as pin:
            chunks = self._pool.take(stop - first, needs=needs)
            checkpoint = self._checkpoint(chunks.pop(), names[-1], needs) if chunks and needs is not None else None
            write = _Write(names[first : first + len(chunks)], chunks, parent, pin, touch, checkpoint)
        granted = Granted(first, self._pool.blocks_of(chunks), pieces=self._granted_pieces(write.checkpoint))
        for slot in granted.all_slots:
            self._records.clear(slot)
        self._writing.update(write.writing)
        asks.writes[id] = write
        return granted

    def commit(self, engine: int, id: int, count: int, has_checkpoint: bool) -> None:
        """The first `count` chunks of a take are written, and the checkpoint or not. No more will be."""
        writes = self._engines[engine].writes
        write = writes.get(id)
        if write is None and not count:
            return  # nothing was granted
        if write is None or not 0 <= count <= len(write.chunks):
            raise MisuseError(f"engine {engine} commits {count} chunks of {id}, which it has not taken")
        if has_checkpoint and (write.checkpoint is None or count < len(write.chunks)):
            raise MisuseError(f"engine {engine} commits the checkpoint of {id}, which it has not written")
        self._policy.serve(engine)
        chunks, names = write.chunks[:count], write.names[:count]
        self._pool.commit(chunks, names, write.parent, write.touch)
        self._pool.abort(write.chunks[count:])
        if chunks and not has_checkpoint:
            self._pool.resume_points.may_be_useless(chunks[-1])
        if write.checkpoint is not None:
            self._end_checkpoint(write.checkpoint, write.touch, has_checkpoint)
        del writes[id]
        self._writing.difference_update(write.writing)
        self._record(write, count)
        if write.checkpoint is not None and has_checkpoint:
            self._record_pieces(write.checkpoint)
        if write.pin is not None:
            self._pool.unpin(write.pin)

    def check_valid(self) -> None:
        """Assert every rule that is kept here. For tests."""
        self._pool.check_valid()
        self._policy.check_valid()
        writes = [write for engine in self._engines.values() for write in engine.writes.values()]
        written = [each for write in writes for each in write.writing]
        assert self._writing == set(written) and len(self._writing) == len(written), "a key has no writer, or two"
        slots = [slot for write in writes for slot in self._pool.blocks_of(write.chunks)]
        slots += [slot for write in writes if write.checkpoint for _, own in write.checkpoint.pieces for slot in own]
        shared = self._pool.statistics().writing - len(slots)  # pieces that a checkpoint shares which is being written
        assert len(set(slots)) == len(slots) and shared >= 0, "a slot was lost, or has two writers"

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

    def _resumed(self, names: Sequence[bytes], path: Sequence[int]) -> tuple[int, int | None]:
        """After how many of these chunks, which are here, a request can resume, and the node that has all it takes."""
        depth = self._pool.depth(self._pool.resume_points.nearest(path[-1])) if path else 0
        return depth, self._coordinator.resume_node(names, depth) if depth else None

    def _check_one_prompt(self, names: Sequence[bytes], first: int) -> None:
        """Raise MisuseError for names of several prompts, of which those from `first` on are not here."""
        if len(set(names)) < len(names):
            raise MisuseError("a chunk comes twice in one prompt")
        if len(self._pool.missing(names[first:])) < len(names) - first:
            raise MisuseError("a chunk of this prompt is that of another prompt, too")

    def _record(self, write: _Write, count: int) -> None:
        """Records of the first `count` chunks."""
        above = None if write.pin is None else self._pool.key(write.parent)
        slots, width = self._pool.blocks_of(write.chunks[:count]), self.planner.host_blocks_per_chunk
        for at, name in enumerate(write.names[:count]):
            parent = None if above is None else above[:KEY_BYTES]
            self._records.write(slots[at * width : at * width + width], name[KEY_BYTES:], name[:KEY_BYTES], parent)
            above = name

    # Checkpoints

    def _record_pieces(self, checkpoint: _Checkpoint) -> None:
        for (name, group, block), slots in checkpoint.pieces:
            below = checkpoint.name[:KEY_BYTES]
            self._records.write(slots, name[KEY_BYTES:], name[:KEY_BYTES], below, group, block)

    def _missing_checkpoint(self, names: Sequence[bytes]) -> list[PieceNeed] | None:
        """The pieces of the checkpoint after these chunks; None if it is here, or resuming there takes none."""
        if not self.planner.needs_checkpoint(len(names)) or self._pool.find(checkpoint_key(names[-1])) is not None:
            return None
        return self._coordinator.needs(self._coordinator.checkpoint_at(names, len(names)))

    def _is_written(self, name: bytes, needs: Sequence[PieceNeed]) -> bool:
        """Whether somebody is writing this checkpoint, or a piece of it."""
        return checkpoint_key(name) in self._writing or any(need.key in self._writing for need in needs)

    def _checkpoint(self, node: int, name: bytes, needs: Sequence[PieceNeed]) -> _Checkpoint:
        own = zip(needs, self._pool.checkpoints.to_write(node), strict=True)
        return _Checkpoint(node, name, [(need.key, slots) for need, slots in own if slots is not None])

    def _granted_pieces(self, checkpoint: _Checkpoint | None) -> list[Sequence[int]] | None:
        if checkpoint is None:
            return None
        return [slots or () for slots in self._pool.checkpoints.to_write(checkpoint.node)]

    def _end_checkpoint(self, checkpoint: _Checkpoint, touch: Any, is_written: bool) -> None:
        chunk = self._pool.find(checkpoint.name)
        if is_written and chunk is not None:
            self._pool.commit([checkpoint.node], [checkpoint_key(checkpoint.name)], chunk, touch)
        else:
            self._pool.abort([checkpoint.node])
