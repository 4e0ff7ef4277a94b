"""A reference for two tiers: every block stored at the very moment it leaves the device, at no cost.

No engine can do that: by then the block belongs to another request. It is what lazy stores approach by looking ahead.
The host here keeps single blocks, least recently used first out, and not prefixes: of a prompt whose beginning is on
the device it may have nothing but the end. A block that leaves the device once more, or is loaded, counts as used.
"""

from collections import OrderedDict
from itertools import islice

from cpu_prefix_cache.pool.block_pool import BlockPool
from cpu_prefix_cache.replay.outcome import Tally
from cpu_prefix_cache.replay.traces import Trace, TraceRequest


def replay_at_eviction(trace: Trace, capacity: int, device_capacity: int) -> Tally:
    """`capacity` blocks on the host behind `device_capacity` on the device."""
    gpu, host = BlockPool(trace.usable(device_capacity)), _Host(capacity)
    tally = Tally()
    for request in trace.requests:
        hit = _serve(request, gpu, host)
        tally.count(request, hit, trace.block_tokens)
    return tally


class _Host:
    """Single blocks, the least recently used first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, key: bytes) -> bool:
        return key in self._order

    def use(self, key: bytes) -> None:
        """Store a block, if it is not here, and make it the youngest."""
        self._order[key] = None
        self._order.move_to_end(key)
        if len(self._order) > self._capacity:
            self._order.popitem(last=False)


def _serve(request: TraceRequest, gpu: BlockPool, host: _Host) -> int:
    """How many blocks of a request were found, on the device and then on the host."""
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
        if pin is not None:
            gpu.unpin(pin)
    return hit


def _store_what_leaves(gpu: BlockPool, wanted: int, host: _Host) -> None:
    """Store the blocks that make room on the device for `wanted` new ones, in the order in which they leave."""
    for block in islice(gpu.soonest_evicted(), max(0, wanted - gpu.statistics().free)):
        key = gpu.key(block)
        if key is not None:
            host.use(key)
