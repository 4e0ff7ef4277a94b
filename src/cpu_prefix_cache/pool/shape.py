"""Shape: what a pool is for, which never changes: its blocks, and what a chunk and a checkpoint take of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from cpu_prefix_cache.index.forest import Forest
from cpu_prefix_cache.messages.errors import ConfigurationError


class Beside(NamedTuple):
    """The pool beside holds up to `chunks` chunks. Those that this pool has come and go, so chunks go by numbers here.

    `overlap`: so many chunks above one that only this pool has stay here, too: whoever looks ahead does not resume
    behind the last chunk of the pool beside, and loads them.
    """

    chunks: int
    overlap: int = 0


@dataclass(frozen=True, slots=True)
class Shape:
    """`capacity` blocks, of which a chunk takes `blocks_per_chunk`. `needs_checkpoint` and `beside` are those of
    `BlockPool`. A pool that never `declines` takes all that is offered, whatever its policy finds it worth.

    Raises ConfigurationError for a pool that holds no chunk.
    """

    capacity: int
    blocks_per_chunk: int = 1
    needs_checkpoint: Callable[[int], bool] | None = None
    beside: Beside | None = None
    declines: bool = True

    def __post_init__(self) -> None:
        least = max(1, self.blocks_per_chunk)
        if self.capacity < least or (self.blocks_per_chunk < 1 and not self.has_checkpoints):
            raise ConfigurationError(f"a pool needs at least the {least} blocks of one chunk, got {self.capacity}")

    @property
    def has_checkpoints(self) -> bool:
        return self.needs_checkpoint is not None

    @property
    def is_shared(self) -> bool:
        """Whether chunks go by numbers, because a pool beside may have them, too."""
        return self.beside is not None

    def new_forest(self, numbers: int = 0) -> Forest:
        """An empty forest for such a pool, with so many numbers beyond its root."""
        if self.beside is None:
            return Forest(self.capacity, numbers=numbers, is_bounded=self.blocks_per_chunk > 0)
        return Forest(0, self.capacity // max(1, self.blocks_per_chunk) + self.beside.chunks, numbers)
