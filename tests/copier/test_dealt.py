"""Ranks that hold the same bytes share one host region: each piece is written by one of them, and read by all."""

import pytest
import torch

from cpu_prefix_cache.copier.dealt import DealtCopier, share
from cpu_prefix_cache.copier.reference import ReferenceCopier
from cpu_prefix_cache.messages.plan import Direction, GroupCopy
from tests.copier.bench import POISON, poisoned, randoms, raw, shapes_of

HOST_BLOCK = 64


class Ranks:
    """Ranks with equal device memory, 12 blocks of 48 bytes in each of two parts, over one region of 12 pieces."""

    def __init__(self, ranks, device_blocks=1):
        parts = [randoms(12, 48, seed=1), randoms(12, 48, seed=2)]
        self.shapes = shapes_of([parts], [device_blocks], HOST_BLOCK)
        self.host = poisoned(12 * self.shapes.pieces[0].host_blocks, HOST_BLOCK)
        self.parts = [[part.clone() for part in parts] for _ in range(ranks)]
        self.written = []
        self.copiers = [
            DealtCopier(Noting(ReferenceCopier(self.shapes, [parts], self.host), self.written), self.shapes, at, ranks)
            for at, parts in enumerate(self.parts)
        ]

    def copy_of(self, host_pieces, device_pieces):
        here, there = self.shapes.pieces[0].host_blocks, self.shapes.pieces[0].device_blocks
        return GroupCopy(
            0,
            tuple(piece * here + at for piece in host_pieces for at in range(here)),
            tuple(piece * there + at for piece in device_pieces for at in range(there)),
        )


class Noting:
    """Notes the host blocks of each store that it is given."""

    def __init__(self, copier, written):
        self._copier, self._written = copier, written

    def here(self):
        return self._copier.here()

    def submit(self, direction, copies, after):
        if direction is Direction.STORE:
            self._written.append([block for copy in copies for block in copy.host_blocks])
        return self._copier.submit(direction, copies, after)


@pytest.mark.parametrize("device_blocks", [1, 2])  # of 2 and of 3 host blocks to a piece
@pytest.mark.parametrize("ranks", [2, 3])
def test_what_all_ranks_stored_together_each_of_them_loads(ranks, device_blocks):
    stage = Ranks(ranks, device_blocks)
    pieces = 12 // device_blocks
    before = [raw(part).clone() for part in stage.parts[0]]
    for copier in stage.copiers:
        copier.copy(Direction.STORE, [stage.copy_of(range(pieces), range(pieces))])
    written = [block for blocks in stage.written for block in blocks]
    assert sorted(written) == list(range(pieces * stage.shapes.pieces[0].host_blocks)), "a block has one writer"
    for copier, parts in zip(stage.copiers, stage.parts, strict=True):
        for part in parts:
            raw(part).fill_(POISON)
        copier.copy(Direction.LOAD, [stage.copy_of(range(pieces), range(pieces))])
        assert all(torch.equal(raw(part), right) for part, right in zip(parts, before, strict=True))


def test_a_rank_that_stores_nothing_is_noticed():
    """The control: its share is missing."""
    stage = Ranks(2)
    right = raw(stage.parts[0][0]).clone()
    stage.copiers[0].copy(Direction.STORE, [stage.copy_of(range(12), range(12))])
    raw(stage.parts[0][0]).fill_(POISON)
    stage.copiers[0].copy(Direction.LOAD, [stage.copy_of(range(12), range(12))])
    assert not torch.equal(raw(stage.parts[0][0]), right)


def test_shares_are_equal_however_many_host_blocks_a_piece_takes():
    for device_blocks in (1, 2):
        stage = Ranks(2, device_blocks)
        pieces = 12 // device_blocks
        for copier in stage.copiers:
            copier.copy(Direction.STORE, [stage.copy_of(range(pieces), range(pieces))])
        assert len(stage.written[0]) == len(stage.written[1])


def test_a_rank_without_a_share_has_ended_at_once_and_asks_its_copier_nothing():
    stage = Ranks(2)
    mark = stage.copiers[1].submit(Direction.STORE, [stage.copy_of([0], [5])], stage.copiers[1].here())
    assert mark.passed() and stage.written == []
    assert share(stage.copy_of([0], [5]), stage.shapes.pieces[0], 0, 2) == stage.copy_of([0], [5])
