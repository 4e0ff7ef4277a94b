"""Coded groups: every copier keeps the same bytes, all bits come back, and what does not fit is reported."""

import weakref

import pytest
import torch

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.copier import coded_form, exchange, staged
from cpu_prefix_cache.copier.choose import choose_copier
from cpu_prefix_cache.copier.events import Stored
from cpu_prefix_cache.copier.worker import CopyWorker
from cpu_prefix_cache.deciding import Direction, GroupCopy, Piece, PrefixGroup, StepPlan, TransferPlan
from tests.support.simulated_driver import SimulatedDriver
from tests.unit.copier.bench import DEVICE, POISON, Shapes, poisoned, raw
from tests.unit.copier.simulated import simulated_copier

RING = 2 << 20
BLOCKS = 6


@pytest.fixture(params=["reference", "staged", "staged, with a driver"])
def build(request):
    if request.param == "staged, with a driver" and DEVICE.type != "cpu":
        pytest.skip(f"the tensors are on {DEVICE}, which has a driver")

    def build(shapes, tensors, host):
        if request.param == "staged, with a driver":
            return simulated_copier(SimulatedDriver(has_batches=True), shapes, tensors, host, ring_bytes=RING)
        return choose_copier(shapes, tensors, host, name=request.param, ring_bytes=RING).copier

    return build


