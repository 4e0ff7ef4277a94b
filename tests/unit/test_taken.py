"""Checkpoints of running requests in a device pool, beside loads that have not ended."""

import pytest

from cpu_prefix_cache.deciding import (
    HybridChunkPlanner,
    KVCacheCoordinator,
    PooledDevice,
    PrefixGroup,
    TakenCheckpoints,
    WindowGroup,
)
from cpu_prefix_cache.pool.coordinator import new_pool

GRID, END = 4, 8
KEYS = [letter * 32 for letter in (b"a", b"b")]


class Taken(TakenCheckpoints):
    def write(self, state, depth, node):
        """Nothing: these have no bytes."""


class Device:
    def __init__(self):
        groups = [
            PrefixGroup(name="full", block_tokens=GRID, block_bytes=64),
            WindowGroup(name="window", block_tokens=GRID, block_bytes=64, window_tokens=9),
        ]
        planner = HybridChunkPlanner(groups, max_model_len=64)
        self.pool = new_pool(planner, 16, on_device=True)
        self.coordinator = KVCacheCoordinator(planner, self.pool, on_device=True)
        self.taken = Taken(self.coordinator)
        self.chunks = self.pool.allocate(2)
        self.pool.commit(self.chunks, KEYS, self.pool.root, self.pool.touch(None))

    def takes(self):
        node = self.taken.take(None, KEYS, END)
        if node is not None:
            self.taken.commit(node, KEYS[1], self.chunks[1], self.pool.touch(None))

    @property
    def found(self):
        return PooledDevice(self.pool).find_checkpoint(self.coordinator.checkpoint_at(KEYS, 2))


@pytest.mark.parametrize("is_ok", [True, False])
def test_a_checkpoint_is_not_taken_over_what_a_load_in_flight_is_to_write(is_ok):
    """Where that load fails, nobody has written it."""
    device = Device()
    filling = device.taken.make_room(KEYS, 0, END)
    device.takes()
    assert device.found is None
    if is_ok:
        device.taken.commit(filling, KEYS[1], device.chunks[1], device.pool.touch(None))
    else:
        device.pool.abort([filling])
        device.takes()
    assert device.found == [(2,), (3,)]
    device.pool.check_valid()
