"""The pieces of checkpoints: which blocks hold each, and which checkpoints use it.

Two checkpoints not far apart see some of the same window blocks, which are kept once:

    tokens         64      80      96     112
    window blocks     [a ]    [b ]    [c ]
    checkpoint at 96   a       b             uses a, b
    checkpoint at 112          b       c     uses b, c

A piece stays as long as a checkpoint uses it, and can be found by others as long as it is or will be right: until the
checkpoint that writes it is given up, or all that use it have been withdrawn. Where checkpoints in different states
use one piece, it is in the state that keeps it longest: WRITING, then RETIRED, then CACHED. So the blocks counted as
CACHED are those that eviction can free.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from cpu_prefix_cache.messages.errors import InternalError
from cpu_prefix_cache.pool.states import CACHED, FREE, RETIRED, WRITING


class PieceNeed(NamedTuple):
    """A piece a checkpoint is to have: what identifies it among all checkpoints, and how many blocks it takes."""

    key: Hashable
    num_blocks: int


class SharedPiece:
    """One piece: its blocks, who fills them, and by how many checkpoints of each state it is used.

    `pins` are on its bytes, by those who hold them without any checkpoint: they count as RETIRED.
    """

    __slots__ = ("blocks", "key", "pins", "users", "writer")

    def __init__(self, key: Hashable, blocks: Sequence[int], writer: int) -> None:
        self.key = key
        self.blocks = tuple(blocks)
        self.writer: int | None = writer  # None: it is written
        self.users = [0, 0, 0, 0]
        self.pins = 0

    @property
    def state(self) -> int:
        if self.users[WRITING]:
            return WRITING
        if self.users[RETIRED] or self.pins:
            return RETIRED
        return CACHED if self.users[CACHED] else FREE

    @property
    def is_found(self) -> bool:
        return bool(self.users[WRITING] or self.users[CACHED])


class Moved(NamedTuple):
    """`piece` went from one state to another because a checkpoint that uses it did."""

    piece: SharedPiece
    before: int
    after: int


class SharedPieces:
    """The pieces of every checkpoint, in the order they were asked for, and those that others may use by key."""

    def __init__(self) -> None:
        self._by_key: dict[Hashable, SharedPiece] = {}
        self._of: dict[int, tuple[SharedPiece, ...]] = {}
        self._at: dict[int, SharedPiece] = {}
        self._widths = Counter[int]()  # of all checkpoints, in blocks

    def __contains__(self, node: int) -> bool:
        return node in self._of

    def of(self, checkpoint: int) -> tuple[SharedPiece, ...]:
        return self._of[checkpoint]

    def at(self, block: int) -> SharedPiece | None:
        """The piece that has this block."""
        return self._at.get(block)

    def num_blocks(self, checkpoint: int) -> int:
        return sum(len(piece.blocks) for piece in self._of[checkpoint])

    @property
    def widest(self) -> int:
        """Blocks of the largest checkpoint there is, shared ones included; 0 without any. O(different sizes)."""
        return max(self._widths, default=0)

    def missing(self, needs: Sequence[PieceNeed]) -> list[PieceNeed]:
        """Those of `needs` that no checkpoint has."""
        return [need for need in needs if need.key not in self._by_key]

    def join(self, checkpoint: int, needs: Sequence[PieceNeed]) -> list[Moved]:
        """A checkpoint that is to be written holds what is there already of the pieces it needs."""
        self._set(checkpoint, tuple(self._by_key[need.key] for need in needs if need.key in self._by_key))
        return self.move(checkpoint, FREE, WRITING)

    def fill(self, checkpoint: int, needs: Sequence[PieceNeed], blocks: Sequence[int]) -> None:
        """It writes the others, which take `blocks`, in order."""
        at, pieces = 0, []
        for need in needs:
            piece = self._by_key.get(need.key)
            if piece is None:
                piece = SharedPiece(need.key, blocks[at : at + need.num_blocks], checkpoint)
                piece.users[WRITING] = 1
                at += need.num_blocks
                self._by_key[need.key] = piece
                self._at.update(dict.fromkeys(piece.blocks, piece))
            pieces.append(piece)
        if at != len(blocks):
            raise InternalError(f"{len(blocks)} blocks were given for missing pieces of {at}")
        self._set(checkpoint, tuple(pieces))

    def move(self, checkpoint: int, before: int, after: int) -> list[Moved]:
        """The checkpoint went from one state to another: the pieces whose own state follows. FREE ones are gone."""
        moved = []
        for piece in self._of[checkpoint]:
            was = piece.state
            if before != FREE:
                piece.users[before] -= 1
            if after != FREE:
                piece.users[after] += 1
            if piece.writer == checkpoint:
                self._writer_moved(piece, after)
            if not piece.is_found:
                self._hide(piece)
            moved += self._moved(piece, was)
        if after == FREE:
            self._set(checkpoint, None)
        return moved

    def pin(self, piece: SharedPiece, change: int) -> list[Moved]:
        """One pin more, or less, on the bytes of a piece."""
        was = piece.state
        piece.pins += change
        return self._moved(piece, was)

    def check_valid(self, states: Sequence[int]) -> None:
        """Assert that users are counted right, given every node's state. For tests."""
        users: dict[SharedPiece, list[int]] = {}
        for checkpoint, pieces in self._of.items():
            for piece in pieces:
                users.setdefault(piece, [0, 0, 0, 0])[states[checkpoint]] += 1
        for piece, counted in users.items():
            assert piece.users == counted and not counted[FREE], f"users of {piece.key!r}"
            found = self._by_key.get(piece.key) is piece
            assert not found or piece.is_found, f"{piece.key!r} can be found and nobody keeps it right"
            assert found or not piece.users[CACHED], f"{piece.key!r} is in use and cannot be found"
        for piece in self._by_key.values():
            assert piece in users, f"{piece.key!r} is used by no checkpoint"
        assert self._widths == Counter(map(self.num_blocks, self._of)), "sizes of checkpoints are miscounted"
        assert set(users) <= set(self._at.values()), "a piece in use has no blocks"

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Every block of every piece once, with the state of the piece. For tests."""
        for piece in set(self._at.values()):
            yield from ((block, piece.state) for block in piece.blocks)

    def _set(self, checkpoint: int, pieces: tuple[SharedPiece, ...] | None) -> None:
        if checkpoint in self._of:
            width = self.num_blocks(checkpoint)
            self._widths[width] -= 1
            if not self._widths[width]:
                del self._widths[width]
            del self._of[checkpoint]
        if pieces is not None:
            self._of[checkpoint] = pieces
            self._widths[self.num_blocks(checkpoint)] += 1

    def _moved(self, piece: SharedPiece, was: int) -> list[Moved]:
        if piece.state == was:
            return []
        if piece.state == FREE:
            for block in piece.blocks:
                del self._at[block]
        return [Moved(piece, was, piece.state)]

    def _writer_moved(self, piece: SharedPiece, after: int) -> None:
        """The writer of a piece is done, or has been given up, and then the piece is nothing to build on."""
        if after == CACHED:
            piece.writer = None
        elif after != WRITING:
            self._hide(piece)

    def _hide(self, piece: SharedPiece) -> None:
        if self._by_key.get(piece.key) is piece:
            del self._by_key[piece.key]
