"""A rank's share of a plan: its own groups, its part of what ranks keep together, and its lane beside that."""

import doctest
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.vllm import shares
from connector.vllm.regions import RankShapes
from connector.vllm.shares import Share
from cpu_prefix_cache.copier.reference import ReferenceCopier
from cpu_prefix_cache.copier.worker import CopyWorker
from cpu_prefix_cache.deciding import PrefixGroup
from cpu_prefix_cache.messages.plan import Direction, GroupCopy, RankReport, StepPlan, TransferPlan
from cpu_prefix_cache.model.planner import Piece
from tests.unit.copier.bench import POISON, poisoned, randoms, raw, shapes_of

HOST_BLOCK = 64
DEVICE_PIECES = 5


def test_the_examples_of_the_docstring_hold():
    assert doctest.testmod(shares) == (0, 3)


# Ranks that share a region: each piece is written by one of them, and read by all


class Ranks:
    """Ranks with equal device memory, 12 blocks of 48 bytes in each of two parts, over one region of 12 pieces."""

    def __init__(self, ranks, device_blocks=1):
        parts = [randoms(12, 48, seed=1), randoms(12, 48, seed=2)]
        self.shapes = shapes_of([parts], [device_blocks], HOST_BLOCK)
        self.host = poisoned(12 * self.shapes.pieces[0].host_blocks, HOST_BLOCK)
        self.parts = [[part.clone() for part in parts] for _ in range(ranks)]
        self.shares = [Share(self.shapes.pieces, [0], 1, rank, ranks) for rank in range(ranks)]
        self.workers = [CopyWorker(at, ReferenceCopier(self.shapes, [parts], self.host)) for at, parts in self.numbered]
        self.ids = iter(range(100))

    @property
    def numbered(self):
        return enumerate(self.parts)

    def transfer(self, direction, host_pieces, device_pieces):
        here, there = self.shapes.pieces[0].host_blocks, self.shapes.pieces[0].device_blocks
        copy = GroupCopy(
            0,
            tuple(piece * here + at for piece in host_pieces for at in range(here)),
            tuple(piece * there + at for piece in device_pieces for at in range(there)),
        )
        return TransferPlan(next(self.ids), direction, (copy,), len(host_pieces) * self.shapes.pieces[0].num_bytes)

    def run(self, rank, transfer):
        """Whether this rank has done its share of it at once."""
        self.workers[rank].run(self.shares[rank].of_plan(StepPlan(0, (transfer,))))
        return transfer.id in self.workers[rank].report().done


