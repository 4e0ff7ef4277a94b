"""Stores in both modes: which chunks are stored, and when."""

from itertools import accumulate, islice
from unittest import mock

import pytest

from cpu_prefix_cache import POLICIES, ConfigurationError, Hit, Miss, MisuseError, Pending
from cpu_prefix_cache.deciding import (
    BlockPool,
    CPUPrefixCache,
    HybridChunkPlanner,
    PooledDevice,
    PrefixGroup,
    Request,
)
from cpu_prefix_cache.eviction.buckets import Buckets
from cpu_prefix_cache.eviction.survival import BINS
from cpu_prefix_cache.offload.lazy import MARGIN
from cpu_prefix_cache.testing.engine import ATTENTION, GRID, Engine, cache_options, chain
from property_tests.models.engines import QueueSlots
from tests.support.story import whole_prompts

# Eager


def test_eager_stores_a_chunk_once_its_tokens_are_confirmed():
    engine = Engine("eager")
    engine.starts("r", "abc")
    engine.fills("r", 3)  # a key may exist before its bytes (rule 11, S7.9)
    assert engine.copies() == []
    engine.cache.computed("r", 2 * GRID + 1)
    assert engine.copies() == ["ab"]
    engine.cache.computed("r", 3 * GRID)
    assert engine.copies() == ["abc"]
    assert engine.host == {"a", "ab", "abc"}


def test_eager_stores_the_last_step_when_the_request_ends():
    """The peer loses it: a one-step prefill of 8,192 tokens hits 0 afterwards (S7.11)."""
    engine = Engine("eager")
    engine.starts("r", "abc")
    engine.fills("r", 3)
    engine.ends("r", 3)
    assert engine.copies() == ["abc"]
    assert engine.asks("abc") == Hit(3 * GRID)


def test_a_prefix_of_two_requests_is_stored_once():
    """S7.8, L5.18"""
    engine = Engine("eager")
    engine.starts("one", "ab")
    engine.computes("one")
    plan = engine.steps()
    engine.starts("two", "abc")
    engine.computes("two")
    (follower,) = engine.steps().transfers
    assert [key.decode() for key in engine.transfer(follower.id).keys] == ["abc"]
    engine.reports([plan.transfers[0].id, follower.id])
    assert engine.host == {"a", "ab", "abc"}


def test_a_hole_in_a_running_request_is_mended():
    """S7.15: the host evicts the tail of a request that runs; its next chunk brings it back."""
    engine = Engine("eager", host=4)
    engine.starts("r", "abcd")
    engine.computes("r", 3)
    engine.copies()
    engine.serves("x")
    engine.serves("y")
    assert "abc" not in engine.host and "ab" in engine.host
    engine.computes("r", 4)
    engine.copies()
    assert {"a", "ab", "abc", "abcd"} == engine.host


def test_a_prompt_longer_than_the_host_is_cut():
    """O8.10, L5.38: a prefix without a hole, and its own chunks are not evicted for it (S7.14)."""
    engine = Engine("eager", host=3)
    engine.serves("abcde")
    assert engine.host == {"a", "ab", "abc"}
    assert engine.cache.statistics().store_refusals == 2 * 2  # as they were computed, and at the end
    assert engine.asks("abcde") == Hit(3 * GRID)


def test_a_full_host_stores_later():
    """S7.14"""
    engine = Engine("eager", host=2)
    engine.serves("xy")
    lease = engine.reserves("xy")
    engine.starts("r", "abc")
    engine.computes("r", 1)
    assert engine.copies() == []
    engine.cache.release(lease)
    engine.computes("r", 2)
    assert engine.copies() == ["ab"]


def test_blocks_that_eager_stores_are_held_until_the_copy_has_ended():
    """S7.1, L5.17"""
    engine = Engine("eager")
    engine.starts("r", "ab")
    engine.computes("r")
    engine.ends("r")
    (transfer,) = engine.steps().transfers
    engine.device_forgets()
    assert engine.gpu.find(b"ab") is not None
    engine.reports([transfer.id])
    engine.device_forgets()
    assert engine.gpu.find(b"a") is None and engine.is_at_rest()


# Lazy


def lazy(**options):
    return Engine("lazy", **{"device": 8, "max_tokens": 2 * GRID, **options})


def test_lazy_leaves_alone_what_the_device_keeps():
    """Blocks that hold nothing are handed out first: as long as there are enough of them, nothing is stored."""
    engine = Engine("lazy", device=16, max_tokens=2 * GRID)
    engine.serves("abc")
    for prompt in "klmnopq":
        engine.serves(prompt)
    assert engine.host == set()
    for prompt in "tuv":  # three empty blocks are left then, and the stretch is four long
        engine.serves(prompt)
    assert engine.host == {"a", "ab", "abc"}


