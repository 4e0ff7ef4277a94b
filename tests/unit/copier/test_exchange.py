"""A load and stores that exchange blocks: their portions, the order between these, and portions that fail alone.

In most of these tests piece i of load 9 reads host block i and overwrites device block i. Store 0 saves device blocks
in blocks that are free, from 50 on, or that the load has read.
"""

import random
import threading
from contextlib import contextmanager

import pytest
import torch

from cpu_prefix_cache import MisuseError
from cpu_prefix_cache.copier import exchange
from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.early import EarlyEnds
from cpu_prefix_cache.copier.events import Passed
from cpu_prefix_cache.copier.exchange import PORTION_BYTES, Portion, Whole, cut, exchanges
from cpu_prefix_cache.copier.pace import RATED_BYTES, RATED_LOADS
from cpu_prefix_cache.copier.reference import ReferenceCopier
from cpu_prefix_cache.copier.staged import StagedCopier
from cpu_prefix_cache.copier.worker import CopyWorker
from cpu_prefix_cache.deciding import Direction, GroupCopy, StepPlan, TransferPlan
from tests.support.simulated_driver import SimulatedDriver
from tests.support.simulated_streams import SimulatedStreams
from tests.support.threads import eventually
from tests.unit.copier.bench import poisoned, randoms, shapes_of
from tests.unit.copier.simulated import simulated_copier

STORE, LOAD = Direction.STORE, Direction.LOAD


def store(host, device, id=0, after=(9,), group=0):
    return TransferPlan(id, STORE, (GroupCopy(group, tuple(host), tuple(device)),), 1, after=after)


def load(count, after=(0,), id=9, num_bytes=1, failed=False):
    return TransferPlan(id, LOAD, (GroupCopy(0, tuple(range(count)), tuple(range(count))),), num_bytes, failed, after)


class Held(Copier):
    """Notes what is submitted, and by its device blocks; one block is a piece. Events pass when the test ends them."""

    knows_pieces = True

    def __init__(self):
        self.submitted = []
        self.ended = set()
        self.failing = {}
        self.said = []

    def here(self):
        return Passed()

    def num_pieces(self, direction, copy):
        return len(copy.host_blocks)

    def submit(self, direction, copies, after):
        what = direction, copies[0].device_blocks
        self.submitted.append(what)
        if error := self.failing.get(what):
            raise error
        return HeldEvent(self, what)

    @contextmanager
    def awaiting_stores(self):
        self.said.append(("enter", threading.current_thread().name, len(self.submitted)))
        yield
        self.said.append(("leave", threading.current_thread().name, len(self.submitted)))

    def has(self, *these):
        """Whether these are submitted, and nothing more follows."""
        came = eventually(lambda: set(self.submitted) == set(these))
        threading.Event().wait(0.03)
        return came and len(self.submitted) == len(these)


class HeldEvent(Passed):
    def __init__(self, copier, what):
        self.copier, self.what = copier, what

    def passed(self):
        if (*self.what, "broken") in self.copier.ended:
            raise RuntimeError("the device is gone")
        return self.what in self.copier.ended


class EndingAtOnce(Held):
    def submit(self, direction, copies, after):
        super().submit(direction, copies, after)
        return Passed()


@pytest.fixture
def held():
    return Held()


@pytest.fixture
def threaded(held):
    worker = CopyWorker(0, held, threads=True)
    yield worker
    held.ended.update((direction, (at,)) for direction in Direction for at in range(60))
    worker.close()


def resolved(worker, done, failed):
    return eventually(lambda: (worker.report().done, worker.report().failed) == (set(done), set(failed)))


# Portions


def test_a_large_load_goes_in_portions_with_stores_that_only_save():
    """The stores wait for nothing."""
    loading = load(8, num_bytes=4 * PORTION_BYTES)
    assert portions(loading, store(range(50, 58), range(8), after=())) == [
        (0, 0, (0, 1), []),
        (9, 0, (0, 1), [(0, 0)]),
        (0, 1, (2, 3), []),
        (9, 1, (2, 3), [(0, 1)]),
        (0, 2, (4, 5), []),
        (9, 2, (4, 5), [(0, 2)]),
        (0, 3, (6, 7), []),
        (9, 3, (6, 7), [(0, 3)]),
    ]


