"""Copies by addresses, with a driver that moves memory: which way, what is pinned, and what is not."""

import ctypes

import pytest
import torch

from cpu_prefix_cache import Direction
from cpu_prefix_cache.copier.link import Region
from cpu_prefix_cache.memory.moves import moves_of
from tests.copier.bench import POISON, poisoned, randoms


class Memory:
    """A driver whose copies are done at once. It notes how each was asked for."""

    def __init__(self, has_batches=True):
        self.has_batches, self.asked = has_batches, []

    def copy(self, destination, source, num_bytes, stream):
        self.asked.append(("one", stream))
        ctypes.memmove(destination, source, num_bytes)

    def copy_batch(self, destinations, sources, sizes, count, stream):
        self.asked.append((count, stream))
        read = ctypes.c_int64 * count
        for to, of, size in zip(*(read.from_address(row) for row in (destinations, sources, sizes)), strict=True):
            ctypes.memmove(to, of, size)


class Pinned:
    def __init__(self, pinned_bytes):
        self.pinned_bytes = pinned_bytes


def region_of(kind, host, driver):
    pinned = {"batched": 64, "old": 64, "pinned": 30, "pageable": 29}.get(kind)
    return Region(host.view(8, 8), None if kind == "memory" else driver, pinned and Pinned(pinned))


@pytest.mark.parametrize("kind", ["memory", "old", "batched", "whole", "pinned", "pageable"])
@pytest.mark.parametrize("direction", Direction)
def test_every_region_copies_what_it_is_told_and_nothing_else(kind, direction):
    device, host, driver = randoms(64), randoms(64, seed=1), Memory(has_batches=kind != "old")
    before = [device.clone(), host.clone()]
    spans = [(device.data_ptr() + 40, 3, 5), (device.data_ptr() + 7, 20, 10)]
    region_of(kind, host, driver).cross(direction, moves_of(spans, host.data_ptr()), 77)
    if direction is Direction.STORE:
        wanted, got, same = before[1].clone(), host, torch.equal(device, before[0])
        wanted[3:8], wanted[20:30] = before[0][40:45], before[0][7:17]
    else:
        wanted, got, same = before[0].clone(), device, torch.equal(host, before[1])
        wanted[40:45], wanted[7:17] = before[1][3:8], before[1][20:30]
    assert torch.equal(got, wanted) and same
    one_by_one = [("one", 77), ("one", 77)]
    assert driver.asked == {"memory": [], "old": one_by_one, "pageable": one_by_one}.get(kind, [(2, 77)])


def test_what_ends_past_the_pinned_bytes_is_not_pinned():
    host, device, driver = poisoned(64), randoms(64), Memory()
    for pinned_bytes, batched in ((29, False), (30, True)):
        region = Region(host.view(8, 8), driver, Pinned(pinned_bytes))
        region.cross(Direction.STORE, moves_of([(device.data_ptr(), 10, 20)], host.data_ptr()), 0)
        assert (driver.asked.pop() == (1, 0)) is batched
    assert (host[30:] == POISON).all()
