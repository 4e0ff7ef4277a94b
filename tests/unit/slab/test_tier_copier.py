"""Transfers between host blocks and slots: whole or failed, each in its own time."""

import errno
import gc
import os
import threading
import time
import weakref

import pytest

from cpu_prefix_cache import ConfigurationError, MisuseError
from cpu_prefix_cache.copier.events import Event, Passed
from cpu_prefix_cache.copier.job_thread import begin_jobs
from cpu_prefix_cache.deciding import Direction, GroupCopy
from cpu_prefix_cache.messages.plan import CHUNK, Label
from cpu_prefix_cache.model.planner import Piece
from cpu_prefix_cache.slab import tier_copier as module
from cpu_prefix_cache.slab.jobs import Jobs
from cpu_prefix_cache.slab.meter import WINDOW_BYTES, RateMeter
from cpu_prefix_cache.slab.tier_copier import TierCopier
from tests.support.threads import eventually
from tests.unit.slab.host_region import region
from tests.unit.slab.small_slab import BLOCK, FULL, PIECES, POISON, SLOTS, WINDOW, open_slab

STORE, LOAD = Direction.STORE, Direction.LOAD


@pytest.fixture
def slab(tmp_path):
    made = open_slab(tmp_path)
    yield made
    made.close()


@pytest.fixture
def host():
    return region(20)


@pytest.fixture
def copier(slab, host):
    made = TierCopier(slab, host, PIECES)
    yield made
    made.close()


