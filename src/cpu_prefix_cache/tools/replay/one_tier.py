"""Replays a trace through the host pool alone: hits are loaded, misses are stored."""

from cpu_prefix_cache.eviction import policy_of
from cpu_prefix_cache.messages.options import CacheOptions
from cpu_prefix_cache.pool.block_pool import BlockPool
from cpu_prefix_cache.tools.replay.meter import Meter
from cpu_prefix_cache.tools.replay.outcome import Tally
from cpu_prefix_cache.tools.replay.tiers import HostTier
from cpu_prefix_cache.tools.replay.traces import Trace, TraceRequest


def replay_one_tier(trace: Trace, host: HostTier, meter: Meter) -> Tally:
    """Replay the requests one after the other.

    Of a prompt longer than the pool, the beginning that fits is stored; the rest counts as missed.
    """
    pool = BlockPool(
        trace.usable(host.capacity),
        policy_of(host.policy, trace.block_tokens),
        thresholds=CacheOptions(store_after=host.store_after, min_store_tokens=host.min_store_tokens),
    )
    tally = Tally()
    tally.count_all(trace, meter, lambda request: serve(pool, request, tally))
    tally.all_hits_were_loaded()
    tally.evictions = pool.statistics().evictions
    return tally


def serve(pool: BlockPool, request: TraceRequest, tally: Tally) -> int:
    """Serve one prompt and store its missing blocks. Returns how many blocks were found."""
    keys = request.keys
    hit = pool.resident_run(keys, 0, len(keys))
    deepest = pool.find(keys[hit - 1]) if hit else None
    touch = pool.touch(deepest, keys, request.now, request.tokens, request.next_use)
    missing = keys[hit : pool.capacity]
    if missing:
        pin = None if deepest is None else pool.pin(deepest)
        tally.stored_blocks += _store(pool, missing, pool.root if deepest is None else deepest, touch)
        pool.unpin(pin)
    return hit


def _store(pool: BlockPool, keys: list[bytes], parent: int, touch: object) -> int:
    """Store the first blocks of `keys`, as many as the policy accepts. Returns their number."""
    accepted = pool.choose(parent, keys)
    chunks = pool.take(accepted, keys[:accepted])
    pool.commit(chunks, keys[: len(chunks)], parent, touch)
    return len(chunks)
