"""Leftovers: what a reset has replaced, dropped bit by bit, because to free a million objects at once takes 100 ms.

>>> old = {1: "a", 2: "b", 3: "c"}
>>> left = Leftovers()
>>> left.add(old)
>>> left.drop(2)
>>> len(old)
1
"""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

Container = dict[Any, Any] | set[Any] | deque[Any]


class Leftovers:
    """Containers that nobody uses any more."""

    def __init__(self) -> None:
        self._left: deque[Iterator[object]] = deque()

    def add(self, *containers: Container) -> None:
        self._left.extend(map(_each_of, containers))

    def drop(self, count: int) -> None:
        """Drop the next `count` things, or all that are left."""
        while self._left and count > 0:
            count -= sum(1 for _ in islice(self._left[0], count))
            if count > 0:
                self._left.popleft()


def _each_of(container: Container) -> Iterator[None]:
    """Take out one thing after the other."""
    take = container.popitem if isinstance(container, dict) else container.pop
    while container:
        take()
        yield
