"""Contract of every driver: CUDA's and HIP's where torch has such a device, the simulated one everywhere.

Below it, the refusals of the simulated driver: rules that tests elsewhere hold the library to by using it.
"""

import mmap
import random
import re
import threading
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from cpu_prefix_cache.memory.driver import DriverError, accelerator_driver
from cpu_prefix_cache.memory.moves import Moves
from tests.support.simulated_driver import SimulatedDriver
from tests.support.simulated_streams import SimulatedStreams

PAGE = mmap.PAGESIZE
SIZE = 4 * PAGE
POISON = 0xAB


class Simulated:
    def __init__(self, has_batches):
        self.driver = SimulatedDriver(has_batches=has_batches, devices=2)
        self.devices, self.refuses_seams = self.driver.devices, True

    def current(self):
        return self.driver.here.device

    def stream(self):
        return self.driver.streams.compute

    def memory(self, host):
        return host.clone()


class Real:
    def __init__(self, name):
        version = {"cuda": torch.version.cuda, "hip": torch.version.hip}[name]
        if version is None or not torch.cuda.is_available():
            pytest.skip(f"torch has no {name} device here")
        torch.cuda.init()
        self.driver, self.devices = accelerator_driver(), range(torch.cuda.device_count())
        self.refuses_seams = name == "cuda"  # what HIP does there is not known

    def current(self):
        return torch.cuda.current_device()

    def stream(self):
        stream = torch.cuda.Stream()
        return SimpleNamespace(handle=stream.cuda_stream, synchronize=stream.synchronize)

    def memory(self, host):
        return host.to("cuda:0")


@pytest.fixture(params=["simulated", "simulated, without batches", "cuda", "hip"])
def bench(request):
    if request.param.startswith("simulated"):
        return Simulated(has_batches="without" not in request.param)
    return Real(request.param)


@pytest.fixture
def driver(bench):
    with bench.driver.working_in(0):
        yield bench.driver


@pytest.fixture
def host(driver):
    """Two registrations of SIZE bytes, one behind the other, filled with what is nowhere else."""
    memory = pages(2 * SIZE)
    for at in (0, SIZE):
        driver.register(memory.data_ptr() + at, SIZE)
    yield memory
    for at in (0, SIZE):
        driver.unregister(memory.data_ptr() + at)


def pages(num_bytes):
    memory = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
    return memory.copy_(randoms(num_bytes))


def randoms(num_bytes, seed=0):
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def poisoned(bench):
    """Device memory."""
    return bench.memory(torch.full((2 * SIZE,), POISON, dtype=torch.uint8))


def one_by_one(driver, moves, stream):
    for destination, source, size in moves:
        driver.copy(destination, source, size, stream)


def as_pinned(driver, moves, stream):
    for destination, source, size in moves:
        driver.copy(destination, source, size, stream, pinned=True)


def in_a_batch(driver, moves, stream):
    """Its arrays are gone when it runs."""
    if not driver.has_batches:
        pytest.skip("this driver has no batches")
    rows = Moves(*(list(row) for row in zip(*moves, strict=True)))
    driver.copy_batch(rows.device, rows.host, rows.size, rows.count, stream)
    for at in range(len(rows._rows)):
        rows._rows[at] = 0


WAYS = [one_by_one, as_pinned, in_a_batch]
# up to the seam between the two registrations, from it on, and a byte: where in the one memory and in the other
PLACES = [(100, SIZE - 1000, 1000), (3000, SIZE, 2000), (7, 2 * SIZE - 1, 1)]


def moved(destination, source, places=PLACES):
    """The moves, and what the destination is to be."""
    wanted = destination.cpu().clone()
    for to, of, size in places:
        wanted[to : to + size] = source.cpu()[of : of + size]
    return [(destination.data_ptr() + to, source.data_ptr() + of, size) for to, of, size in places], wanted


def comes_right(bench, host, way):
    """Whether bytes of the host come to device memory, and back to other bytes of the host, and nothing else does."""
    device = poisoned(bench)
    stream = bench.stream()
    right = []
    for destination, source in ((device, host), (host, device)):
        places = PLACES if source is host else [(of, to, size) for to, of, size in PLACES]
        if destination is host:
            host.fill_(POISON)
        moves, wanted = moved(destination, source, places)
        way(bench.driver, moves, stream.handle)
        stream.synchronize()
        right.append(torch.equal(destination.cpu(), wanted))
    return all(right)


