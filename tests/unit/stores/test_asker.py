"""Queries to a shared store, call by call, and when an answer is reported and forgotten."""

import sys
import threading

import pytest

from cpu_prefix_cache.deciding import HybridChunkPlanner, PrefixGroup, RankReport, StateGroup, StepPlan, WindowGroup
from cpu_prefix_cache.messages.plan import CHUNK
from cpu_prefix_cache.messages.tier import Ask, TierPlan, TierReport, Told
from cpu_prefix_cache.stores import asker
from cpu_prefix_cache.stores.asker import FIRST_PORTION, Asker
from cpu_prefix_cache.stores.frame import Names
from cpu_prefix_cache.testing import MemoryStore
from tests.support.threads import wait_until

GRID = 4
FULL = PrefixGroup(name="full", block_tokens=GRID, block_bytes=4096)
DRAFT = PrefixGroup(name="draft", block_tokens=GRID, block_bytes=1024)
LARGE = PrefixGroup(name="large", block_tokens=GRID, block_bytes=12_288)
STATE = StateGroup(name="state", block_tokens=GRID, block_bytes=4096)
WINDOW = WindowGroup(name="window", block_tokens=GRID // 2, block_bytes=4096, window_tokens=GRID + 3)
NAMES = Names(bytes(32))


class Recorder(MemoryStore):
    """Records its calls, answers when it `runs`, and fails while it `fails`."""

    def __init__(self):
        super().__init__()
        self.calls = []
        self.runs = threading.Event()
        self.fails = False
        self.runs.set()

    def exists(self, keys, timeout):
        self.calls.append(list(keys))
        assert self.runs.wait(10)
        if self.fails:
            raise TimeoutError("the server does not answer")
        return super().exists(keys, timeout)


class Asked:
    """An Asker over a store, spoken to step by step. Keys are letters."""

    def __init__(self, *groups):
        self.store = Recorder()
        self.planner = HybridChunkPlanner(groups or [FULL], max_model_len=10_000, grid_tokens=GRID, in_pages=True)
        self.asker = Asker(self.store, lambda: NAMES, self.planner.pieces)
        self.number = 0

    def has(self, keys, groups=None):
        for key in keys:
            for group, piece in enumerate(self.planner.pieces):
                if piece.in_chunk and (groups is None or group in groups):
                    for place in range(piece.host_blocks):
                        self.has_value(key, group, place, CHUNK)

    def has_value(self, key, group, place, block):
        self.store.values[NAMES.of(key, group, place, block)] = b""

    def step(self, *asks, told_below=0):
        self.asker.begin(TierPlan(StepPlan(0, ()), asks=asks, told_below=told_below))

    def told(self):
        return list(self.asker.told(TierReport(RankReport(0))).told)

    def answers(self, keys=(), depth=0):
        """The answer in the end."""
        self.number += 1
        self.step(Ask(self.number, tuple(keys), depth, GRID), told_below=self.number)
        wait_until(lambda: not self.asker.is_busy)
        (told,) = self.told()
        assert told.id == self.number
        return told


def keys_of(count):
    return [b"%d" % at for at in range(count)]


@pytest.fixture
def make():
    made = []

    def make(*groups):
        made.append(Asked(*groups))
        return made[-1]

    yield make
    for asked in made:
        asked.store.runs.set()
        asked.asker.close()
        asked.asker._thread.join(10)
        assert not asked.asker._thread.is_alive()


def test_the_leading_chunks_that_exist_are_reported(make):
    asked = make()
    asked.has([b"a", b"b", b"d"])
    assert asked.answers([b"a", b"b", b"c", b"d"]) == Told(1, True, 2, ())
    assert asked.answers([b"c", b"d"]).chunks == 0
    assert asked.answers([b"a", b"b"]).chunks == 2
    assert asked.store.calls[0] == [NAMES.of(key, 0, 0, CHUNK) for key in (b"a", b"b", b"c", b"d")]


def test_a_chunk_is_there_with_all_groups_and_places(make):
    asked = make(DRAFT, LARGE)
    assert [piece.host_blocks for piece in asked.planner.pieces] == [1, 3]
    asked.has([b"a", b"b"])
    asked.has([b"c"], groups=[0])
    for place in (0, 1):
        asked.has_value(b"c", 1, place, CHUNK)
    assert asked.answers([b"a", b"b", b"c"]).chunks == 2
    asked.has_value(b"c", 1, 2, CHUNK)
    assert asked.answers([b"a", b"b", b"c"]).chunks == 3
    assert len(asked.store.calls[0]) == 3 * 4


def test_portions_double_and_end_with_the_first_chunk_that_is_missing(make):
    asked, keys = make(), keys_of(20 * FIRST_PORTION)
    asked.has(keys[: 4 * FIRST_PORTION])
    assert asked.answers(keys).chunks == 4 * FIRST_PORTION
    assert [len(call) for call in asked.store.calls] == [each * FIRST_PORTION for each in (1, 2, 4)]


@pytest.mark.parametrize("there", [0, 1, FIRST_PORTION - 1, FIRST_PORTION, FIRST_PORTION + 1, 3 * FIRST_PORTION, 99])
def test_wherever_the_end_is(make, there):
    asked, keys = make(), keys_of(99)
    asked.has(keys[:there])
    assert asked.answers(keys).chunks == there


def test_one_call_has_at_most_so_many_names(make, monkeypatch):
    monkeypatch.setattr(asker, "NAMES_AT_ONCE", 5)
    asked, keys = make(), keys_of(FIRST_PORTION)
    asked.has(keys[:13])
    assert asked.answers(keys).chunks == 13
    assert [len(call) for call in asked.store.calls] == [5, 5, 5, 1]


def test_states_are_reported_at_their_chunks(make):
    asked = make(FULL, STATE)
    asked.has([b"a", b"b", b"c"])
    for key in (b"b", b"c", b"d"):
        asked.has_value(key, 1, 0, 0)
    assert asked.answers([b"a", b"b", b"c", b"d"]) == Told(1, True, 3, ((b"b", 1, 0), (b"c", 1, 0)))
    assert len(asked.store.calls[1]) == 3, "not beyond the chunks that are there"


def test_pieces_of_windows_are_reported_by_their_number_in_the_chunk(make):
    """Two blocks to a chunk; the window of seven tokens needs three, of which the first chunk has two."""
    asked = make(FULL, WINDOW)
    asked.has([b"a", b"b"])
    asked.has_value(b"a", 1, 0, 1)
    asked.has_value(b"b", 1, 0, 0)
    asked.has_value(b"b", 1, 0, 1)
    assert asked.answers([b"a", b"b"]).pieces == ((b"a", 1, 1), (b"b", 1, 0), (b"b", 1, 1))


@pytest.mark.parametrize("depth", [0, 1, 5])
def test_every_piece_of_every_checkpoint_is_queried_under_the_planners_numbers(make, depth):
    asked, keys = make(FULL, WINDOW, STATE), keys_of(9)
    there = set()
    for end in range(depth + 1, 10):
        for at in asked.planner.checkpoint(end):
            if at.chunk >= depth:
                there.add((keys[at.chunk], at.group, at.block))
    asked.has(keys)
    for key, group, block in there:
        asked.has_value(key, group, 0, block)
    assert set(asked.answers(keys[depth:], depth).pieces) == there


def test_a_piece_is_there_with_all_its_places(make):
    large = StateGroup(name="large state", block_tokens=GRID, block_bytes=12_288)
    asked = make(FULL, large)
    places = asked.planner.pieces[1].host_blocks
    asked.has([b"a"])
    for place in range(places - 1):
        asked.has_value(b"a", 1, place, 0)
    assert places > 1 and asked.answers([b"a"]).pieces == ()
    asked.has_value(b"a", 1, places - 1, 0)
    assert asked.answers([b"a"]).pieces == ((b"a", 1, 0),)


def test_models_of_states_alone_query_no_chunks(make):
    asked = make(STATE)
    asked.has_value(b"b", 0, 0, 0)
    assert asked.answers([b"a", b"b", b"c"]) == Told(1, True, 3, ((b"b", 0, 0),))
    assert len(asked.store.calls) == 1


def test_a_query_without_keys_tests_whether_the_store_answers(make):
    asked = make()
    assert asked.answers() == Told(1, ok=True)
    assert asked.store.calls == [[NAMES.of_nothing]]
    asked.store.fails = True
    assert not asked.answers().ok


def test_whatever_a_store_raises_is_an_answer(make):
    asked = make()
    for error in (TimeoutError("late"), ValueError("a bug"), ConnectionError("gone")):
        asked.store.exists = raising(error)
        assert asked.answers([b"a"]) == Told(asked.number, ok=False)


def raising(error):
    def exists(keys, timeout):
        raise error

    return exists


def test_answers_are_repeated_until_nobody_waits_for_them(make):
    asked = make()
    asked.step(Ask(1, (b"a",)), Ask(2, (b"b",)))
    wait_until(lambda: not asked.asker.is_busy)
    assert [told.id for told in asked.told()] == [told.id for told in asked.told()] == [1, 2]
    asked.step(told_below=2)
    assert [told.id for told in asked.told()] == [2]
    asked.step(told_below=3)
    assert asked.told() == []


def test_queries_that_nobody_waits_for_any_more_are_dropped(make):
    asked = make()
    asked.store.runs.clear()
    asked.step(Ask(1, (b"a",)), Ask(2, (b"b",)), Ask(3, (b"c",)))
    wait_until(lambda: asked.store.calls)
    assert asked.asker.is_busy and asked.told() == []
    asked.step(told_below=3)
    asked.store.runs.set()
    wait_until(lambda: not asked.asker.is_busy)
    assert asked.store.calls == [[NAMES.of(key, 0, 0, CHUNK)] for key in (b"a", b"c")]
    asked.step(told_below=3)
    assert [told.id for told in asked.told()] == [3]


def test_names_are_those_at_the_moment_of_the_query(make):
    asked = make()
    others = Names(b"1" * 32)
    asked.asker._names = lambda: others
    asked.answers([b"a"])
    assert asked.store.calls == [[others.of(b"a", 0, 0, CHUNK)]]


def test_steps_and_answers_at_any_time_do_not_disturb_each_other(make):
    """The thread adds an answer while the step forgets others."""
    asked, before = make(), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(3000):
            asked.step(Ask(number, (b"a",)), told_below=max(0, number - 50))
            asked.told()
        wait_until(lambda: not asked.asker.is_busy)
    finally:
        sys.setswitchinterval(before)
    assert asked.told()[-1].id == 2999
