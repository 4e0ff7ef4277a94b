"""Options that are whole numbers, and sizes in bytes."""

import operator
from typing import Any

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import parse_bytes


def check_whole(**options: Any) -> None:
    """Raise ConfigurationError for an option that is neither a whole number nor None."""
    for name, value in options.items():
        if value is None:
            continue
        try:
            operator.index(value)
        except TypeError:
            raise ConfigurationError(f"{name} must be a whole number, got {value!r}") from None


def num_bytes(name: str, size: int | str) -> int:
    """`size` as a number of bytes: a number, or a text such as "2GiB". Raises ConfigurationError for others."""
    if isinstance(size, str):
        return parse_bytes(size)
    try:
        return operator.index(size)
    except TypeError:
        raise ConfigurationError(
            f'{name} must be a whole number of bytes, or a text such as "2GiB"; got {size!r}'
        ) from None
