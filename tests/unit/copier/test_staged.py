"""The staging ring: when a slot may be used again, the waits of a copy, and the slices in which it goes."""

import gc
import random
from contextlib import nullcontext
from itertools import chain, count
from threading import Semaphore
from unittest.mock import Mock

import pytest
import torch

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.copier import paths, ring, staged, triton_staging
from cpu_prefix_cache.copier.binding import Binding
from cpu_prefix_cache.copier.link import HostRegion
from cpu_prefix_cache.copier.loads_first import LoadsFirst
from cpu_prefix_cache.copier.reference import ReferenceCopier
from cpu_prefix_cache.copier.staged import StagedCopier
from cpu_prefix_cache.copier.worker import CopyWorker
from cpu_prefix_cache.deciding import Direction, GroupCopy, StepPlan, TransferPlan
from cpu_prefix_cache.memory import span_tables
from tests.support.simulated_driver import SLICE, SimulatedDriver, pinned_arena
from tests.support.simulated_streams import SimulatedStreams
from tests.support.threads import eventually
from tests.unit.copier.bench import POISON, poisoned, randoms, shapes_of
from tests.unit.copier.simulated import simulated_copier

BLOCKS = 24


class Bench:
    """One group of two parts, 1 KiB a block together, one device block to a piece, and rings of two slots each."""

    def __init__(self, streams, **options):
        self.parts = [randoms(BLOCKS, 1000), randoms(BLOCKS, 24, seed=1)]
        self.before = [part.clone() for part in self.parts]
        self.shapes = shapes_of([self.parts], [1], 1024)
        self.host = poisoned(BLOCKS, 1024)
        self.streams, driver = streams, SimulatedDriver(streams)
        ring_bytes = 2 * ring.SLOTS * 1024
        self.copier = simulated_copier(driver, self.shapes, [self.parts], self.host, ring_bytes=ring_bytes, **options)

    def copy(self, direction, host_blocks, device_blocks):
        self.copier.copy(direction, [GroupCopy(0, tuple(host_blocks), tuple(device_blocks))])


# The rule of reuse


EAGER = [("pack", "in"), ("out", "unpack")]  # as far ahead as it may, and the other step as late as it may


@pytest.mark.parametrize("eager", EAGER)
def test_a_slot_is_used_again_only_when_its_slice_has_left_it(eager):
    bench = Bench(SimulatedStreams(eager))
    ids = list(range(BLOCKS))
    bench.copy(Direction.STORE, ids, reversed(ids))
    for at, (part, begin) in enumerate(zip(bench.parts, (0, 1000), strict=True)):
        assert torch.equal(bench.host[:, begin : begin + part.shape[1]], bench.before[at].flip(0))
        part.fill_(POISON)
    bench.copy(Direction.LOAD, reversed(ids), ids)
    assert all(torch.equal(part, was) for part, was in zip(bench.parts, bench.before, strict=True))


def test_while_one_slot_crosses_the_next_is_packed():
    bench = Bench(SimulatedStreams(("pack", "out")))
    bench.streams.ran.clear()
    bench.copy(Direction.STORE, range(4), range(4))
    packed = ["pack"] * 2  # the slice's ids, and the slice
    assert bench.streams.ran == [*packed, *packed, "out", *packed, "out", *packed, "out", "out"]


# Waits of a copy


def test_a_store_copies_the_bytes_that_compute_wrote_before_it():  # L5.16
    bench = Bench(SimulatedStreams(("pack", "in", "out", "unpack")))  # compute last, unless it is waited for
    bench.streams.compute.submit(lambda _: bench.parts[0].fill_(7))
    bench.copy(Direction.STORE, range(4), range(4))
    assert (bench.host[:4, :1000] == 7).all()


