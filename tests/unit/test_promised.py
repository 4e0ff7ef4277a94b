"""An engine that admits by reservation promises waiting blocks to running requests. No hold of a store takes them."""

import pytest

from cpu_prefix_cache import ChainHasher
from cpu_prefix_cache.deciding import CPUPrefixCache, EngineSteps, HybridChunkPlanner, PrefixGroup, Request
from cpu_prefix_cache.messages.plan import RankReport
from cpu_prefix_cache.testing.engine import cache_options
from tests.support.small_engine import SmallEngine

GRID = 4
KEYS = ChainHasher(GRID).keys(range(6 * GRID))


class Reserving(SmallEngine):
    num_promised = 0


class HoldsWholeNodes(Reserving):
    """As in a radix tree: one block held, all are."""

    def hold(self, blocks, parent=()):
        rest = [block for block in self.free_blocks if self.keys[block] is not None and block not in blocks]
        return super().hold([*rest, *blocks], parent)


def engine_with_waiting_chunks(device, offload="lazy"):
    """Its six chunks wait, two blank blocks before them, and lazy has not looked yet."""
    planner = HybridChunkPlanner(
        [PrefixGroup(name="attention", block_tokens=GRID, block_bytes=64)], max_model_len=1_000
    )
    steps = EngineSteps(max_tokens=100 * GRID, ahead_blocks=8)
    cache = CPUPrefixCache(planner, device, host_blocks=16, **cache_options(offload=offload, steps=steps))
    cache.admit(Request("r", KEYS, 6 * GRID + 1), 0)
    request = device.take(KEYS, 0, ())
    device.computed(request, 6)
    cache.computed("r", 6 * GRID)
    return cache, request


def ends(cache, device, request):
    cache.finished("r", 6 * GRID)
    device.free(request)
    for _ in range(device.num_waiting - 8):
        device.hand_out()


def lands(cache):
    plan = cache.step()
    cache.report(RankReport(0, frozenset(each.id for each in plan.transfers)))
    return len(plan.transfers)


@pytest.mark.parametrize("promised", range(9))
def test_lazy_stores_what_it_can_hold_besides(promised):
    device = Reserving(16, hands_out_first=False)
    cache, request = engine_with_waiting_chunks(device)
    ends(cache, device, request)
    device.num_promised = promised
    cache.step()
    assert device.num_waiting >= promised
    assert device.num_waiting == max(2, promised) or promised == 8


def test_a_hold_of_whole_nodes_takes_no_promised_blocks_either():
    device = HoldsWholeNodes(16, hands_out_first=False)
    cache, request = engine_with_waiting_chunks(device)
    ends(cache, device, request)
    order = list(device.soonest_evicted())
    device.num_promised = 3
    assert not cache.step().transfers and list(device.soonest_evicted()) == order
    device.hand_out()  # of the two blank blocks
    device.num_promised = 1
    assert lands(cache) == 1
    assert list(device.soonest_evicted()) == order[1:]
    assert cache.statistics().chunks_stored == 6


def test_blocks_in_use_are_stored_however_many_are_promised():
    device = Reserving(16, hands_out_first=False)
    cache, request = engine_with_waiting_chunks(device, "eager")
    device.num_promised = 2
    assert lands(cache) == 1
    ends(cache, device, request)
    assert cache.statistics().chunks_stored == 6