SAVES, LARGE = store([50], [0], after=()), load(4, num_bytes=4 * PORTION_BYTES)


@pytest.mark.parametrize(
    ("saves", "loading"),
    [
        (SAVES, load(4, num_bytes=PORTION_BYTES)),  # it is small
        (store([50], [0], after=(), group=1), LARGE),
        (SAVES, load(4, after=(), num_bytes=4 * PORTION_BYTES)),
        (SAVES._replace(holds_compute=True), LARGE),
    ],
)
def test_else_a_load_begins_when_its_stores_have_ended(saves, loading):
    assert exchanges([SAVES, LARGE], knows_pieces=True) == {9: [0]}
    assert exchanges([saves, loading], knows_pieces=True) == {}


def test_a_copier_that_does_not_know_pieces_gets_no_portions(held):
    """A wrapper around another copier, for example."""
    held.knows_pieces = False
    worker = CopyWorker(0, held, threads=False)
    held.ended.update([(STORE, (0, 1)), (LOAD, (0, 1))])
    worker.run(StepPlan(0, (store([50, 51], [0, 1], after=()), load(2, num_bytes=4 * PORTION_BYTES))))
    worker.close()
    assert held.submitted == [(STORE, (0, 1)), (LOAD, (0, 1))]


def test_the_first_portion_of_a_large_load_does_not_wait_for_all_that_is_saved(threaded, held):
    threaded.run(StepPlan(0, (store(range(50, 54), range(4), after=()), load(4, num_bytes=4 * PORTION_BYTES))))
    assert held.has(*((STORE, (at,)) for at in range(4)))
    held.ended.add((STORE, (0,)))
    assert held.has(*((STORE, (at,)) for at in range(4)), (LOAD, (0,)))
    held.ended.update((direction, (at,)) for direction in Direction for at in range(4))
    assert resolved(threaded, {0, 9}, {})


def portions(loading, *stores):
    """Each portion: its transfer, its number, its pieces by device block, and what it waits for in the same words."""
    named = [
        (each.whole.transfer.id, each.number, each.copy.device_blocks, each.before)
        for each in cut(*map(Whole, (loading, *stores)), copier=Held())
    ]
    return [(*name, [(each.whole.transfer.id, each.number) for each in before]) for *name, before in named]


def test_a_portion_is_half_of_the_lag_and_a_store_is_two_ahead_of_what_it_waits_for():
    """Four pieces go into free blocks, and the others into what the load has read four pieces before."""
    assert portions(load(8), store([50, 51, 52, 53, 0, 1, 2, 3], range(8))) == [
        (0, 0, (0, 1), []),
        (9, 0, (0, 1), [(0, 0)]),
        (0, 1, (2, 3), []),
        (9, 1, (2, 3), [(0, 1)]),
        (0, 2, (4, 5), [(9, 0)]),
        (9, 2, (4, 5), [(0, 2)]),
        (0, 3, (6, 7), [(9, 1)]),
        (9, 3, (6, 7), [(0, 3)]),
    ]


def test_with_the_least_lag_they_take_turns():
    assert portions(load(3), store([50, 0, 1], range(3))) == [
        (0, 0, (0,), []),
        (9, 0, (0,), [(0, 0)]),
        (0, 1, (1,), [(9, 0)]),
        (9, 1, (1,), [(0, 1)]),
        (0, 2, (2,), [(9, 1)]),
        (9, 2, (2,), [(0, 2)]),
    ]


def test_store_blocks_that_the_load_does_not_overwrite_come_last():
    assert portions(load(2), store([1, 50, 0], [40, 0, 1])) == [
        (0, 0, (0,), []),
        (9, 0, (0,), [(0, 0)]),
        (0, 1, (1,), [(9, 0)]),
        (9, 1, (1,), [(0, 1)]),
        (0, 2, (40,), [(9, 1)]),
    ]


