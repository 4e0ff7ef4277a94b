"""Loads save what they overwrite, also where an engine frees the blocks of a chunk group by group."""

from collections.abc import Sequence

from cpu_prefix_cache import Hit
from cpu_prefix_cache.deciding import (
    CPUPrefixCache,
    Direction,
    EngineSteps,
    HybridChunkPlanner,
    PrefixGroup,
    RankReport,
    Request,
)
from cpu_prefix_cache.offload.device import Device
from cpu_prefix_cache.testing.engine import GRID, cache_options, chain


class TwoGroups(Device):
    """A queue of blocks, of which a chunk has one in each of two groups. That of the first group brings its key."""

    def __init__(self, blocks: int) -> None:
        self.total, self.queue = blocks, list(range(blocks))
        self.key: dict[int, bytes] = {}
        self.blocks: dict[bytes, tuple[int, int]] = {}
        self.noted: dict[bytes, Sequence[int]] = {}

    def handed_out(self):
        noted, self.noted = self.noted, {}
        return noted

    @property
    def num_blocks(self):
        return self.total

    @property
    def num_waiting(self):
        return len(self.queue)

    def find(self, key):
        return self.blocks.get(key)

    def soonest_evicted(self):
        return iter([(block, self.key.get(block)) for block in self.queue])

    def is_waiting(self, block, key):
        return block in self.queue and self.key.get(block) == key

    def hold(self, blocks, parent=()):
        return blocks

    def release(self, hold):
        """All that is held here is in use as well."""

    # the engine's part

    def take(self, count: int) -> list[int]:
        taken, self.queue = self.queue[:count], self.queue[count:]
        for block in taken:
            key = self.key.pop(block, None)
            if key in self.blocks:
                self.noted[key] = self.blocks[key]
        self.blocks = {key: both for key, both in self.blocks.items() if set(both).isdisjoint(taken)}
        return taken

    def publish(self, keys: Sequence[bytes], first: Sequence[int], second: Sequence[int]) -> None:
        self.blocks |= zip(keys, zip(first, second, strict=True), strict=True)
        self.key |= zip(first, keys, strict=True)

    def free(self, *groups: Sequence[int]) -> None:
        for group in groups:
            self.queue += group[::-1]


def all_land(cache):
    plan = cache.step()
    cache.report(RankReport(0, frozenset(transfer.id for transfer in plan.transfers)))
    return plan.transfers


def test_a_load_into_the_blocks_of_one_group_saves_their_chunks():
    """ "ab" is on the host alone. The four blocks that are handed out first are of one group, of the chunks of "wxyz",
    which the device alone has; those of the other group are behind them.
    """
    groups = [PrefixGroup(name=name, block_tokens=GRID, block_bytes=100) for name in ("one", "two")]
    device = TwoGroups(16)
    cache = CPUPrefixCache(
        HybridChunkPlanner(groups, max_model_len=1_000, grid_tokens=GRID),
        device,
        host_blocks=14,
        **cache_options(offload="lazy", steps=EngineSteps(max_tokens=GRID, ahead_blocks=1)),
    )

    def computes(prompt):
        cache.admit(Request(prompt, chain(prompt), len(prompt) * GRID + 1), 0, None, 0.0)
        first, second = device.take(len(prompt)), device.take(len(prompt))
        device.publish(chain(prompt), first, second)
        cache.computed(prompt, len(prompt) * GRID)
        return first, second

    first = computes("ab")
    cache.finished("ab", 2 * GRID)
    device.free(*first)
    device.take(device.num_waiting)
    all_land(cache)
    device.free(range(16))
    blocks = computes("wxyz")
    cache.finished("wxyz", 4 * GRID)
    device.take(device.num_waiting)  # something else runs
    device.free(*blocks)

    request = Request("again", chain("ab"), 2 * GRID + 1)
    assert cache.lookup(request, 0, 1.0) == Hit(2 * GRID)
    taken = device.take(4)
    assert set(taken) == set(blocks[0])
    cache.admit(request, 0, 2 * GRID, 1.0)
    cache.load("again", 2 * GRID, [taken[:2], taken[2:]], 1.0)
    assert [each.direction for each in all_land(cache)] == [Direction.STORE, Direction.LOAD]
    assert all(cache.pool.find(key) is not None for key in chain("wxyz"))
