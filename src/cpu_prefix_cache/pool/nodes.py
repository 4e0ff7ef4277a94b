"""The nodes of a pool: the state of each, the blocks it has, and how many blocks are in each state (rule 1).

A chunk is named by its first block. Where it may have none, and for a checkpoint, the name is a number beyond the root
of the forest; numbers are used again.
"""

from collections.abc import Sequence

from cpu_prefix_cache.index.forest import NONE, Forest
from cpu_prefix_cache.pool.checkpoints import Checkpoints
from cpu_prefix_cache.pool.chunk_blocks import ChunkBlocks
from cpu_prefix_cache.pool.shape import Shape
from cpu_prefix_cache.pool.states import CACHED, FREE, RETIRED, BlockState


class Nodes:
    """The nodes of a pool of this shape over this forest, which is empty."""

    def __init__(self, forest: Forest, shape: Shape) -> None:
        size = len(forest.key)
        self._forest = forest
        self._shape = shape
        self.state = bytearray(size)  # by node
        self.count = [0] * len(BlockState)  # blocks by BlockState; that of FREE means nothing
        self.chunks = ChunkBlocks(size, shape.blocks_per_chunk, by_number=shape.is_shared)
        self.checkpoints = Checkpoints(self.count)
        self.unfinished: set[int] = set()  # RETIRED nodes whose writer is not done
        self._numbers = [*range(forest.root + 1, size)]

    def take_over(self, before: "Nodes", nodes: Sequence[int], writing: set[int]) -> set[int]:
        """Nodes of an earlier pool, of which some are `writing`, keep their names and blocks, and are RETIRED here. The
        blocks that are in use.
        """
        held = set(nodes)
        self._numbers = [number for number in self._numbers if number not in held]
        self.unfinished = writing
        for node in nodes:
            self.state[node] = RETIRED
        chunks = [node for node in nodes if node not in before.checkpoints]
        blocks = before.chunks.of(chunks)
        self.chunks.give(chunks, blocks)
        self.count[RETIRED] += len(blocks) - blocks.count(NONE)
        self.checkpoints.take_over(before.checkpoints, held.difference(chunks))
        return {*blocks, *(block for block, _ in self.checkpoints.blocks())} - {NONE}

    @property
    def num_absent(self) -> int:
        """How many chunks have a place and no blocks: all that have a key, but those that are cached."""
        if not self._shape.is_shared:
            return 0
        return len(self._forest) - self.count[CACHED] // self._shape.blocks_per_chunk

    @property
    def most(self) -> int:
        """How many nodes there is room for, if the others are as large as those that are here."""
        blocks = self.count[CACHED]
        if self._shape.is_shared or not blocks:
            return self._forest.capacity
        return self._shape.capacity * len(self._forest) // blocks

    def new_numbers(self, count: int) -> list[int]:
        """Names of nodes that have no block to be named by: checkpoints, or chunks that may take no blocks."""
        first = max(0, len(self._numbers) - count)
        numbers = self._numbers[first:]
        del self._numbers[first:]
        for _ in range(count - len(numbers)):
            self.state.append(FREE)
            self.chunks.add_node()
            numbers.append(self._forest.add_number())
        return numbers

    def put_back(self, nodes: Sequence[int]) -> None:
        """These nodes do not exist any more: numbers among them can be used again."""
        self._numbers += [node for node in nodes if node > self._forest.root]

    def move(self, nodes: Sequence[int], before: int, after: int) -> None:
        """Nodes go from one state to another and keep their blocks."""
        state = self.state
        for node in nodes:
            state[node] = after
        checkpoints = [node for node in nodes if node in self.checkpoints] if self._shape.has_checkpoints else []
        for node in checkpoints:
            self.checkpoints.move(node, before, after)
        blocks = (len(nodes) - len(checkpoints)) * self._shape.blocks_per_chunk
        self.count[before] -= blocks
        self.count[after] += blocks

    def remove(self, nodes: Sequence[int], before: int) -> list[int]:
        """Nodes do not exist any more. Returns the blocks that nothing uses now."""
        shape = self._shape
        if shape.blocks_per_chunk == 1 and not (shape.has_checkpoints or shape.is_shared):
            self.count[before] -= len(nodes)
            return list(nodes)
        for node in nodes:
            self.state[node] = FREE
        self.put_back(nodes)
        chunks = [node for node in nodes if node not in self.checkpoints] if shape.has_checkpoints else nodes
        freed = [
            block for node in nodes if node in self.checkpoints for block in self.checkpoints.move(node, before, FREE)
        ]
        return freed + self.empty(chunks, before)

    def empty(self, chunks: Sequence[int], before: int) -> list[int]:
        """Take the blocks of chunks in this state, which have none any more."""
        blocks = self.chunks.take(chunks)
        self.count[before] -= len(blocks)
        return blocks