@pytest.mark.parametrize("device_blocks", [1, 2])  # of 2 and of 3 host blocks to a piece
@pytest.mark.parametrize("ranks", [2, 3])
def test_blocks_that_all_ranks_stored_together_each_of_them_loads(ranks, device_blocks):
    stage = Ranks(ranks, device_blocks)
    pieces = range(12 // device_blocks)
    before = [raw(part).clone() for part in stage.parts[0]]
    store = stage.transfer(Direction.STORE, pieces, pieces)
    assert all(stage.run(rank, store) for rank in range(ranks))
    mine = [share.of_transfer(store) for share in stage.shares]
    written = [block for transfer in mine for copy in transfer.copies for block in copy.host_blocks]
    assert sorted(written) == list(range(len(pieces) * stage.shapes.pieces[0].host_blocks)), "a block has one writer"
    assert [transfer.num_bytes for transfer in mine] == [store.num_bytes // ranks] * ranks, "shares are not equal"
    load = stage.transfer(Direction.LOAD, pieces, pieces)
    for rank, parts in stage.numbered:
        for part in parts:
            raw(part).fill_(POISON)
        assert stage.run(rank, load)
        assert all(torch.equal(raw(part), right) for part, right in zip(parts, before, strict=True))


def test_a_rank_that_stores_nothing_is_noticed():
    """The control: its share is missing."""
    stage = Ranks(2)
    right = raw(stage.parts[0][0]).clone()
    assert stage.run(0, stage.transfer(Direction.STORE, range(12), range(12)))
    raw(stage.parts[0][0]).fill_(POISON)
    assert stage.run(0, stage.transfer(Direction.LOAD, range(12), range(12)))
    assert not torch.equal(raw(stage.parts[0][0]), right)


def test_a_rank_without_a_share_has_ended_at_once_and_copies_nothing():
    stage = Ranks(2)
    before = stage.host.clone()
    store = stage.transfer(Direction.STORE, [0], [5])
    assert stage.run(1, store)
    assert torch.equal(stage.host, before)
    assert stage.shares[1].of_transfer(store).num_bytes == 0
    assert stage.shares[0].of_transfer(store) == store


def test_every_rank_has_all_of_a_load():
    stage = Ranks(2)
    load = stage.transfer(Direction.LOAD, [0, 1], [5, 6])
    assert [share.of_transfer(load) for share in stage.shares] == [load] * 2


# Lanes: beside what all ranks have, each has bytes of its own


@st.composite
def mixed(draw):
    """How many ranks, and pieces of which each has its own, some have the same, or all."""
    holders, parts, lane_bytes = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 40))
    ranks = holders * parts
    pieces = []
    for name in "abc"[: draw(st.integers(1, 3))]:
        group = PrefixGroup(name=name, block_tokens=1, block_bytes=draw(st.integers(1, 200)))
        lanes = draw(st.sampled_from([1, parts, ranks]))
        width = -(-group.block_bytes * lanes // (lane_bytes * ranks))
        pieces.append(Piece(group, 1, width, group.block_bytes, lanes))
    return RankShapes(tuple(pieces), ranks * lane_bytes, ranks)


@settings(deadline=None)
@given(mixed(), st.randoms(use_true_random=False))
def test_each_rank_reads_what_all_have_and_what_it_has_written_itself(shapes, random):
    """From any host blocks."""
    ranks, pieces = range(shapes.lanes), shapes.pieces
    blocks = list(range(DEVICE_PIECES * sum(piece.host_blocks for piece in pieces)))
    lanes = poisoned(len(blocks) * shapes.lanes, shapes.host_block_bytes // shapes.lanes)
    random.shuffle(blocks)
    left = iter(blocks)
    copies = tuple(
        GroupCopy(at, tuple(islice(left, DEVICE_PIECES * piece.host_blocks)), tuple(range(DEVICE_PIECES)))
        for at, piece in enumerate(pieces)
    )

    def copy(rank, direction, parts):
        share = Share(pieces, range(len(pieces)), len(pieces), rank, shapes.lanes, shapes.lanes)
        mine = share.of_transfer(TransferPlan(0, direction, copies, 0)).copies
        ReferenceCopier(shapes.by_lane(), [[part] for part in parts], lanes).copy(direction, mine)

    written = [
        [randoms(DEVICE_PIECES, piece.num_bytes, seed=rank * piece.lanes // len(ranks)) for piece in pieces]
        for rank in ranks
    ]
    for rank in ranks:
        copy(rank, Direction.STORE, written[rank])
    for rank in ranks:
        read = [poisoned(*part.shape) for part in written[rank]]
        copy(rank, Direction.LOAD, read)
        assert all(map(torch.equal, read, written[rank]))


def test_a_report_has_the_blocks_of_the_plan():
    pieces = shapes_of([[randoms(4, 10)]], [1], 32).pieces
    report = RankReport(1, frozenset({3}), unfit=((3, (8, 21)),))
    assert Share(pieces, [0], 1, 1, 4, 4).of_report(report).unfit == ((3, (2, 5)),)
    assert Share(pieces, [0], 1).of_report(report) == report


# A stage of a pipeline: copies of its own groups, under its own numbers


def test_groups_have_other_numbers_there_and_other_stages_groups_are_left_out():
    pieces = shapes_of([[randoms(4, 10)], [randoms(4, 20)]], [1, 1], 32).pieces
    share = Share(pieces, [1, 3], 4)
    copies = tuple(GroupCopy(group, (group,), (7,)) for group in range(4))
    mine = share.of_transfer(TransferPlan(5, Direction.LOAD, copies, 100))
    assert mine == TransferPlan(5, Direction.LOAD, (GroupCopy(0, (1,), (7,)), GroupCopy(1, (3,), (7,))), 30)
    others = share.of_transfer(TransferPlan(6, Direction.STORE, copies[::2], 100))
    assert others == TransferPlan(6, Direction.STORE, (), 0)


def test_a_rank_that_has_everything_gets_the_plan_itself():
    pieces = shapes_of([[randoms(4, 10)]], [1], 32).pieces
    plan = StepPlan(0, (TransferPlan(5, Direction.LOAD, (GroupCopy(0, (1,), (7,)),), 10),))
    assert Share(pieces, [0], 1).of_plan(plan) is plan
