"""A request's block hashes: which of them are keys of chunks, and which name the blocks within a chunk.

vLLM computes chained hashes of blocks whose length divides the block length of every group. The hash at the end of a
chunk is the chunk's key; vLLM finds a block of any group by the hash at the block's end.

    hashes          h0  h1  h2  h3  h4  h5  h6        of 16 tokens
    keys                h1      h3      h5            chunks of 32
    blocks of 32        h1      h3      h5
    blocks of 16    h0  h1  h2  h3  h4  h5  h6

The earlier hashes of a chunk do not follow from its key. So where a group has blocks shorter than a chunk, those hashes
are remembered by the key, from when the chunk is computed until the device has none of its last blocks.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import overload

from cpu_prefix_cache.deciding import FAR_CHUNKS, Forgetting, HybridChunkPlanner


class ChunkKeys(Sequence[bytes]):
    """Every `each`-th of `hashes`: a view of a list that grows while the request runs."""

    def __init__(self, hashes: Sequence[bytes], each: int) -> None:
        self._hashes = hashes
        self._each = each

    @classmethod
    def of(cls, hashes: Sequence[bytes], each: int) -> Sequence[bytes]:
        """The keys of the chunks: `hashes` itself if each hash is a chunk's."""
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
    """For block b of group g within a chunk, as (g, b): the index of its hash among the chunk's hashes.

    Only for blocks that are used: a short window needs only the last blocks of a chunk.
    """
    far = {(at.group, at.block) for at in planner.checkpoint(planner.chunks_to_resume(FAR_CHUNKS))}
    ends = {}
    for at, piece in enumerate(planner.pieces):
        each = planner.grid_tokens // piece.group.block_tokens
        for block in range(each):
            if piece.in_chunk or each == 1 or (at, block) in far:
                ends[at, block] = (block + 1) * hashes_per_chunk // each - 1
    return ends


class HashesOnDevice:
    """The hashes of a chunk's blocks, by the chunk's key. `picked` are their indices among the chunk's `each` hashes,
    ascending.

    `is_here` is true while the device has a last block of the chunk with this key. Chunks without one are
    forgotten, a few in each call of `add`.
    """

    def __init__(self, picked: Sequence[int], each: int, is_here: Callable[[bytes], bool]) -> None:
        self._picked = picked
        self._each = each
        self._is_here = is_here
        self._sweep = Forgetting()
        self.by_key = OrderedDict[bytes, Sequence[bytes]]()

    def add(self, hashes: Sequence[bytes], start: int, stop: int) -> None:
        """Remember chunks [start, stop) of a request with these hashes, and forget others."""
        for first in range(start * self._each, stop * self._each, self._each):
            picked = tuple(hashes[first + at] for at in self._picked)
            if self.by_key.setdefault(picked[-1], picked) is picked:
                self._sweep.added(1)
        for key in self._sweep.gone(self.by_key, lambda keys: [self._is_here(each) for each in keys]):
            del self.by_key[key]
