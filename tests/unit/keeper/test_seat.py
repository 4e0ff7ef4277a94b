"""The seat of an engine: its lock and its files, in one process and in two, and what a keeper takes back."""

import os
import socket
import subprocess
import sys
import threading
from contextlib import closing
from unittest.mock import patch

import pytest

from cpu_prefix_cache import ConfigurationError, NodePool
from cpu_prefix_cache.deciding import HybridChunkPlanner, PrefixGroup
from cpu_prefix_cache.keeper.protocol import NAMESPACE_BYTES
from cpu_prefix_cache.keeper.records import Records, records_bytes
from cpu_prefix_cache.keeper.shape import spelled
from cpu_prefix_cache.memory import limits
from cpu_prefix_cache.memory.shared_file import receive
from cpu_prefix_cache.node import region as regions
from cpu_prefix_cache.node.joined_pool import JoinedPool
from cpu_prefix_cache.node.presence import is_present, lock
from cpu_prefix_cache.node.seat import Seat
from cpu_prefix_cache.slab.namespace import Namespace
from tests.support.host_engine import CHUNK_BYTES, PATIENCE
from tests.unit.keeper.pool_engine import ROOT, KeeperProcess

SLOTS = 4
PLANNER = HybridChunkPlanner([PrefixGroup(name="full", block_tokens=4, block_bytes=8)], max_model_len=4)
SHAPE = spelled(PLANNER)


@pytest.fixture
def keeper(tmp_path):
    with KeeperProcess(tmp_path) as process:
        yield process


@pytest.fixture
def address(tmp_path):
    """A name of a meeting that no other test has: an offer that has ended may keep its own for a moment."""
    return f"cpc-test-{os.getpid()}-{tmp_path.name}"


def seat_at(keeper):
    return Seat.of(keeper.path, bytes(NAMESPACE_BYTES), CHUNK_BYTES, SHAPE, connect_seconds=PATIENCE)


def open_files():
    return len(os.listdir("/proc/self/fd"))


def records_of(file):
    """A file of records for a region of SLOTS, as a keeper makes it."""
    os.ftruncate(file, records_bytes(SLOTS))
    contents = memoryview(bytearray(records_bytes(SLOTS)))
    Records(contents).begin(SLOTS, CHUNK_BYTES)
    os.pwrite(file, contents, 0)
    return file


@pytest.fixture
def loose(tmp_path):
    """The files of a region, one with a name and one without, whose sizes anybody may change."""
    region, records = os.open(tmp_path / "region", os.O_RDWR | os.O_CREAT), os.memfd_create("records")
    os.ftruncate(region, SLOTS * CHUNK_BYTES)
    yield region, records_of(records)
    os.close(region)
    os.close(records)


def test_files_whose_size_may_change_are_not_taken_back(loose):
    """Whoever made one shorter would end the keeper that reads it."""
    region = regions.make(SLOTS * CHUNK_BYTES, CHUNK_BYTES)
    assert regions.adopt(region.files, CHUNK_BYTES, SLOTS) is not None
    for files in (loose, (region.files[0], loose[1]), (loose[0], region.files[1])):
        assert regions.adopt(files, CHUNK_BYTES, SLOTS) is None