def test_a_load_comes_after_the_last_reader_and_after_zeroing():
    bench = Bench(SimulatedStreams(("pack", "in", "out", "unpack")))
    bench.copy(Direction.STORE, range(4), range(4))
    read = []
    bench.streams.compute.submit(lambda _: read.append(bench.parts[0][8:12].clone()))
    bench.streams.compute.submit(lambda _: bench.parts[0].zero_())
    bench.copy(Direction.LOAD, range(4), range(8, 12))
    bench.streams.compute.synchronize()
    assert torch.equal(read[0], bench.before[0][8:12])
    assert torch.equal(bench.parts[0][8:12], bench.before[0][:4])


def test_blocks_that_cross_as_they_are_wait_for_compute_too():
    streams = SimulatedStreams(("pack", "in", "out", "unpack"))
    part, host = randoms(6, 64), poisoned(6, 64)
    shapes = shapes_of([[part]], [1], 64)
    copier = simulated_copier(SimulatedDriver(streams), shapes, [[part]], host, direct_bytes=60)
    streams.compute.submit(lambda _: part.fill_(7))
    copier.copy(Direction.STORE, [GroupCopy(0, (1, 2), (1, 2))])
    assert (host[1:3] == 7).all()
    streams.compute.submit(lambda _: part.zero_())
    copier.copy(Direction.LOAD, [GroupCopy(0, (1, 2), (4, 5))])
    streams.compute.synchronize()
    assert (part[4:] == 7).all() and (part[:4] == 0).all()


@pytest.mark.parametrize("seed", range(4))
def test_compute_that_a_store_holds_waits_for_its_reads_and_not_for_the_link(seed):
    """The reads of both slots, whichever comes first."""
    bench = Bench(SimulatedStreams(("compute", "pack"), random.Random(seed)))
    event = bench.copier.submit(Direction.STORE, [GroupCopy(0, (0, 1), (3, 4))], bench.copier.here())
    bench.copier.hold_compute(event.reads)
    bench.streams.compute.submit(lambda _: bench.parts[0].fill_(7))
    bench.streams.compute.synchronize()
    assert not event.passed()
    event.until_passed()
    assert torch.equal(bench.host[:2, :1000], bench.before[0][3:5])


def test_compute_that_a_direct_store_holds_waits_for_the_link():
    streams = SimulatedStreams(("pack", "compute"))
    part, host = randoms(6, 64), poisoned(6, 64)
    copier = simulated_copier(SimulatedDriver(streams), shapes_of([[part]], [1], 64), [[part]], host, direct_bytes=60)
    before = part.clone()
    event = copier.submit(Direction.STORE, [GroupCopy(0, (1, 2), (1, 2))], copier.here())
    copier.hold_compute(event.reads)
    streams.compute.submit(lambda _: part.fill_(7))
    streams.compute.synchronize()
    assert torch.equal(host[1:3], before[1:3])


def test_submit_does_not_wait_for_the_end_and_its_event_is_passed_then():
    bench = Bench(SimulatedStreams(("pack", "in")))
    copies = [GroupCopy(0, (0, 1), (3, 2))]
    event = bench.copier.submit(Direction.STORE, copies, bench.copier.here())
    assert not event.passed() and (bench.host == POISON).all()
    event.until_passed()
    assert event.passed()
    assert torch.equal(bench.host[:2, :1000], bench.before[0][2:4].flip(0))


def test_stores_and_loads_do_not_wait_for_each_other():
    bench = Bench(SimulatedStreams(("in", "unpack")))
    bench.copy(Direction.STORE, range(4), range(4))
    store = bench.copier.submit(Direction.STORE, [GroupCopy(0, (8, 9), (8, 9))], bench.copier.here())
    bench.copy(Direction.LOAD, range(4), range(12, 16))
    assert torch.equal(bench.parts[0][12:16], bench.before[0][:4])
    assert not store.passed()
    store.until_passed()


def check_round_trip(bench, ids):
    bench.copy(Direction.STORE, ids, ids)
    for part in bench.parts:
        part.fill_(POISON)
    bench.copy(Direction.LOAD, ids, ids)
    assert all(torch.equal(part[ids], was[ids]) for part, was in zip(bench.parts, bench.before, strict=True))


def under_way(bench):
    return any(stream.entries for stream in bench.streams.all if stream is not bench.streams.compute)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("what", ["kernel", "link"])
