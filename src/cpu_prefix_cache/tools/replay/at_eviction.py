"""A reference for two tiers: every block is stored when the device evicts it, at no cost.

No engine can do that, because the block then belongs to another request. Lazy stores come close by looking ahead.
This host keeps single blocks and evicts the least recently used one. They need not form prefixes: of a prompt whose
beginning is on the device, the host may have only the end. A block counts as used when the device evicts it or it is
loaded.
"""

from collections import OrderedDict
from itertools import islice

from cpu_prefix_cache.pool.block_pool import BlockPool
from cpu_prefix_cache.tools.replay.outcome import Tally
from cpu_prefix_cache.tools.replay.traces import Trace, TraceRequest


def replay_at_eviction(trace: Trace, capacity: int, device_capacity: int) -> Tally:
    """Replay with `device_capacity` blocks on the device and `capacity` on the host."""
    gpu, host = BlockPool(trace.usable(device_capacity)), _Host(capacity)
    tally = Tally()
    for request in trace.requests:
        hit = _serve(request, gpu, host)
        tally.count(request, hit, trace.block_tokens)
    return tally


class _Host:
    """Single blocks in LRU order."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._order

    def use(self, key: bytes) -> None:
        """Store the block if it is missing, and make it the most recently used."""
        self._order[key] = None
        self._order.move_to_end(key)
        if len(self._order) > self._capacity:
            self._order.popitem(last=False)


def _serve(request: TraceRequest, gpu: BlockPool, host: _Host) -> int:
    """Serve one request. Returns how many blocks were found, on the device and then on the host."""
    keys = request.keys[: gpu.capacity]
    on_device = hit = gpu.resident_run(keys, 0, len(keys))
    while hit < len(keys) and keys[hit] in host:
        hit += 1
    deepest = gpu.find(keys[on_device - 1]) if on_device else None
    touch = gpu.touch(deepest)
    for key in reversed(keys[on_device:hit]):
        host.use(key)
    if on_device < len(keys):
        pin = None if deepest is None else gpu.pin(deepest)
        _store_what_leaves(gpu, len(keys) - on_device, host)
        parent = gpu.root if deepest is None else deepest
        gpu.commit(gpu.allocate(len(keys) - on_device), keys[on_device:], parent, touch)
        gpu.unpin(pin)
    return hit


def _store_what_leaves(gpu: BlockPool, wanted: int, host: _Host) -> None:
    """Store the blocks that the device will evict for `wanted` new ones, in the order of eviction."""
    for block in islice(gpu.soonest_evicted(), max(0, wanted - gpu.statistics().free)):
        key = gpu.key(block)
        if key is not None:
            host.use(key)