def test_stores_have_portions_of_one_size_and_those_that_only_save_make_none_smaller():
    all = portions(load(4), store([50, 51], [0, 2]), store([0], [3], id=1), store([52], [1], id=2))
    assert [(id, number, blocks) for id, number, blocks, _ in all] == [
        (0, 0, (0,)),
        (9, 0, (0,)),
        (2, 1, (1,)),
        (9, 1, (1,)),
        (0, 2, (2,)),
        (9, 2, (2,)),
        (1, 3, (3,)),
        (9, 3, (3,)),
    ]
    assert len(portions(load(4), store([50, 51], [0, 2]))) == 2


def test_untouched_pieces_go_as_one_portion():
    """The load's pieces 4 and 9 are saved, the latter in what it has read as piece 7: so a portion is one piece."""
    all = portions(load(12), store([50, 7], [4, 9]))
    assert [(number, blocks) for id, number, blocks, _ in all if id == 9] == [
        (0, (0, 1, 2, 3)),
        (1, (4,)),
        (2, (5, 6)),
        (3, (7,)),
        (4, (8,)),
        (5, (9,)),
        (6, (10, 11)),
    ]
    assert [each for each in all if each[0] == 0] == [
        (0, 1, (4,), []),
        (0, 5, (9,), [(9, number) for number in range(4)]),
    ]
    assert [before for id, number, _, before in all if id == 9 and number in (1, 5)] == [[(0, 1)], [(0, 5)]]


# Waits


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_each_waits_for_the_other_and_both_directions_move(threaded, held, order):
    both = [store([50, 51, 0, 1], range(4)), load(4)]
    threaded.run(StepPlan(0, tuple(both[at] for at in order)))
    first, second = [(STORE, (0,)), (STORE, (1,))], [(LOAD, (0,)), (LOAD, (1,))]
    assert held.has(*first)
    held.ended.add(first[0])
    assert held.has(*first, second[0])  # while the second portion of the store moves
    held.ended.add(first[1])
    assert held.has(*first, *second)
    held.ended.add(second[0])
    assert held.has(*first, *second, (STORE, (2,)))
    assert not threaded.report().done
    held.ended |= {second[1], (STORE, (2,)), (STORE, (3,)), (LOAD, (2,)), (LOAD, (3,))}
    assert resolved(threaded, {0, 9}, ())


def test_without_threads_they_alternate():
    copier = EndingAtOnce()
    worker = CopyWorker(0, copier)
    worker.run(StepPlan(0, (store([50, 51, 0, 1], range(4)), load(4))))
    assert copier.submitted == [(direction, (at,)) for at in range(4) for direction in (STORE, LOAD)]
    assert worker.report().done == {0, 9}


def test_a_store_that_only_saves_is_waited_for_though_it_is_behind_the_others(threaded, held):
    only_saves = store([52], [30], id=1, after=())
    threaded.run(StepPlan(0, (store([50, 0], [0, 1]), only_saves, load(2, after=(0, 1)))))
    assert held.has((STORE, (0,)), (STORE, (30,)))
    held.ended.add((STORE, (0,)))
    assert held.has((STORE, (0,)), (STORE, (30,)))
    held.ended.add((STORE, (30,)))
    assert held.has((STORE, (0,)), (STORE, (30,)), (LOAD, (0,)))


@pytest.mark.parametrize("threads", [False, True])
def test_two_exchanges_of_a_plan_do_not_wait_for_each_other(threads):
    """Whatever the order of their stores."""
    copier = EndingAtOnce()
    worker = CopyWorker(0, copier, threads=threads)
    shifted = TransferPlan(8, LOAD, (GroupCopy(0, (20, 21), (20, 21)),), 1, after=(1,))
    worker.run(StepPlan(0, (store([60, 20], [20, 21], id=1, after=(8,)), store([50, 0], [0, 1]), load(2), shifted)))
    assert resolved(worker, {0, 1, 8, 9}, ())
    worker.close()


def test_a_store_waits_for_all_of_a_load_that_does_not_wait_for_it(threaded, held):
    threaded.run(StepPlan(0, (load(1, after=()),)))
    threaded.run(StepPlan(0, (store([0], [30]),)))
    assert held.has((LOAD, (0,)))
    held.ended.add((LOAD, (0,)))
    assert held.has((LOAD, (0,)), (STORE, (30,)))
    assert not held.said  # only the load's thread may report that it waits


# Stores and loads of other transfers