@pytest.mark.parametrize("way", WAYS)
def test_bytes_come_both_ways_up_to_a_seam_and_from_it_on(bench, host, way):
    assert comes_right(bench, host, way)


@pytest.mark.parametrize("way", WAYS)
def test_a_byte_that_does_not_come_is_seen(bench, host, way):  # the control of the one above
    def one_byte_less(driver, moves, stream):
        destination, source, size = moves[0]
        way(driver, [(destination, source, size - 1), *moves[1:]], stream)

    assert not comes_right(bench, host, one_byte_less)


def test_a_stream_keeps_its_order(bench, driver, host):
    device, stream = poisoned(bench), bench.stream()
    first, second = host[:PAGE].clone(), host[PAGE : 2 * PAGE].clone()
    begin, on_device = host.data_ptr(), device.data_ptr()
    host[SIZE : SIZE + 2 * PAGE] = POISON
    driver.copy(on_device, begin, PAGE, stream.handle)
    driver.copy(begin + SIZE, on_device, PAGE, stream.handle)
    driver.copy(on_device, begin + PAGE, PAGE, stream.handle)  # over what the second has read
    driver.copy(begin + SIZE + PAGE, on_device, PAGE, stream.handle)
    stream.synchronize()
    assert torch.equal(host[SIZE : SIZE + PAGE], first)
    assert torch.equal(host[SIZE + PAGE : SIZE + 2 * PAGE], second) and not torch.equal(first, second)


def test_memory_that_is_not_pinned_is_copied_one_by_one(bench, driver):
    device = poisoned(bench)
    stream = bench.stream()
    host = pages(SIZE)
    before = host.clone()
    one_by_one(driver, [(device.data_ptr(), host.data_ptr(), SIZE)], stream.handle)
    stream.synchronize()
    host.fill_(POISON)
    one_by_one(driver, [(host.data_ptr(), device.data_ptr(), SIZE)], stream.handle)
    stream.synchronize()
    assert torch.equal(host, before)


def test_unpinned_memory_may_be_pinned_again_as_more(bench, driver):
    host = pages(SIZE)
    device = poisoned(bench)
    stream = bench.stream()
    for num_bytes in (PAGE, SIZE, 2 * PAGE):
        driver.register(host.data_ptr(), num_bytes)
        moves, wanted = moved(device, host, [(0, 0, num_bytes)])
        as_pinned(driver, moves, stream.handle)
        stream.synchronize()
        assert torch.equal(device.cpu(), wanted)
        driver.unregister(host.data_ptr())
        host.copy_(randoms(SIZE, seed=num_bytes))


REFUSED = (DriverError, AssertionError)  # a real one refuses; the simulated one makes the test fail


def test_nothing_is_pinned_twice_or_unpinned_that_was_not(driver, host):
    with pytest.raises(REFUSED):
        driver.register(host.data_ptr(), SIZE)
    with pytest.raises(REFUSED):
        driver.unregister(host.data_ptr() + PAGE)


@pytest.mark.parametrize("way", WAYS)
def test_no_copy_lies_over_two_registrations(bench, driver, host, way):
    if not bench.refuses_seams:
        pytest.skip("what this driver does at a seam is not known, and nothing relies on it")
    device, stream = poisoned(bench), bench.stream()
    with pytest.raises(REFUSED):
        way(driver, [(device.data_ptr(), host.data_ptr() + SIZE - 10, 20)], stream.handle)
    with pytest.raises(REFUSED):
        way(driver, [(host.data_ptr() + SIZE - 10, device.data_ptr(), 20)], stream.handle)
    stream.synchronize()
    assert (device.cpu() == POISON).all()


def test_where_there_are_no_batches_one_is_refused(bench, driver, host):
    if driver.has_batches:
        pytest.skip("this driver has batches")
    rows = Moves([poisoned(bench).data_ptr()], [host.data_ptr()], [10])
    with pytest.raises(REFUSED):
        driver.copy_batch(rows.device, rows.host, rows.size, rows.count, bench.stream().handle)


