"""Decisions of an engine over a pool, call by call, as vLLM's scheduler makes them. The test is its keeper."""

from contextlib import nullcontext

import pytest

from cpu_prefix_cache import ConfigurationError, Hit, Miss, Pending
from cpu_prefix_cache.deciding import HybridChunkPlanner, PrefixGroup, RankReport, Request, WindowGroup
from cpu_prefix_cache.keeper.answers import check_answered
from cpu_prefix_cache.keeper.kept_cache import KeptCache
from cpu_prefix_cache.keeper.protocol import Kind, Message, ProtocolError
from cpu_prefix_cache.keeper.questions import ASK_SECONDS, PAUSE_SECONDS, UNANSWERED
from cpu_prefix_cache.keeper.takes import TAKE_SECONDS
from cpu_prefix_cache.messages.tier import KEY_BYTES
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.testing.slots import PoolSlots
from tests.support.small_engine import SmallEngine

GRID, SLOTS = 4, 16
KEYS = [letter.encode() * KEY_BYTES for letter in "abcd"]


class Line:
    """A messenger that keeps what is sent, and has the answers that the test gives."""

    num_slots, connection, is_up = SLOTS, 1, True

    def __init__(self):
        self.sent, self.given, self.uses = [], [], 0

    def send(self, connection, message):
        self.sent.append(message)

    def answers(self):
        given, self.given = self.given, []
        return given

    def begin_use(self, connection):
        self.uses += 1
        return True

    def end_use(self):
        self.uses -= 1

    def answer(self, kind, *numbers):
        """To what was sent last."""
        self.given.append((self.connection, Message(kind, self.sent[-1].id, numbers)))

    def kinds(self):
        return [message.kind for message in self.sent]


class Engine:
    def __init__(self, lookahead=0, ranks=1, ready_slots=SLOTS):
        group = PrefixGroup(name="full", block_tokens=GRID, block_bytes=64, lookahead_tokens=lookahead)
        self.line, self.device = Line(), SmallEngine(12)
        planner = HybridChunkPlanner([group], max_model_len=64)
        self.cache = KeptCache(planner, self.device, self.line, ready_slots=ready_slots, ranks=ranks)

    def computes(self, id="r"):
        """A request of four chunks runs, and wants slots for them."""
        request = Request(id, KEYS, 4 * GRID)
        self.cache.admit(request, 0, 0)
        running = self.device.take(KEYS, 0, ())
        self.device.computed(running, len(KEYS))
        self.cache.computed(id, 4 * GRID)
        assert self.line.sent[-1].kind is Kind.TAKE
        return running.blocks

    def finds(self, id="r", slots=(0, 1), keys=KEYS):
        """A request asks, and the keeper has these slots."""
        request = Request(id, keys, 4 * GRID)
        assert isinstance(self.cache.lookup(request, 0, 0.0), Pending)
        self.line.answer(Kind.RAN, len(slots), len(slots), *slots)
        assert self.cache.lookup(request, 0, 0.0) == Hit(len(slots) * GRID)
        return request

    def stores(self):
        self.line.answer(Kind.TOOK, False, 0, 4, 0, 1, 2, 3)
        self.cache.passed(0.0)
        (plan,) = self.cache.step().transfers
        return plan.id

    def reports(self, id, rank=0):
        self.cache.report(RankReport(rank, done=frozenset({id})))
        return self.line.sent[-1]


def test_a_store_is_committed_when_the_rank_has_reported_it():
    engine = Engine()
    engine.computes()
    assert engine.reports(engine.stores()) == Message(Kind.COMMIT, 0, (4, False)) and not engine.line.uses


def test_a_store_is_committed_when_the_last_rank_has_reported_it():
    engine = Engine(ranks=2)
    engine.computes()
    id = engine.stores()
    for _ in range(2):
        assert engine.reports(id, rank=1).kind is Kind.TAKE and engine.line.uses
    assert engine.reports(id) == Message(Kind.COMMIT, 0, (4, False)) and not engine.line.uses


