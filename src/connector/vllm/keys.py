"""A request's block hashes as keys of chunks, and as what vLLM knows the blocks within chunks by.

vLLM hashes blocks of the length that divides all of its groups', each hash chained to the one before; so the hash at
the end of a chunk is the chunk's key, and vLLM itself knows every block by the hash at its end.

    hashes          h0  h1  h2  h3  h4  h5  h6        of 16 tokens
    keys                h1      h3      h5            chunks of 32
    blocks of 32        h1      h3      h5
    blocks of 16    h0  h1  h2  h3  h4  h5  h6

A key does not tell the hashes before it. So where a group has blocks shorter than a chunk, those hashes are remembered
by the key, from when the chunk is computed for as long as the device has some of it.
"""

from collections.abc import Callable, Sequence
from typing import overload

from cpu_prefix_cache import HybridChunkPlanner
from cpu_prefix_cache.model.planner import FAR_CHUNKS
from cpu_prefix_cache.offload.forgetting import Forgetting


class ChunkKeys(Sequence[bytes]):
    """Every `each`-th of `hashes`, as they are at the moment: the list grows as the request goes on."""

    def __init__(self, hashes: Sequence[bytes], each: int) -> None:
        self._hashes = hashes
        self._each = each

    @classmethod
    def of(cls, hashes: Sequence[bytes], each: int) -> Sequence[bytes]:
        """The list itself where a block is a chunk: it is read as it lies."""
        return hashes if each == 1 else cls(hashes, each)

    def __len__(self) -> int:
        return len(self._hashes) // self._each

    @overload
    def __getitem__(self, at: int) -> bytes: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[bytes]: ...

    def __getitem__(self, at: int | slice) -> bytes | Sequence[bytes]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        return self._hashes[range(len(self))[at] * self._each + self._each - 1]


def block_ends(planner: HybridChunkPlanner, hashes_per_chunk: int) -> dict[tuple[int, int], int]:
    """For block number b of group g within a chunk, as (g, b): which of the chunk's hashes, from 0, it ends with.

    Those blocks only that are ever asked for: a short window takes no more than the last of a chunk.
    """
    far = {(at.group, at.block) for at in planner.checkpoint(FAR_CHUNKS)}
    ends = {}
    for at, piece in enumerate(planner.pieces):
        each = planner.grid_tokens // piece.group.block_tokens
        for block in range(each):
            if piece.in_chunk or each == 1 or (at, block) in far:
                ends[at, block] = (block + 1) * hashes_per_chunk // each - 1
    return ends


class HashesOnDevice:
    """Hashes of chunks by their keys: `picked` are those of a chunk's `each` hashes that blocks end with, ascending.

    `is_here` says of a key whether the device still has an end of the chunk. What has none is forgotten in time, a
    portion in each call.
    """

    def __init__(self, picked: Sequence[int], each: int, is_here: Callable[[bytes], bool]) -> None:
        self._picked = picked
        self._each = each
        self._is_here = is_here
        self._sweep = Forgetting()
        self.by_key: dict[bytes, Sequence[bytes]] = {}

    def add(self, hashes: Sequence[bytes], start: int, stop: int) -> None:
        """Remember chunks [start, stop) of a request with these hashes, and forget others."""
        for first in range(start * self._each, stop * self._each, self._each):
            picked = tuple(hashes[first + at] for at in self._picked)
            if self.by_key.setdefault(picked[-1], picked) is picked:
                self._sweep.add((picked[-1],))
        for key in self._sweep.gone(lambda keys: [self._is_here(each) for each in keys]):
            del self.by_key[key]
