"""A pool with checkpoints the slow, obvious way: nodes in a list, pieces that are searched in every node.

A chunk is called by its prompt, "ab"; the checkpoint at its end by that and a "!", "ab!". The names show parents, and
the nodes that can be resumed from. Nothing here is shared with what it is compared to.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field


@dataclass(eq=False)
class Piece:
    """Blocks that checkpoints use. Its bytes are right once the node that writes it is committed."""

    key: Hashable
    blocks: tuple[int, ...]
    writer: "Node"
    pins: int = 0
    is_old: bool = False  # there was a reset since


@dataclass(eq=False)
class Node:
    """A chunk or a checkpoint, from its allocation until it is gone. Below `above`, if it ever was committed."""

    number: int
    name: str
    blocks: tuple[int, ...] = ()
    pieces: list[Piece] = field(default_factory=list)
    state: str = "writing"
    above: "Node | None" = None
    pins: int = 0
    has_writer: bool = True
    ever_cached: bool = False
    touch: int = 0
    is_old: bool = False
    over: bool = False  # a chunk whose request has ended, or that has lost all that hung below it

    @property
    def is_checkpoint(self) -> bool:
        return self.name.endswith("!")


class SlowHybridPool:
    def __init__(self, needs_checkpoint: Callable[[int], bool]) -> None:
        self.needs_checkpoint = needs_checkpoint
        self.nodes: list[Node] = []
        self.stamp = 0

    # nodes here

    def in_state(self, *states: str) -> list[Node]:
        return [node for node in self.nodes if node.state in states]

    def cached(self, name: str) -> Node | None:
        return next((node for node in self.in_state("cached") if node.name == name), None)

    def longest(self, prompt: str) -> str:
        """The longest beginning of a prompt that is cached."""
        able = [prompt[:end] for end in range(len(prompt) + 1) if all(map(self.cached, beginnings(prompt[:end])))]
        return max(able, key=len)

    def resumable(self, name: str) -> str:
        """The longest beginning from which a request can go on; "" if there is none."""
        able = [
            each
            for each in beginnings(name)
            if self.cached(each) and (not self.needs_checkpoint(len(each)) or self.cached(each + "!"))
        ]
        return max(able, key=len, default="")

    def below(self, node: Node) -> list[Node]:
        """Children of the node, whether they can be found or not."""
        return [each for each in self.nodes if each.above is node]

    # pieces

    def pieces(self) -> list[Piece]:
        found: list[Piece] = []
        for node in self.nodes:
            found += [piece for piece in node.pieces if piece not in found]
        return found + [piece for piece in self.orphans if piece not in found]

    @property
    def orphans(self) -> list[Piece]:
        """Pieces of no checkpoint any more whose bytes somebody pins."""
        self._pinned = [piece for piece in getattr(self, "_pinned", []) if piece.pins]
        return self._pinned

    def pin_piece(self, piece: Piece) -> None:
        piece.pins += 1
        self._pinned = [*self.orphans, piece]

    def shared(self, key: Hashable) -> Piece | None:
        """The piece a new checkpoint uses instead of its own: somebody wants it, and it is or will be right."""
        for piece in self.pieces():
            wanted = any(node.state in ("writing", "cached") for node in self.users(piece))
            right = piece.writer.ever_cached or piece.writer.state == "writing"
            if piece.key == key and wanted and right:
                return piece
        return None

    def users(self, piece: Piece) -> list[Node]:
        return [node for node in self.nodes if piece in node.pieces]

    def piece_state(self, piece: Piece) -> str:
        states = {node.state for node in self.users(piece)}
        if "writing" in states:
            return "writing"
        return "retired" if piece.pins or "retired" in states else "cached"

    # blocks

    def blocks(self, state: str) -> set[int]:
        """All blocks in this state."""
        found = {block for node in self.in_state(state) for block in node.blocks}
        return found | {block for each in self.pieces() if self.piece_state(each) == state for block in each.blocks}

    def evictable(self) -> list[Node]:
        """Cached nodes with no pin on them or below them."""
        return [node for node in self.in_state("cached") if not self._is_held(node)]

    def can_free(self) -> int:
        """How many blocks eviction can free."""
        able = self.evictable()
        pieces = [
            piece
            for piece in self.pieces()
            if self.piece_state(piece) == "cached" and all(node in able for node in self.users(piece))
        ]
        return sum(len(node.blocks) for node in able) + sum(len(piece.blocks) for piece in pieces)

    def useless(self) -> list[Node]:
        """The chunks that go before anything else: of ended requests, and nothing can be resumed from them or below."""
        gone: list[Node] = []
        while True:
            more = [
                node
                for node in self.in_state("cached")
                if node not in gone
                and not node.is_checkpoint
                and not node.pins
                and (node.over or any(each.above is node for each in gone))
                and all(each in gone for each in self.below(node))
                and self.needs_checkpoint(len(node.name))
            ]
            if not more:
                return gone
            gone += more

    # events

    def touch(self, node: Node | None) -> int:
        self.stamp += 1
        if node is not None:
            node.touch = self.stamp
        return self.stamp

    def commit(self, node: Node, touch: int) -> None:
        node.state = "cached"
        node.touch = touch
        node.has_writer = False
        node.ever_cached = True
        node.above = self.cached(node.name[:-1])

    def leave(self, gone: list[Node]) -> None:
        """Evicted."""
        for node in gone:
            if node.above is not None:
                node.above.over = True
        self.nodes = [node for node in self.nodes if node not in gone]

    def withdraw(self, name: str) -> None:
        for node in self.in_state("cached"):
            if node.name.startswith(name):
                node.state = "retired"
        self.free_unneeded()

    def free_unneeded(self) -> None:
        """A retired node goes when nobody pins it, nothing hangs below it and its writer is done."""
        while True:
            gone = [node for node in self.in_state("retired") if not (node.pins or node.has_writer or self.below(node))]
            if not gone:
                return
            self.leave(gone)

    def _is_held(self, node: Node) -> bool:
        return bool(node.pins) or any(self._is_held(each) for each in self.below(node))


def beginnings(name: str) -> list[str]:
    return [name[:end] for end in range(1, len(name) + 1)]