def test_a_store_that_one_rank_could_not_write_is_not_committed():
    engine = Engine(ranks=2)
    engine.computes()
    id = engine.stores()
    engine.cache.report(RankReport(1, failed=frozenset({id})))
    assert engine.reports(id) == Message(Kind.COMMIT, 0, (0, False))


def test_chunks_wait_for_slots_half_a_second_from_the_end_of_the_step_that_computed_them():
    engine = Engine()
    engine.computes()
    for now in (7.0, 7.4):  # the step took seven seconds
        engine.cache.passed(now)
        assert engine.line.kinds() == [Kind.TAKE] and engine.cache.has_transfers
    engine.cache.passed(7.5)
    assert engine.line.kinds() == [Kind.TAKE, Kind.COMMIT] and not engine.cache.has_transfers


def test_a_lease_waits_two_seconds_for_its_request_from_the_end_of_a_long_step():
    engine, request = Engine(), Request("r", KEYS, 4 * GRID)
    assert isinstance(engine.cache.lookup(request, 0, 0.0), Pending)
    engine.line.answer(Kind.RAN, 2, 2, 0, 1)
    for now in (7.0, 8.9):  # the step took seven seconds
        assert engine.cache.lookup(request, 0, now) == Hit(2 * GRID)
    engine.cache.passed(9.0)
    assert engine.line.sent[-1].kind is Kind.RELEASE and not engine.cache.has_transfers


def test_a_request_waits_for_files_until_the_keeper_has_promised_an_answer():
    engine, request = Engine(), Request("r", KEYS, 4 * GRID)
    assert engine.cache.lookup(request, 0, 0.0) == Pending(ASK_SECONDS)
    engine.line.answer(Kind.READING, 500_000)
    assert engine.cache.lookup(request, 0, 0.01) == Pending(0.01 + 0.5 + ASK_SECONDS)
    engine.line.answer(Kind.RAN, 2, 2, 0, 1)
    assert engine.cache.lookup(request, 0, 0.4) == Hit(2 * GRID)


def test_a_lease_ends_in_time_behind_a_question_that_waits_for_files():
    engine = Engine()
    assert isinstance(engine.cache.lookup(Request("slow", KEYS, 4 * GRID), 0, 0.0), Pending)
    engine.line.answer(Kind.READING, 60_000_000)
    engine.finds("r")
    engine.cache.passed(1.9)
    assert Kind.RELEASE not in engine.line.kinds()
    engine.cache.passed(2.0)
    assert engine.line.kinds().count(Kind.RELEASE) == 1
    assert engine.cache.lookup(Request("slow", KEYS, 4 * GRID), 0, 2.0) == Pending(60 + ASK_SECONDS)


def test_questions_go_on_to_a_keeper_that_reads_files_for_long():
    engine = Engine()
    for number in range(2 * UNANSWERED):
        request = Request(str(number), KEYS, 4 * GRID)
        assert isinstance(engine.cache.lookup(request, 0, float(number)), Pending)
        engine.line.answer(Kind.READING, 500_000)
        engine.cache.passed(number + 0.01)
        assert isinstance(engine.cache.lookup(request, 0, number + 0.9), Miss), "it has promised to answer by then"
    assert engine.line.kinds().count(Kind.RUN) == 2 * UNANSWERED


def test_no_request_waits_for_the_answer_of_a_keeper_that_is_gone():
    engine = Engine()
    *requests, last = [Request(str(number), KEYS, 4 * GRID) for number in range(2 * UNANSWERED + 1)]
    for request in requests:
        assert isinstance(engine.cache.lookup(request, 0, 0.0), Pending)
        engine.line.answer(Kind.READING, 60_000_000)
    assert isinstance(engine.cache.lookup(requests[0], 0, 0.01), Pending)
    engine.line.is_up = False
    assert all(isinstance(engine.cache.lookup(request, 0, 0.01), Miss) for request in (*requests, last))
    engine.line.is_up = True
    engine.line.connection += 1
    assert isinstance(engine.cache.lookup(last, 0, 0.02), Pending), "the next one has left no question unanswered"


