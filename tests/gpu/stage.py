"""Shared by the tests on a device: a group of parts there, a region here, and a copier between them."""

import random
import time

import torch

from cpu_prefix_cache.copier.choose import choose_copier
from cpu_prefix_cache.deciding import Direction, GroupCopy, TransferPlan
from cpu_prefix_cache.memory.arena import HostArena
from cpu_prefix_cache.messages.plan import StepPlan
from tests.unit.copier.bench import POISON, shapes_of

DEVICE = torch.device("cuda", 0)


GENERATOR = torch.Generator(DEVICE)  # our own: a capture that fails spoils the global one


def random_bytes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=DEVICE, generator=GENERATOR)


class Stage:
    """One group: `layers` parts of `fragment` bytes in `blocks` device blocks, and as many host blocks."""

    def __init__(self, layers=6, fragment=18 * 1024, blocks=64, *, num_host=None, pinned_at_once=True, **options):
        self.parts = [random_bytes(blocks, fragment) for _ in range(layers)]
        self.shapes = shapes_of([self.parts], [1], layers * fragment)
        self.arena = HostArena(num_host or blocks, layers * fragment, pinned_for=DEVICE)
        if pinned_at_once:
            self.arena.wait_until_ready()
        choice = choose_copier(
            self.shapes, [self.parts], self.arena.blocks, pinned=self.arena, name="staged", **options
        )
        self.copier, self.reason = choice.copier, choice.reason

    def rows(self, blocks):
        """Bytes that the host should hold of these device blocks: uint8 [blocks, bytes], there."""
        return torch.cat([part[list(blocks)] for part in self.parts], dim=1)

    def copy(self, direction, host_blocks, device_blocks):
        self.copier.copy(direction, [GroupCopy(0, tuple(host_blocks), tuple(device_blocks))])

    def round_trip(self, seed=0, count=None):
        """Whether bytes come back, through random host blocks to random device blocks, into poisoned memory."""
        rng = random.Random(seed)
        blocks = self.parts[0].shape[0]
        count = count or blocks // 2
        sources, goals = rng.sample(range(blocks), count), rng.sample(range(blocks), count)
        here = rng.sample(range(self.arena.blocks.shape[0]), count)
        wanted = self.rows(sources).clone()
        self.arena.blocks[here] = POISON
        self.copy(Direction.STORE, here, sources)
        for part in self.parts:
            part.fill_(POISON)
        self.copy(Direction.LOAD, here, goals)
        torch.cuda.synchronize()
        others = sorted(set(range(blocks)) - set(goals))
        return torch.equal(self.rows(goals), wanted) and bool((self.rows(others) == POISON).all())


def plan_of(id, direction, host_blocks, device_blocks, **fields):
    copies = (GroupCopy(0, tuple(host_blocks), tuple(device_blocks)),)
    return StepPlan(0, (TransferPlan(id, direction, copies, 0),), **fields)


def wait_for(worker, *ids, seconds=30):
    """The report in which all these have ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        report = worker.report()
        if report.done | report.failed >= set(ids):
            return report
        time.sleep(0.0005)
    raise AssertionError(f"transfers {ids} have not ended: {worker.report()}")