def test_nothing_is_under_way_when_submit_raises_and_the_next_copy_works(
    monkeypatch, direction, at, what
):  # S7.45, L5.34
    bench = Bench(SimulatedStreams(("pack", "in")))
    ids = list(range(8))  # four slices through each slot, of which the first or the second fails
    bench.copy(Direction.STORE, ids, ids)
    stream = bench.streams.all[{"kernel": (1, 4), "link": (2, 3)}[what][direction is Direction.LOAD]]
    submitted, right = [], stream.submit

    def failing(work):
        submitted.append(work)
        if len(submitted) == at + 1:
            raise RuntimeError("out of resources")
        right(work)

    monkeypatch.setattr(stream, "submit", failing)
    with pytest.raises(RuntimeError, match="out of resources"):
        bench.copy(direction, ids, ids)
    assert not under_way(bench)
    for part in (*bench.parts, bench.host):
        part.fill_(POISON)
    for part, was in zip(bench.parts, bench.before, strict=True):
        part.copy_(was)
    check_round_trip(bench, ids)


@pytest.mark.parametrize("direction", Direction)
def test_a_copier_that_is_dropped_keeps_its_slots_until_what_uses_them_has_run(direction):
    bench = Bench(SimulatedStreams(("pack", "in")))
    bench.copier.submit(direction, [GroupCopy(0, (0, 1), (3, 2))], bench.copier.here())
    assert under_way(bench)
    del bench.copier
    gc.collect()
    assert not under_way(bench)


@pytest.mark.parametrize("direction", Direction)
def test_direct_copies_that_fail_leave_nothing_behind(monkeypatch, direction):  # S7.45
    bench = Bench(SimulatedStreams(), direct_bytes=1)
    ids, link = list(range(BLOCKS)), bench.streams.all[3 if direction is Direction.LOAD else 2]
    bench.copy(Direction.STORE, ids, ids)
    with monkeypatch.context() as patched:
        patched.setattr(link, "submit", Mock(side_effect=RuntimeError("out of resources")))
        for _ in range(5):
            with pytest.raises(RuntimeError, match="out of resources"):
                bench.copy(direction, ids, ids)
            assert not under_way(bench)
    bench.host.fill_(POISON)
    check_round_trip(bench, ids)


@pytest.mark.parametrize("direct", [False, True])
def test_a_store_pauses_before_each_slice_for_loads(monkeypatch, direct):
    said = []
    monkeypatch.setattr(LoadsFirst, "pause", lambda loads: said.append("pauses"))
    monkeypatch.setattr(LoadsFirst, "loading", lambda loads: said.append("loads") or nullcontext())
    bench = Bench(SimulatedStreams(), loads_first=True, direct_bytes=1 if direct else 1 << 20)
    bench.copy(Direction.STORE, [0, 1, 2], [0, 1, 2])
    assert said == ["pauses"] * (1 if direct else 3)  # one slice, or one for each block
    said.clear()
    bench.copy(Direction.LOAD, [0, 1, 2], [0, 1, 2])
    assert said == ["loads"]
    said.clear()
    monkeypatch.setattr(LoadsFirst, "awaiting", lambda loads: said.append("waits") or nullcontext())
    with bench.copier.awaiting_stores():
        assert said == ["waits"]


def test_no_stream_is_made_to_wait_for_a_slot():
    """A wait at the head of a stream may hold up other streams."""
    bench = Bench(SimulatedStreams(("pack", "out")))
    kernels = bench.streams.streams.stores.kernels
    ids = tuple(range(12))
    bench.copier.submit(Direction.STORE, [GroupCopy(0, ids, ids)], bench.copier.here()).until_passed()
    assert {waited for stream in kernels for waited in stream.waited_for} == {bench.streams.compute}


LINKS = [(Direction.STORE, "out", "pack"), (Direction.LOAD, "in", "unpack")]