def test_stores_do_not_pause_from_before_the_load_until_all_of_it_is_submitted(threaded, held):
    threaded.run(StepPlan(0, (store([50, 0, 1], [0, 1, 40]), load(2))))
    for what in [(STORE, (0,)), (LOAD, (0,)), (STORE, (1,)), (LOAD, (1,))]:
        assert eventually(lambda what=what: what in held.submitted)
        held.ended.add(what)
    assert eventually(lambda: len(held.said) == 2)
    (*enter, before), (*leave, after) = held.said
    assert (enter, leave) == (["enter", "load-0"], ["leave", "load-0"])
    assert before <= 1 and after >= 4


def test_a_paced_copier_does_not_sleep_in_an_exchange():
    bench = Staged(loads_first=True)
    slept = []
    bench.copier._loads_first._sleep = slept.append
    worker = CopyWorker(0, bench.copier, threads=True)
    worker.run(StepPlan(0, (store([50, *range(11)], range(12)), load(12))))
    worker.drain()
    assert worker.report().done == {0, 9} and not slept
    worker.close()


def test_an_exchange_does_not_measure_the_rate_of_loads():
    copier, now = EndingAtOnce(), [0.0]
    worker = CopyWorker(0, copier, threads=True, clock=lambda: now[0])
    copier.num_pieces = lambda direction, copy: now.__setitem__(0, now[0] + 1) or len(copy.host_blocks)
    for at in range(RATED_LOADS):
        pair = store([50, 0], [0, 1], id=2 * at, after=(2 * at + 1,)), load(2, (2 * at,), 2 * at + 1, RATED_BYTES)
        worker.run(StepPlan(0, pair))
    worker.drain()
    assert worker.report().load_bytes_per_second is None and worker.pace.seconds_per_byte is None
    worker.close()


def test_an_exchange_is_not_reported_to_end_soon(threaded, held):
    threaded.pace.seconds_per_byte = 1e-9
    threaded.run(StepPlan(0, (store([50, 0], [0, 1]), load(2))))
    held.ended.add((STORE, (0,)))
    assert eventually(lambda: (LOAD, (0,)) in held.submitted)
    assert EarlyEnds(threaded, held).ends_soon(1000) == set()


# Failures

PAIR = store([50, 51, 0, 1], range(4)), load(4)


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize(("direction", "failed"), [(STORE, 0), (LOAD, 9)])
@pytest.mark.parametrize("at", range(4))
def test_a_portion_that_is_refused_ends_its_transfer_and_the_other_goes_on(direction, failed, at, threads):
    copier = EndingAtOnce()
    copier.failing[direction, (at,)] = RuntimeError("out of resources")
    worker = CopyWorker(0, copier, threads=threads)
    worker.run(StepPlan(0, PAIR))
    assert resolved(worker, {0, 9} - {failed}, {failed})
    assert {blocks for each, blocks in copier.submitted if each is direction} == {(n,) for n in range(at + 1)}
    assert {blocks for each, blocks in copier.submitted if each is not direction} == {(n,) for n in range(4)}
    worker.close()


@pytest.mark.parametrize(("direction", "failed"), [(STORE, 0), (LOAD, 9)])
def test_a_transfer_with_a_portion_that_fails_on_the_link_is_over_when_all_of_it_has_ended(
    threaded, held, direction, failed
):
    threaded.run(StepPlan(0, PAIR))
    held.ended |= {(each, (at,)) for each in Direction for at in range(4)} - {(direction, (0,)), (direction, (1,))}
    assert eventually(lambda: (direction, (1,)) in held.submitted)
    held.ended.add((direction, (0,), "broken"))
    threading.Event().wait(0.03)
    assert threaded.report().failed == set()  # its second portion still moves
    held.ended.add((direction, (1,)))
    assert resolved(threaded, {0, 9} - {failed}, {failed})


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize(("direction", "failed"), [(STORE, {0, 1}), (LOAD, {9})])
@pytest.mark.filterwarnings("error")
def test_an_interrupt_ends_what_its_thread_had_to_submit(direction, failed, error):
    copier = EndingAtOnce()
    copier.failing[direction, (0,)] = error()
    worker = CopyWorker(0, copier, threads=True)
    worker.run(StepPlan(0, (store([50, 0], [0, 1]), store([51], [2], id=1), load(4, after=(0, 1)))))
    assert resolved(worker, {0, 1, 9} - failed, failed)
    worker.run(StepPlan(0, (load(2, id=10, after=()),)))
    assert resolved(worker, {0, 1, 9, 10} - failed, failed)
    worker.close()


