"""On a device that notes what it hands out, a chunk goes to the host then, and not before."""

import pytest

from cpu_prefix_cache import Hit, Miss, Pending
from cpu_prefix_cache.deciding import CPUPrefixCache, Direction, HybridChunkPlanner, PrefixGroup, RankReport, Request
from cpu_prefix_cache.prefix_cache import STORE_SECONDS
from cpu_prefix_cache.testing.engine import GRID, chain
from property_tests.models.engines import QueueSlots, cache_options

SLOTS = 6


class Story:
    """An engine with `SLOTS` slots, one rank, and copies that end when the story ends them."""

    def __init__(self, host_blocks: int = 20, width: int = 1, **options) -> None:
        self.device = QueueSlots(SLOTS, width, noted={})
        groups = [PrefixGroup(name=f"attention {at}", block_tokens=GRID, block_bytes=100) for at in range(width)]
        planner = HybridChunkPlanner(groups, max_model_len=100)
        self.cache = CPUPrefixCache(planner, self.device, host_blocks=host_blocks, **cache_options(**options))

    def take(self, prompt: str, boundary: int = 0):
        """Admit a request. Of its blocks, those from `boundary` on are computed."""
        matched = self.device.match(chain(prompt))
        holding = self.device.take(chain(prompt), matched, len(prompt))
        self.cache.admit(self.request(prompt), matched * GRID, boundary or None, now=0.0)
        return holding

    def end(self, prompt: str, holding) -> None:
        self.device.publish(holding, chain(prompt), len(prompt))
        self.cache.finished(prompt, len(prompt) * GRID)
        self.device.let_go(holding)

    def run(self, prompt: str):
        """Compute a prompt to its end. Returns the plan of its step."""
        holding = self.take(prompt)
        plan = self.cache.step()
        self.end(prompt, holding)
        return plan

    def land(self, plan, ok: bool = True) -> None:
        ids = frozenset(transfer.id for transfer in plan.transfers)
        self.cache.report(RankReport(0, ids) if ok else RankReport(0, failed=ids))

    def lookup(self, prompt: str, now: float = 0.0):
        matched = self.device.match(chain(prompt))
        return self.cache.lookup(self.request(prompt), matched * GRID, now)

    def request(self, prompt: str) -> Request:
        return Request(prompt, chain(prompt), len(prompt) * GRID + 1)


@pytest.fixture
def story():
    return Story()


def on_host(story, *names):
    return [name for name in names if story.cache.pool.find(name.encode()) is not None]


def test_blocks_that_the_device_hands_out_are_stored_before_compute_overwrites_them(story):
    """Its end first: the beginning stays on the device alone, as long as it waits there."""
    assert not story.run("abc").transfers
    assert not story.cache.step().transfers  # nothing is stored ahead
    (store,) = story.run("wxyz").transfers
    assert store.direction is Direction.STORE and store.holds_compute
    assert store.copies[0].device_blocks == (3,)
    story.land(story.cache.step())
    story.cache.report(RankReport(0, frozenset([store.id])))
    assert on_host(story, "a", "ab", "abc") == ["abc"]
    assert story.lookup("abc") == Hit(3 * GRID, 2 * GRID)
    assert story.cache.statistics().lost_before_store == 0


def test_a_store_commits_though_its_parent_has_left_since(story):
    """The parent is on its way when what hangs below it has landed."""
    story.run("abc")
    first = story.run("wxyz")
    second = story.run("klmno")
    story.land(first)
    story.land(second)
    assert on_host(story, "a", "ab", "abc") == ["a", "ab", "abc"]
    assert story.lookup("abc") == Hit(3 * GRID, 0)


def test_a_request_waits_for_what_is_on_its_way_to_the_host(story):
    """Neither side has it. It does not wait for ever."""
    story.run("abc")
    plan = story.run("uvwxyz")
    deadline = 7.0 + STORE_SECONDS
    assert story.lookup("abc", now=7.0) == Pending(deadline)
    assert story.lookup("abc", now=deadline - 0.01) == Pending(deadline)
    assert story.lookup("abc", now=deadline) == Miss()
    story.land(plan)
    assert story.lookup("abc", now=deadline) == Hit(3 * GRID, 0)