def test_a_thread_works_with_a_device_within_working_in(bench):
    first, last = bench.devices[0], bench.devices[-1]
    with bench.driver.working_in(first):
        with bench.driver.working_in(last):
            with bench.driver.working_in(None):
                assert bench.current() == last
            with bench.driver.working_in(first):
                assert bench.current() == first
            assert bench.current() == last
        assert bench.current() == first
        with pytest.raises(KeyError), bench.driver.working_in(last):
            raise KeyError
        assert bench.current() == first


def test_a_thread_that_never_had_a_device_works_with_one(bench, driver, host):
    device, stream = poisoned(bench), bench.stream()
    moves, wanted = moved(device, host)
    raised = []

    def copies():
        try:
            with bench.driver.working_in(0):
                as_pinned(driver, moves, stream.handle)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=copies)
    thread.start()
    thread.join()
    assert not raised
    stream.synchronize()
    assert torch.equal(device.cpu(), wanted)


def test_an_error_has_the_number_of_the_driver(bench):
    with pytest.raises(DriverError, match=r"would not .*: error \d+") as caught, bench.driver.working_in(99):
        raise KeyError
    assert caught.value.code


def test_the_address_of_a_device_is_as_the_system_writes_it(bench):
    for device in bench.devices:
        assert re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]", bench.driver.pci_address(device))


# Refusals of the simulated driver


@pytest.fixture
def simulated():
    return SimulatedDriver(devices=2)


@pytest.fixture
def memory(simulated):
    """Two registrations of 100 bytes and 100 bytes that are not pinned."""
    memory = torch.zeros(300, dtype=torch.uint8)
    with simulated.working_in(0):
        for at in (0, 100):
            simulated.register(memory.data_ptr() + at, 100)
        yield memory.data_ptr()


def batch(driver, *moves):
    rows = Moves(*(list(row) for row in zip(*moves, strict=True)))
    driver.copy_batch(rows.device, rows.host, rows.size, rows.count, driver.streams.compute.handle)


DEVICE = torch.zeros(1000, dtype=torch.uint8)
ELSEWHERE = DEVICE.data_ptr()

WRONG = {
    "a batch over two registrations": (
        "over two registrations",
        lambda driver, at: batch(driver, (ELSEWHERE, at + 90, 20)),
    ),
    "a batch that is pinned in part": (
        "in a registration in part",
        lambda driver, at: batch(driver, (ELSEWHERE, at, 10), (ELSEWHERE, at + 190, 20)),
    ),
    "a batch of which one is not pinned": (
        "not pinned is asked for as if",
        lambda driver, at: batch(driver, (ELSEWHERE, at, 10), (ELSEWHERE, at + 200, 10)),
    ),
    "a copy over two registrations": (
        "over two registrations",
        lambda driver, at: driver.copy(at + 90, ELSEWHERE, 20, driver.streams.compute.handle),
    ),
    "a copy said to be pinned that is not": (
        "not pinned is asked for as if",
        lambda driver, at: driver.copy(at + 200, ELSEWHERE, 20, driver.streams.compute.handle, pinned=True),
    ),
    "a copy in a stream whose handle was cut": (
        "which is no stream",
        lambda driver, at: driver.copy(at, ELSEWHERE, 20, driver.streams.compute.handle & 0xFFFFFFFF),
    ),
    "the same memory pinned twice": ("pinned already", lambda driver, at: driver.register(at, 100)),
    "memory pinned that is pinned in part": ("pinned already", lambda driver, at: driver.register(at + 199, 10)),
    "memory unpinned from its middle on": ("not pinned from there", lambda driver, at: driver.unregister(at + 1)),
    "memory unpinned twice": (
        "not pinned from there",
        lambda driver, at: [driver.unregister(at), driver.unregister(at)],
    ),
}


@pytest.mark.parametrize(("sentence", "wrong"), WRONG.values(), ids=WRONG)
def test_calls_that_a_real_driver_refuses_make_a_test_fail(simulated, memory, sentence, wrong):
    with pytest.raises(AssertionError, match=sentence):
        wrong(simulated, memory)
    assert not simulated.under_way, "what was refused is under way"


