"""KeyPlanner: the arithmetic where blocks are named by keys one by one, wherever in a prompt they are.

    prefix groups     a chunk for each key, as everywhere
    other groups      a *side* for each key that the engine gives blocks for: what one group keeps of one key

    keys        k0      k1      k2      k3
    chunks     [  ]----[  ]----[  ]----[  ]
    window                      `-[ ]   `-[ ]        the engine gave those of the last two keys
    state                               `-[ ]        and of the last

A side is a checkpoint that reaches over its own chunk alone. So one that is stored, found and evicted does not depend
on its depth, and what an engine needs to resume is asked of the group when it looks up.
"""

from collections.abc import Sequence
from copy import copy

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.model.groups import Group
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.model.planner import HybridChunkPlanner, PieceAt

ANY_LENGTH = 1 << 62  # tokens: an engine that gives keys need not know how long its prompts are
SIDE = b"\x03"


class KeyPlanner(HybridChunkPlanner):
    """The planner of a KeyedCache, in which a key is that of `chunk_tokens` tokens.

    Raises ConfigurationError as HybridChunkPlanner, and for prefix groups that look ahead.
    """

    def __init__(self, groups: Sequence[Group], *, chunk_tokens: int | None, in_pages: bool) -> None:
        super().__init__(groups, max_model_len=ANY_LENGTH, grid_tokens=chunk_tokens, in_pages=in_pages)
        self.chunk_groups = [at for at, piece in enumerate(self.pieces) if piece.in_chunk]
        self.side_groups = self._checkpoint_groups
        for group in self.groups:
            if group.lookahead_tokens:
                raise ConfigurationError(
                    f"group {group.name!r} looks ahead by {group.lookahead_tokens} tokens, but an engine that loads "
                    "blocks by keys chooses itself which it needs: leave lookahead_tokens at 0"
                )

    def blocks_of_key(self, at: int) -> int:
        """How many device blocks of a group one key has."""
        return self.pieces[at].device_blocks * (1 if self.pieces[at].in_chunk else len(self._kept(at)))

    def needed(self, at: int, boundary: int) -> Sequence[int]:
        """The chunks whose sides of a group it takes to resume after `boundary` chunks, ascending."""
        blocks, width = self.groups[at].needed(boundary * self.grid_tokens), self._blocks_per_chunk[at]
        if isinstance(blocks, range) and blocks.step == 1:
            return range(blocks.start // width, -(-blocks.stop // width)) if blocks else blocks
        return sorted({block // width for block in blocks})

    def side_name(self, key: bytes, at: int) -> bytes:
        """The name of the side of a group: of the first of these the key itself."""
        return key + SIDE * self.side_groups.index(at)

    def side_keys(self, keys: Sequence[bytes], at: int) -> list[bytes]:
        """The keys of the sides of a group in a pool."""
        beyond = checkpoint_key(self.side_name(b"", at))
        return [key + beyond for key in keys]

    def of_side(self, at: int) -> "KeyPlanner":
        """The same planner where one group alone has sides."""
        only = copy(self)
        only._checkpoint_groups = (at,)
        return only

    def needs_checkpoint(self, depth: int) -> bool:
        """Never: which chunks lead to a place to resume, the engine knows."""
        return False

    def checkpoint(self, depth: int) -> tuple[PieceAt, ...]:
        return tuple(PieceAt(at, depth - 1, block) for at in self._checkpoint_groups for block in self._kept(at))

    def _kept(self, at: int) -> range:
        """Which of the blocks in a chunk a side has: all of them, of a state the last."""
        blocks = self._blocks_per_chunk[at]
        return range(blocks - 1 if self.groups[at].is_state else 0, blocks)
