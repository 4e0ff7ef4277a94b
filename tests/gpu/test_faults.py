"""A fault on the way fails its own transfer and no other, and leaves the ring as good as new."""

import itertools

import pytest
import torch

from cpu_prefix_cache import MisuseError
from cpu_prefix_cache.copier import triton_staging
from cpu_prefix_cache.copier.link import HostRegion
from cpu_prefix_cache.copier.worker import CopyWorker
from cpu_prefix_cache.deciding import Direction, GroupCopy
from tests.gpu.stage import Stage, plan_of, wait_for
from tests.unit.copier.bench import POISON

BLOCKS = 2000  # 216 MB: a dozen slices


@pytest.fixture
def stage():
    return Stage(blocks=BLOCKS)


def failing_at(call, at):
    count = itertools.count(1)

    def failing(*args):
        if next(count) == at:
            raise RuntimeError("out of resources")
        return call(*args)

    return failing


def breakable(stage, what):
    """Where a launch, or a copy, comes by."""
    if what == "launch":
        return triton_staging.Launcher, "launch"
    return HostRegion, "cross"


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("what", ["launch", "copy"])
@pytest.mark.parametrize("at", [1, 2, 6])
def test_a_failing_step_fails_its_transfer_alone(stage, monkeypatch, direction, what, at):  # S7.45, L5.34
    worker = CopyWorker(0, stage.copier, stage.arena, threads=True)
    everything = range(BLOCKS)
    wanted = stage.rows(everything).clone()
    worker.run(plan_of(0, Direction.STORE, everything, everything))
    worker.drain()
    where, name = breakable(stage, what)
    right = getattr(where, name)
    failing = failing_at(right, at)
    after = stage.copier.here()
    moving = stage.copier.submit(direction, plan_of(1, direction, everything, everything).transfers[0].copies, after)
    monkeypatch.setattr(where, name, failing)
    worker.run(plan_of(2, direction, everything, everything))
    report = wait_for(worker, 0, 2)
    assert (report.done, report.failed) == ({0}, {2})
    assert moving.passed()  # what was under way before has ended as it should, and is waited for
    monkeypatch.undo()
    worker.run(plan_of(3, Direction.STORE, everything, everything))
    assert 3 in wait_for(worker, 3).done
    assert torch.equal(stage.arena.blocks, wanted.cpu())
    for part in stage.parts:
        part.fill_(POISON)
    worker.run(plan_of(4, Direction.LOAD, everything, everything))
    assert 4 in wait_for(worker, 4).done
    assert torch.equal(stage.rows(everything), wanted)
    worker.close()


def test_bad_ids_move_nothing(stage):
    before = stage.rows(range(BLOCKS)).clone()
    stage.arena.blocks.fill_(POISON)
    for bad in (GroupCopy(0, (BLOCKS,), (1,)), GroupCopy(0, (1, 1), (1, 2)), GroupCopy(1, (), ())):
        with pytest.raises(MisuseError):
            stage.copier.copy(Direction.STORE, [GroupCopy(0, (0,), (3,)), bad])
        with pytest.raises(MisuseError):
            stage.copier.copy(Direction.LOAD, [GroupCopy(0, (0,), (3,)), GroupCopy(0, (5, 6), (3, 3))])
    assert (stage.arena.blocks == POISON).all()
    assert torch.equal(stage.rows(range(BLOCKS)), before)
    stage.arena.close()


def test_the_ring_does_not_grow(stage):
    before = torch.cuda.memory_allocated()
    for seed in range(5):
        assert stage.round_trip(seed)
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
    stage.arena.close()
