"""Recovery: the records of an earlier keeper are taken into a pool, all of whose slots are free.

    chunk         below the chunk above it, if that is here
    checkpoint    below its chunk, if that is here and so are all its pieces

First come all chunks, then all checkpoints. Slots of what is not taken in are free.

A slot that was freed and not handed out again still has its record. So a chunk may come twice, once from before it was
evicted: the bytes of both are right, and the first counts.
"""

from collections.abc import Hashable

from cpu_prefix_cache.keeper.records import Records, Run
from cpu_prefix_cache.messages.tier import Found
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
    by_key: dict[Hashable, Found] = {(each.label.key, each.label.group, each.label.block): each for each in pieces}
    for name in dict.fromkeys(name for each in pieces for name in (each.label.parent, each.label.key)):
        coordinator.take_in(name, by_key)


def _take_run(run: Run, coordinator: KVCacheCoordinator) -> None:
    pool, per_chunk = coordinator.pool, coordinator.planner.host_blocks_per_chunk
    names, chunks = run.names, run.slots[::per_chunk]
    parent = pool.root if run.parent is None else pool.find(run.parent)
    twice = 0 if parent is None else pool.resident_run(names, 0, len(names))
    if twice:
        parent = pool.find(names[twice - 1])
    if parent is None:
        pool.abort(chunks)
    else:
        pool.abort(chunks[:twice])
        pool.commit(chunks[twice:], names[twice:], parent, pool.touch(None))
