"""Replays a trace through the host pool alone: what it hits is loaded, what it misses is stored."""

from cpu_prefix_cache.pool.admission import Thresholds
from cpu_prefix_cache.pool.block_pool import BlockPool
from cpu_prefix_cache.replay.meter import Meter
from cpu_prefix_cache.replay.outcome import Tally
from cpu_prefix_cache.replay.tiers import HostTier
from cpu_prefix_cache.replay.traces import Trace, TraceRequest


def replay_one_tier(trace: Trace, host: HostTier, meter: Meter) -> Tally:
    """One request after the other, each over before the next one comes.

    Of a prompt longer than the pool, the beginning that fits is stored; the rest counts as missed.
    """
    pool = BlockPool(
        trace.usable(host.capacity),
        host.policy,
        thresholds=Thresholds(host.store_after, host.min_store_tokens),
    )
    tally = Tally()
    for requests in meter.slices(trace.requests):
        for request in requests:
            hit = serve(pool, request, tally)
            tally.count(request, hit, trace.block_tokens)
    tally.loaded_blocks = tally.hit_blocks
    tally.evictions = pool.statistics().evictions
    return tally


def serve(pool: BlockPool, request: TraceRequest, tally: Tally) -> int:
    """Find a prompt and store what is missing of it. How many of its blocks were found."""
    keys = request.keys
    hit = pool.resident_run(keys, 0, len(keys))
    deepest = pool.find(keys[hit - 1]) if hit else None
    touch = pool.touch(deepest, keys, request.now, request.tokens)
    missing = keys[hit : pool.capacity]
    if missing:
        pin = None if deepest is None else pool.pin(deepest)
        tally.stored_blocks += _store(pool, missing, pool.root if deepest is None else deepest, touch)
        if pin is not None:
            pool.unpin(pin)
    return hit


def _store(pool: BlockPool, keys: list[bytes], parent: int, touch: object) -> int:
    """Store the beginning of `keys` that the policy accepts. How many blocks that is."""
    accepted = pool.accepted(parent, keys)
    if accepted < len(keys):
        keys = keys[:accepted]
    if keys:
        pool.commit(pool.allocate(accepted, keys), keys, parent, touch)
    return accepted