def test_without_threads_an_interrupt_is_raised_and_all_resolve():
    copier = EndingAtOnce()
    copier.failing[LOAD, (1,)] = KeyboardInterrupt()
    worker = CopyWorker(0, copier)
    with pytest.raises(KeyboardInterrupt):
        worker.run(StepPlan(0, (*PAIR, load(1, id=10, after=()))))
    assert resolved(worker, (), {0, 9, 10})


class Unfit(Passed):
    """The end of a store whose piece does not fit. The first question for it is interrupted."""

    def __init__(self, block):
        self.block, self.asked = block, 0

    def unfit(self):
        self.asked += 1
        if self.asked == 1:
            raise KeyboardInterrupt
        return [self.block]


def test_a_report_that_is_interrupted_hides_no_piece_that_does_not_fit():
    copier = EndingAtOnce()
    copier.submit = lambda direction, copies, after: Unfit(copies[0].host_blocks[0]) if direction is STORE else Passed()
    worker = CopyWorker(0, copier)
    worker.run(StepPlan(0, (store([50, 51], [0, 1], after=()), load(2, num_bytes=4 * PORTION_BYTES))))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            worker.report()
    assert worker.report().unfit == ((0, (50, 51)),)


def test_a_wait_for_the_end_raises_a_failure_although_another_thread_asks_meanwhile():
    whole = Whole(load(2), error=RuntimeError("the device is gone"))
    first, second = (Portion(whole, at, load(2).copies[0], []) for at in range(2))
    for portion in (first, second):
        portion.submit(EndingAtOnce(), Passed())
        whole.left.append(portion)
    asks, goes_on = threading.Event(), threading.Event()
    other = threading.Thread(target=second.until_passed)

    def until_passed():
        if threading.current_thread() is other:
            asks.set()
            goes_on.wait(10)

    def passed():  # both are awaited, and then the other thread asks the second
        other.start()
        threading.Timer(0.05, goes_on.set).start()
        return asks.wait(10)

    first.end.own.until_passed = lambda: None
    first.end.own.passed, second.end.own.until_passed = passed, until_passed
    with pytest.raises(RuntimeError, match="gone"):
        whole.until_passed()
    other.join()


def test_stores_go_on_if_the_load_is_cancelled_before_it_is_taken_up(threaded, held):
    threaded.run(StepPlan(0, PAIR))
    assert held.has((STORE, (0,)), (STORE, (1,)))
    threaded.run(StepPlan(0, (), cancelled=(9,)))
    assert threaded.report().failed == {9}
    held.ended |= {(STORE, (at,)) for at in range(4)}
    assert resolved(threaded, {0}, {9})
    assert not [each for each in held.submitted if each[0] is LOAD]


@pytest.mark.parametrize("cancelled", [(0,), (9,), (0, 9)])
def test_transfers_cancelled_in_their_own_plan_are_not_waited_for(cancelled):
    copier = EndingAtOnce()
    worker = CopyWorker(0, copier)
    worker.run(StepPlan(0, PAIR, cancelled=cancelled))
    assert resolved(worker, {0, 9} - set(cancelled), cancelled)


def test_a_deadline_between_portions_makes_the_load_late_and_both_go_on(held):
    now = [0.0]
    worker = CopyWorker(0, held, threads=True, load_seconds=30, clock=lambda: now[0])
    worker.run(StepPlan(0, PAIR))
    held.ended.add((STORE, (0,)))
    assert eventually(lambda: (LOAD, (0,)) in held.submitted)
    now[0] = 31.0
    assert worker.report().late == {9}
    held.ended |= {(each, (at,)) for each in Direction for at in range(4)}
    assert resolved(worker, {0}, {9})
    worker.close()


