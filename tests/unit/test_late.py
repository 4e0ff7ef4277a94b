"""On a device that notes what it hands out, a chunk goes to the host then, and before while there is ample room."""

import pytest

from cpu_prefix_cache import Hit, Miss, Pending
from cpu_prefix_cache.deciding import Direction, HybridChunkPlanner, PrefixGroup, Request
from cpu_prefix_cache.prefix_cache import STORE_SECONDS
from cpu_prefix_cache.testing.engine import GRID, Engine, chain
from property_tests.models.engines import QueueSlots

SLOTS = 6


class Story(Engine):
    """Its device has `SLOTS` slots, and its host less room, but for old chunks that leave first, unless it is `ample`.
    Without `load` a request computes what the host would bring."""

    def __init__(self, host: int = 20, width: int = 1, ample: bool = False, **options) -> None:
        groups = [PrefixGroup(name=f"attention {at}", block_tokens=GRID, block_bytes=100) for at in range(width)]
        planner = HybridChunkPlanner(groups, max_model_len=100)
        super().__init__("lazy", QueueSlots(SLOTS, width, noted={}), host, planner=planner, **options)
        pool, old = self.cache.pool, [b"old %d" % at for at in range(0 if ample else host // width - SLOTS + 1)]
        pool.commit(pool.allocate(len(old), old), old, pool.root, pool.touch(None))

    def run(self, prompt: str):
        """Compute a prompt to its end. Returns the plan of its step."""
        self.starts(prompt, prompt, load=False)
        plan = self.steps()
        self.fills(prompt)
        self.ends(prompt)
        return plan

    def lookup(self, prompt: str, now: float = 0.0):
        self.now = now
        return self.asks(prompt, self.device.match(chain(prompt)) * GRID)


@pytest.fixture
def story():
    return Story()


def blocks_of(story, id):
    return [block for slot in story.slots[id] for block in story.device.blocks_of(slot)]


def on_host(story, *names):
    return [name for name in names if story.cache.pool.find(name.encode()) is not None]


def test_blocks_that_the_device_hands_out_are_stored_before_compute_overwrites_them(story):
    """Its end first: the beginning stays on the device alone, as long as it waits there."""
    assert not story.run("abc").transfers
    assert not story.steps().transfers  # nothing is stored ahead
    (store,) = story.run("wxyz").transfers
    assert store.direction is Direction.STORE and store.holds_compute
    assert store.copies[0].device_blocks == (3,)
    story.reports(story.steps().transfers)
    story.reports([store.id])
    assert on_host(story, "a", "ab", "abc") == ["abc"]
    assert story.lookup("abc") == Hit(3 * GRID, 2 * GRID)
    assert story.cache.statistics().lost_before_store == 0


def test_chunks_are_stored_when_computed_while_all_that_the_device_has_alone_would_find_room():
    """Then nothing is stored, or holds compute, when their blocks are handed out."""
    story = Story(host=SLOTS + 1, ample=True)
    story.starts("abc", "abc", load=False)
    assert not story.steps().transfers
    story.fills("abc")
    story.computes("abc")
    (ahead,) = story.steps().transfers
    assert ahead.direction is Direction.STORE and not ahead.holds_compute
    story.reports([ahead])
    assert on_host(story, "a", "ab", "abc") == ["a", "ab", "abc"]
    story.ends("abc")
    assert not story.run("wxyz").transfers  # overwrites "abc"
    assert story.lookup("abc") == Hit(3 * GRID, 2 * GRID)
    story.reports(story.steps().transfers)  # four blocks are free, and "a" and "ab" are on both
    story.run("k")
    story.reports(story.steps().transfers)
    assert on_host(story, "wxyz", "k") == ["wxyz"]


def test_chunks_behind_a_beginning_that_the_host_has_are_stored_when_computed():
    story = Story(ample=True)
    for prompt in ("ab", "uvwxyz"):
        story.run(prompt)
        story.reports(story.steps().transfers)
    story.run("abcd")  # computes "ab" anew
    (store,) = story.steps().transfers
    assert len(store.copies[0].device_blocks) == 2


def test_chunks_that_leave_the_device_unnoticed_are_duplicates_no_more():
    story = Story(ample=True)
    story.run("abcdef")
    story.reports(story.steps().transfers)
    assert story.cache.pool.num_duplicates == 6
    story.starts("uvwxyz", "uvwxyz", load=False)
    story.cache.invalidated([])  # what is handed out in this step is not looked at
    story.steps()
    assert story.cache.pool.num_duplicates == 0


def test_a_device_that_was_emptied_alone_leaves_no_duplicates_for_long():
    story = Story(host=40, ample=True)
    story.run("abcdef")
    story.reports(story.steps().transfers)
    story.device.reset()
    for prompt in ("uvwxyz", "ghijkl", "mnopqr"):
        story.run(prompt)
        story.reports(story.steps().transfers)
    assert story.cache.pool.num_duplicates <= SLOTS


def test_chunks_that_a_request_was_given_are_not_stored_for_it():
    """They were when they were computed, if there was room. Of what it computes, only what the host lacks."""
    story = Story(ample=True)
    story.run("abc")
    story.reports(story.steps().transfers)
    story.cache.pool.withdraw(story.cache.pool.find(b"ab"))
    story.run("abcd")
    (store,) = story.steps().transfers
    assert len(store.copies[0].device_blocks) == 1


def test_a_store_commits_though_its_parent_has_left_since(story):
    """The parent is on its way when what hangs below it has landed."""
    story.run("abc")
    first = story.run("wxyz")
    second = story.run("klmno")
    story.reports(first.transfers)
    story.reports(second.transfers)
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
    story.reports(plan.transfers)
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
    story.reports(story.run("uvwxyz").transfers)
    assert story.lookup("abc") == Hit(3 * GRID, 0)
    story.starts("abc", "abc")
    store, load = story.steps().transfers
    assert (store.direction, load.direction) == (Direction.STORE, Direction.LOAD)
    assert load.after == (store.id,) and not store.holds_compute
    assert set(store.copies[0].device_blocks) == set(blocks_of(story, "abc"))


def test_each_load_of_a_plan_is_right_behind_its_stores_and_short_ones_come_first(story):
    for prompt in ("abc", "x", "klmnop"):
        story.reports(story.run(prompt).transfers)
    for prompt in ("abc", "x"):  # the long one is planned first
        story.starts(prompt, prompt)
    transfers = story.steps().transfers
    loads = [each for each in transfers if each.direction is Direction.LOAD]
    assert [len(load.copies[0].host_blocks) for load in loads] == [1, 3]
    assert [each.id for each in transfers] == [id for load in loads for id in (*load.after, load.id)]
    assert all(load.after for load in loads)


def test_all_loads_that_overwrite_parts_of_a_chunk_follow_its_store(monkeypatch):
    """A radix tree frees the pages of a chunk, and hands them out one by one."""
    story = Story(width=2)
    story.run("ab")
    story.run("cd")
    story.reports(story.run("uvwxyz").transfers)
    tables = {}
    for prompt in ("ab", "cd"):
        story.starts(prompt, prompt, load=False)
        tables[prompt] = [story.device.blocks_of(slot) for slot in story.slots[prompt]]
    parts = tables["ab"][0][0], tables["cd"][0][1]
    noted = [{b"uvwxyz": parts}, {}, {}, {}]
    monkeypatch.setattr(story.device, "handed_out", lambda: noted.pop(0))
    for prompt in tables:
        story.loads(prompt, 2 * GRID)
    store, *loads = sorted(story.steps().transfers, key=lambda each: each.direction is Direction.LOAD)
    assert store.copies[0].device_blocks + store.copies[1].device_blocks == parts and store.holds_compute
    assert [load.after for load in loads] == 2 * [(store.id,)]


def test_a_store_of_what_a_load_overwrites_counts_only_if_the_load_ends_well(story):
    """Else its blocks, which are free then, may be computed into before they were read."""
    story.run("abc")
    story.reports(story.run("uvwxyz").transfers)
    story.starts("abc", "abc")
    store, load = story.steps().transfers
    slots = story.slots["abc"]
    story.preempts("abc")
    story.reports(failed=[load.id])
    assert all(map(story.device.is_free, slots))
    story.reports([store.id])
    assert on_host(story, *(key.decode() for key in chain("uvwxyz"))) == []


def test_a_load_that_has_lost_its_source_leaves_its_blocks_to_compute(story):
    """It fails at once, and its request computes."""
    story.run("abc")
    story.reports(story.run("uvwxyz").transfers)
    story.starts("abc", "abc", load=False)
    story.cache.pool.withdraw(story.cache.pool.find(b"a"))
    story.loads("abc", 3 * GRID)
    load, store = sorted(story.steps().transfers, key=lambda each: each.direction is Direction.STORE)
    assert load.failed and store.holds_compute and set(store.copies[0].device_blocks) == set(blocks_of(story, "abc"))


def test_a_chunk_that_the_device_has_twice_is_not_stored(story):
    """Two requests compute it at once."""
    for id in ("one", "other"):
        story.starts(id, "a")
    story.steps()
    for id in ("one", "other"):
        story.fills(id)
        story.ends(id)
    assert not story.run("vwxyz").transfers
    plan = story.run("klmnop")  # now its last copy leaves, too
    assert sum(len(store.copies[0].host_blocks) for store in plan.transfers) == 6


def test_a_chunk_that_leaves_the_device_again_becomes_the_youngest_of_the_host():
    story = Story(host=8)
    for prompt in ("a", "b", "klmn", "c", "d"):  # a and b leave
        story.reports(story.run(prompt).transfers)
    for prompt in ("a", "stuvwx", "y"):  # a leaves again, and the host, which is full then, needs a block more
        story.reports(story.run(prompt).transfers)
    assert on_host(story, "a", "b") == ["a"]


def test_wrong_bytes_are_not_stored(story):
    story.run("abc")
    story.starts("uvwxyz", "uvwxyz")
    story.cache.invalidated([1])
    assert not story.steps().transfers
    story.fills("uvwxyz")
    story.ends("uvwxyz")


def test_a_reset_forgets_what_was_handed_out(story):
    story.run("abc")
    story.starts("uvwxyz", "uvwxyz")
    story.cache.reset()
    assert not story.steps().transfers


def test_a_store_that_fails_loses_what_it_read(story):
    story.run("abc")
    story.reports(failed=story.run("uvwxyz").transfers)
    assert story.lookup("abc") == Miss() and on_host(story, "a", "ab", "abc") == []


def test_chunks_for_which_the_host_has_no_room_count_as_lost():
    story = Story(host=4)
    story.run("abcd")
    lease_on = story.run("uvwxyz")
    story.reports(lease_on.transfers)
    lease = story.reserves("abcd")
    story.run("klmnop")
    story.steps()
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
        story.reports(story.run(f"a{number:02}").transfers)
        story.cache.admit(Request("other", chain("other"), 5 * GRID, stores=stores), 0, None, now=0.0)
        story.starts(f"c{number:02}", f"c{number:02}")
        story.cache.invalidated([])  # what is handed out in this step is not stored
        story.reports(story.steps().transfers)
        story.cache.finished("other", 0)
        story.fills(f"c{number:02}")
        story.ends(f"c{number:02}")
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
        story.reports(story.run("".join(chr(65 + number) for _ in range(3))).transfers)
    assert story.cache.statistics().remembered <= 5 * SLOTS