@pytest.mark.parametrize(("direction", "link", "kernels"), LINKS)
def test_as_many_slices_are_under_way_as_a_ring_has_slots(direction, link, kernels):
    """Copies of others to the host wait for all that a store has submitted."""
    streams, ids = SimulatedStreams((kernels,)), tuple(range(BLOCKS))  # nothing crosses before the host waits for it
    bench = Bench(streams)
    event = bench.copier.submit(direction, [GroupCopy(0, ids, ids)], bench.copier.here())
    assert streams.ran.count(link) == BLOCKS - ring.SLOTS
    event.until_passed()
    assert streams.ran.count(link) == BLOCKS


@pytest.mark.parametrize(("most", "left"), [(2000, 1 + BLOCKS), (1000, BLOCKS), (100, 4), (1, 1)])
@pytest.mark.parametrize(("direction", "link", "kernels"), LINKS)
def test_past_the_ring_so_many_bytes_are_under_way(monkeypatch, direction, link, kernels, most, left):
    """A slice for each block: of the part of 1,000 bytes, then of that of 24. One that is too large goes alone."""
    monkeypatch.setattr(paths, "SMALLEST_SLICE_BYTES", 1)
    monkeypatch.setattr(paths, "DIRECT_SLICE_BYTES", 1)
    monkeypatch.setattr(ring, "PAST_BYTES", most)
    streams, ids = SimulatedStreams((kernels,)), tuple(range(BLOCKS))
    bench = Bench(streams, direct_bytes=1)
    event = bench.copier.submit(direction, [GroupCopy(0, ids, ids)], bench.copier.here())
    assert streams.ran.count(link) == 2 * BLOCKS - left
    event.until_passed()
    assert streams.ran.count(link) == 2 * BLOCKS


@pytest.mark.parametrize("eager", EAGER)
def test_a_slice_has_no_more_blocks_than_a_slot_has_ids(monkeypatch, eager):
    monkeypatch.setattr(staged, "SLOT_IDS", 4)
    monkeypatch.setattr(paths, "SLOT_IDS", 4)
    parts = [randoms(60, 8)]
    shapes, rng = shapes_of([parts], [2], 8), random.Random(3)
    host, expected = poisoned(70, 8), poisoned(70, 8)
    streams = SimulatedStreams(eager)
    copier = simulated_copier(SimulatedDriver(streams), shapes, [parts], host, ring_bytes=2048)
    copies = [GroupCopy(0, tuple(rng.sample(range(70), 60)), tuple(rng.sample(range(60), 60)))]
    copier.submit(Direction.STORE, copies, copier.here()).until_passed()
    assert streams.ran.count("out") == 15  # of two pieces each, where a slot has room for 64
    ReferenceCopier(shapes, [parts], expected).copy(Direction.STORE, copies)
    assert torch.equal(host, expected)
    before = parts[0].clone()
    parts[0].fill_(POISON)
    copier.submit(Direction.LOAD, copies, copier.here()).until_passed()
    assert torch.equal(parts[0], before)


@pytest.mark.parametrize("eager", EAGER)
def test_transfers_submitted_one_behind_another_do_not_mix(eager):
    bench = Bench(SimulatedStreams(eager))
    order = random.Random(5).sample(range(BLOCKS), BLOCKS)
    events = [
        bench.copier.submit(Direction.STORE, [GroupCopy(0, (here,), (there,))], bench.copier.here())
        for here, there in enumerate(order)
    ]
    events[-1].until_passed()
    assert all(event.passed() for event in events)
    assert torch.equal(bench.host[:, :1000], bench.before[0][order])