def normal(values, seed=0):
    return torch.randn(BLOCKS, values, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def any_bits(seed=0):
    drawn = torch.randint(-32768, 32768, (BLOCKS, 512), generator=torch.Generator().manual_seed(seed))
    return drawn.to(torch.int16).view(torch.bfloat16).to(DEVICE)


class Bench:
    """`tensors`, [blocks, values], coded in pieces of `device_blocks` blocks; and a raw group beside them."""

    def __init__(self, build, tensors, device_blocks=1):
        size = sum(each[0].nbytes for each in tensors)
        coded = PrefixGroup(name="coded", block_tokens=1, block_bytes=size, codec="exponent")
        plain = PrefixGroup(name="plain", block_tokens=1, block_bytes=100)
        self.num_bytes = device_blocks * coded.kept_bytes
        self.tensors, self.raw = tensors, torch.full((BLOCKS, 100), 7, dtype=torch.uint8, device=DEVICE)
        pieces = [Piece(coded, device_blocks, 2, self.num_bytes), Piece(plain, 1, 1, 100)]
        self.host = poisoned(2 * BLOCKS, self.num_bytes // 2 + 16)
        self.copier = build(Shapes(pieces, self.host.shape[1]), [tensors, [self.raw]], self.host)

    def store(self, host_blocks, device_blocks):
        return self.copier.copy(Direction.STORE, [GroupCopy(0, host_blocks, device_blocks), GroupCopy(1, (11,), (2,))])

    def load(self, host_blocks, device_blocks):
        self.copier.copy(Direction.LOAD, [GroupCopy(0, host_blocks, device_blocks)])

    def piece(self, first, second):
        return torch.cat([self.host[first], self.host[second]])[: self.num_bytes]


@pytest.mark.parametrize(
    ("device_blocks", "values"),
    [(1, [512]), (1, [8192, 1536]), (2, [512, 8704, 512])],  # a unit of the coded form has 8192: less, as many, more
)
def test_a_piece_lies_coded_part_after_part_and_all_bits_come_back(build, values, device_blocks):
    bench = Bench(build, [normal(count, seed) for seed, count in enumerate(values)], device_blocks)
    before = [raw(each).clone() for each in bench.tensors]
    taken, landed = ((4, 1), (0, 5)) if device_blocks == 1 else ((4, 1, 0, 2), (3, 2, 5, 4))
    event = bench.store((5, 2, 9, 0), taken)
    assert event.unfit() == [] and event.passed()
    parts = [coded_form.encode(each[list(taken[:device_blocks])].cpu())[0].flatten() for each in before]
    assert torch.equal(bench.piece(5, 2), torch.cat(parts))
    assert (bench.host[11, :100] == 7).all() and (bench.host[[1, 3, 4, 6, 7, 8, 10]] == POISON).all()

    for each in bench.tensors:
        raw(each).fill_(POISON)
    bench.load((5, 2, 9, 0), landed)
    untouched = sorted({*range(BLOCKS)} - {*landed})
    for each, was in zip(bench.tensors, before, strict=True):
        assert torch.equal(raw(each)[list(landed)], was[list(taken)])
        assert (raw(each)[untouched] == POISON).all()


def test_a_damaged_byte_shows(build):
    """The control: a load of other bytes brings other bits."""
    bench = Bench(build, [normal(512)])
    before = raw(bench.tensors[0]).clone()
    bench.store((5, 2), (4,))
    bench.host[5, 10] ^= 1
    bench.load((5, 2), (0,))
    assert not torch.equal(raw(bench.tensors[0])[0], before[4])


def test_pieces_that_do_not_fit_are_reported_by_their_first_host_block(build):
    """Others of the same store come back whole."""
    tensors = [normal(512), normal(512, 1)]
    tensors[1][3] = any_bits()[3]
    before = [raw(each).clone() for each in tensors]
    bench = Bench(build, tensors)
    event = bench.store((5, 2, 9, 0, 1, 3), (1, 3, 0))
    assert event.unfit() == [9]
    bench.load((5, 2, 1, 3), (4, 5))
    for each, was in zip(tensors, before, strict=True):
        assert torch.equal(raw(each)[[4, 5]], was[[1, 0]])


@pytest.mark.parametrize("threads", [False, True])
def test_the_worker_reports_them_with_their_store(build, threads):
    bench = Bench(build, [any_bits()])
    worker = CopyWorker(3, bench.copier, threads=threads)
    copies = [(GroupCopy(0, (5, 2), (4,)),), (GroupCopy(1, (11,), (1,)),)]
    stores = tuple(TransferPlan(at, Direction.STORE, each, 1) for at, each in enumerate(copies))
    held = TransferPlan(2, Direction.STORE, (GroupCopy(0, (8, 7), (0,)),), 1, holds_compute=True)
    worker.run(StepPlan(0, (*stores, held)))
    worker.drain()
    report = worker.report()
    assert report.done == {0, 1, 2} and dict(report.unfit) == {0: (5,), 2: (8,)}
    worker.run(StepPlan(0, (), resolved_below=3))
    assert worker.report().unfit == ()
    worker.close()


def test_parts_of_other_sizes_are_refused(build):
    with pytest.raises(ConfigurationError, match=r"whole units of 1024 bytes, got 512; take blocks of more tokens"):
        Bench(build, [normal(256), normal(256)])


def test_a_piece_fits_if_all_its_blocks_do(build):
    tensors = [normal(512)]
    tensors[0][3] = any_bits()[3]
    bench = Bench(build, tensors, device_blocks=2)
    assert bench.store((5, 2, 9, 0), (1, 3, 0, 4)).unfit() == [5]


def test_a_store_in_portions_reports_them_too(build, monkeypatch):
    """A load overwrites what two stores save."""
    monkeypatch.setattr(exchange, "PORTION_BYTES", 1)
    bench = Bench(build, [any_bits()])
    worker = CopyWorker(3, bench.copier)
    pieces = GroupCopy(0, (0, 1, 2, 3), (0, 1))
    store = TransferPlan(0, Direction.STORE, (pieces,), 2)
    load = TransferPlan(1, Direction.LOAD, (GroupCopy(0, (4, 5, 6, 7), (0, 1)),), 2, after=(0,))
    worker.run(StepPlan(0, (store, load)))
    worker.drain()
    report = worker.report()
    assert report.done == {0, 1} and dict(report.unfit) == {0: (0, 2)}
    worker.close()


@pytest.mark.parametrize(("far", "unfit"), [(8, []), (9, [5])])
def test_a_unit_has_room_for_four_far_values_a_group(build, far, unfit):
    tensors = [torch.ones(BLOCKS, 512, dtype=torch.bfloat16, device=DEVICE)]
    tensors[0][4, 3 : 3 + 50 * far : 50] = 2.0**-40
    bench = Bench(build, tensors)
    assert bench.store((5, 2), (4,)).unfit() == unfit


def test_a_store_is_not_done_before_it_is_known_what_does_not_fit(monkeypatch):
    """An interrupt comes between, and whoever waits then asks again."""
    bench = Bench(lambda *args: choose_copier(*args, name="reference").copier, [any_bits()])
    worker = CopyWorker(3, bench.copier)
    worker.run(StepPlan(0, (TransferPlan(0, Direction.STORE, (GroupCopy(0, (5, 2), (4,)),), 1),)))
    with monkeypatch.context() as interrupted:
        interrupted.setattr(Stored, "unfit", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            worker.report()
    report = worker.report()
    assert report.done == {0} and dict(report.unfit) == {0: (5,)}
    worker.close()


def raising(error):
    def raises(*args, **options):
        raise error

    return raises


def test_flags_outlive_a_submission_that_fails(monkeypatch):
    """Kernels of its first copy may still write them while a later one is refused."""
    bench = Bench(lambda *args: choose_copier(*args, name="staged", ring_bytes=RING).copier, [any_bits()])
    flags, alive = list[weakref.ref](), list[bool]()
    first, second = bench.copier._paths

    def submit(*args, was=first.submit):
        unfit = was(*args)
        flags.append(weakref.ref(unfit.args[0]))
        return unfit

    monkeypatch.setattr(first, "submit", submit)
    monkeypatch.setattr(second, "submit", raising(RuntimeError("no more")))
    monkeypatch.setattr(staged, "_synchronize", lambda *args: alive.append(flags[0]() is not None))
    with pytest.raises(RuntimeError, match="no more"):
        bench.store((5, 2), (4,))
    assert alive == [True]