def test_it_waits_for_as_much_as_it_would_load_and_needs_no_more():
    story = Story(min_load_tokens=2 * GRID)
    story.run("abc")
    story.run("uvwxyz")
    assert isinstance(story.lookup("abcd"), Pending)  # nobody has its last chunk


def test_it_does_not_wait_for_less_than_it_would_load():
    story = Story(min_load_tokens=3 * GRID + 1)
    story.run("abc")
    story.run("uvwxyz")
    assert story.lookup("abc") == Miss()


def test_blocks_that_a_load_overwrites_are_stored_before_the_load_and_hold_no_compute(story):
    story.run("abc")
    story.land(story.run("uvwxyz"))
    assert story.lookup("abc") == Hit(3 * GRID, 0)
    holding = story.take("abc", boundary=3 * GRID)
    blocks = [block for slot in holding.slots for block in story.device.blocks_of(slot)]
    story.cache.load("abc", 3 * GRID, [blocks], now=0.0)
    store, load = story.cache.step().transfers
    assert (store.direction, load.direction) == (Direction.STORE, Direction.LOAD)
    assert load.after == (store.id,) and not store.holds_compute
    assert set(store.copies[0].device_blocks) == set(blocks)


def test_each_load_of_a_plan_is_right_behind_its_stores_and_short_ones_come_first(story):
    for prompt in ("abc", "x", "klmnop"):
        story.land(story.run(prompt))
    for prompt in ("abc", "x"):  # the long one is planned first
        holding = story.take(prompt, boundary=len(prompt) * GRID)
        blocks = [block for slot in holding.slots for block in story.device.blocks_of(slot)]
        story.cache.load(prompt, len(prompt) * GRID, [blocks], now=0.0)
    transfers = story.cache.step().transfers
    loads = [each for each in transfers if each.direction is Direction.LOAD]
    assert [len(load.copies[0].host_blocks) for load in loads] == [1, 3]
    assert [each.id for each in transfers] == [id for load in loads for id in (*load.after, load.id)]
    assert all(load.after for load in loads)


def test_all_loads_that_overwrite_parts_of_a_chunk_follow_its_store(monkeypatch):
    """A radix tree frees the pages of a chunk, and hands them out one by one."""
    story = Story(width=2)
    story.run("ab")
    story.run("cd")
    story.land(story.run("uvwxyz"))
    tables = {}
    for prompt in ("ab", "cd"):
        holding = story.take(prompt, boundary=2 * GRID)
        tables[prompt] = [story.device.blocks_of(slot) for slot in holding.slots]
    parts = tables["ab"][0][0], tables["cd"][0][1]
    noted = [{b"uvwxyz": parts}, {}, {}, {}]
    monkeypatch.setattr(story.device, "handed_out", lambda: noted.pop(0))
    for prompt, blocks in tables.items():
        story.cache.load(prompt, 2 * GRID, [list(group) for group in zip(*blocks, strict=True)], now=0.0)
    store, *loads = sorted(story.cache.step().transfers, key=lambda each: each.direction is Direction.LOAD)
    assert store.copies[0].device_blocks + store.copies[1].device_blocks == parts and store.holds_compute
    assert [load.after for load in loads] == 2 * [(store.id,)]


def test_a_store_of_what_a_load_overwrites_counts_only_if_the_load_ends_well(story):
    """Else its blocks, which are free then, may be computed into before they were read."""
    story.run("abc")
    story.land(story.run("uvwxyz"))
    holding = story.take("abc", boundary=3 * GRID)
    blocks = [block for slot in holding.slots for block in story.device.blocks_of(slot)]
    story.cache.load("abc", 3 * GRID, [blocks], now=0.0)
    store, load = story.cache.step().transfers
    story.cache.preempted("abc")
    story.device.let_go(holding)
    story.cache.report(RankReport(0, failed=frozenset([load.id])))
    assert all(map(story.device.is_free, holding.slots))
    story.cache.report(RankReport(0, frozenset([store.id])))
    assert on_host(story, *(key.decode() for key in chain("uvwxyz"))) == []


