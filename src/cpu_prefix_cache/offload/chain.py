"""Chain: what one store writes, and one load reads."""

from collections.abc import Sequence
from dataclasses import dataclass

from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.model.hashing import checkpoint_key


@dataclass(frozen=True, slots=True)
class Chain:
    """Chunks with these keys, each below the one before it, the first below `parent_key` (None: a first chunk).

    `checkpoint` is to hang below the last of them, or below the parent if there are none.
    """

    parent_key: bytes | None
    keys: Sequence[bytes]
    checkpoint: CheckpointAt | None = None

    def __len__(self) -> int:
        return len(self.keys) + (self.checkpoint is not None)

    @property
    def node_keys(self) -> Sequence[bytes]:
        """The keys of its chunks, and of its checkpoint."""
        return self.keys if self.checkpoint is None else (*self.keys, checkpoint_key(self.checkpoint.tail[-1]))

    def first(self, count: int) -> "Chain":
        """Its first `count` nodes, which is without the checkpoint if there are more."""
        return self if count >= len(self) else Chain(self.parent_key, self.keys[:count])