def test_the_next_keeper_has_not_left_the_questions_to_the_one_before_unanswered():
    engine = Engine()
    *requests, last = [Request(str(number), KEYS, 4 * GRID) for number in range(UNANSWERED + 1)]
    for request in requests:
        assert isinstance(engine.cache.lookup(request, 0, 0.0), Pending)
    engine.line.connection += 1  # between two steps
    engine.cache.passed(ASK_SECONDS)
    assert isinstance(engine.cache.lookup(last, 0, ASK_SECONDS), Pending)


def test_a_keeper_that_does_not_answer_is_left_alone_for_a_second():
    engine = Engine()
    *requests, last = [Request(str(number), KEYS, 4 * GRID) for number in range(UNANSWERED + 1)]
    for request in requests:
        assert isinstance(engine.cache.lookup(request, 0, 0.0), Pending)
    engine.cache.passed(ASK_SECONDS)
    assert isinstance(engine.cache.lookup(last, 0, ASK_SECONDS), Miss)
    assert isinstance(engine.cache.lookup(last, 0, ASK_SECONDS + PAUSE_SECONDS), Pending)


def test_a_lease_ends_when_the_last_rank_has_loaded():
    engine = Engine(ranks=2)
    running = engine.device.take(KEYS, 0, ())
    engine.cache.admit(engine.finds(), 0, 2 * GRID)
    load = engine.cache.load("r", 2 * GRID, [running.blocks[:2]], 0.0)
    engine.cache.step()
    assert engine.reports(load, rank=1).kind is Kind.RUN and engine.line.uses
    assert engine.reports(load).kind is Kind.RELEASE and not engine.line.uses


@pytest.mark.parametrize(("ready", "hit"), [((0, 4), 0), ((4, 1), 1), ((2, 4), 2)])
def test_slots_that_a_rank_has_not_prepared_are_no_hit(ready, hit):
    engine = Engine(ranks=2, ready_slots=0)
    for rank, slots in enumerate(ready):
        engine.cache.report(RankReport(rank, ready_blocks=slots))
    request = Request("r", KEYS, 4 * GRID)
    engine.cache.lookup(request, 0, 0.0)
    engine.line.answer(Kind.RAN, 2, 2, 0, 1)
    assert engine.cache.lookup(request, 0, 0.0) == (Hit(hit * GRID) if hit else Miss())


@pytest.mark.parametrize(("groups", "slots"), [(["full"], (9, 8, 0)), (["full", "other"], (12, 13, 9, 8, 0, 1))])
def test_slots_of_chunks_that_the_device_has_need_not_be_prepared(groups, slots):
    groups = [PrefixGroup(name=name, block_tokens=GRID, block_bytes=64) for name in groups]
    planner, line = HybridChunkPlanner(groups, max_model_len=64), Line()
    cache = KeptCache(planner, PoolSlots(planner, 12).device, line, ready_slots=4)
    request = Request("r", KEYS, 4 * GRID)
    assert isinstance(cache.lookup(request, 2 * GRID, 0.0), Pending)
    line.answer(Kind.RAN, 3, 3, *slots)
    assert cache.lookup(request, 2 * GRID, 0.0) == Hit(3 * GRID, start=2 * GRID)


def test_a_store_of_blocks_that_are_wrong_is_not_committed():
    engine = Engine()
    blocks = engine.computes()
    id = engine.stores()
    engine.cache.invalidated(blocks[2:3])
    assert engine.reports(id) == Message(Kind.COMMIT, 0, (0, False))


def test_blocks_that_are_wrong_are_not_taken_any_more():
    engine = Engine()
    engine.cache.invalidated(engine.computes()[2:3])
    assert engine.line.sent[-1] == Message(Kind.COMMIT, 0, (0, False))
    engine.line.answer(Kind.TOOK, False, 0, 4, 0, 1, 2, 3)
    engine.cache.passed(0.0)
    assert not engine.cache.step().transfers and not engine.cache.has_transfers