def test_a_load_that_has_lost_its_source_leaves_its_blocks_to_compute(story):
    """It fails at once, and its request computes."""
    story.run("abc")
    story.land(story.run("uvwxyz"))
    holding = story.take("abc", boundary=3 * GRID)
    story.cache.pool.withdraw(story.cache.pool.find(b"a"))
    blocks = [block for slot in holding.slots for block in story.device.blocks_of(slot)]
    story.cache.load("abc", 3 * GRID, [blocks], now=0.0)
    load, store = sorted(story.cache.step().transfers, key=lambda each: each.direction is Direction.STORE)
    assert load.failed and store.holds_compute and set(store.copies[0].device_blocks) == set(blocks)


def test_a_chunk_that_the_device_has_twice_is_not_stored(story):
    """Two requests compute it at once."""
    one, other = story.take("a"), story.take("a")
    story.cache.step()
    story.end("a", one)
    story.device.publish(other, chain("a"), 1)
    story.device.let_go(other)
    assert not story.run("vwxyz").transfers
    plan = story.run("klmnop")  # now its last copy leaves, too
    assert sum(len(store.copies[0].host_blocks) for store in plan.transfers) == 6


def test_a_chunk_that_leaves_the_device_again_becomes_the_youngest_of_the_host():
    story = Story(host_blocks=8)
    for prompt in ("a", "b", "klmn", "c", "d"):  # a and b leave
        story.land(story.run(prompt))
    for prompt in ("a", "stuvwx", "y"):  # a leaves again, and the host, which is full then, needs a block more
        story.land(story.run(prompt))
    assert on_host(story, "a", "b") == ["a"]


def test_wrong_bytes_are_not_stored(story):
    story.run("abc")
    holding = story.take("uvwxyz")
    story.cache.invalidated([1])
    assert not story.cache.step().transfers
    story.end("uvwxyz", holding)


def test_a_reset_forgets_what_was_handed_out(story):
    story.run("abc")
    story.take("uvwxyz")
    story.cache.reset()
    assert not story.cache.step().transfers


def test_a_store_that_fails_loses_what_it_read(story):
    story.run("abc")
    story.land(story.run("uvwxyz"), ok=False)
    assert story.lookup("abc") == Miss() and on_host(story, "a", "ab", "abc") == []


def test_chunks_for_which_the_host_has_no_room_count_as_lost():
    story = Story(host_blocks=4)
    story.run("abcd")
    lease_on = story.run("uvwxyz")
    story.land(lease_on)
    lease = story.cache.reserve(story.request("abcd"), 4 * GRID)
    story.run("klmnop")
    story.cache.step()
    assert story.cache.statistics().lost_before_store == 6
    story.cache.release(lease)


def test_chunks_that_the_host_declines_do_not_count_as_lost():
    story = Story(store_after=2)
    story.run("abc")
    assert story.run("uvwxyz").transfers == ()
    assert story.cache.statistics().lost_before_store == 0


@pytest.mark.parametrize("stores", [True, False])
def test_chunks_that_leave_unnoticed_are_forgotten_and_count_as_lost(story, stores):
    """Also while requests come that store nothing."""
    for number in range(40):
        story.land(story.run(f"a{number:02}"))
        story.cache.admit(Request("other", chain("other"), 5 * GRID, stores=stores), 0, None, now=0.0)
        holding = story.take(f"c{number:02}")
        story.cache.invalidated([])  # what is handed out in this step is not stored
        story.land(story.cache.step())
        story.cache.finished("other", 0)
        story.end(f"c{number:02}", holding)
    assert story.cache.statistics().remembered <= 4 * SLOTS
    assert story.cache.statistics().lost_before_store > 30


def test_a_cache_that_is_off_remembers_nothing_of_what_leaves(story):
    story.cache.turn_off()
    story.run("abc")
    story.run("uvwxyz")
    assert not story.device.noted


def test_a_transfer_that_never_ends_does_not_keep_all_parents(story):
    """Parents are remembered while a store may need them, and no longer than a few devices hold."""
    story.run("abc")
    story.run("uvwxyz")  # its store never ends
    for number in range(40):
        story.land(story.run("".join(chr(65 + number) for _ in range(3))))
    assert story.cache.statistics().remembered <= 5 * SLOTS
