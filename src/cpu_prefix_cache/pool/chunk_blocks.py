"""Blocks of chunks: which ones a chunk takes, and which chunk has a block.

A chunk that takes blocks goes by the first of them, so a pool of one block to a chunk keeps nothing here. Where chunks
lose their blocks and keep their places, because a pool beside has them, each goes by a number instead:

    by its first block     chunk 7 has blocks 7, 12, 13    further blocks  [7] -> 12, 13
    by a number            chunk 3 has blocks 7, 12, 13    further blocks  [3] -> 7, 12, 13
"""

from array import array
from collections.abc import Iterable, Sequence

from cpu_prefix_cache.index.forest import NONE


class ChunkBlocks:
    """The blocks of `nodes` nodes, `per_chunk` of each that is a chunk and has any."""

    def __init__(self, nodes: int, per_chunk: int, *, by_number: bool) -> None:
        self._per_chunk = per_chunk
        self._by_number = by_number
        self._width = per_chunk if by_number else max(0, per_chunk - 1)
        self._further = array("i", [NONE]) * (self._width * nodes)
        self._chunk: dict[int, int] = {}  # by further block, where chunks go by their first one

    def add_node(self) -> None:
        """There is one node more, without blocks."""
        self._further.extend([NONE] * self._width)

    def of(self, chunks: Sequence[int]) -> tuple[int, ...]:
        """All the blocks of chunks, chunk after chunk; NONE for each block that a chunk lacks."""
        if self._by_number:
            return tuple(self._further_of(chunks))
        if self._per_chunk <= 1:
            return tuple(chunks) if self._per_chunk else ()
        return tuple(block for chunk in chunks for block in (chunk, *self._further_of((chunk,))))

    def chunk_of(self, block: int) -> int:
        """The chunk of a further block; any other block, as it is."""
        return self._chunk.get(block, block)

    def give(self, chunks: Sequence[int], blocks: Sequence[int]) -> None:
        """Give chunks their blocks, chunk after chunk."""
        width, per_chunk, further = self._width, self._per_chunk, self._further
        if width == per_chunk == 1:
            for chunk, block in zip(chunks, blocks, strict=True):
                further[chunk] = block
        elif width:
            for at, chunk in enumerate(chunks, 1):
                own = blocks[at * per_chunk - width : at * per_chunk]
                further[chunk * width : (chunk + 1) * width] = array("i", own)
                if not self._by_number:
                    self._chunk.update(dict.fromkeys(own, chunk))

    def take(self, chunks: Sequence[int]) -> list[int]:
        """Take the blocks of chunks, which have none any more."""
        width, further = self._width, self._further
        blocks = [block for block in self.of(chunks) if block != NONE]
        none = array("i", [NONE]) * width
        for chunk in chunks if self._by_number else ():
            further[chunk * width : (chunk + 1) * width] = none
        for block in blocks if self._chunk else ():
            self._chunk.pop(block, None)
        return blocks

    def check_valid(self, chunks: Iterable[int]) -> None:
        """Assert that further blocks know their chunks, given all chunks that have blocks. For tests."""
        named = {} if self._by_number else {block: chunk for chunk in chunks for block in self._further_of((chunk,))}
        assert self._chunk == named, "blocks of another chunk"

    def _further_of(self, chunks: Sequence[int]) -> Iterable[int]:
        width, further = self._width, self._further
        if width == 1:
            return map(further.__getitem__, chunks)
        return (block for chunk in chunks for block in further[chunk * width : (chunk + 1) * width])