@pytest.mark.parametrize("is_planned", [False, True])
def test_chunks_that_were_computed_over_a_wrong_block_are_not_committed(is_planned):
    """The pool has the first two chunks. Another connector filled their blocks, the second with wrong bytes."""
    engine = Engine()
    engine.cache.admit(engine.finds(), 0, 0)
    running = engine.device.take(KEYS, 0, ())
    engine.device.computed(running, len(KEYS))
    engine.cache.computed("r", 4 * GRID)
    take = engine.line.sent[-1]
    assert take.kind is Kind.TAKE
    engine.line.answer(Kind.TOOK, False, 2, 2, 5, 6)
    if is_planned:
        engine.cache.passed(0.0)
        (plan,) = engine.cache.step().transfers
    engine.cache.invalidated({running.blocks[1]})
    if is_planned:
        engine.reports(plan.id)
    assert engine.line.sent[-1] == Message(Kind.COMMIT, take.id, (0, False))
    engine.cache.passed(0.0)
    assert not engine.cache.step().transfers


def test_no_blocks_being_wrong_changes_nothing():
    engine = Engine()
    engine.computes()
    engine.cache.invalidated(())
    assert engine.reports(engine.stores()) == Message(Kind.COMMIT, 0, (4, False))


@pytest.mark.parametrize("boundary", [None, 0])
def test_a_request_that_loads_nothing_gives_its_lease_back(boundary):
    engine = Engine()
    engine.cache.admit(engine.finds(), 0, boundary)
    assert engine.line.kinds()[-1] is Kind.RELEASE and not engine.cache.has_transfers


def test_a_lease_of_an_earlier_connection_is_no_hit():
    """Its load would be planned as failed. The next keeper is queried instead."""
    engine = Engine()
    request = engine.finds()
    engine.line.connection = 2
    assert isinstance(engine.cache.lookup(request, 0, 0.0), Pending)
    assert engine.line.kinds() == [Kind.RUN, Kind.RELEASE, Kind.RUN]
    engine.line.answer(Kind.RAN, 2, 2, 2, 3)
    assert engine.cache.lookup(request, 0, 0.0) == Hit(2 * GRID)


def test_a_request_goes_on_while_its_load_is_in_flight():
    """Its lease ends with the load, and what it computes meanwhile is stored."""
    engine = Engine()
    running = engine.device.take(KEYS, 0, ())
    engine.cache.admit(engine.finds(), 0, 2 * GRID)
    load = engine.cache.load("r", 2 * GRID, [running.blocks[:2]], 0.0)
    engine.cache.step()
    engine.device.computed(running, len(KEYS))
    engine.cache.computed("r", 4 * GRID)
    assert Kind.TAKE not in engine.line.kinds()
    engine.cache.goes_on("r")
    engine.cache.computed("r", 4 * GRID)
    assert engine.line.kinds()[-1] is Kind.TAKE
    assert engine.reports(load).kind is Kind.RELEASE and not engine.line.uses


def test_a_load_of_a_request_that_was_aborted_is_none_of_the_next_one_with_its_id():
    engine, loads = Engine(), []
    for keys in (KEYS, [key.upper() for key in KEYS]):
        engine.cache.finished("r", 0)
        engine.cache.admit(engine.finds(keys=keys), 0, 2 * GRID)
        running = engine.device.take(keys, 0, ())
        loads.append(engine.cache.load("r", 2 * GRID, [running.blocks[:2]], 0.0))
        engine.cache.step()
    engine.reports(loads[0])
    engine.device.computed(running, len(KEYS))
    engine.cache.computed("r", 4 * GRID)
    assert Kind.TAKE not in engine.line.kinds(), "it is loading"
    engine.reports(loads[1])


def counts_of(engine):
    pool = engine.cache.statistics().pool
    return pool.cached, pool.protected, pool.evictions


