"""One host region for several ranks that hold the same bytes: each block has one writer, and every rank reads.

The pieces of a store are dealt round by where they lie in the region, so that all links carry an equal share.
A rank whose share of a transfer is empty has ended with it at once.
"""

from collections.abc import Sequence

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.binding import Shapes
from cpu_prefix_cache.copier.queues import Mark, Passed
from cpu_prefix_cache.messages.plan import Direction, GroupCopy
from cpu_prefix_cache.model.planner import Piece


class DealtCopier(Copier):
    """Of stores, what falls to rank `rank` of `ranks`, by way of `copier`; of loads, everything."""

    def __init__(self, copier: Copier, shapes: Shapes, rank: int, ranks: int) -> None:
        self._copier = copier
        self._pieces = shapes.pieces
        self._rank = rank
        self._ranks = ranks

    def here(self) -> Mark:
        return self._copier.here()

    def hold_compute(self, mark: Mark) -> None:
        self._copier.hold_compute(mark)

    def submit(self, direction: Direction, copies: Sequence[GroupCopy], after: Mark) -> Mark:
        if direction is Direction.STORE:
            dealt = [share(copy, self._pieces[copy.group], self._rank, self._ranks) for copy in copies]
            copies = [copy for copy in dealt if copy.host_blocks]
            if not copies:
                return Passed()
        return self._copier.submit(direction, copies, after)


def share(copy: GroupCopy, piece: Piece, rank: int, ranks: int) -> GroupCopy:
    """The pieces of `copy` that one rank writes.

    >>> from cpu_prefix_cache.model.groups import Group, GroupKind
    >>> group = Group(name="mla", kind=GroupKind.PREFIX, block_tokens=16, block_bytes=100, replicated=True)
    >>> share(GroupCopy(0, (4, 5, 6, 9), (1, 2, 3, 7)), Piece(group, 1, 1, 100), rank=1, ranks=2)
    GroupCopy(group=0, host_blocks=(5, 9), device_blocks=(2, 7))
    """
    here, there = piece.host_blocks, piece.device_blocks
    mine = _dealt(copy, piece, rank, ranks)
    return GroupCopy(
        copy.group,
        tuple(block for at in mine for block in copy.host_blocks[at * here : (at + 1) * here]),
        tuple(block for at in mine for block in copy.device_blocks[at * there : (at + 1) * there]),
    )


def share_bytes(copies: Sequence[GroupCopy], pieces: Sequence[Piece], rank: int, ranks: int) -> int:
    """What the pieces weigh that one rank writes; `pieces` are those of all groups."""
    return sum(len(_dealt(copy, pieces[copy.group], rank, ranks)) * pieces[copy.group].num_bytes for copy in copies)


def _dealt(copy: GroupCopy, piece: Piece, rank: int, ranks: int) -> list[int]:
    """Which pieces of `copy` fall to one rank."""
    first_blocks = copy.host_blocks[:: piece.host_blocks]
    return [at for at, block in enumerate(first_blocks) if block // piece.host_blocks % ranks == rank]
