"""ATOM's BlockPool as a Device, by the demands of a CPUPrefixCache (`check_device`), and ATOM's peculiarities."""

import random
from types import SimpleNamespace

import pytest

from cpu_prefix_cache.testing import check_device
from tests.engines.atom.source import WHY_NOT_REAL

if WHY_NOT_REAL:
    pytest.skip(WHY_NOT_REAL, allow_module_level=True)

from connector.atom.device import AtomDevice
from tests.engines.atom.pools import POOLS


def hash_of(key):
    return int.from_bytes(key[:7], "little")


class Trial:
    """Requests that take blocks, compute and end as ATOM's BlockManager has them do, on the real pool."""

    chunk_blocks = 1
    remembers = True
    policy = "lru"

    def __init__(self, num_blocks):
        self.pool = POOLS[self.policy](num_blocks)
        self.device = AtomDevice(self.pool)

    def take(self, keys, cached, tokens):
        found = [self.device.block(key) for key in keys[:cached]]
        if self.pool.num_free - sum(not self.pool.is_used(block) for block in found) < len(keys) - cached:
            return None
        for block in found:
            self.pool.claim(block)
        return SimpleNamespace(keys=keys, table=found + [self.hand_out() for _ in keys[cached:]], computed=cached)

    def hand_out(self):
        block = self.pool.pop()
        self.pool.allocate(block)
        return block

    def blocks(self, request):
        return [[block] for block in request.table]

    def computed(self, request, chunks):
        for block, key in list(zip(request.table, request.keys, strict=True))[request.computed : chunks]:
            self.pool.publish(block, hash_of(key), list(key))
            if self.remembers:
                self.device.remember(block, key)
        request.computed = max(request.computed, chunks)

    def free(self, request):
        for block in reversed(request.table):
            self.pool.free(block)


class SlruTrial(Trial):
    policy = "slru"


@pytest.mark.parametrize("trial", [Trial, SlruTrial])
def test_a_block_pool_is_a_device(trial):
    check_device(lambda: trial(7))


@pytest.mark.parametrize("trial", [Trial, SlruTrial])
def test_the_check_sees_a_device_that_forgets_where_blocks_waited(trial):
    class Forgetful(trial):
        def __init__(self, num_blocks):
            super().__init__(num_blocks)
            self.device.hold, self.device.release = self.hold, self.release

        def hold(self, blocks, parent=()):
            for block in blocks:
                self.pool.claim(block)
            return blocks

        def release(self, blocks):
            for block in reversed(blocks):
                self.pool.free(block)

    with pytest.raises(AssertionError, match="waited before"):
        check_device(lambda: Forgetful(7), examples=10_000, shrink=False)


@pytest.mark.parametrize("trial", [Trial, SlruTrial])
@pytest.mark.parametrize("seed", range(5))
def test_held_blocks_are_at_the_front_again_when_all_before_them_are_gone(trial, seed):
    """ATOM hands out what waits behind it meanwhile."""
    draw, trial = random.Random(seed), two_prompts(trial(16))
    while any(key is None for _, key in trial.device.soonest_evicted()):
        trial.hand_out()
    order = list(trial.device.soonest_evicted())
    places = order[:5]
    drawn = draw.sample(places, 5)
    holds = [trial.device.hold([block]) for block, _ in drawn]
    trial.hand_out()
    draw.shuffle(holds)
    for hold in holds:
        trial.device.release(hold)
    assert list(trial.device.soonest_evicted()) == places + order[6:]


def two_prompts(trial):
    """A device on which two prompts wait: of the second the first two blocks were used again."""
    for name in (b"a", b"b"):
        keys = [name * 15 + b"%d" % at for at in range(3)]
        for cached in (0, 2) if name == b"b" else (0,):
            request = trial.take(keys, cached, ())
            trial.computed(request, 3)
            trial.free(request)
    return trial


@pytest.mark.parametrize(("trial", "protected"), [(Trial, 0), (SlruTrial, 2)])
def test_a_hold_is_no_use(trial, protected):
    """ATOM protects blocks that requests use again. All of them are seen, in the order in which they are handed out."""
    trial = two_prompts(trial(8))
    order = list(trial.device.soonest_evicted())
    waiting = [block for block, key in order if key is not None]
    assert len(order) == 8 and len(waiting) == 7  # the last block of the second prompt was computed twice
    for held in (waiting, waiting[:3], waiting[-2:]):
        trial.device.release(trial.device.hold(held))
        assert list(trial.device.soonest_evicted()) == order
    assert len(vars(trial.pool).get("_protected", ())) == protected
    assert [trial.hand_out() for _ in order] == [block for block, _ in order]


@pytest.mark.parametrize("trial", [Trial, SlruTrial])
def test_a_use_of_a_held_block_counts(trial):
    """A request finds the block, and ends, while a store reads it: it is the last then."""
    trial = two_prompts(trial(8))
    (block,) = trial.device.find(b"a" * 15 + b"0")
    hold = trial.device.hold([block])
    request = trial.take([b"a" * 15 + b"0", b"c" * 16], 1, ())
    trial.device.release(hold)
    assert block not in [each for each, _ in trial.device.soonest_evicted()]
    trial.free(request)
    assert [each for each, _ in trial.device.soonest_evicted()][-1] == block


def test_blocks_of_which_the_device_was_not_notified_have_no_key():
    class Untold(Trial):
        remembers = False

    trial = Untold(4)
    request = trial.take([b"a" * 16, b"b" * 16], 0, ())
    trial.computed(request, 2)
    trial.free(request)
    assert [key for _, key in trial.device.soonest_evicted()] == [None] * 4
    assert trial.device.find(b"a" * 16) is None


def test_a_key_counts_while_the_block_has_its_hash():
    trial = Trial(2)
    request = trial.take([b"a" * 16], 0, ())
    trial.computed(request, 1)
    (block,) = request.table
    assert trial.device.find(b"a" * 16) == (block,)
    trial.free(request)
    trial.pool.clear_index()  # ATOM's reset
    assert trial.device.find(b"a" * 16) is None and trial.device.key(block) is None


def test_a_second_block_with_the_key_is_found_when_it_is_remembered_after_the_first_is_gone():
    trial = Trial(2)
    one, two = (trial.take([b"a" * 16], 0, ()) for _ in range(2))
    trial.computed(one, 1)
    trial.computed(two, 1)
    trial.free(one)
    trial.hand_out()
    assert trial.device.find(b"a" * 16) is None
    trial.device.remember(two.table[0], b"a" * 16)
    assert trial.device.find(b"a" * 16) == tuple(two.table)


@pytest.mark.parametrize("seed", range(3))
def test_a_long_order_keeps_its_order_through_holds_of_its_front(seed):
    """A thousand waiting blocks; what lazy offload holds comes back to where it waited."""
    draw, trial = random.Random(seed), Trial(1000)
    for at in range(100):
        keys = [b"%08d%08d" % (at, each) for each in range(10)]
        request = trial.take(keys, 0, ())
        trial.computed(request, 10)
        trial.free(request)
    order = list(trial.device.soonest_evicted())
    for _ in range(50):
        drawn = [block for block, _ in draw.sample(order[:200], 60)]
        holds = [trial.device.hold(drawn[at : at + 20]) for at in range(0, 60, 20)]
        draw.shuffle(holds)
        for hold in holds:
            trial.device.release(hold)
        assert list(trial.device.soonest_evicted()) == order