def test_the_keeper_is_queried_for_its_counts_once_a_second_and_nobody_waits():
    engine = Engine()
    for now in (10.0, 10.9, 11.0, 11.5, 12.0):
        engine.cache.passed(now)
    assert engine.line.kinds() == [Kind.COUNT] * 2 and not engine.cache.has_transfers
    assert counts_of(engine) == (0, 0, 0)


def test_counts_of_a_pool_go_on_with_the_keeper_that_comes_next():
    """Evictions are those since this engine joined."""
    engine, shown = Engine(), []
    for cached, evictions in ((7, 100), (5, 110), (2, 3), (2, 4)):
        engine.cache.passed(2.0 * len(shown))
        engine.cache.passed(2.0 * len(shown) + 1)
        engine.line.answer(Kind.COUNTED, 1, 2, cached, 0, 1, 4, evictions, 0, 0)
        engine.cache.passed(2.0 * len(shown) + 1)
        shown.append(counts_of(engine))
    assert shown == [(7, 4, 0), (5, 4, 10), (2, 4, 13), (2, 4, 14)]


def test_chunks_for_which_the_pool_has_no_room_are_counted():
    engine = Engine()
    engine.computes()
    engine.line.answer(Kind.TOOK, False, 1, 0)
    engine.cache.passed(0.0)
    assert engine.cache.statistics().store_refusals == 3


@pytest.mark.parametrize(
    ("answer", "kinds"),
    [
        (None, [Kind.COMMIT, Kind.TAKE]),  # too late
        ((False, 1, 0), [Kind.COMMIT, Kind.TAKE]),  # no room
        ((False, 4, 0), [Kind.COMMIT]),  # all is there
    ],
)
def test_chunks_that_were_not_taken_are_taken_at_the_end_of_their_request(answer, kinds):
    engine = Engine()
    engine.computes()
    if answer is not None:
        engine.line.answer(Kind.TOOK, *answer)
    engine.cache.passed(0.0)
    engine.cache.passed(TAKE_SECONDS)
    sent = len(engine.line.sent)
    engine.cache.finished("r", 4 * GRID)
    assert engine.line.kinds()[1:] == kinds and sent == 2
    if Kind.TAKE in kinds:
        assert engine.line.sent[-1].keys == tuple(KEYS)
        assert engine.reports(engine.stores()).numbers == (4, False)


def test_chunks_whose_slots_were_not_prepared_yet_are_taken_at_the_end_of_their_request():
    engine = Engine(ready_slots=0)
    engine.computes()
    engine.line.answer(Kind.TOOK, False, 0, 4, 0, 1, 2, 3)
    engine.cache.passed(0.0)
    assert engine.line.kinds() == [Kind.TAKE, Kind.COMMIT]
    engine.cache.report(RankReport(0, ready_blocks=SLOTS))
    engine.cache.finished("r", 4 * GRID)
    assert engine.reports(engine.stores()).numbers == (4, False)


def test_chunks_behind_those_that_were_granted_are_taken_at_the_end_of_their_request():
    engine = Engine()
    engine.computes()
    engine.line.answer(Kind.TOOK, False, 0, 2, 0, 1)
    engine.cache.passed(0.0)
    (plan,) = engine.cache.step().transfers
    assert engine.reports(plan.id).numbers == (2, False)
    engine.cache.finished("r", 4 * GRID)
    engine.line.answer(Kind.TOOK, False, 2, 2, 2, 3)
    engine.cache.passed(0.0)
    (plan,) = engine.cache.step().transfers
    assert plan.copies[0].host_blocks == (2, 3) and engine.reports(plan.id).numbers == (2, False)


