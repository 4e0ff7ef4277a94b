"""Notes of chunks that have left their blocks, from the first time that somebody takes them.

    add     a block is handed out, or a chunk evicted
    take    what was added since; the blocks hold these chunks as long as nobody has written to them

If nobody takes them any more, at most as many are kept as there are blocks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence


class Notes:
    """The blocks of chunks, by the keys of these, in the order in which they left."""

    def __init__(self, num_blocks: int) -> None:
        self._most = num_blocks
        self._blocks: dict[bytes, Sequence[int]] | None = None

    @property
    def are_taken(self) -> bool:
        """Whether anybody has taken them yet."""
        return self._blocks is not None

    def add(self, key: bytes, blocks: Sequence[int]) -> None:
        self.update({key: blocks})

    def update(self, left: Mapping[bytes, Sequence[int]]) -> None:
        noted = self._blocks
        if noted is None:
            return
        noted.update(left)
        while len(noted) > self._most:
            del noted[next(iter(noted))]

    def take(self, find_all: Callable[[Sequence[bytes]], Iterable[object]]) -> Mapping[bytes, Sequence[int]]:
        """The notes since the last call, of chunks that `find_all` does not find: the others are there a second
        time, or have come back.
        """
        noted, self._blocks = self._blocks or {}, {}
        found = zip(noted, find_all([*noted]), strict=True) if noted else ()
        for key in [key for key, here in found if here is not None]:
            del noted[key]
        return noted
