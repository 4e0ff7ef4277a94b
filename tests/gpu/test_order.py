"""Order by event (rule 11): compute writes blocks, they are stored, and overwritten as soon as they are released.

Eight sets of blocks go round and round, each at its own pace:

    compute writes a pattern, late  ->  store  ->  its report: compute writes junk  ->  compute zeroes, late  ->  load
    ->  its report: compute compares and writes junk  ->  ...

The host region is poisoned before each store. A copier that forgets either wait copies junk or zeroes.
"""

import pytest
import torch

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.early import EarlyEnds
from cpu_prefix_cache.copier.events import Passed
from cpu_prefix_cache.copier.worker import CopyWorker
from cpu_prefix_cache.deciding import Direction
from tests.gpu.stage import DEVICE, Stage, plan_of, wait_for
from tests.unit.copier.bench import POISON

SETS = 8
BLOCKS = 8
ROUNDS = 1000


class Careless(Copier):
    """Does not wait for compute: the negative control."""

    def __init__(self, copier, direction):
        self.copier, self.direction = copier, direction

    def here(self):
        return self.copier.here()

    def submit(self, direction, copies, after):
        return self.copier.submit(direction, copies, Passed() if direction is self.direction else after)


class Rounds:
    def __init__(self, careless=None):
        self.stage = Stage(layers=5, blocks=SETS * BLOCKS)
        copier = self.stage.copier if careless is None else Careless(self.stage.copier, careless)
        self.worker = CopyWorker(0, copier, self.stage.arena, threads=True)
        self.work = torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16)
        self.wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
        self.next_id = 0

    def late(self):
        for _ in range(6):
            self.work @ self.work

    def fill(self, blocks, value):
        for number, part in enumerate(self.stage.parts):
            part[blocks[0] : blocks[-1] + 1].fill_((value + number) % 251)

    def begin(self, direction, blocks):
        self.worker.run(plan_of(self.next_id, direction, blocks, blocks))
        self.next_id += 1
        return self.next_id - 1

    def one_set(self, number, rounds):
        """Yields the id of the transfer it waits for."""
        blocks = range(number * BLOCKS, (number + 1) * BLOCKS)
        for round in rounds:
            self.stage.arena.blocks[blocks[0] : blocks[-1] + 1] = POISON
            self.late()
            self.fill(blocks, round)
            yield self.begin(Direction.STORE, blocks)
            self.fill(blocks, round + 100)
            self.late()
            self.fill(blocks, 0)
            yield self.begin(Direction.LOAD, blocks)
            for layer, part in enumerate(self.stage.parts):
                self.wrong += (part[blocks[0] : blocks[-1] + 1] != (round + layer) % 251).sum()
            self.fill(blocks, round + 50)

    def run(self, rounds):
        going = dict.fromkeys(self.one_set(at, range(at, rounds, SETS)) for at in range(SETS))
        going = {set_: next(set_) for set_ in going}
        while going:
            report = wait_for(self.worker, min(going.values()))
            for set_, id in list(going.items()):
                if id in report.done | report.failed:
                    assert id in report.done
                    going[set_] = next(set_, None)
                    if going[set_] is None:
                        del going[set_]
        wrong = int(self.wrong)
        self.worker.close()
        return wrong


def test_blocks_that_compute_overwrites_as_soon_as_they_are_released():
    assert Rounds().run(ROUNDS) == 0


@pytest.mark.parametrize("direction", Direction)
def test_without_the_wait_bytes_are_wrong(direction):
    assert Rounds(careless=direction).run(64) > 0


@pytest.mark.parametrize("holds", [True, False])
def test_compute_that_is_held_reads_what_a_load_brings_though_nobody_waits_for_its_end(holds):
    """The control: compute that is not held reads junk."""
    rounds, blocks = Rounds(), range(SETS * BLOCKS)
    rounds.fill(blocks, 1)
    wait_for(rounds.worker, rounds.begin(Direction.STORE, blocks))
    rounds.fill(blocks, 2)
    rounds.late()
    load = rounds.begin(Direction.LOAD, blocks)
    if holds:
        EarlyEnds(rounds.worker, rounds.stage.copier).hold_compute({load})
    for layer, part in enumerate(rounds.stage.parts):
        rounds.wrong += (part[blocks[0] : blocks[-1] + 1] != 1 + layer).sum()
    wait_for(rounds.worker, load)
    assert (int(rounds.wrong) == 0) == holds
    rounds.worker.close()