def test_chunks_of_two_slots_behind_those_that_were_granted_are_taken_at_the_end_of_their_request():
    groups = [PrefixGroup(name=name, block_tokens=GRID, block_bytes=64) for name in ("full", "other")]
    planner, line = HybridChunkPlanner(groups, max_model_len=64), Line()
    device = PoolSlots(planner, 12)
    cache = KeptCache(planner, device.device, line, ready_slots=SLOTS)
    cache.admit(Request("r", KEYS, 4 * GRID), 0, 0)
    device.pool.commit(device.pool.allocate(4), KEYS, device.pool.root, device.pool.touch(None))
    cache.computed("r", 4 * GRID)
    line.answer(Kind.TOOK, False, 0, 4, 0, 1, 2, 3)
    cache.passed(0.0)
    (plan,) = cache.step().transfers
    cache.report(RankReport(0, done=frozenset({plan.id})))
    assert line.sent[-1].kind is Kind.COMMIT and line.sent[-1].numbers == (2, False)
    cache.finished("r", 4 * GRID)
    assert line.sent[-1].kind is Kind.TAKE and line.sent[-1].keys == tuple(KEYS)


def test_a_drafter_that_looks_ahead_is_refused():
    with pytest.raises(ConfigurationError, match="knows no drafter"):
        Engine(lookahead=GRID)


# Models with windows


WINDOW = HybridChunkPlanner(
    [
        PrefixGroup(name="full", block_tokens=GRID, block_bytes=64),
        WindowGroup(name="window", block_tokens=GRID, block_bytes=64, window_tokens=GRID + 1),
    ],
    max_model_len=64,
)