def test_a_deadline_before_the_first_portion_cancels_the_load(held):
    now = [0.0]
    worker = CopyWorker(0, held, threads=True, load_seconds=30, clock=lambda: now[0])
    worker.run(StepPlan(0, PAIR))
    now[0] = 31.0
    assert worker.report().failed == {9}
    held.ended |= {(STORE, (at,)) for at in range(4)}
    assert resolved(worker, {0}, {9})
    worker.close()


def test_close_waits_for_all_portions(threaded, held):
    threaded.run(StepPlan(0, PAIR))
    closer = threading.Thread(target=threaded.close)
    closer.start()
    held.ended |= {(each, (at,)) for each in Direction for at in range(4)} - {(LOAD, (3,))}
    assert eventually(lambda: len(held.submitted) == 8)
    closer.join(0.05)
    assert closer.is_alive()
    held.ended.add((LOAD, (3,)))
    closer.join(10)
    assert not closer.is_alive() and threaded.report().done == {0, 9}
    threaded.run(StepPlan(0, PAIR))  # to be refused
    assert threaded.report().failed == {0, 9}


@pytest.mark.parametrize("threads", [False, True])
def test_a_load_that_was_planned_as_failed_or_copies_nothing_here_is_not_waited_for(threads):
    copier = EndingAtOnce()
    worker = CopyWorker(0, copier, threads=threads)
    worker.run(StepPlan(0, (PAIR[0], load(4, failed=True))))
    assert resolved(worker, {0}, {9})
    nothing = load(4, after=(1,), id=8)._replace(copies=())
    worker.run(StepPlan(0, (store([50], [1], id=1, after=(8,)), nothing)))
    assert resolved(worker, {0, 1, 8}, {9})
    worker.close()


def test_a_store_that_was_forgotten_is_not_waited_for():
    copier = EndingAtOnce()
    worker = CopyWorker(0, copier)
    worker.run(StepPlan(0, (PAIR[0],)))  # its load has been, or will be
    assert worker.report().done == {0}
    worker.run(StepPlan(0, (PAIR[1],), resolved=(0,)))
    assert worker.report().done == {9}


# Misuse


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize(
    ("stores", "loading"),
    [
        ([store([50, 1], [0, 1])], load(2)),  # piece 1 is read when it has been overwritten
        ([store([50, 51], [0, 1]), store([1], [0], id=1)], load(2, after=(0, 1))),
        ([store([50], [0], group=1)], load(2)),
        ([store([50], [0])], load(2)._replace(copies=load(2).copies * 2)),
        ([store([50], [0])._replace(copies=store([50], [0]).copies * 2)], load(2)),
        ([store([], [])], load(2)),
    ],
    ids=["one store", "one of two", "groups", "copies of the load", "copies of the store", "no pieces"],
)
def test_exchanges_that_cannot_be_made_fail_and_move_nothing(stores, loading, threads, caplog):
    copier = EndingAtOnce()
    worker = CopyWorker(0, copier, threads=threads)
    worker.run(StepPlan(0, (*stores, loading)))
    assert resolved(worker, (), {9, *(each.id for each in stores)})
    assert not copier.submitted
    assert all(record.exc_info[0] is MisuseError for record in caplog.records)
    worker.close()


def test_a_load_that_waits_for_one_that_begins_after_it_fails():
    """Nobody would end these waits: the first in line would wait for one behind it."""
    copier = EndingAtOnce()
    worker = CopyWorker(0, copier, threads=True)
    worker.run(StepPlan(0, (load(2, after=(0,), id=8), *PAIR)))
    assert resolved(worker, {0, 9}, {8})
    worker.close()


def test_ids_are_checked_before_a_byte_moves():  # rule 14
    bench = Staged()
    before = bench.part.clone()
    worker = CopyWorker(0, bench.copier)
    worker.run(StepPlan(0, (store([50, 51, 0, 0], range(4)), load(4))))
    assert worker.report().failed == {0, 9}
    worker.run(StepPlan(0, (store([50, 0], [0, 1], id=1, after=(8,)), load(80, after=(1,), id=8))))
    assert worker.report().failed == {0, 9, 1, 8}
    assert torch.equal(bench.part, before)


# Bytes


LATE = ("in", "unpack")  # what loads do as early as they may, and what stores do as late