def test_a_region_that_is_none_of_the_engines_model_is_not_taken_back():
    """A keeper that did would end: its pool holds no chunk."""
    region = regions.make(SLOTS * CHUNK_BYTES, CHUNK_BYTES)
    assert regions.adopt(region.files, CHUNK_BYTES, SLOTS + 1) is None
    assert regions.adopt(region.files, CHUNK_BYTES // 2, 1) is None


def test_engines_take_the_pages_of_a_pool_and_not_its_keeper(tmp_path, monkeypatch):
    """A unit of the system gives the keeper 8 GB for a pool of 512. What it reads from files it takes itself."""
    (tmp_path / "memory.max").write_text(f"{1 << 20}\n")
    (tmp_path / "memory.current").write_text("0\n")
    monkeypatch.setattr(limits, "CGROUP", tmp_path)
    assert regions.make(SLOTS * CHUNK_BYTES, CHUNK_BYTES).num_slots == SLOTS
    with pytest.raises(ConfigurationError, match="may use"):
        regions.make(SLOTS * CHUNK_BYTES, CHUNK_BYTES, taken_here=True)


def test_an_engine_whose_lock_cannot_be_taken_leaves_nothing_open(keeper):
    with closing(seat_at(keeper)):
        files = open_files()
        locked = patch("cpu_prefix_cache.node.presence.fcntl.fcntl", side_effect=BlockingIOError("locked"))
        with locked, pytest.raises(ConfigurationError, match="is locked by another one"):
            seat_at(keeper)
        assert open_files() == files


def test_a_seat_leaves_nothing_open(keeper, address):
    files = open_files()
    seat = seat_at(keeper)
    seat.give(address, b"")
    seat.close()
    assert open_files() <= files + 1  # which the thread that waited is closing


TAKES = """
import sys
from cpu_prefix_cache.node.seat import Seat
seat, note = Seat.taken(sys.argv[1])
print(seat.number, seat.num_slots, note.decode(), flush=True)
sys.stdin.read()
"""


def test_an_engine_of_two_processes_is_there_until_both_are_gone(keeper, tmp_path, address):
    watch = seat_at(keeper)
    with closing(watch):
        worker = seat_at(keeper)
        worker.give(address, b"note")
        decides = subprocess.Popen(
            [sys.executable, "-c", TAKES, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        )
        try:
            assert decides.stdout.readline().decode().split() == [str(worker.number), str(worker.num_slots), "note"]
            records, number = watch.files[1], worker.number
            worker.close()
            assert is_present(records, number)
        finally:
            decides.kill()
            decides.wait()
            decides.stdout.close()
        assert not is_present(records, number)


def test_a_worker_that_lives_keeps_the_lock_of_its_engine(keeper, address):
    """Its device may still write."""
    with closing(seat_at(keeper)) as watch, closing(seat_at(keeper)) as worker:
        worker.give(address, b"")
        Seat.taken(address)[0].close()
        assert is_present(watch.files[1], worker.number)


def test_the_last_process_that_takes_a_seat_has_its_line(keeper, address):
    """Ranks come first, and have the files and the lock; the engine is there until the last of all has ended."""
    with closing(seat_at(keeper)) as watch, closing(seat_at(keeper)) as first:
        first.give(address, b"", takers=3)
        ranks = [Seat.taken(address, decides=False)[0] for _ in range(2)]
        decides, _ = Seat.taken(address)
        seats = [first, *ranks, decides]
        assert {(seat.number, seat.num_slots, seat.block_bytes) for seat in seats} == {(2, 32, CHUNK_BYTES)}
        for thread in threading.enumerate():
            if thread.name == "keeper-seat":
                thread.join(5)
        assert [seat.connected.fileno() < 0 for seat in seats] == [True, True, True, False]
        for seat in (first, decides, ranks[0]):
            seat.close()
            assert is_present(watch.files[1], first.number)
        ranks[1].close()
        assert not is_present(watch.files[1], first.number)


def test_a_pool_that_a_worker_has_joined_is_taken_at_its_meeting(keeper, address):
    pool = NodePool(keeper.address, model="m", revision="1", connect_seconds=PATIENCE)
    with closing(JoinedPool.join(pool, CHUNK_BYTES, Namespace((("revision", "1"),)), PLANNER)) as joined:
        joined.give(address)
        with closing(pool.taken(address)) as taken:
            assert (taken.num_slots, taken.num_bytes) == (32, 32 * CHUNK_BYTES)


def test_a_seat_is_offered_until_it_is_closed(keeper, address):
    """The scheduler comes when the worker's graphs are captured, after minutes or hours."""
    with closing(seat_at(keeper)) as worker:
        worker.give(address, b"")
        assert worker._offer.gettimeout() is None


def test_a_process_that_connects_and_goes_takes_no_seat(keeper, address):
    with closing(seat_at(keeper)) as worker:
        worker.give(address, b"note")
        for reads in False, True:
            with socket.socket(socket.AF_UNIX) as curious:
                curious.connect(f"\0{address}")
                for file in receive(curious, 1, 8)[1] if reads else ():
                    os.close(file)
        seat, note = Seat.taken(address)
        with closing(seat):
            assert note == b"note"


def test_a_worker_that_is_stopped_is_not_waited_for_without_end(monkeypatch, address):
    monkeypatch.setattr("cpu_prefix_cache.node.seat.TAKE_SECONDS", 0.01)
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(f"\0{address}")
        stopped.listen()
        with pytest.raises(ConfigurationError, match="from its worker"):
            Seat.taken(address)


def test_no_program_that_an_engine_starts_keeps_its_seat(keeper, address):
    """It would keep the lock, and the engine would count as there until that program ends."""
    with closing(seat_at(keeper)) as worker:
        worker.give(address, b"")
        with closing(Seat.taken(address)[0]) as taken:
            for seat in worker, taken:
                files = [*seat.files, seat.lock] + [seat.connected.fileno()] * (seat is taken)
                assert not [file for file in files if os.get_inheritable(file)]


def test_files_come_without_being_inheritable():
    """The control: as Python takes them, programs that are started inherit them."""
    one, other = socket.socketpair()
    with one, other:
        for _ in range(2):
            socket.send_fds(one, [b"."], [one.fileno()])
        _, (plain, *_), _, _ = socket.recv_fds(other, 1, 1)
        _, (ours,) = receive(other, 1, 1)
        assert os.get_inheritable(plain) and not os.get_inheritable(ours)
        os.close(plain)
        os.close(ours)


def test_two_engines_of_one_name_are_refused(keeper, address):
    with closing(seat_at(keeper)) as one, closing(seat_at(keeper)) as other:
        one.give(address, b"")
        with pytest.raises(ConfigurationError, match="start this engine again"):
            other.give(address, b"")


def test_without_a_worker_there_is_no_seat(address):
    with pytest.raises(ConfigurationError, match="from its worker"):
        Seat.taken(address)


def test_a_lock_that_another_engine_has_is_refused():
    file = os.memfd_create("records")
    try:
        own = lock(file, 3)
        with pytest.raises(ConfigurationError, match="engine 3"):
            lock(file, 3)
        os.close(own)
    finally:
        os.close(file)
