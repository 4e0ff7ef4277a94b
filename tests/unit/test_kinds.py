"""README's table of kinds, for an engine that is joined to the library: which groups its device may have."""

from collections.abc import Callable

import pytest

from cpu_prefix_cache import Device, QueueDevice
from cpu_prefix_cache.deciding import (
    ChunkLocalGroup,
    CPUPrefixCache,
    Group,
    HybridChunkPlanner,
    PooledDevice,
    PrefixGroup,
    StateGroup,
    WindowGroup,
    new_pool,
)
from cpu_prefix_cache.offload.radix_device import RadixDevice
from tests.support.kinds import KEPT, REFUSED, column, outcome
from tests.support.small_engine import SmallEngine

SIZES = dict(block_tokens=4, block_bytes=64)
FULL = PrefixGroup(name="full", **SIZES)
WINDOW = WindowGroup(name="window", window_tokens=9, **SIZES)
STATE = StateGroup(name="state", **SIZES)
GROUPS: dict[str, list[Group]] = {
    "full attention": [FULL],
    "MLA": [FULL],
    "MLA with an indexer, or of compressed tokens": [FULL],  # parts of the same blocks
    "sliding windows": [FULL, WINDOW],
    "chunked-local attention": [FULL, ChunkLocalGroup(name="local", window_tokens=12, **SIZES)],
    "states: Mamba, linear attention, convolutions": [FULL, STATE],
    "a window and states in one layer": [WINDOW, STATE],
}


class Tree(RadixDevice):
    """A tree with nothing in it."""

    num_waiting = 0
    free_pages = free = parent = pages = last_use = locks = lock = None


def pooled(planner: HybridChunkPlanner) -> Device:
    return PooledDevice(new_pool(planner, num_blocks=8))


def queue(planner: HybridChunkPlanner) -> QueueDevice:
    return SmallEngine(8)


def tree(planner: HybridChunkPlanner) -> RadixDevice:
    return Tree(8, 1)


def kept(device: Callable[[HybridChunkPlanner], Device], groups: list[Group]) -> str:
    planner = HybridChunkPlanner(groups, max_model_len=100)
    return outcome(lambda: CPUPrefixCache(planner, device(planner), host_blocks=16).planner is planner)


@pytest.mark.parametrize(
    ("name", "device"),
    [("your engine, our pool", pooled), ("its own queue or tree", queue), ("its own queue or tree", tree)],
)
def test_the_table_has_the_groups_that_a_device_may_have(name, device):
    found = {row: kept(device, groups) for row, groups in GROUPS.items()}
    assert column(name) == found


def test_both_answers_are_in_the_table():
    assert {*column("its own queue or tree").values()} == {KEPT, REFUSED}