class Staged:
    """A staged copier in Triton's interpreter, on streams that run as late as they may, in any order."""

    def __init__(self, seed=0, eager=(), **options):
        self.part, self.host = randoms(64, 96), poisoned(96, 96)
        self.host[:] = randoms(96, 96, seed=1)
        self.streams = SimulatedStreams(eager, random.Random(seed))
        driver = SimulatedDriver(self.streams)
        self.shapes = shapes_of([[self.part]], [1], 96)
        self.copier = simulated_copier(driver, self.shapes, [[self.part]], self.host, ring_bytes=4096, **options)


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("exchanges", [False, True])
def test_a_staged_copier_saves_what_a_load_overwrites(exchanges, seed, threads, monkeypatch):
    assert both_have_their_bytes(Staged(seed), exchanges, threads, monkeypatch)


@pytest.mark.parametrize("exchanges", [False, True])
def test_a_load_that_does_not_wait_for_reads_would_overwrite_them(exchanges, monkeypatch):
    """The control."""
    assert both_have_their_bytes(Staged(eager=LATE), exchanges, False, monkeypatch)
    monkeypatch.setattr(StagedCopier, "behind", lambda self, after, stores: after)
    assert not both_have_their_bytes(Staged(eager=LATE), exchanges, False, monkeypatch)


@pytest.mark.parametrize("seed", range(6))
def test_an_early_load_comes_after_what_compute_waited_for_in_the_plan_before(seed):
    """A block may be given back by a step that did not use it."""
    bench = Staged(seed)
    was = bench.part[3].clone()
    worker = CopyWorker(0, bench.copier)
    worker.run(StepPlan(0, (store([50], [3], after=())._replace(holds_compute=True, is_early=True),)))
    loading = TransferPlan(1, LOAD, (GroupCopy(0, (7,), (3,)),), 1, is_early=True)
    worker.run(StepPlan(0, (loading,)))
    for stream in bench.streams.all:
        stream.synchronize()
    assert torch.equal(bench.host[50], was)
    worker.close()


def both_have_their_bytes(bench, exchanges, threads, monkeypatch):
    """Save what a load overwrites, in an exchange in host blocks that it has read. Whether all bytes are right then."""
    monkeypatch.setattr(exchange, "PORTION_BYTES", 0)
    rng, count, lag = random.Random(0), 40, 16
    host, device = rng.sample(range(40), count), rng.sample(range(64), count)
    saved_in = [*range(50, 50 + lag), *host[: count - lag]] if exchanges else [*range(50, 50 + count)]
    was_host, was_part = bench.host.clone(), bench.part.clone()
    loading = TransferPlan(9, LOAD, (GroupCopy(0, tuple(host), tuple(device)),), 1, after=(0,))
    saving = store(saved_in, device)._replace(after=(9,) if exchanges else ())
    worker = CopyWorker(0, bench.copier, threads=threads)
    worker.run(StepPlan(0, (saving, loading)))
    worker.drain()
    assert worker.report().done == {0, 9}
    worker.close()
    was_host[saved_in], was_part[device] = was_part[device], was_host[host]
    return torch.equal(bench.host, was_host) and torch.equal(bench.part, was_part)


def test_a_piece_of_several_blocks_on_both_sides_is_one_piece():
    part, host = randoms(12, 30), poisoned(20, 20)
    host[:] = randoms(20, 20, seed=1)
    copier = ReferenceCopier(shapes_of([[part]], [2], 20), [[part]], host)
    was_part = part.clone()
    expected = poisoned(3, 20)
    ReferenceCopier(shapes_of([[part]], [2], 20), [[part]], expected).copy(STORE, [GroupCopy(0, (0, 1, 2), (2, 3))])
    loading = TransferPlan(9, LOAD, (GroupCopy(0, tuple(range(9)), tuple(range(6))),), 1, after=(0,))
    saving = store([0, 10, 1], [2, 3])  # of piece 1, in blocks of piece 0
    worker = CopyWorker(0, copier)
    worker.run(StepPlan(0, (saving, loading)))
    assert worker.report().done == {0, 9}
    assert torch.equal(host[[0, 10, 1]], expected) and not torch.equal(part[:6], was_part[:6])
