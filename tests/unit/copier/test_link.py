"""Copies by addresses, through a driver: their direction, and which go in a batch and which one by one."""

import pytest
import torch

from cpu_prefix_cache.copier.link import HostRegion
from cpu_prefix_cache.deciding import Direction
from cpu_prefix_cache.memory.moves import moves_of
from tests.support.simulated_driver import SLICE, SimulatedDriver, pinned_arena
from tests.unit.copier.bench import POISON, randoms

SLICES = 3
SIZE = SLICES * SLICE


@pytest.fixture
def region_of():
    """A host region of three slices, of which so many are pinned, and its driver. Of another kind than an arena's:
    "memory" has no driver, and "whole" is pinned by somebody else."""
    arenas = []

    def region_of(kind, pinned_slices=SLICES):
        driver = SimulatedDriver(has_batches=kind != "old")
        driver.use(0)
        driver.refuses_after = pinned_slices
        arenas.append(pinned_arena(driver, 1, SIZE))
        arenas[-1].wait_until_ready()
        arena = None if kind in ("memory", "whole") else arenas[-1]
        region = HostRegion(arenas[-1].blocks, None if kind == "memory" else driver, arena, SLICE)
        return region, driver, arenas[-1].blocks

    yield region_of
    for arena in arenas:
        arena.close()


KINDS = {"memory": SLICES, "old": SLICES, "batched": SLICES, "whole": SLICES, "pinned": 2, "pageable": 1}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("direction", Direction)
def test_every_region_copies_the_given_spans_and_nothing_else(region_of, kind, direction):
    region, driver, blocks = region_of(kind, KINDS[kind])
    device, host = randoms(SIZE), blocks.view(-1).copy_(randoms(SIZE, seed=1))
    before, stream = [device.clone(), host.clone()], driver.streams.compute
    spans = [(device.data_ptr() + 40, 3, 5), (device.data_ptr() + 7, 2 * SLICE - 10, 10)]
    region.cross(direction, moves_of(spans, host.data_ptr(), SLICE), stream.handle)
    assert kind == "memory" or (torch.equal(device, before[0]) and torch.equal(host, before[1]))
    stream.synchronize()
    if direction is Direction.STORE:
        wanted = before[1].clone()
        got = host
        same = torch.equal(device, before[0])
        wanted[3:8], wanted[2 * SLICE - 10 : 2 * SLICE] = before[0][40:45], before[0][7:17]
    else:
        wanted = before[0].clone()
        got = device
        same = torch.equal(host, before[1])
        wanted[40:45], wanted[7:17] = before[1][3:8], before[1][2 * SLICE - 10 : 2 * SLICE]
    assert torch.equal(got, wanted) and same
    one_by_one = [("one", stream.handle)] * 2
    assert driver.asked == {"memory": [], "old": one_by_one, "pageable": one_by_one}.get(kind, [(2, stream.handle)])


@pytest.mark.parametrize("pinned_slices", [1, 2])
def test_a_span_that_ends_past_the_pinned_bytes_is_not_pinned(region_of, pinned_slices):
    region, driver, blocks = region_of("batched", pinned_slices)
    device = randoms(SLICE)
    host = blocks.view(-1).fill_(POISON)
    stream = driver.streams.compute
    spans = [(device.data_ptr(), SLICE, SLICE)]  # the second slice
    region.cross(Direction.STORE, moves_of(spans, host.data_ptr(), SLICE), stream.handle)
    stream.synchronize()
    assert driver.asked == [("one" if pinned_slices == 1 else 1, stream.handle)]
    assert torch.equal(host[SLICE : 2 * SLICE], device)
    assert (host[:SLICE] == POISON).all() and (host[2 * SLICE :] == POISON).all()


def test_moves_that_are_not_cut_at_the_seams_make_a_test_fail(region_of):
    """The control: what no cutting would do."""
    region, driver, blocks = region_of("batched")
    moves = moves_of([(randoms(20).data_ptr(), SLICE - 10, 20)], blocks.data_ptr(), SIZE)
    with pytest.raises(AssertionError, match="over two registrations"):
        region.cross(Direction.STORE, moves, driver.streams.compute.handle)
