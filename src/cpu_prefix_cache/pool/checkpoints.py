"""The checkpoints of a pool: the pieces of each, and the blocks that hold them.

Two checkpoints not far apart see some of the same window blocks, which are kept once:

    tokens         64      80      96     112
    window blocks     [a ]    [b ]    [c ]
    checkpoint at 96   a       b             uses a, b
    checkpoint at 112          b       c     uses b, c

A piece exists as long as a checkpoint uses it or its bytes are pinned. A new checkpoint can share it as long as its
bytes are right or will be: until the checkpoint that writes it is retired, or all that use it have been withdrawn.

The blocks of a piece count in one state, the first of these that applies: WRITING, if a checkpoint that uses it is;
RETIRED, if one is, or the bytes are pinned; CACHED.
"""

from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from cpu_prefix_cache.pool.states import CACHED, FREE, RETIRED, WRITING


class PieceNeed(NamedTuple):
    """A piece that a checkpoint has: its key, by which checkpoints share it, and how many blocks it takes."""

    key: Hashable
    num_blocks: int


class _Piece:
    """One piece: its blocks, the checkpoint that writes it, and how many checkpoints use it, by their state."""

    __slots__ = ("blocks", "byte_pins", "need", "users", "writer")

    def __init__(self, need: PieceNeed, writer: int) -> None:
        self.need = need
        self.blocks: tuple[int, ...] = ()
        self.writer: int | None = writer  # None: it is written
        self.users = [0, 0, 0, 0]  # that of FREE means nothing
        self.byte_pins = 0  # on its bytes, whatever becomes of the checkpoints

    @property
    def state(self) -> int:
        if self.users[WRITING]:
            return WRITING
        if self.users[RETIRED] or self.byte_pins:
            return RETIRED
        return CACHED if self.users[CACHED] else FREE


