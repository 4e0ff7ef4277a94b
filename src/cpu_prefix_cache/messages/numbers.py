"""Numbers of blocks and pages, as engines have them: in a list, or in a tensor or array of any library."""

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Array(Protocol):
    """A tensor or array."""

    def tolist(self) -> Any: ...


Numbers = Array | Iterable[int]


def numbers(given: Numbers) -> list[int]:
    """As a list of ints: those of a tensor would be no keys of a dict.

    >>> numbers(range(3)), numbers([7, 8])
    ([0, 1, 2], [7, 8])
    """
    if isinstance(given, list):
        return given
    if isinstance(given, Array):
        listed: list[int] = given.tolist()
        return listed
    return list(given)