def test_the_stretch_that_lazy_looks_ahead_is_an_option():
    """A stretch of three chunks, however much a step may allocate: with four empty ones nothing is stored."""
    engine = Engine("lazy", device=8, max_tokens=100 * GRID, ahead_blocks=3)
    engine.serves("abcd")
    assert engine.host == set()
    engine.serves("xy")  # two empty ones are left
    assert engine.host == {"a", "ab", "abc", "abcd"}


def test_lazy_stores_from_a_device_of_one_block():
    engine = Engine("lazy", device=1, max_tokens=GRID)
    engine.serves("a")
    engine.serves("b")
    assert engine.host >= {"a"}


def test_lazy_may_look_over_all_of_the_device():
    engine = Engine("lazy", device=4, max_tokens=GRID, ahead_blocks=4)
    for _ in range(2):  # a step each
        engine.serves("ab")
    assert engine.host == {"a", "ab"}


def test_lazy_above_a_tier_stores_ancestors_first():
    engine = lazy(max_tokens=4 * GRID, cache=whole_prompts)
    engine.serves("ab")
    engine.serves("xyz")
    assert {"a", "ab"} <= engine.host


def test_a_hot_common_prefix_stays_on_the_device_alone():
    """L5.19: it is never evicted there. What hung below it is hit all the same, behind what the device has."""
    engine = lazy(hands_out_first=True, host=7)
    engine.starts("hot", "ab")
    engine.computes("hot")
    for tail in "cdefghi":
        engine.serves("ab" + tail)
    assert engine.host.isdisjoint({"a", "ab"}) and "abc" in engine.host
    engine.device_forgets()
    assert engine.gpu.find(b"ab") is not None  # still there: "hot" runs
    assert engine.asks("abc", 2 * GRID) == Hit(3 * GRID, 2 * GRID)
    assert engine.asks("abc", GRID) == Miss(), "neither has the second chunk for a device that has the first alone"


def test_a_step_above_a_tier_stores_no_more_than_its_budget_and_no_child_without_its_parent():
    engine = Engine("lazy", device=12, max_tokens=2 * GRID, cache=whole_prompts)
    engine.starts("r", "abcdef")
    engine.computes("r")
    engine.ends("r")
    engine.gpu.allocate(6)
    stored = []
    for _ in range(6):
        before = engine.host
        engine.copies()
        stored.append(len(engine.host - before))
        assert engine.host == {"abcdef"[: end + 1] for end in range(len(engine.host))}
    assert max(stored) == 2 and sum(stored) == 6


def test_blocks_in_flight_count_as_covered_and_are_held():
    """S7.1, S7.29: nothing is planned twice, and the device does not reuse what is being read."""
    engine = lazy()
    engine.starts("long", "klmnop")
    engine.computes("long")
    engine.starts("r", "ab")
    engine.computes("r")
    engine.ends("r")
    plan = engine.steps()
    assert engine.steps().transfers == ()
    engine.device_forgets()
    assert engine.gpu.find(b"ab") is not None
    engine.reports([transfer.id for transfer in plan.transfers])
    engine.device_forgets()
    assert engine.gpu.find(b"ab") is None and engine.host >= {"a", "ab"}


def test_where_too_little_waits_lazy_is_eager_with_whole_prompts():
    """Blocks of what runs are handed out as soon as it ends, or is preempted: maybe before the next look."""
    engine, stored = lazy(cache=whole_prompts), []
    for prompt in ("ab", "cd", "e", "f"):
        engine.starts(prompt, prompt)
        engine.computes(prompt)
        stored.append(engine.copies())
    # The stretch is four chunks. Of the empty ones there wait 6, 4, 3, 2.
    assert stored == [[], [], ["ab", "cd", "e"], ["f"]]
    for prompt in ("ab", "cd", "e"):
        engine.ends(prompt)
    stored = []
    for prompt in ("gh", "i"):
        engine.starts(prompt, prompt)
        engine.computes(prompt)
        stored.append(engine.copies())
    assert stored == [[], []]  # enough waits again


def test_a_request_that_ends_with_a_short_free_queue_is_stored_before_reuse():
    engine = lazy()
    engine.starts("r", "abcdefg")
    engine.computes("r", 5)
    engine.copies()
    engine.fills("r")  # decoded: not reported before the end
    engine.ends("r", 7)
    engine.starts("next", "k")  # in the same step, and there is one that waits
    engine.device_forgets()
    engine.copies()
    assert "abcdefg" in engine.host
    assert engine.cache.statistics().lost_before_store == 0