@pytest.mark.parametrize("seed", range(4))
def test_two_threads_copy_while_the_region_is_being_pinned(seed):
    """Into blocks that are ready, in any order of the streams, with and without batches, in threads of their own."""
    num_blocks = 3 * SLICE // 1024
    part = randoms(num_blocks, 1024)
    before = part.clone()
    driver = SimulatedDriver(SimulatedStreams(rng=random.Random(seed), hurry=seed / 4), has_batches=seed % 2 == 0)
    arena, shapes = pinned_arena(driver, num_blocks, 1024), shapes_of([[part]], [1], 1024)
    options = dict(pinned=arena, seam_bytes=SLICE, ring_bytes=SLICE)
    copier = simulated_copier(driver, shapes, [[part]], arena.blocks, **options)
    driver.gate = Semaphore(0)
    worker = CopyWorker(0, copier, arena, threads=True)
    ids = count()
    stored = 0

    def copies(direction, blocks):
        transfer = TransferPlan(next(ids), direction, (GroupCopy(0, tuple(blocks), tuple(blocks)),), 1)
        worker.run(StepPlan(0, (transfer,)))
        return transfer.id

    worker.run(StepPlan(0, ()))
    while stored < num_blocks:
        driver.gate.release()
        assert eventually(lambda first=stored: worker.report().ready_blocks > first)
        ready = worker.report().ready_blocks
        begun = [copies(Direction.STORE, range(stored, ready))]
        if stored:  # what was stored before, meanwhile
            part[:stored] = POISON
            begun.append(copies(Direction.LOAD, range(stored)))
        worker.drain()
        assert worker.report().done >= set(begun)
        assert torch.equal(part, before)
        stored = ready
    arena.blocks[5, 7] ^= 1  # the control
    copies(Direction.LOAD, range(num_blocks))
    worker.close()
    assert not torch.equal(part, before)
    assert not driver.registered


# Slices


def test_a_slot_may_fit_one_host_block_of_several():
    raw = randoms(9, 257)
    parts = [raw[:, :128], raw[:, 128:256], raw[:, 256:]]
    shapes, copies = shapes_of([parts], [2], 512), [GroupCopy(0, (6, 3, 5, 0), (4, 7, 3, 2))]
    host, expected = poisoned(7, 512), poisoned(7, 512)
    StagedCopier(Binding(shapes, [parts], host), ring_bytes=2048).copy(Direction.STORE, copies)
    ReferenceCopier(shapes, [parts], expected).copy(Direction.STORE, copies)
    assert torch.equal(host, expected)


def test_a_ring_too_small_for_a_part_is_refused_with_a_size_that_works():
    parts = [randoms(5, 700)]
    with pytest.raises(ConfigurationError, match="ring_bytes=4096 works"):
        StagedCopier(Binding(shapes_of([parts], [1], 700), [parts], poisoned(5, 700)), ring_bytes=4095)
    StagedCopier(Binding(shapes_of([parts], [1], 700), [parts], poisoned(5, 700)), ring_bytes=4096)