class WindowEngine:
    """Its window sees one block before the next token, so a checkpoint is one piece."""

    def __init__(self):
        self.line, self.device = Line(), PoolSlots(WINDOW, 12)
        self.cache = KeptCache(WINDOW, self.device.device, self.line, ready_slots=SLOTS)

    def computes(self):
        self.is_computed()
        self.cache.finished("r", 4 * GRID)
        return self.stores()

    def is_computed(self):
        coordinator, pool = self.device.coordinator, self.device.pool
        request = Request("r", KEYS, 4 * GRID + 1)
        assert self.cache.boundaries_of(request, 0) == [4 * GRID]
        self.cache.admit(request, 0, 0)
        assert self.cache.boundaries("r") == [4 * GRID]
        chunks = pool.allocate(4)
        pool.commit(chunks, KEYS, pool.root, pool.touch(None))
        [node] = pool.allocate(0, needs=coordinator.needs(coordinator.checkpoint_at(KEYS, 4)))
        pool.commit([node], [checkpoint_key(KEYS[3])], chunks[3], pool.touch(None))
        self.cache.computed("r", 4 * GRID)
        assert self.line.sent[-1][:3] == (Kind.TAKE, 0, (True,))

    def stores(self):
        self.line.answer(Kind.TOOK, False, 0, 4, 0, 1, 2, 3, 1, 4)
        self.cache.passed(0.0)
        (plan,) = self.cache.step().transfers
        return plan

    def finds(self, *slots):
        """A prompt of which two chunks can be loaded, and then what its window takes."""
        request = Request("r", KEYS, 4 * GRID + 1)
        assert isinstance(self.cache.lookup(request, 0, 0.0), Pending)
        self.line.answer(Kind.RAN, 3, 2, *slots)
        assert self.cache.lookup(request, 0, 0.0) == Hit(2 * GRID)
        self.cache.admit(request, 0, 2 * GRID)

    def loads(self, boundary):
        self.cache.load("r", boundary, [list(range(boundary // GRID)), [9]], 0.0)
        (plan,) = self.cache.step().transfers
        return plan


@pytest.fixture
def windows():
    return WindowEngine()


def test_a_checkpoint_is_committed_with_its_chunks(windows):
    plan = windows.computes()
    assert sorted(copy.host_blocks for copy in plan.copies) == [(0, 1, 2, 3), (4,)]
    windows.cache.report(RankReport(0, done=frozenset({plan.id})))
    assert windows.line.sent[-1] == Message(Kind.COMMIT, 0, (4, True))
    assert windows.cache.statistics().checkpoints_stored == 1 and not windows.cache.has_transfers


def test_a_checkpoint_that_was_not_taken_is_taken_at_the_end_of_its_request(windows):
    windows.is_computed()
    windows.cache.passed(0.0)
    windows.cache.passed(TAKE_SECONDS)
    windows.cache.computed("r", 4 * GRID)
    assert windows.line.kinds() == [Kind.TAKE, Kind.COMMIT]
    windows.cache.finished("r", 4 * GRID)
    assert windows.line.kinds() == [Kind.TAKE, Kind.COMMIT, Kind.TAKE]
    assert windows.line.sent[-1].numbers == (True,) and windows.stores().copies


def test_a_checkpoint_is_not_committed_where_chunks_before_the_take_have_left_the_pool(windows):
    windows.is_computed()
    windows.line.answer(Kind.TOOK, False, 0, 2, 0, 1)
    windows.cache.passed(0.0)
    (plan,) = windows.cache.step().transfers
    windows.cache.report(RankReport(0, done=frozenset({plan.id})))
    windows.cache.finished("r", 4 * GRID)
    assert windows.line.sent[-1][::2] == (Kind.TAKE, (True,))
    windows.line.answer(Kind.TOOK, False, 0, 4, 0, 1, 2, 3, 1, 4)
    windows.cache.passed(0.0)
    assert windows.line.sent[-1][::2] == (Kind.COMMIT, (0, False)) and not windows.cache.step().transfers


def test_a_prompt_departs_where_the_device_has_no_more_of_it(windows):
    windows.is_computed()
    other = Request("other", [*KEYS[:2], *(key.upper() for key in KEYS[2:])], 4 * GRID + 1)
    assert windows.cache.branch(other, 0) == 2 * GRID


@pytest.mark.parametrize(("unfit", "committed"), [(4, (4, False)), (2, (2, False))])
def test_a_checkpoint_is_not_committed_where_something_did_not_fit(windows, unfit, committed):
    plan = windows.computes()
    windows.cache.report(RankReport(0, done=frozenset({plan.id}), unfit=((plan.id, (unfit,)),)))
    assert windows.line.sent[-1] == Message(Kind.COMMIT, 0, committed)


def test_a_load_that_ends_where_no_checkpoint_is_leased_is_planned_as_failed(windows):
    windows.device.pool.allocate(10)
    windows.finds(5, 6, 7)
    assert windows.loads(1 * GRID).failed
    assert windows.line.kinds()[-1] is Kind.RELEASE and not windows.line.uses


def test_a_load_brings_chunks_and_the_checkpoint_after_them(windows):
    windows.device.pool.allocate(10)
    windows.finds(5, 6, 7)
    plan = windows.loads(2 * GRID)
    assert [(copy.group, copy.host_blocks) for copy in plan.copies] == [(0, (5, 6)), (1, (7,))] and not plan.failed


def test_a_checkpoint_of_which_a_slot_is_not_prepared_is_no_hit(windows):
    windows.cache._ready_on[0] = 7
    request = Request("r", KEYS, 4 * GRID + 1)
    windows.cache.lookup(request, 0, 0.0)
    windows.line.answer(Kind.RAN, 3, 2, 5, 6, 7)
    assert windows.cache.lookup(request, 0, 0.0) == Miss()


@pytest.mark.parametrize(
    ("numbers", "is_right"),
    [
        ((0, 0, 2, 5, 6, 1, 7), True),
        ((0, 0, 2, 5, 6, 0), True),
        ((0, 2, 0, 1, 7), True),
        ((0, 0, 2, 5, 6), True),
        ((0, 0, 1, 5, 1, 7), False),
        ((0, 0, 2, 5, 6, 2, 7, 8), False),
        ((0, 0, 2, 5, 6, 1, 7, 1, 8), False),
        ((0, 0, 2, 5, 6, 1, 5), False),
        ((0, 0, 2, 5, 6, 1), False),
        ((0, 0, 2, 5, 6, 1, SLOTS), False),
    ],
)
def test_only_slots_for_the_pieces_of_a_checkpoint_are_an_answer(numbers, is_right):
    asked, answer = Message(Kind.TAKE, 1, (True,), KEYS[:2]), Message(Kind.TOOK, 1, numbers)
    with nullcontext() if is_right else pytest.raises(ProtocolError):
        check_answered(asked, answer, SLOTS, WINDOW)