class Checkpoints:
    """Every checkpoint of a pool, by node. `count` is the pool's number of blocks in each state, and is kept right."""

    def __init__(self, count: list[int]) -> None:
        self._count = count
        self._of: dict[int, tuple[_Piece, ...]] = {}  # by checkpoint, in the order of its needs
        self._by_key: dict[Hashable, _Piece] = {}  # those that a new checkpoint can share
        self._at: dict[int, _Piece] = {}  # by block
        self._width: dict[int, int] = {}  # blocks of each checkpoint, shared ones included
        self._widths = Counter[int]()  # how many checkpoints have each width

    def __len__(self) -> int:
        return len(self._of)

    def __contains__(self, node: int) -> bool:
        return node in self._of

    def pieces(self, checkpoint: int) -> list[tuple[int, ...]]:
        """The blocks of each piece of a checkpoint, in the order of its needs."""
        return [piece.blocks for piece in self._of[checkpoint]]

    def to_write(self, checkpoint: int) -> list[tuple[int, ...] | None]:
        """The same for a checkpoint that is being written, with None for the pieces that another one has or writes."""
        return [piece.blocks if piece.writer == checkpoint else None for piece in self._of[checkpoint]]

    def key_of(self, block: int) -> Hashable:
        """The key of the piece with this block."""
        return self._at[block].need.key

    def needs(self, checkpoint: int) -> list[PieceNeed]:
        """The needs of a checkpoint: with some of them another checkpoint shares its pieces."""
        return [piece.need for piece in self._of[checkpoint]]

    def missing(self, needs: Sequence[PieceNeed]) -> list[PieceNeed]:
        """Needs without a piece: a new checkpoint would write it."""
        return [need for need in needs if need.key not in self._by_key]

    def are_written(self, needs: Sequence[PieceNeed]) -> bool:
        """Whether no piece of these is still being written."""
        there = (self._by_key.get(need.key) for need in needs)
        return all(piece.writer is None for piece in there if piece is not None)

    def num_missing(self, needs: Sequence[PieceNeed]) -> int:
        """How many blocks these take."""
        return sum(need.num_blocks for need in self.missing(needs))

    def num_blocks(self, nodes: Iterable[int]) -> int:
        """How many blocks those of these nodes have that are checkpoints; shared ones count for each."""
        return sum(self._width.get(node, 0) for node in nodes)

    def num_cached(self, nodes: Iterable[int]) -> int:
        """How many of these blocks are CACHED; each counts once."""
        return sum(piece.need.num_blocks for piece in self._pieces_of(nodes) if piece.state == CACHED)

    def cost(self, needs: Sequence[PieceNeed], pinned: Iterable[int]) -> int:
        """How many blocks that are free or can be evicted a checkpoint with these needs makes unavailable."""
        protected = self._pieces_of(pinned)
        there = ((need, self._by_key.get(need.key)) for need in needs)
        return sum(
            need.num_blocks
            for need, piece in there
            if piece is None or (piece.state == CACHED and piece not in protected)
        )

    @property
    def widest(self) -> int:
        """Blocks of the largest checkpoint, shared ones included; 0 if there is none. O(different sizes)."""
        return max(self._widths, default=0)

    # Called by the pool

    def add(self, checkpoint: int, needs: Sequence[PieceNeed]) -> int:
        """A checkpoint will be written. It shares the pieces that exist; returns how many blocks the others take."""
        missing = self.missing(needs)
        self._by_key.update((need.key, _Piece(need, checkpoint)) for need in missing)
        self._of[checkpoint] = tuple(self._by_key[need.key] for need in needs)
        self._width[checkpoint] = sum(need.num_blocks for need in needs)
        self.move(checkpoint, FREE, WRITING)
        return sum(need.num_blocks for need in missing)

    def fill(self, checkpoint: int, blocks: Sequence[int]) -> None:
        """Give a checkpoint the blocks of the pieces that it writes, in the order of its needs."""
        rest = iter(blocks)
        for piece in self._of[checkpoint]:
            if piece.writer == checkpoint:
                piece.blocks = tuple(islice(rest, piece.need.num_blocks))
                self._at.update(dict.fromkeys(piece.blocks, piece))
        self._widths[self._width[checkpoint]] += 1  # not before: to make room for it, none as wide need be evicted

    def move(self, checkpoint: int, before: int, after: int) -> list[int]:
        """A checkpoint went from one state to another. Returns the blocks that nothing uses any more."""
        freed = []
        is_right = after in (WRITING, CACHED)
        for piece in self._of[checkpoint]:
            was, users = piece.state, piece.users
            users[before] -= 1
            users[after] += 1
            if piece.writer == checkpoint:
                if not is_right:
                    self._hide(piece)
                elif after == CACHED:
                    piece.writer = None
            if not users[WRITING] and not users[CACHED]:
                self._hide(piece)
            freed += self._recount(piece, was)
        if after == FREE:
            self._widths -= Counter((self._width.pop(checkpoint),))
            del self._of[checkpoint]
        return freed

    def take_over(self, before: "Checkpoints", checkpoints: Collection[int]) -> None:
        """These of an earlier pool are RETIRED here, and pieces whose bytes are pinned stay. Nobody can share them. The
        earlier pool ends. O(its blocks).
        """
        pieces = before._pieces_of(checkpoints) | {piece for piece in before._at.values() if piece.byte_pins}
        for piece in pieces:
            piece.users = [0, 0, 0, 0]
            self._at.update(dict.fromkeys(piece.blocks, piece))
            self._count[RETIRED] += piece.need.num_blocks
        for checkpoint in checkpoints:
            self._of[checkpoint], self._width[checkpoint] = before._of[checkpoint], before._width[checkpoint]
            self._widths[self._width[checkpoint]] += 1
            for piece in self._of[checkpoint]:
                piece.users[RETIRED] += 1

    def has_block(self, block: int) -> bool:
        """Whether this is a block of a piece."""
        return block in self._at

    def is_written(self, block: int) -> bool:
        """Whether the piece with this block has its bytes."""
        return self._at[block].writer is None

    def pin_block(self, block: int, change: int) -> list[int]:
        """The bytes of the piece with this block have one pin more (+1) or less (-1). Returns what `move` does."""
        piece = self._at[block]
        was = piece.state
        piece.byte_pins += change
        return self._recount(piece, was)

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Every block of every piece once, with the state it counts as."""
        for piece in set(self._at.values()):
            yield from ((block, piece.state) for block in piece.blocks)

    def check_valid(self, states: Sequence[int]) -> None:
        """Assert that users are counted right, given every node's state. For tests."""
        users: dict[_Piece, list[int]] = {}
        for checkpoint, pieces in self._of.items():
            for piece in pieces:
                users.setdefault(piece, [0, 0, 0, 0])[states[checkpoint]] += 1
        for piece, counted in users.items():
            name = repr(piece.need.key)
            assert piece.users[WRITING:] == counted[WRITING:] and not counted[FREE], f"users of {name}"
            found = self._by_key.get(piece.need.key) is piece
            assert not found or counted[WRITING] or counted[CACHED], f"{name} can be found and nobody keeps it right"
            assert found or not counted[CACHED], f"{name} is in use and cannot be found"
        for piece in self._by_key.values():
            assert piece in users, f"{piece.need.key!r} is used by no checkpoint"
        assert self._widths == Counter(self._width.values()), "sizes of checkpoints are miscounted"
        assert {piece for piece in users if piece.need.num_blocks} <= set(self._at.values()), "a piece has no blocks"

    def _recount(self, piece: _Piece, was: int) -> list[int]:
        """Count the blocks of a piece in its state now. Returns them if nothing uses them any more."""
        state = piece.state
        if state != was:
            self._count[was] -= piece.need.num_blocks
            self._count[state] += piece.need.num_blocks
        if state != FREE:
            return []
        for block in piece.blocks:
            del self._at[block]
        return list(piece.blocks)

    def _hide(self, piece: _Piece) -> None:
        if self._by_key.get(piece.need.key) is piece:
            del self._by_key[piece.need.key]

    def _pieces_of(self, nodes: Iterable[int]) -> set[_Piece]:
        return {piece for node in nodes for piece in self._of.get(node, ())}