@pytest.mark.parametrize("seam", [64, 100, 1000, 1024, 5000])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("size", [600, 1200])
def test_no_copy_crosses_a_seam_of_the_host_region(monkeypatch, seam, direct, size):
    """Pieces of one host block that cross directly have a table of spans."""
    monkeypatch.setattr(paths, "FEWEST_IN_TABLE", 1)
    seen = []

    cross = HostRegion.cross
    monkeypatch.setattr(HostRegion, "cross", lambda region, *what: seen.append(what[1]) or cross(region, *what))
    parts = [randoms(9, 300), randoms(9, 200, seed=1)]
    shapes = shapes_of([parts], [2], size)
    host, expected = poisoned(30, size), poisoned(30, size)
    options = dict(ring_bytes=1 << 14, seam_bytes=seam, direct_bytes=1 if direct else 10_000)
    copier = simulated_copier(SimulatedDriver(), shapes, [parts], host, **options)
    host_blocks = (4, 5, 6, 7, 20, 3, 21, 22)[: 4800 // size]
    copies = [GroupCopy(0, host_blocks, (8, 0, 1, 2, 5, 4, 3, 7))]
    copier.copy(Direction.STORE, copies)
    ReferenceCopier(shapes, [parts], expected).copy(Direction.STORE, copies)
    assert torch.equal(host, expected)
    before = [part.clone() for part in parts]
    for part in parts:
        part[[8, 0, 1, 2, 5, 4, 3, 7]] = POISON
    copier.copy(Direction.LOAD, copies)
    assert all(torch.equal(part, was) for part, was in zip(parts, before, strict=True))
    for _, here, size in chain.from_iterable(moves.listed() for moves in seen):
        first = here - host.data_ptr()
        assert size > 0 and first // seam == (first + size - 1) // seam


def test_large_blocks_of_one_part_are_not_staged(monkeypatch):
    part = randoms(6, 1024, 1024)
    assert part[0].numel() >= staged.DIRECT_BYTES
    host = poisoned(8, part[0].numel() // 2)
    shapes = shapes_of([[part]], [2], host.shape[1])
    copier = StagedCopier(Binding(shapes, [[part]], host), ring_bytes=0)
    monkeypatch.setattr(triton_staging.Launcher, "launch", None)  # what only staging needs
    copier.copy(Direction.STORE, [GroupCopy(0, (7, 3, 1, 2), (4, 1))])
    assert torch.equal(host[[7, 3, 1, 2]].view(2, -1), part[[4, 1]].view(2, -1))
    assert (host[[0, 4, 5, 6]] == POISON).all()
    part.fill_(POISON)
    copier.copy(Direction.LOAD, [GroupCopy(0, (7, 3, 1, 2), (0, 5))])
    assert torch.equal(part[[0, 5]].view(2, -1), host[[7, 3, 1, 2]].view(2, -1))
    assert (part[1:5] == POISON).all()


def test_layers_that_lie_together_in_every_block_are_not_staged():
    raw = randoms(6, 80)
    layers = [raw[:, at : at + 20] for at in (0, 20, 40)]
    copier = StagedCopier(
        Binding(shapes_of([layers], [1], 60), [layers], host := poisoned(6, 60)), ring_bytes=0, direct_bytes=60
    )
    copier.copy(Direction.STORE, [GroupCopy(0, (3, 1), (0, 5))])
    assert torch.equal(host[[3, 1]], raw[[0, 5], :60])


def test_layers_of_several_blocks_to_a_piece_do_not_lie_as_the_host_has_them():
    raw = randoms(6, 80)
    layers = [raw[:, at : at + 20] for at in (0, 20, 40)]
    shapes, host = shapes_of([layers], [2], 60), poisoned(6, 60)
    copier = StagedCopier(Binding(shapes, [layers], host), ring_bytes=4096, direct_bytes=60)
    copier.copy(Direction.STORE, [GroupCopy(0, (3, 1), (0, 5))])
    assert torch.equal(host[[3, 1]].flatten(), torch.cat([layer[[0, 5]].flatten() for layer in layers]))


def test_several_parts_are_not_staged_when_all_are_large():
    parts = [randoms(6, 60), randoms(6, 70, seed=1)]
    host = poisoned(12, 100)
    copier = StagedCopier(Binding(shapes_of([parts], [2], 100), [parts], host), ring_bytes=0, direct_bytes=60)
    copies = [GroupCopy(0, (7, 3, 0, 1, 11, 9), (0, 5, 2, 1))]
    copier.copy(Direction.STORE, copies)
    expected = poisoned(12, 100)
    ReferenceCopier(shapes_of([parts], [2], 100), [parts], expected).copy(Direction.STORE, copies)
    assert torch.equal(host, expected)
    before = [part.clone() for part in parts]
    for part in parts:
        part.fill_(POISON)
    copier.copy(Direction.LOAD, copies)
    for part, was in zip(parts, before, strict=True):
        assert torch.equal(part[[0, 5, 2, 1]], was[[0, 5, 2, 1]])
        assert (part[[3, 4]] == POISON).all()
    with pytest.raises(ConfigurationError, match="too small for a part of 140 bytes"):
        StagedCopier(Binding(shapes_of([parts], [2], 100), [parts], host), ring_bytes=0, direct_bytes=61)


@pytest.mark.parametrize(("most", "moves"), [(1024, [16] * 3), (512, [8] * 6), (256, [4] * 12)])
def test_a_slice_has_all_layers_of_a_block_unless_they_are_too_many_bytes(monkeypatch, most, moves):
    """Six blocks of eight layers, 512 bytes a block."""
    monkeypatch.setattr(paths, "DIRECT_SLICE_BYTES", most)
    layers, host, expected = [randoms(6, 64, seed=at) for at in range(8)], poisoned(9, 512), poisoned(9, 512)
    shapes, driver = shapes_of([layers], [1], 512), SimulatedDriver(SimulatedStreams())
    copier = simulated_copier(driver, shapes, [layers], host, direct_bytes=64)
    copies = [GroupCopy(0, (7, 3, 8, 0, 1, 5), (0, 5, 2, 1, 4, 3))]
    copier.copy(Direction.STORE, copies)
    ReferenceCopier(shapes, [layers], expected).copy(Direction.STORE, copies)
    assert torch.equal(host, expected)
    before = [layer.clone() for layer in layers]
    for layer in layers:
        layer.fill_(POISON)
    copier.copy(Direction.LOAD, copies)
    assert all(torch.equal(layer, was) for layer, was in zip(layers, before, strict=True))
    assert [count for count, _ in driver.asked] == 2 * moves


@pytest.mark.parametrize("seam", [1 << 20, 450, 599])  # 599 cuts a byte off
@pytest.mark.parametrize("spans", [1, 7, 12, 1000])
def test_slices_are_parts_of_tables(monkeypatch, spans, seam):
    """Slices of two pieces with three spans each; a table has so many spans, those of whole slices."""
    monkeypatch.setattr(paths, "FEWEST_IN_TABLE", 1)
    monkeypatch.setattr(span_tables, "TABLE_SPANS", spans)
    for name, most in (("SMALLEST_SLICE_BYTES", 1), ("FIRST_SLICE_BYTES", 600), ("DIRECT_SLICE_BYTES", 1200)):
        monkeypatch.setattr(paths, name, most)
    parts = [randoms(12, size, seed=size) for size in (300, 200, 100)]
    shapes, host, expected = shapes_of([parts], [1], 700), poisoned(13, 700), poisoned(13, 700)
    copier = simulated_copier(SimulatedDriver(), shapes, [parts], host, seam_bytes=seam, direct_bytes=1)
    copies = [GroupCopy(0, (3, 12, 0, 7, 1, 8, 11, 2, 5), (5, 0, 11, 2, 1, 7, 6, 10, 3))]
    copier.copy(Direction.STORE, copies)
    ReferenceCopier(shapes, [parts], expected).copy(Direction.STORE, copies)
    assert torch.equal(host, expected)
    before = [part.clone() for part in parts]
    for part in parts:
        part[list(copies[0].device_blocks)] = POISON
    copier.copy(Direction.LOAD, copies)
    assert all(map(torch.equal, parts, before))


@pytest.mark.parametrize(
    ("blocks", "moves"), [((1, 1, 1), [12]), ((1, 3, 1), [12, 8]), ((2, 3, 1), [8] * 3), ((3, 1, 0), [8, 8])]
)
def test_a_slice_has_blocks_of_several_groups_if_they_are_few(monkeypatch, blocks, moves):
    """Groups of four layers, 256 bytes a block; a slice has at most 768, and a group at most 512 of it."""
    monkeypatch.setattr(paths, "DIRECT_SLICE_BYTES", 768)
    monkeypatch.setattr(paths, "FIRST_SLICE_BYTES", 512)
    monkeypatch.setattr(paths, "SMALLEST_SLICE_BYTES", 512)
    groups = [[randoms(6, 64, seed=4 * group + at) for at in range(4)] for group in range(3)]
    host, expected = poisoned(9, 256), poisoned(9, 256)
    shapes, driver = shapes_of(groups, [1, 1, 1], 256), SimulatedDriver(SimulatedStreams(("pack", "in")))
    copier = simulated_copier(driver, shapes, groups, host, direct_bytes=64)
    free = iter((7, 3, 8, 0, 1, 5))
    there = [tuple(range(5, 5 - few, -1)) for few in blocks]
    copies = [GroupCopy(at, tuple(next(free) for _ in each), each) for at, each in enumerate(there)]
    copier.copy(Direction.STORE, copies)
    ReferenceCopier(shapes, groups, expected).copy(Direction.STORE, copies)
    assert torch.equal(host, expected)
    before = [[rows.clone() for rows in group] for group in groups]
    for rows in chain(*groups):
        rows.fill_(POISON)
    copier.copy(Direction.LOAD, copies)
    for group, was, loaded in zip(groups, before, there, strict=True):
        for block in range(6):
            expect = [rows[block] if block in loaded else torch.full_like(rows[block], POISON) for rows in was]
            assert torch.equal(torch.stack([rows[block] for rows in group]), torch.stack(expect))
    assert [count for count, _ in driver.asked] == 2 * moves


def test_a_ring_need_not_hold_what_lies_together_only_part_by_part():
    raw = randoms(4, 5000)
    parts = [raw[:, at : at + 500] for at in range(0, 4500, 500)]
    others = [randoms(4, 24, seed=1)]
    host = poisoned(4, 4524)
    copier = StagedCopier(Binding(shapes_of([parts + others], [1], 4524), [parts + others], host), ring_bytes=2048)
    copier.copy(Direction.STORE, [GroupCopy(0, (3, 0), (1, 2))])
    assert torch.equal(host[[3, 0], :4500], raw[[1, 2], :4500])


# Addresses


@pytest.mark.parametrize(
    ("size", "first", "stride", "word"),
    [(48, 0, 64, 16), (48, 8, 64, 8), (24, 0, 64, 8), (48, 0, 56, 8), (20, 0, 64, 4), (6, 0, 64, 2), (48, 1, 64, 1)],
)
def test_words_are_as_wide_as_everything_about_a_part_is_aligned(size, first, stride, word):
    memory = torch.empty(1024, dtype=torch.uint8)
    assert memory.data_ptr() % 16 == 0
    part = memory.as_strided((4, size), (stride, 1), first)
    (launcher,) = triton_staging.launchers([part], [0], device_blocks=1)
    assert launcher.alignment == word
    (launcher,) = triton_staging.launchers([part], [2], device_blocks=1)
    assert launcher.alignment == min(word, 2)  # where it lies in a slot counts too


def test_every_fragment_in_a_slot_is_as_aligned_as_its_words_are(monkeypatch):
    """The interpreter forgives an address that is not; a GPU does not."""
    seen = []
    monkeypatch.setattr(
        triton_staging.Launcher,
        "launch",
        lambda launcher, direction, pitch, slot, *_: seen.append((launcher, pitch, slot)),
    )
    parts = [randoms(4, 32), randoms(4, 6, seed=1), randoms(4, 16, seed=2)]
    copier = StagedCopier(Binding(shapes_of([parts], [2], 128), [parts], poisoned(4, 128)), ring_bytes=4 * 1024)
    seen.clear()
    copier.copy(Direction.STORE, [GroupCopy(0, (0, 1), (0, 1, 2, 3))])
    assert sorted(launcher.alignment for launcher, *_ in seen) == [2, 4, 16]
    for launcher, pitch, slot in seen:
        lengths, offsets = launcher.table[2:]
        for number in (slot.data_ptr(), pitch, *lengths.tolist(), *offsets.tolist()):
            assert number % launcher.alignment == 0


# Where it runs


def test_a_staged_copier_names_its_requirements(monkeypatch):
    part = randoms(4, 64)
    shapes = shapes_of([[part]], [1], 64)
    with pytest.raises(ConfigurationError, match="contiguous"):
        StagedCopier(Binding(shapes, [[part]], poisoned(4, 128)[:, :64]))
    with pytest.raises(ConfigurationError, match="reference copier takes any"):
        StagedCopier(Binding(shapes, [[part.to("meta")]], poisoned(4, 64)))
    monkeypatch.setattr(triton_staging, "INTERPRETED", False)
    with pytest.raises(ConfigurationError, match="TRITON_INTERPRET=1"):
        StagedCopier(Binding(shapes, [[part]], poisoned(4, 64)))
