"""Recovery: the records of an earlier keeper are taken into a pool, all of whose slots are free.

    chunk         below the chunk above it, if that is here
    checkpoint    below its chunk, if that is here and so are all its pieces

First come all chunks, then all checkpoints. Slots of what is not taken in are free.

A slot that was freed and not handed out again still has its record. So a chunk may come twice, once from before it was
evicted: the bytes of both are right, and the first counts.
"""

from collections.abc import Hashable, Sequence

from cpu_prefix_cache.keeper.records import PieceFound, Records, Run
from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.pool.coordinator import KVCacheCoordinator


def recover(records: Records, coordinator: KVCacheCoordinator) -> None:
    """Take in what the records have."""
    planner, pool = coordinator.planner, coordinator.pool
    widths = [0 if piece.in_chunk else piece.host_blocks for piece in planner.pieces]
    per_chunk = planner.host_blocks_per_chunk
    runs, pieces = records.found(per_chunk, lambda group: widths[group] if group < len(widths) else 0)
    # at once: one alone costs as much as a chunk
    pool.claim([slots for run in runs for slots in zip(*[iter(run.slots)] * per_chunk, strict=True)])
    for run in runs:
        _take_run(run, coordinator)
    by_key: dict[Hashable, PieceFound] = {}
    below = dict[bytes, None]()
    for piece in pieces:
        name = piece.key + piece.namespace
        by_key[name, piece.group, piece.block] = piece
        below.update(dict.fromkeys((piece.below + piece.namespace, name)))
    for name in below:
        _take_checkpoint(name, by_key, coordinator)


def named(namespace: bytes, keys: Sequence[bytes]) -> list[bytes]:
    """Names in the forest, which go by their first byte to one of many dictionaries: so that of a key comes first."""
    return [key + namespace for key in keys]


def _take_run(run: Run, coordinator: KVCacheCoordinator) -> None:
    pool, per_chunk = coordinator.pool, coordinator.planner.host_blocks_per_chunk
    names, chunks = named(run.namespace, run.keys), run.slots[::per_chunk]
    parent = pool.root if run.parent is None else pool.find(run.parent + run.namespace)
    twice = 0 if parent is None else pool.resident_run(names, 0, len(names))
    if twice:
        parent = pool.find(names[twice - 1])
    if parent is None:
        pool.abort(chunks)
    else:
        pool.abort(chunks[:twice])
        pool.commit(chunks[twice:], names[twice:], parent, pool.touch(None))


def _take_checkpoint(name: bytes, pieces: dict[Hashable, PieceFound], coordinator: KVCacheCoordinator) -> None:
    """The checkpoint below the chunk with this name, if all its pieces are in the pool or found."""
    pool, chunk = coordinator.pool, coordinator.pool.find(name)
    if chunk is None or pool.find(checkpoint_key(name)) is not None:
        return
    depth = pool.depth(chunk)
    above = pool.keys_of(pool.path(chunk, coordinator.planner.reach(depth)))
    needs = coordinator.needs(CheckpointAt(depth, tuple(key for key in above if key)))
    missing = [need.key for need in pool.checkpoints.missing(needs)]
    if needs and pieces.keys() >= set(missing):
        slots = [slot for key in missing for slot in pieces.pop(key).slots]
        pool.commit([pool.claim_checkpoint(slots, needs)], [checkpoint_key(name)], chunk, pool.touch(None))