def copy(slots, blocks, group=0, generation=1, block=CHUNK, places=2):
    labels = tuple(
        Label(b"k" * 32, b"", group, at % places, block, generation + at // places) for at in range(len(slots))
    )
    return GroupCopy(group, tuple(slots), tuple(blocks), labels)


def fill(host):
    for block in range(host.shape[0]):
        host[block] = block + 1


def test_a_round_trip(copier, host):
    fill(host)
    copies = [copy(range(4, 14), range(10)), copy([2, 0], [11, 10], group=1, block=0, places=1)]
    copier.copy(STORE, copies)
    kept = host.clone()
    host.fill_(POISON)
    event = copier.copy(LOAD, copies)
    assert host[:12].equal(kept[:12])
    assert set(host[12:].flatten().tolist()) == {POISON}
    assert not event.unfit()


def test_to_other_host_blocks(copier, host):
    fill(host)
    copier.copy(STORE, [copy([5, 6], [1, 2])])
    copier.copy(LOAD, [copy([5, 6], [19, 0])])
    assert host[19].tolist() == [2] * BLOCK
    assert host[0, :100].tolist() == [3] * 100


def test_no_byte_behind_a_piece_reaches_the_file(copier, slab, host):
    host.fill_(77)  # another tenant's
    copier.copy(STORE, [copy([0, 1], [0, 1]), copy([2], [2], group=1, block=0, places=1)])
    with open(os.path.join(slab.folder, "blocks"), "rb") as file:
        data = file.read(3 * BLOCK)
    assert data[: BLOCK + 100] == bytes([77]) * (BLOCK + 100)
    assert data[BLOCK + 100 : 2 * BLOCK] == bytes(BLOCK - 100)
    assert data[2 * BLOCK :] == bytes([77]) * BLOCK  # full to its last byte


def test_host_blocks_that_a_piece_does_not_reach_are_zeroed(slab, host):
    copier = TierCopier(slab, host, (Piece(FULL, 1, 3, BLOCK // 2),))
    host.fill_(77)
    copier.copy(STORE, [copy([0, 1, 2], [0, 1, 2], places=3)])
    assert host[0, BLOCK // 2 :].tolist() == [0] * (BLOCK // 2)
    assert not host[1:3].any()
    copier.close()


def test_bytes_behind_a_piece_in_each_lane_reach_no_file(slab, host):
    """A piece of 3,000 bytes on each of four ranks, in two host blocks with lanes of 2,048."""
    copier = TierCopier(slab, host, (Piece(FULL, 1, 2, 3_000, lanes=4),))
    host.fill_(77)
    copier.copy(STORE, [copy([0, 1], [0, 1])])
    lanes = host[:2].view(2, 4, 2_048)
    assert (lanes[0] == 77).all() and (lanes[1, :, : 3_000 - 2_048] == 77).all()
    assert not lanes[1, :, 3_000 - 2_048 :].any()
    copier.close()


def test_slots_that_a_load_refuses_are_reported_with_its_end(copier, slab, host):
    fill(host)
    copier.copy(STORE, [copy(range(6), range(6))])
    with open(os.path.join(slab.folder, "blocks"), "r+b") as file:
        file.seek(3 * BLOCK)
        file.write(b"!")
    event = copier.copy(LOAD, [copy(range(6), range(10, 16))])
    assert event.unfit() == [3]
    assert host[14].tolist() == [5] * BLOCK
    assert copier.statistics().refused == 1


# Failures


def failing(monkeypatch, call, slot):
    """From the disk, for one slot."""
    real = getattr(os, call)

    def instead(file, views, offset):
        if offset <= slot * BLOCK < offset + len(views) * BLOCK:
            raise OSError(errno.EIO, "the disk is broken")
        return real(file, views, offset)

    monkeypatch.setattr(os, call, instead)


def test_a_store_that_fails_has_no_record(copier, slab, monkeypatch):  # S8.5
    failing(monkeypatch, "pwritev", 9)
    event = copier.submit(STORE, [copy(range(12), range(12))], Passed())
    with pytest.raises(OSError, match="broken"):
        event.until_passed()
    with pytest.raises(OSError, match="broken"):
        event.passed()
    assert [slab.record(slot) for slot in range(SLOTS)] == [None] * SLOTS


def test_a_load_that_fails_is_no_refusal(copier, monkeypatch):
    copier.copy(STORE, [copy(range(4), range(4))])
    failing(monkeypatch, "preadv", 2)
    with pytest.raises(OSError, match="broken"):
        copier.copy(LOAD, [copy(range(4), range(4))])
    monkeypatch.undo()
    assert not copier.copy(LOAD, [copy(range(4), range(4))]).unfit()
    assert copier.statistics().refused == 0


def test_it_has_not_failed_before_all_of_it_has_ended(copier, monkeypatch):
    """Its host blocks are given away then."""
    copier.copy(STORE, [copy(range(8), range(8))])
    held, real = threading.Event(), os.preadv

    def first_fails(file, views, offset):
        if offset == 0:
            raise OSError(errno.EIO, "the disk is broken")
        held.wait(5)
        return real(file, views, offset)

    monkeypatch.setattr(os, "preadv", first_fails)
    event = copier.submit(LOAD, [copy(range(8), range(8))], Passed())
    assert not event.passed()
    held.set()
    with pytest.raises(OSError, match="broken"):
        event.until_passed()


class Told(Event):
    def __init__(self):
        self.told = threading.Event()
        self.waiting = set()

    def passed(self):
        self.waiting.add(threading.get_ident())
        return self.told.is_set()


def test_an_earlier_event_is_waited_for_in_a_thread(copier, host):
    fill(host)
    after = Told()
    event = copier.submit(STORE, [copy([0, 1], [0, 1])], after)
    assert not event.passed()
    host[0] = 99
    after.told.set()
    event.until_passed()
    host.fill_(POISON)
    copier.copy(LOAD, [copy([0, 1], [0, 1])])
    assert host[0].tolist() == [99] * BLOCK


def test_loads_do_not_queue_behind_stores(copier, host):
    fill(host)
    copier.copy(STORE, [copy([0, 1], [0, 1])])
    after = Told()
    stores = [copier.submit(STORE, [copy(range(2, 16), range(2, 16))], after) for _ in range(3)]
    assert eventually(lambda: len(after.waiting) == module.STORING)
    time.sleep(0.02)  # and no other thread takes one
    assert len(after.waiting) == module.STORING
    load = copier.submit(LOAD, [copy([0, 1], [18, 19])], Passed())
    assert eventually(load.passed)
    assert not any(event.passed() for event in stores)
    after.told.set()
    for event in stores:
        event.until_passed()


# Callers

WRONG = {
    "group": GroupCopy(3, (0,), (0,), (Label(b"k", b"", 3, 0, 0, 1),)),
    "negative group": GroupCopy(-1, (0,), (0,), (Label(b"k", b"", 0, 0, 0, 1),)),
    "slot": copy([SLOTS], [0]),
    "negative slot": copy([-1], [0]),
    "slot that is no number": copy(["1"], [0]),
    "host block": copy([0], [20]),
    "negative host block": copy([0], [-1]),
    "uneven": GroupCopy(0, (0, 1), (0,), copy([0, 1], [0, 1]).labels),
    "no labels": GroupCopy(0, (0,), (0,)),
    "label of another group": copy([0], [0])._replace(group=1),
    "place": GroupCopy(0, (0,), (0,), (Label(b"k", b"", 0, 2, CHUNK, 1),)),
    "key": GroupCopy(0, (0,), (0,), (Label(b"k" * 33, b"", 0, 0, CHUNK, 1),)),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("direction", list(Direction))
def test_forbidden_copies_are_refused_before_any_byte_moves(copier, slab, host, wrong, direction):
    before = host.clone()
    with pytest.raises(MisuseError):
        copier.submit(direction, [copy([5, 6], [5, 6]), WRONG[wrong]], Passed())
    assert host.equal(before) and slab.record(5) is None


def test_no_slot_and_no_host_block_is_written_twice(copier):
    with pytest.raises(MisuseError, match="twice"):
        copier.submit(STORE, [copy([3, 3], [0, 1])], Passed())
    with pytest.raises(MisuseError, match="twice"):
        copier.submit(LOAD, [copy([2, 3], [1, 1])], Passed())


def test_a_piece_larger_than_its_host_blocks_is_refused(slab, host):
    with pytest.raises(ConfigurationError, match="'window'"):
        TierCopier(slab, host, (Piece(WINDOW, 1, 1, BLOCK + 1),))
    with pytest.raises(ConfigurationError, match="'window'"):
        TierCopier(slab, host, (Piece(WINDOW, 1, 1, BLOCK // 2 + 1, lanes=2),))


def test_slots_of_another_size_than_host_blocks_are_refused(slab):
    with pytest.raises(ConfigurationError, match=f"{BLOCK} bytes below .* which has {2 * BLOCK} bytes"):
        TierCopier(slab, region(2, 2 * BLOCK), PIECES)


def test_nothing_to_copy_has_ended(copier):
    assert copier.submit(LOAD, [], Passed()).passed()
    assert copier.submit(STORE, [GroupCopy(0, (), ())], Passed()).passed()


# Its end


def slab_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("slab-")]


def test_close_waits_for_what_was_submitted(slab, host):
    fill(host)
    copier = TierCopier(slab, host, PIECES)
    events = [copier.submit(STORE, [copy([at, at + 1], [0, 1])], Passed()) for at in range(0, 16, 2)]
    copier.close()
    copier.close()
    assert all(event.passed() for event in events)
    assert not slab_threads()
    with pytest.raises(RuntimeError, match="closed"):
        copier.submit(STORE, [copy([0], [0])], Passed())


def test_a_copier_that_nobody_has_ends_its_threads(slab, host):
    copier = TierCopier(slab, host, PIECES)
    gone = weakref.ref(copier)
    copier.copy(STORE, [copy([0, 1], [0, 1])])
    del copier
    gc.collect()
    assert eventually(lambda: gone() is None and not slab_threads())


# Slices


@pytest.mark.parametrize("slice_bytes", [BLOCK, 3 * BLOCK, 100 * BLOCK])
def test_a_slice_has_adjacent_slots(copier, slab, monkeypatch, slice_bytes):
    monkeypatch.setattr(module, "SLICE_BYTES", slice_bytes)
    seen, real = [], slab.write
    monkeypatch.setattr(slab, "write", lambda slots, *rest: (seen.append(slots), real(slots, *rest)))
    copier.copy(STORE, [copy(range(11, -1, -1), range(12))])
    assert sorted(slot for slots in seen for slot in slots) == list(range(12))
    for slots in seen:
        assert list(slots) == list(range(slots[0], slots[0] + len(slots)))
        assert len(slots) <= max(1, slice_bytes // BLOCK)


def test_threads_take_what_is_urgent_first():
    jobs = Jobs()
    order = []
    done = threading.Event()
    jobs.put(STORE, [lambda: order.append("store")])
    jobs.put(LOAD, [lambda: order.append("load"), lambda: order.append("load")])
    thread = begin_jobs("test", lambda: jobs.take((LOAD, STORE)))
    jobs.put(STORE, [done.set])
    assert done.wait(5)
    assert order == ["load", "load", "store"]
    jobs.close()
    thread.join()


def test_a_job_that_raises_does_not_end_its_thread(caplog):
    jobs, done = Jobs(), threading.Event()
    thread = begin_jobs("test", lambda: jobs.take((LOAD,)))
    jobs.put(LOAD, [lambda: 1 / 0, done.set])
    assert done.wait(5)
    jobs.close()
    thread.join()


# How fast


def test_the_time_of_transfers_at_once_counts_once():
    now = [0.0]
    meter = RateMeter(lambda: now[0])
    for begin in (meter.begin, meter.begin):
        begin()
    now[0] = 2.0
    meter.moved(WINDOW_BYTES // 2)
    assert meter.bytes_per_second is None
    meter.moved(WINDOW_BYTES // 2)
    assert meter.bytes_per_second == WINDOW_BYTES / 2
    meter.end()
    meter.end()
    now[0] = 100.0  # nothing is under way
    meter.begin()
    now[0] = 101.0
    meter.moved(WINDOW_BYTES)
    assert meter.bytes_per_second == pytest.approx(WINDOW_BYTES * (0.9 + 1) / (0.9 * 2 + 1))
    assert meter.seconds == 3.0 and meter.num_bytes == 2 * WINDOW_BYTES


def test_bursts_do_not_raise_the_rate():
    now = [0.0]
    meter = RateMeter(lambda: now[0])
    meter.begin()
    for _ in range(40):  # two windows end at nearly the same time
        now[0] += 1.0
        meter.moved(WINDOW_BYTES)
        now[0] += 0.001
        meter.moved(WINDOW_BYTES)
    assert meter.bytes_per_second == pytest.approx(2 * WINDOW_BYTES, rel=0.06)


def test_the_rate_is_known_after_enough_bytes(copier):
    assert copier.read_bytes_per_second is None
    copier.copy(STORE, [copy(range(16), range(16))])
    copier.copy(LOAD, [copy(range(16), range(16))])
    assert copier.read_bytes_per_second is None
    for _ in range(WINDOW_BYTES // (16 * BLOCK)):
        copier.copy(LOAD, [copy(range(16), range(16))])
    assert copier.read_bytes_per_second > 0
    statistics = copier.statistics()
    assert statistics.bytes_read == WINDOW_BYTES + 16 * BLOCK and statistics.bytes_written == 16 * BLOCK
    assert statistics.read_seconds > 0 and statistics.write_seconds > 0


def test_memory_at_a_page_is_read_and_written_directly_as_before(tmp_path):
    """Where the file system allows it: aligned memory is no reason to stop."""
    slab = open_slab(tmp_path)
    before = slab.is_direct
    copier = TierCopier(slab, region(8), PIECES)
    assert slab.is_direct == before
    copier.close()
    slab.close()


# Reads that stall


@pytest.fixture
def hanging(slab, monkeypatch):
    """Reads end when this is set."""
    goes_on, read = threading.Event(), slab.read

    def hangs(*arguments):
        refused = read(*arguments)
        goes_on.wait()
        return refused

    monkeypatch.setattr(slab, "read", hangs)
    yield goes_on
    goes_on.set()


def test_a_load_whose_reads_stall_is_given_up_and_writes_nothing_afterwards(slab, host, hanging):
    copier = TierCopier(slab, host, PIECES, stall_seconds=0.1)
    fill(host)
    copier.copy(STORE, [copy([4, 5], [0, 1])])
    load = copier.submit(LOAD, [copy([4, 5], [2, 3])], Passed())
    with pytest.raises(OSError, match="in time"):
        load.until_passed()
    host.fill_(POISON)  # the blocks are somebody else's now
    hanging.set()
    copier.close()
    assert set(host.flatten().tolist()) == {POISON}


def test_control_a_load_that_nobody_may_give_up_is_waited_for(copier, host, hanging):
    fill(host)
    copier.copy(STORE, [copy([4, 5], [0, 1])])
    load = copier.submit(LOAD, [copy([4, 5], [2, 3])], Passed())
    time.sleep(0.3)
    assert not load.passed()
    hanging.set()
    load.until_passed()
    assert host[2:4].equal(host[:2])


def test_a_load_that_may_be_given_up_brings_its_bytes(slab, host):
    copier = TierCopier(slab, host, PIECES, stall_seconds=10.0)
    fill(host)
    copier.copy(STORE, [copy(range(4, 14), range(10))])
    kept = host[:10].clone()
    host.fill_(POISON)
    copier.copy(LOAD, [copy(range(4, 14), range(10))])
    assert host[:10].equal(kept)
    copier.close()


def slow_down(slab, monkeypatch, seconds):
    """Each read takes so long from now on."""
    read = slab.read

    def slowly(*arguments):
        time.sleep(seconds)
        return read(*arguments)

    monkeypatch.setattr(slab, "read", slowly)


def test_a_load_behind_others_is_not_given_up_while_these_are_read(slab, host, monkeypatch):
    """Each slice takes less than the stall, and all together more."""
    monkeypatch.setattr(module, "THREADS", 1)
    monkeypatch.setattr(module, "SLICE_BYTES", BLOCK)
    copier = TierCopier(slab, host, PIECES, stall_seconds=1.0)
    fill(host)
    copier.copy(STORE, [copy(range(4, 16), range(12))])
    slow_down(slab, monkeypatch, seconds=0.1)
    copier.copy(LOAD, [copy(range(4, 16), range(12))])
    copier.close()


def test_rows_of_more_than_a_slice_have_more_time(slab, host, monkeypatch):
    """A read counts once a slice of it, one row at least, is whole."""
    monkeypatch.setattr(module, "SLICE_BYTES", BLOCK // 8)
    copier = TierCopier(slab, host, PIECES, stall_seconds=0.3)
    fill(host)
    copier.copy(STORE, [copy([4, 5], [0, 1])])
    slow_down(slab, monkeypatch, seconds=1.0)
    copier.copy(LOAD, [copy([4, 5], [2, 3])])
    assert host[2:4].equal(host[:2])
    copier.close()


def test_while_every_thread_hangs_loads_are_given_up_at_once(slab, host, hanging):
    copier = TierCopier(slab, host, PIECES, stall_seconds=0.3)
    fill(host)
    copier.copy(STORE, [copy(range(4, 10), range(6))])
    for at in range(module.THREADS):
        one = copier.submit(LOAD, [copy([4 + at], [at])], Passed())
        assert not one.passed(), "there is another thread"
        with pytest.raises(OSError, match="in time"):
            one.until_passed()
    with pytest.raises(OSError, match="in time"):
        copier.submit(LOAD, [copy([9], [5])], Passed()).passed()
    hanging.set()
    assert eventually(lambda: loads(copier, 9, 5)), "threads are there again"
    copier.close()


def test_stores_end_while_every_thread_hangs_that_reads(slab, host, hanging):
    copier = TierCopier(slab, host, PIECES, stall_seconds=0.3)
    fill(host)
    copier.copy(STORE, [copy(range(4, 12), range(8))])
    load = copier.submit(LOAD, [copy(range(4, 12), range(8))], Passed())
    with pytest.raises(OSError, match="in time"):
        load.until_passed()
    store = copier.submit(STORE, [copy([12], [8])], Passed())
    assert eventually(store.passed)
    hanging.set()
    copier.close()


def loads(copier, slot, block):
    try:
        copier.copy(LOAD, [copy([slot], [block])])
    except OSError:
        return False
    return True