@pytest.mark.parametrize("limit", [1, 2])
def test_a_batch_longer_than_it_may_be_makes_a_test_fail(simulated, memory, limit):
    simulated.longest_batch = limit
    moves = [(ELSEWHERE, memory, 10), (ELSEWHERE + 10, memory + 10, 10)]
    if limit == 2:
        batch(simulated, *moves)
    else:
        with pytest.raises(AssertionError, match="a batch of 2 copies"):
            batch(simulated, *moves)


def test_a_batch_where_there_are_none_makes_a_test_fail(simulated, memory):
    simulated.has_batches = False
    with pytest.raises(AssertionError, match="where there are none"):
        batch(simulated, (ELSEWHERE, memory, 10))


@pytest.mark.parametrize("side", ["destination", "source"])
def test_memory_unpinned_while_it_is_copied_makes_a_test_fail(simulated, memory, side):
    ends = {"destination": (memory + 150, ELSEWHERE), "source": (ELSEWHERE, memory + 150)}[side]
    simulated.copy(*ends, 10, simulated.streams.compute.handle)
    simulated.unregister(memory)  # the other registration
    with pytest.raises(AssertionError, match="copies of it are under way"):
        simulated.unregister(memory + 100)
    simulated.streams.compute.synchronize()
    simulated.unregister(memory + 100)


CALLS = {
    "register": lambda driver, at: driver.register(at + 200, 50),
    "unregister": lambda driver, at: driver.unregister(at),
    "copy": lambda driver, at: driver.copy(ELSEWHERE, at, 10, driver.streams.compute.handle),
    "batch": lambda driver, at: batch(driver, (ELSEWHERE, at, 10)),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("device", [None, 1])
def test_a_thread_without_a_device_makes_a_test_fail(simulated, memory, call, device):
    raised = []

    def calls():
        try:
            with simulated.working_in(device):
                call(simulated, memory)
        except AssertionError as error:
            raised.append(str(error))

    thread = threading.Thread(target=calls)
    thread.start()
    thread.join()
    assert len(raised) == (device is None) and all("works with no device" in each for each in raised)


@pytest.mark.parametrize("call", [CALLS["register"], CALLS["unregister"]], ids=["register", "unregister"])
def test_pinning_during_a_capture_makes_a_test_fail_unless_the_thread_is_relaxed(simulated, memory, call):
    simulated.here.is_relaxed = False  # as one that torch alone has given a device
    with simulated.capturing():
        with pytest.raises(AssertionError, match="which ends the capture"):
            call(simulated, memory)
        with simulated.working_in(None):
            call(simulated, memory)
    assert not simulated.here.is_relaxed


def test_streams_that_wait_for_each_other_are_reported(simulated):
    one, other = simulated.streams.all[:2]
    never = other.record()
    other.entries.clear()
    one.wait(never)
    with pytest.raises(RuntimeError, match="every stream waits"):
        one.synchronize()


def orders(hurry):
    """In which order two streams did three things each, by seed, and what was done before anybody waited."""
    for seed in range(30):
        streams, ran = SimulatedStreams(rng=random.Random(seed), hurry=hurry), []
        both = streams.all[:2]
        for at in range(3):
            for stream in both:
                stream.put(partial(ran.append, (stream.name, at)))
        early = list(ran)
        for stream in both:
            stream.synchronize()
        yield ran, early


@pytest.mark.parametrize("hurry", [0.0, 0.5])
def test_streams_run_in_any_order_and_each_in_its_own(hurry):
    seen = {tuple(ran) for ran, _ in orders(hurry)}
    assert len(seen) > 10  # of 20
    for ran in seen:
        assert [at for who, at in ran if who == "pack"] == [at for who, at in ran if who == "compute"] == [0, 1, 2]


def test_they_run_late_unless_they_are_in_a_hurry():
    assert not any(early for _, early in orders(hurry=0.0))
    counts = {len(early) for _, early in orders(hurry=0.5)}
    assert len(counts) > 2
