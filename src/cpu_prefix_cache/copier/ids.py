"""Checks of the numbers of blocks, before anything moves. Knows no torch."""

from array import array
from collections.abc import Sequence

from cpu_prefix_cache.messages.errors import MisuseError


def check_range(what: str, ids: Sequence[int], limit: int) -> None:
    """Raise MisuseError unless all `ids` are in [0, limit)."""
    if ids:
        numbers = numbers_of(what, ids, limit)
        check_ends(what, min(numbers), max(numbers), limit)


def numbers_of(what: str, ids: Sequence[int], limit: int) -> "array[int]":
    """Raises MisuseError for what is no whole number."""
    try:
        return array("q", ids)
    except (TypeError, OverflowError) as error:
        raise MisuseError(f"{what} must be whole numbers from 0 to {limit - 1}: {error}") from error


def check_ends(what: str, least: int, most: int, limit: int) -> None:
    """Raise MisuseError unless both are in [0, limit)."""
    if least < 0 or most >= limit:
        raise MisuseError(f"{what} must be from 0 to {limit - 1}, got {least} to {most}")
