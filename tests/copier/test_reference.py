"""What a copy means: the right bytes to the right blocks, nothing else touched, nothing moved on a bad id."""

import pytest
import torch

from cpu_prefix_cache import ConfigurationError, Direction, Group, GroupCopy, GroupKind, HybridChunkPlanner, MisuseError
from cpu_prefix_cache.copier.reference import ReferenceCopier
from cpu_prefix_cache.memory.parts import block_bytes

POISON = 0xAB


class Bench:
    """Two groups, a host region and the copier between them: `wide` has 2 device blocks to a piece, `narrow` 1."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.wide = [torch.randn(6, 4, 3, generator=generator), torch.randn(6, 4, 1, generator=generator)]
        self.narrow = [torch.randn(5, 8, 2, generator=generator)]
        groups = [
            Group(name="wide", kind=GroupKind.PREFIX, block_tokens=4, block_bytes=4 * 4 * 4),
            Group(name="narrow", kind=GroupKind.PREFIX, block_tokens=8, block_bytes=8 * 2 * 4),
        ]
        self.planner = HybridChunkPlanner(groups, max_model_len=64)
        self.host = torch.full((8, self.planner.host_block_bytes), POISON, dtype=torch.uint8)
        self.copier = ReferenceCopier(self.planner, [self.wide, self.narrow], self.host)

    def copies(self, wide_host, wide_device, narrow_host, narrow_device):
        return [GroupCopy(0, wide_host, wide_device), GroupCopy(1, narrow_host, narrow_device)]


def test_a_piece_lies_on_the_host_part_after_part():
    bench = Bench()
    assert [piece.host_blocks for piece in bench.planner.pieces] == [2, 1]
    bench.copier.copy(Direction.STORE, [GroupCopy(0, (5, 2), (4, 1))])
    expected = [bench.wide[0][4], bench.wide[0][1], bench.wide[1][4], bench.wide[1][1]]
    lies = torch.cat([bench.host[5], bench.host[2]])
    assert lies.tolist() == torch.cat([block.flatten() for block in expected]).view(torch.uint8).tolist()


def test_a_round_trip_to_other_blocks_brings_every_byte():
    bench = Bench()
    before = [part.clone() for part in (*bench.wide, *bench.narrow)]
    bench.copier.copy(Direction.STORE, bench.copies((7, 0, 3, 1), (0, 5, 2, 1), (4, 6), (3, 0)))
    for part in (*bench.wide, *bench.narrow):
        part.fill_(-1.0)
    bench.copier.copy(Direction.LOAD, bench.copies((7, 0, 3, 1), (3, 4, 0, 2), (4, 6), (1, 2)))
    for part, was in zip(bench.wide, before, strict=False):
        assert torch.equal(part[[3, 4, 0, 2]], was[[0, 5, 2, 1]])
        assert (part[[1, 5]] == -1.0).all()
    assert torch.equal(bench.narrow[0][[1, 2]], before[2][[3, 0]])
    assert (bench.narrow[0][[0, 3, 4]] == -1.0).all()


def test_blocks_may_lie_apart_in_a_larger_tensor():
    padded = torch.arange(4 * 10, dtype=torch.int16).view(4, 10)[:, 2:8]
    assert block_bytes(padded).shape == (4, 12)
    assert block_bytes(padded)[1].view(torch.int16).tolist() == [12, 13, 14, 15, 16, 17]
    block_bytes(padded)[1] = 0
    assert padded[1].sum() == 0
    assert padded[2].tolist() == [22, 23, 24, 25, 26, 27]


def test_torn_blocks_are_refused():
    with pytest.raises(ConfigurationError, match="contiguous"):
        block_bytes(torch.zeros(4, 6, 2).transpose(1, 2))


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize(
    "narrow",
    [
        GroupCopy(1, (8,), (0,)),  # past the host region
        GroupCopy(1, (0,), (5,)),  # past the device pool
        GroupCopy(1, (-1,), (0,)),
        GroupCopy(1, (0,), (-1,)),
        GroupCopy(1, (0, 1), (0,)),  # not whole pieces
    ],
)
def test_bad_ids_are_refused_before_any_byte_moves(direction, narrow):  # L5.32
    bench = Bench()
    before = [part.clone() for part in (*bench.wide, *bench.narrow, bench.host)]
    with pytest.raises(MisuseError):
        bench.copier.copy(direction, [GroupCopy(0, (0, 1), (0, 1)), narrow])
    for part, was in zip((*bench.wide, *bench.narrow, bench.host), before, strict=True):
        assert torch.equal(part, was)


def test_a_destination_may_not_come_twice_but_a_source_may():
    bench = Bench()
    with pytest.raises(MisuseError, match="twice"):
        bench.copier.copy(Direction.STORE, [GroupCopy(1, (2, 2), (0, 1))])
    with pytest.raises(MisuseError, match="twice"):
        bench.copier.copy(Direction.LOAD, [GroupCopy(1, (2, 3), (1, 1))])
    bench.copier.copy(Direction.STORE, [GroupCopy(1, (2, 3), (1, 1))])
    assert torch.equal(bench.host[2], bench.host[3])


def test_tensors_that_weigh_other_than_planned_are_refused():
    bench = Bench()
    with pytest.raises(ConfigurationError, match="weighs"):
        ReferenceCopier(bench.planner, [bench.wide[:1], bench.narrow], bench.host)


def test_parts_of_a_group_must_have_the_same_blocks():
    bench = Bench()
    with pytest.raises(ConfigurationError, match="differ"):
        ReferenceCopier(bench.planner, [[bench.wide[0], bench.wide[1][:5]], bench.narrow], bench.host)
