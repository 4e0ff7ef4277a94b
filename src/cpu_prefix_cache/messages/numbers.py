"""Numbers as engines give them: of blocks and pages in a list, or in a tensor or array of any library; and sizes."""

from collections.abc import Iterable
from numbers import Integral
from typing import Any, Protocol, TypeGuard, runtime_checkable

from cpu_prefix_cache.messages.errors import ConfigurationError


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


def is_integer(value: object) -> TypeGuard[int]:
    """Whether this is an integer, of any library. A bool is none: it answers a question.

    >>> is_integer(16), is_integer(16.0), is_integer(True)
    (True, False, False)
    """
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def is_whole(value: object, least: int = 0) -> TypeGuard[int]:
    """Whether this is an integer from `least` on."""
    return is_integer(value) and value >= least


def check_whole(name: str, value: object, least: int) -> None:
    """Raise ConfigurationError unless `value` is an integer from `least` on."""
    if not is_whole(value, least):
        raise ConfigurationError(f"{name} must be a whole number of at least {least}, got {value!r}")
