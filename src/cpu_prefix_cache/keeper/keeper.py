"""Keeper: what becomes of the slots of one region, for the engines that have joined.

    join      an engine has a number and a namespace: one for each model, revision and layout
    run       after how much of a prompt can a request resume? It is leased: nobody overwrites it until `release`
    take      slots for the chunks that are missing behind what is here, and for the checkpoint after the last of them:
              this engine writes them, and nobody else
    commit    they are written: found by all engines of the namespace. Written less, or none: the rest is free again
    name      the engine's weights are others from now on, and so is its namespace. Those that name the same meet
    leave     the engine is gone: its leases end, and what it was writing is free

What another engine is writing is not granted a second time: the answer is to try again. That is so for a chunk, and
for each piece of a checkpoint. A take is a promotion on the pool's edge: a store whose bytes come from elsewhere, here
from an engine.

Slots are the blocks of a BlockPool, its keys names (`names.py`). Each call is one of an `engine`.
All models of one pool have one shape (`shape.py`), so the pool itself knows where they resume.

A keeper that follows another one begins with the records that it finds (`records.py`). Until all engines of that one
have come back, or are gone, it hands out no slot: they may still write to any.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from cpu_prefix_cache.index.forest import Forest
from cpu_prefix_cache.keeper.answers import Granted, Leased
from cpu_prefix_cache.keeper.fair_lru import FairLru
from cpu_prefix_cache.keeper.names import named
from cpu_prefix_cache.keeper.recorded import RecordedEdge, RecordedStores
from cpu_prefix_cache.keeper.records import Records
from cpu_prefix_cache.keeper.recovery import recover
from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.request import CheckpointAt, Pending
from cpu_prefix_cache.messages.stats import KeeperStatistics, PoolStatistics
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.offload.chain import Chain
from cpu_prefix_cache.offload.transfers import Promotion, StoreTransfer
from cpu_prefix_cache.pool.block_pool import BlockPool, Pin
from cpu_prefix_cache.pool.coordinator import KVCacheCoordinator


@dataclass(slots=True)
class _Engine:
    namespace: bytes
    leases: dict[int, Pin] = field(default_factory=dict)
    writes: dict[int, Promotion] = field(default_factory=dict)


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
        self._edge = RecordedEdge(RecordedStores(self._coordinator, records), records)
        (self._policy,) = policies
        self._engines: dict[int, _Engine] = {}
        self._questions = self._asked_chunks = self._hit_chunks = self._tier_hit_chunks = self._stored = 0
        self.absent = set[int]()  # engines of the keeper before this one

    # Looking

    def statistics(self) -> PoolStatistics:
        return self._pool.statistics()

    def keeper_statistics(self) -> KeeperStatistics:
        """O(engines + pins)."""
        engines = self._engines.values()
        return KeeperStatistics(
            self._pool.statistics(),
            engines=len(engines),
            leases=sum(len(engine.leases) for engine in engines),
            writes=sum(len(engine.writes) for engine in engines),
            questions=self._questions,
            asked_chunks=self._asked_chunks,
            hit_chunks=self._hit_chunks,
            tier_hit_chunks=self._tier_hit_chunks,
            stored=self._stored,
        )

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

    def run(
        self, engine: int, id: int, keys: Sequence[bytes], now: float = 0.0, chunk_nanoseconds: int = 0
    ) -> Leased | Pending:
        """The part of a prompt that is here. The request uses it, and has a lease on all that it takes to resume.
        Pending: the answer waits for what is below this pool. Computing a chunk takes so long; 0: nobody knows.
        """
        return self._lease(engine, id, *self._find(engine, id, keys))

    def release(self, engine: int, id: int) -> None:
        """End a lease. Of a run that found nothing there is none."""
        self._pool.unpin(self._engines[engine].leases.pop(id, None))

    def take(self, engine: int, id: int, keys: Sequence[bytes], has_checkpoint: bool = False) -> Granted:
        """`has_checkpoint`: the engine could write the checkpoint after the last of these chunks, too. Where there is
        no room for both, nothing is granted (rule 4).
        """
        names, path, _, used = self._find(engine, id, keys)
        first = len(path)
        checkpoint = self._missing_checkpoint(names) if has_checkpoint else None
        if first == len(names) and checkpoint is None:
            return Granted(first, ())
        self._check_one_prompt(names, first)
        writing = self._edge.ledger.writing
        stop = next((at for at in range(first, len(names)) if names[at] in writing), len(names))
        if stop < len(names):
            checkpoint = None
        is_written = checkpoint is not None and self._is_written(checkpoint)
        if self.absent or stop == first < len(names) or is_written:
            return Granted(first, (), try_again=True)
        self._policy.serve(engine)
        touch = self._pool.touch(used)
        wanted = Chain(names[first - 1] if first else None, names[first:stop], checkpoint)
        write = self._edge.stores.receive(wanted, touch, engine)
        if write is None:
            return Granted(first, ())
        self._engines[engine].writes[id] = write
        slots = self._pool.blocks_of(write.nodes[: len(write.chain.keys)])
        return Granted(first, slots, pieces=self._granted_pieces(write))

    def commit(self, engine: int, id: int, count: int, has_checkpoint: bool) -> None:
        """The first `count` chunks of a take are written, and the checkpoint or not. No more will be."""
        writes = self._engines[engine].writes
        write = writes.get(id)
        if write is None and not count:
            return  # nothing was granted
        if write is None or not 0 <= count <= len(write.chain.keys):
            raise MisuseError(f"engine {engine} commits {count} chunks of {id}, which it has not taken")
        if has_checkpoint and (write.chain.checkpoint is None or count < len(write.chain.keys)):
            raise MisuseError(f"engine {engine} commits the checkpoint of {id}, which it has not written")
        self._policy.serve(engine)
        written = count + has_checkpoint
        committed = self._edge.promoted(write, True, written)
        del writes[id]
        self._stored += written
        self._committed(committed)

    def check_valid(self) -> None:
        """Assert every rule that is kept here. For tests."""
        self._edge.check_valid()
        writes = [write.id for engine in self._engines.values() for write in engine.writes.values()]
        owned = [each.id for each in self._edge.ledger if isinstance(each.owner, int)]
        assert sorted(writes) == sorted(owned), "a write has no engine, or two"

    # Details

    def _check_new(self, engine: int, id: int) -> None:
        asks = self._engines[engine]
        if id in asks.leases or id in asks.writes:
            raise MisuseError(f"the number {id} is that of another question")

    def _find(
        self, engine: int, id: int, keys: Sequence[bytes]
    ) -> tuple[Sequence[bytes], Sequence[int], int, int | None]:
        """The names of a prompt, the nodes of those that are here, after how many of them a request can resume, and the
        node that has all it takes.
        """
        self._check_new(engine, id)
        names = named(self._engines[engine].namespace, keys)
        path = path_of(names, self._pool)
        depth = self._pool.depth(self._pool.resume_points.nearest(path[-1])) if path else 0
        return names, path, depth, self._coordinator.resume_node(names, depth) if depth else None

    def _lease(
        self, engine: int, id: int, names: Sequence[bytes], path: Sequence[int], depth: int, node: int | None
    ) -> Leased:
        self._questions += 1
        self._asked_chunks += len(names)
        if node is None:
            return Leased(len(path), 0, ())
        self._hit_chunks += depth
        self._used(names[:depth])
        self._policy.serve(engine)
        self._pool.touch(node)
        self._engines[engine].leases[id] = self._pool.pin(node)
        pieces = self._pool.checkpoints.pieces(node) if node in self._pool.checkpoints else ()
        return Leased(len(path), depth, (*self._pool.blocks_of(path[:depth]), *chain.from_iterable(pieces)))

    def _check_one_prompt(self, names: Sequence[bytes], first: int) -> None:
        """Raise MisuseError for names of several prompts, of which those from `first` on are not here."""
        if len(set(names)) < len(names):
            raise MisuseError("a chunk comes twice in one prompt")
        if len(self._pool.missing(names[first:])) < len(names) - first:
            raise MisuseError("a chunk of this prompt is that of another prompt, too")

    # Writes

    def _missing_checkpoint(self, names: Sequence[bytes]) -> CheckpointAt | None:
        """The checkpoint after these chunks; None if it is here, or resuming there takes none."""
        if not self.planner.needs_checkpoint(len(names)) or self._pool.find(checkpoint_key(names[-1])) is not None:
            return None
        return self._coordinator.checkpoint_at(names, len(names))

    def _is_written(self, checkpoint: CheckpointAt) -> bool:
        """Whether somebody is writing this checkpoint, or a piece of it."""
        writing = self._edge.ledger.writing
        needs = self._coordinator.needs(checkpoint)
        return checkpoint_key(checkpoint.tail[-1]) in writing or any(need.key in writing for need in needs)

    def _granted_pieces(self, write: Promotion) -> list[Sequence[int]] | None:
        if write.chain.checkpoint is None:
            return None
        return [slots or () for slots in self._pool.checkpoints.to_write(write.nodes[-1])]

    # Told to a tier below

    def _used(self, names: Sequence[bytes]) -> None:
        """A request loads these chunks."""

    def _committed(self, stores: Sequence[StoreTransfer]) -> None:
        """Chunks and checkpoints of these can be found from now on."""


def path_of(names: Sequence[bytes], pool: BlockPool) -> Sequence[int]:
    """The nodes of those that a pool has, from the first on. Raises MisuseError for names of several prompts."""
    end = pool.resident_run(names, 0, len(names))
    deepest = pool.find(names[end - 1]) if end else None
    path = () if deepest is None else pool.path(deepest, pool.depth(deepest))
    if pool.keys_of(path) != names[:end]:
        raise MisuseError("a key is that of all tokens up to the end of its chunk; these are of several prompts")
    return path