def test_blocks_in_flight_are_not_replaced_in_the_front():
    """It comes back to the front of the order: storing more instead would run ahead of the device, step by step."""
    engine = Engine("lazy", device=16, host=64, max_tokens=8 * GRID)
    for prompt in "abcdefghijklmnop":
        engine.serves(prompt)
    on_their_way = 0
    for prompt in ("qr", "st"):  # two leave, two join the stretch of eight; nothing lands
        engine.starts(prompt, prompt)
        engine.computes(prompt)
        on_their_way += len(engine.steps().transfers)
    assert on_their_way > 0
    assert len(engine.host) + on_their_way <= 4 + 8


def test_chunks_evicted_without_a_store_are_counted():
    engine = lazy()
    engine.starts("r", "abc")
    engine.computes("r")
    engine.ends("r")
    engine.device_forgets()  # more at once than any horizon holds
    for prompt in ("wxyz", "klmn"):
        engine.serves(prompt)
    assert engine.cache.statistics().lost_before_store == 3


def test_unconfirmed_tokens_are_not_stored():
    """S7.9: keys alone prove nothing."""
    engine = lazy()
    engine.starts("r", "ab")
    engine.fills("r")
    engine.ends("r", 0)
    assert engine.copies() == [] and engine.host == set()


def test_admitted_tokens_are_not_yet_computed():
    engine = lazy()
    engine.starts("r", "abc")
    engine.fills("r", 3)
    engine.cache.computed("r", GRID)
    engine.leaves("r")
    engine.copies()
    engine.copies()
    assert engine.host <= {"a"}


# Loads take device blocks too


def loading(mode, *others, **options):
    """Two prompts of two chunks, and the others, are on the host alone, and the first is being loaded."""
    engine = Engine(mode, device=8, host=32, max_tokens=GRID, cache=whole_prompts, **options)
    for prompt in ("xy", "zw", *others, *"01234567"):
        engine.serves(prompt)
    assert engine.asks("xy") == engine.asks("zw") == Hit(2 * GRID)  # whatever they take: the link is free
    engine.load = engine.starts("loads", "xy")
    return engine


def end_stores(engine):
    """All that there are; the load goes on."""
    for _ in range(5):
        engine.reports({transfer.id for transfer in engine.steps().transfers} - {engine.load})


def test_a_load_beside_another_waits_where_lazy_has_still_to_store():
    engine = loading("lazy")
    assert isinstance(engine.asks("zw"), Pending)
    engine.steps()
    engine.steps()
    assert isinstance(engine.asks("zw"), Pending)
    engine.reports({engine.load})
    assert engine.asks("zw") == Hit(2 * GRID)


@pytest.mark.parametrize("horizon", [5, 8])  # of six that wait
def test_a_load_that_overwrites_only_covered_blocks_starts_at_once(horizon):
    engine = loading("lazy", ahead_blocks=horizon)
    end_stores(engine)
    assert engine.cache.statistics().loading == 1
    assert engine.asks("zw") == Hit(2 * GRID)


def test_small_loads_do_not_overtake_a_large_one_for_ever():
    engine = loading("lazy", "uvt", ahead_blocks=3)
    end_stores(engine)
    assert engine.asks("zw") == Hit(2 * GRID)
    assert isinstance(engine.asks("uvt"), Pending)
    assert isinstance(engine.asks("zw"), Pending)
    engine.steps()
    assert engine.asks("zw") == Hit(2 * GRID)


def test_nothing_waits_for_a_load_that_takes_too_long():
    engine = loading("lazy")
    engine.now = engine.asks("zw").deadline
    assert engine.asks("zw") == Hit(2 * GRID)


def test_nothing_waits_where_all_is_stored_at_once():
    assert loading("eager").asks("zw") == Hit(2 * GRID)


def test_a_chunk_used_again_stays_known_to_the_walk():
    """S7.47: used again and released, it waits at the far end, and what lies between is still looked at."""
    engine = Engine("lazy", device=12, max_tokens=3 * GRID)
    for prompt in ("a", "b", "c", "d"):
        engine.serves(prompt)
    for prompt in ("a", "efg", "b", "hij", "a", "klm", "nop"):
        engine.serves(prompt)
        waiting = [key for _, key in islice(PooledDevice(engine.gpu).soonest_evicted(), 4)]
        engine.copies()
        assert {key.decode() for key in waiting if key is not None} <= engine.host


def test_lazy_goes_on_while_a_request_runs_below_what_waits():
    """A chunk above a pinned one leaves the order without being pinned itself; the walk must not stop there."""
    engine = Engine("lazy", device=7, max_tokens=2 * GRID)
    engine.serves("ab")
    engine.starts("r", "abc")
    engine.computes("r")
    for prompt in ("k", "l", "m", "n"):
        engine.serves(prompt)
    engine.copies()
    assert {"k", "l"} <= engine.host


class Queue(Engine):
    """Lazy, on a device that is a queue, where these prompts wait one behind the other, behind what nobody has used."""

    def __init__(self, slots, *prompts, mode="lazy", width=1, notes=False, host=20, **options):
        attention = PrefixGroup(name="attention", block_tokens=GRID // width, block_bytes=100)
        planner = HybridChunkPlanner([attention], max_model_len=100, grid_tokens=GRID)
        device = QueueSlots(slots, width, noted={} if notes else None)
        super().__init__(mode, device, host, planner=planner, **options)
        for prompt in prompts:
            self.runs(prompt)

    def runs(self, prompt):
        """A whole request, without a step."""
        self.starts(prompt, prompt, load=False)
        self.computes(prompt)
        self.ends(prompt)

    def rests(self):
        """Steps until nothing is stored any more, each store landing with its step. What they looked at in all."""
        before = self.cache.statistics().work
        while self.copies():
            pass
        return self.cache.statistics().work - before


@pytest.mark.parametrize("width", [1, 2])
def test_blocks_about_to_leave_go_back_to_their_places(width):
    """All the blocks of a chunk, the deepest chunk first. Released as usual, the coldest would become the hottest."""
    engine = Queue(6, "ab", "xyz", width=width, host=8, max_tokens=2 * GRID)
    before = list(engine.device.soonest_evicted())
    assert [key for _, key in before if key is not None] == [b"ab", b"a", b"xyz", b"xy", b"x"]
    (transfer,) = engine.steps().transfers
    assert [key for _, key in engine.device.soonest_evicted() if key is not None] == [b"xyz", b"xy", b"x"]
    engine.reports([transfer])
    assert list(engine.device.soonest_evicted()) == before


def test_stores_portion_by_portion_keep_the_order_of_the_device():
    """Behind what was covered before it, and ancestors behind a descendant that the budget did not reach."""
    sizes = {"max_tokens": 2 * GRID}
    engine = Queue(10, "ab", "xyz", "klmno", **sizes)
    before = list(engine.device.soonest_evicted())
    stored = 0
    for _ in range(8):
        moving = [transfer.id for transfer in engine.steps().transfers]
        engine.reports(moving)
        stored += len(moving)
        assert list(engine.device.soonest_evicted()) == before
    assert stored > 1
    assert engine.cache.pool.find(b"xyz") is not None


def test_ancestors_that_were_in_use_when_they_were_stored_leave_last():
    """Only what waited goes back to where it waited: a request that ends meanwhile has used the others just now."""
    engine = Queue(8, max_tokens=9 * GRID, ahead_blocks=5)
    engine.starts("runs", "ab")
    engine.computes("runs")
    for prompt in ("abx", "k"):
        engine.runs(prompt)
    moving = engine.steps().transfers
    assert len(moving) == 1  # of "k" nothing yet
    engine.ends("runs")
    engine.reports(moving)
    waiting = [key for _, key in engine.device.soonest_evicted() if key is not None]
    assert waiting[:2] == [b"abx", b"k"] and set(waiting[2:]) == {b"ab", b"a"}


@pytest.mark.parametrize("first_lands", ["before it ends", "first", "last"])
@pytest.mark.parametrize("width", [1, 2])
def test_however_the_stores_of_a_request_land_its_end_leaves_before_its_beginning(first_lands, width):
    engine = Queue(8, mode="eager", width=width)
    engine.starts("r", "abcde")
    engine.computes("r", 3)
    first = engine.steps().transfers
    if first_lands == "before it ends":
        engine.reports(first)
    engine.fills("r")
    engine.ends("r")
    second = engine.steps().transfers
    for landed in [second, first] if first_lands == "last" else [first, second]:
        engine.reports(landed)
    waiting = [key.decode() for _, key in engine.device.soonest_evicted() if key is not None]
    assert waiting == ["abcde", "abcd", "abc", "ab", "a"]


def stores_in_one_step(**options: int) -> tuple[Queue, list[int]]:
    """Three prompts that wait one behind the other; what is stored of them in one step."""
    engine = Queue(9, "abc", "def", "ghi", **{"max_tokens": 9 * GRID, "ahead_blocks": 9, **options})
    return engine, [transfer.id for transfer in engine.steps().transfers]


@pytest.mark.parametrize("at_once", [True, False])
def test_several_stores_of_one_step_keep_the_order_of_the_device(at_once):
    engine, moving = stores_in_one_step()
    assert len(moving) == 3 and not engine.device.waiting
    for done in [moving] if at_once else [[id] for id in moving]:
        engine.reports(done)
    waiting = [key for _, key in engine.device.soonest_evicted()]
    assert waiting == [b"abc", b"ab", b"a", b"def", b"de", b"d", b"ghi", b"gh", b"g"]


@pytest.mark.parametrize(("width", "slots", "stored"), [(1, 22, 8), (1, 21, 4), (2, 22, 8), (2, 21, 4)])
def test_a_prompt_is_stored_whole_where_the_device_can_spare_it(width, slots, stored):
    """Its end leaves first and is stored last: in portions it would be gone before its turn came. What is left are the
    6 chunks that steps until the report can allocate, and as many again as are held."""
    options = {"max_tokens": 2 * GRID, "report_steps": 2, "ahead_blocks": 5, "cache": whole_prompts}
    engine = Queue(slots, "abcdefgh", width=width, **options)
    engine.device.let_go(engine.device.take([], 0, slots - 8))  # what waited before it waits behind it
    (transfer,) = engine.steps().transfers
    assert len(transfer.copies[0].device_blocks) == stored * width


def test_running_blocks_are_not_stored_because_ancestors_of_waiting_ones_are_held():
    """They are missing from the order as if the device were all in use, and come back."""
    sizes = {"host": 60, "max_tokens": 3 * GRID, "report_steps": 2, "ahead_blocks": 48, "cache": whole_prompts}
    engine = Queue(66, "z", "abcdefghijklmnop", **sizes)
    engine.device.take([], 0, 14)  # what nobody has used
    first, second = sorted(engine.steps().transfers, key=lambda each: each.num_bytes)
    assert [len(each.copies[0].device_blocks) for each in (first, second)] == [1, 16]
    engine.cache.admit(Request("uvw", chain("uvw"), 100), 0)
    engine.device.publish(engine.device.take(chain("uvw"), 0, 3), chain("uvw"), 3)
    engine.cache.computed("uvw", 3 * GRID)
    engine.reports([first])
    assert engine.steps().transfers == ()


def test_a_beginning_that_the_host_took_waits_behind_the_end_it_has_no_room_for():
    engine = Queue(40, "abcde", host=3, max_tokens=6 * GRID, ahead_blocks=20)
    engine.device.let_go(engine.device.take([], 0, 35))
    (transfer,) = engine.steps().transfers
    engine.reports([transfer])
    order = [key for _, key in engine.device.soonest_evicted() if key is not None]
    assert order.index(b"abcde") < order.index(b"abc") < order.index(b"ab") < order.index(b"a")


@pytest.mark.parametrize("per_chunk", [2, 3])
def test_a_device_pool_with_several_blocks_to_a_chunk_names_a_chunk_by_its_first(per_chunk):
    pool = BlockPool(3 * per_chunk, blocks_per_chunk=per_chunk)
    device = PooledDevice(pool)
    nodes = pool.allocate(2)
    pool.commit(nodes, [b"a", b"ab"], pool.root, pool.touch(None))
    deepest, first = device.find(b"ab"), device.find(b"a")
    free = [(block, None) for block in pool.free]
    rest = [None] * (per_chunk - 1)
    waiting = [*zip(deepest, [b"ab", *rest], strict=True), *zip(first, [b"a", *rest], strict=True)]
    assert list(device.soonest_evicted()) == free + waiting
    assert all(device.is_waiting(*place) for place in free + waiting)
    hold = device.hold([*first, *deepest])  # one pin for each chunk
    assert not any(device.is_waiting(*place) for place in waiting)
    device.release(hold)
    assert device.num_waiting == 3 * per_chunk


class DoesNotTell(PooledDevice):
    """How many blocks a chunk has."""

    blocks_per_chunk = None


def cache_over(device):
    planner = HybridChunkPlanner([ATTENTION], max_model_len=1_000)
    return CPUPrefixCache(planner, device, host_blocks=8, **cache_options(offload="eager"))


def test_a_device_pool_with_more_blocks_to_a_chunk_than_the_model_has_is_refused():
    gpu = BlockPool(8, blocks_per_chunk=2)
    gpu.commit(gpu.allocate(1), [b"a"], gpu.root, gpu.touch(None))
    with pytest.raises(ConfigurationError, match="takes 1 device blocks, but PooledDevice has 2"):
        cache_over(PooledDevice(gpu))
    cache = cache_over(DoesNotTell(gpu))
    cache.admit(Request("r", chain("a"), GRID + 1), 0)
    cache.computed("r", GRID)
    with pytest.raises(MisuseError, match="2 blocks for a chunk that takes 1"):
        cache.step()


def test_blocks_of_a_device_pool_wait_unless_held_or_being_written():
    pool = BlockPool(4)
    device = PooledDevice(pool)
    assert device.num_waiting == 4
    nodes = pool.allocate(2)
    assert device.num_waiting == 2
    pool.commit(nodes, [b"a", b"ab"], pool.root, pool.touch(None))
    assert device.num_waiting == 4
    device.hold(device.find(b"a"))
    assert device.num_waiting == 3


@pytest.mark.parametrize("width", [1, 2])
def test_a_chunk_that_is_used_again_leaves_the_front(width):
    """With all blocks of its chunks. Its first and its last block wait, as before; what it has less is made up for."""
    engine = Queue(12, *"abcd", "efg", *"hijkl", width=width, max_tokens=GRID, ahead_blocks=8 * width)
    engine.rests()
    assert [key for key in "hijkl" if engine.cache.pool.find(key.encode()) is not None] == ["h"]
    engine.device.take(chain("efg"), 3, 3)
    engine.cache.admit(Request("r", chain("efg"), 100), 3 * GRID)
    engine.rests()
    assert [key for key in "hijkl" if engine.cache.pool.find(key.encode()) is not None] == ["h", "i", "j", "k"]


def test_held_blocks_stay_in_the_front():
    """It comes back to where it waited: nothing is stored to make up for it, although there is a budget."""
    engine = Queue(14, "abc", max_tokens=3 * GRID, report_steps=2, ahead_blocks=4)
    engine.device.let_go(engine.device.take([], 0, 1))
    engine.runs("def")
    in_use, _ = (
        engine.device.take([], 0, 3),
        engine.device.take([], 0, 4),
    )  # what nobody has used, but for one behind "abc"
    assert [len(transfer.copies[0].device_blocks) for transfer in engine.steps().transfers] == [3]
    engine.device.let_go(in_use)  # so that it is examined again
    assert engine.steps().transfers == ()


def test_blocks_whose_store_failed_are_examined_again():
    engine = Queue(14, "abc", "def", max_tokens=3 * GRID, ahead_blocks=3)
    engine.device.take([], 0, 8)  # what nobody has used
    (store,) = engine.steps().transfers
    engine.reports(failed=[store])
    (again,) = engine.steps().transfers
    assert again.copies[0].device_blocks == store.copies[0].device_blocks


def test_blocks_that_do_not_fit_their_codec_are_not_stored_in_each_step():
    """All that waits is examined again, since the next store fails."""
    engine = Queue(14, "abc", "def", max_tokens=3 * GRID, ahead_blocks=3)
    engine.device.take([], 0, 8)  # what nobody has used
    (store,) = engine.steps().transfers
    unfit = ((store.id, store.copies[0].host_blocks[:1]),)
    engine.reports([store], unfit=unfit)
    engine.device.take([], 0, 1)
    (other,) = engine.steps().transfers
    engine.reports(failed=[other])
    again = {block for each in engine.steps().transfers for block in each.copies[0].device_blocks}
    assert again == {*other.copies[0].device_blocks}


def test_a_front_without_keys_may_move_unseen():
    """Requests take it and give it back without a key between two steps: it waits by the same names, but last."""
    engine = Queue(14, "abc", max_tokens=4 * GRID, ahead_blocks=4)
    in_use = engine.device.take([], 0, 2)
    engine.rests()
    for _ in range(9):
        engine.device.let_go(engine.device.take([], 0, 1))
    engine.device.let_go(in_use)
    assert [key for _, key in engine.device.soonest_evicted()][:3] == [b"abc", b"ab", b"a"]
    engine.rests()
    assert engine.cache.pool.find(b"abc") is not None and engine.cache.pool.find(b"a") is not None


@pytest.mark.parametrize("load_ends", ["last", "first", "first, and has failed"])
def test_blocks_that_a_load_overwrites_are_stored_before_it(load_ends):
    """A load that went well has waited for the store, whichever is reported first. After one that has failed the store
    may still read what is computed next.
    """
    engine = Queue(6, "xy", notes=True, host=3)
    spare = [engine.device.take([], 0, 1) for _ in range(4)]
    for _ in range(2):  # "xy" leaves, block by block
        engine.rests()
        spare.append(engine.device.take([], 0, 1))
        engine.rests()
    engine.device.let_go(spare.pop())
    request = engine.requests["b"] = Request("b", chain("b"), 100)
    engine.holdings["b"] = spare.pop()  # a block that was not waiting
    engine.cache.admit(request, 0)
    engine.computes("b")
    engine.ends("b")
    engine.rests()
    engine.starts("loads", "xy")
    store, load = engine.steps().transfers
    assert load.after == (store.id,) and set(store.copies[0].device_blocks) < set(load.copies[0].device_blocks)
    has_failed = load_ends == "first, and has failed"
    reports = [{"done": [store]}, {"failed" if has_failed else "done": [load]}]
    for report in reports if load_ends == "last" else reversed(reports):
        engine.reports(**report)
    assert ("b" in engine.host) != has_failed


def test_a_prompt_on_its_way_keeps_nothing_behind_it_from_being_stored():
    """Most of it stood behind the stretch, which goes on being looked at."""
    sizes = {"max_tokens": 3 * GRID, "report_steps": 2, "ahead_blocks": 5, "cache": whole_prompts}
    engine = Queue(60, "abcdefgh", "klm", **sizes)
    engine.device.let_go(engine.device.take([], 0, 45))  # four others wait before the first, these behind the second
    stored = []
    for _ in range(2):
        stored += [len(transfer.copies[0].device_blocks) for transfer in engine.steps().transfers]
        engine.device.take([], 0, 4)
    assert stored == [8, 3]


def test_while_stores_are_on_their_way_and_nothing_is_handed_out_the_order_is_looked_at_once():
    engine = Queue(18, "abc", "def", "ghi", max_tokens=3 * GRID, ahead_blocks=9)
    engine.device.take([], 0, 9)  # what nobody has used
    assert len(engine.steps().transfers) == 1
    work = engine.cache.statistics().work
    for _ in range(5):
        assert engine.steps().transfers == ()
    assert engine.cache.statistics().work == work


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_preemption_stores_what_was_computed(mode):
    """S7.16, O8.22"""
    engine = Engine(mode, device=64, max_tokens=GRID)
    engine.starts("r", "abc")
    engine.computes("r", 2)
    engine.preempts("r")
    assert engine.copies() == ["ab"]
    engine.device_forgets()
    assert engine.starts("r", "abcd") is not None  # the same id comes back, with a longer prompt
    engine.copies()
    engine.computes("r", 4)
    engine.ends("r")
    engine.copies()
    engine.copies()
    assert engine.asks("abc") != Miss()
    assert engine.is_at_rest()


@pytest.mark.parametrize("mode", ["eager", "lazy"])
def test_an_aborted_request_stores_only_what_was_computed(mode):
    """O8.31"""
    engine = Engine(mode)
    engine.starts("r", "abcd")
    engine.computes("r", 2)
    engine.ends("r", 2)
    for _ in range(3):
        engine.copies()
    assert engine.host <= {"a", "ab"}
    assert engine.is_at_rest()


@pytest.mark.parametrize("cache", [CPUPrefixCache, whole_prompts])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_lazy_comes_to_rest_where_the_host_is_smaller_than_the_front(policy, cache):
    engine = Engine("lazy", device=16, host=4, policy=policy, cache=cache)
    for prompt in ("abc", "vwx", "mno", "ijk"):
        engine.serves(prompt)
    engine.gpu.allocate(engine.gpu.statistics().free)
    while engine.copies():
        pass  # or it would never end
    assert engine.cache.statistics().chunks_stored < 24


@pytest.mark.parametrize("cache", [CPUPrefixCache, whole_prompts])
def test_a_chunk_that_a_small_host_evicted_is_stored_again_after_a_use(cache):
    engine = Queue(24, *"abcdef", cache=cache, host=2, max_tokens=4 * GRID, report_steps=1)
    engine.device.let_go(engine.device.take([], 0, 18))  # what waited before it waits behind it
    for taken, used, stored in [(0, "", 6), (1, "", 0), (1, "", 0), (0, "c", 0), (4, "", 0), (4, "", 0), (6, "", 1)]:
        engine.device.take([], 0, taken)
        if used:  # by a request that ends before it has computed anything
            holding = engine.device.take(chain(used), 1, 1)
            engine.cache.admit(Request(used, chain(used), 100), GRID)
            engine.cache.finished(used, 0)
            engine.device.let_go(holding)
        before = engine.cache.statistics().chunks_stored
        engine.rests()
        assert engine.cache.statistics().chunks_stored - before == stored
    assert engine.cache.pool.find(b"c") is not None


def test_a_small_host_does_not_store_a_whole_prompt_twice():
    """Chunks that are preempted are stored at once, and take their place before the front comes to them."""
    options = {"host": 4, "max_tokens": GRID, "ahead_blocks": 2, "cache": whole_prompts}
    engine = Queue(30, "abcd", **options)
    holding = engine.device.take([], 0, 4)
    engine.device.let_go(engine.device.take([], 0, 22))
    engine.rests()
    assert engine.cache.pool.find(b"abcd") is not None
    engine.device.publish(holding, chain("wxyz"), 4)
    engine.cache.admit(Request("r", chain("wxyz"), 100), 0)
    engine.cache.computed("r", 4 * GRID)
    engine.cache.preempted("r")
    engine.device.let_go(holding)
    engine.rests()
    assert engine.cache.pool.find(b"wxyz") is not None and engine.cache.pool.find(b"a") is None
    stored = engine.cache.statistics().chunks_stored
    engine.device.take([], 0, 2)
    engine.rests()
    assert engine.cache.statistics().chunks_stored == stored == 8


def test_a_chunk_that_a_small_host_evicted_is_stored_again_after_it_was_recomputed():
    """It has left the device meanwhile, and that was not noticed yet."""
    options = {"host": 2, "max_tokens": GRID, "ahead_blocks": 2, "cache": whole_prompts}
    engine = Queue(4, "ab", "c", "d", **options)
    engine.rests()
    for prompt in ("e", "f"):
        engine.runs(prompt)
        engine.rests()
    assert engine.cache.pool.find(b"a") is None
    engine.runs("ab")
    engine.device.take([], 0, 2)
    engine.rests()
    assert engine.cache.pool.find(b"ab") is not None


def test_descendants_of_evicted_chunks_are_walked_once():
    prompts = ("a" + "x" * 9, "c" * 10, "a" + "y" * 40)
    options = {"host": 10, "max_tokens": 160 * GRID, "ahead_blocks": 61, "cache": whole_prompts}
    engine = Queue(110, *prompts, **options)
    engine.device.let_go(engine.device.take([], 0, 50))
    assert engine.rests() < 8 * 60


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_a_system_prompt_that_all_share_outlives_the_device(mode, policy):
    """The device never evicts it, as somebody always uses it; when the device is reset, the host has it."""
    engine = Engine(mode, device=12, host=24, policy=policy)
    for number in range(30):
        engine.now += 2.0
        engine.serves("system" + chr(ord("A") + number) * 3)
    engine.gpu.reset()
    assert engine.asks("systemz") == Hit(6 * GRID)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_declined_chunks_are_not_offered_again_in_every_step(policy):
    """Nor does it stop the walk: what the device evicts after it is still stored."""
    engine = Engine("lazy", device=16, host=12, policy=policy, max_tokens=16 * GRID)
    for number in range(40):
        engine.now += 3.0
        engine.serves(chr(ord("A") + number) * 4 if number % 4 == 0 else "regular")
    before = engine.cache.statistics()
    for _ in range(50):
        engine.copies()
    after = engine.cache.statistics()
    assert after.store_declined == before.store_declined and after.work == before.work


@pytest.mark.parametrize(
    ("mode", "cache", "times", "host"),
    [
        ("eager", CPUPrefixCache, 0.9, "abcdef"),
        ("eager", CPUPrefixCache, 1.1, "uvwxyz"),
        ("lazy", CPUPrefixCache, 0.9, "abcdef"),
        ("lazy", CPUPrefixCache, 1.1, "uvwxyz"),
        ("lazy", whole_prompts, MARGIN - 0.1, "abcdef"),
        ("lazy", whole_prompts, MARGIN + 0.1, "uvwxyz"),
    ],
)
def test_lazy_moves_bytes_only_for_what_is_worth_clearly_more_than_what_leaves(mode, cache, times, host):
    """A prompt that waits on the device is worth so many times what the host is full of, which is older. Where device
    and host hold prompts together, more is enough.
    """
    with mock.patch.object(Buckets, "_learn"):  # what the buckets are worth stays as it is here
        engine = Engine(
            mode, device=12, host=6, policy="adaptive", cache=cache, hands_out_first=cache is CPUPrefixCache
        )
        worth = engine.cache.pool._policy._buckets._survival.worth
        worth[:] = [times if bucket % BINS == 0 else 1.0 for bucket in range(len(worth))]
        for prompt in ("abcdef", "uvwxyz"):
            engine.now += 10.0
            engine.serves(prompt)
        for _ in range(2):
            engine.gpu.allocate(6)  # the first prompt leaves, then the second
            engine.copies()
    assert engine.host == set(accumulate(host))
    if mode == "lazy":
        declined = 6 if host == "abcdef" else 0
        assert engine.cache.statistics().store_declined == declined, "asked once, and not again for each chunk of it"


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_a_policy_counts_hits_on_the_device(mode):
    engine = Engine(mode, policy="adaptive")
    engine.serves("ab")
    engine.now = 9.0
    engine.serves("ab")
    assert engine.cache.statistics().chunks_loaded == 0
    assert engine.cache.pool._policy._segments.find(b"a").use.at == 9.0


def test_a_chunk_that_is_declined_does_not_stop_the_walk():
    engine = Engine("lazy", device=8, host=12, cache=whole_prompts, ahead_blocks=4)
    engine.cache.pool.choose = lambda parent, keys, needs, **_: len(keys) if keys[0] == b"a" else 0
    for prompt in ("x", "y", "ab"):
        engine.starts(prompt, prompt)
        engine.computes(prompt)
    for prompt in ("x", "y", "ab"):
        engine.ends(prompt)
    engine.starts("r", "long")  # takes the blocks that never held anything: the others are the front
    engine.copies()
    assert engine.host == {"a", "ab"}
    assert engine.cache.statistics().store_declined == 2  # x and y, offered once
