"""Options that are numbers of bytes, as people write them."""

import operator
import re

from cpu_prefix_cache.messages.errors import ConfigurationError

POWERS = {"k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
MOST_DIGITS = 15


def parse_bytes(text: str) -> int:
    """A number of bytes with an optional unit, binary (GiB) or decimal (GB). Raises ConfigurationError.

    >>> parse_bytes("64GiB"), parse_bytes("1.5 GB"), parse_bytes("4096")
    (68719476736, 1500000000, 4096)
    """
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*(?:([kmgtp])(i?))?b?", text.strip().lower(), re.ASCII)
    if match is None:
        raise ConfigurationError(
            f"a size is a number of bytes such as 64GiB or 500GB, in at most {MOST_DIGITS} digits; got {text[:40]!r}"
        )
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** POWERS.get(prefix or "", 0))


def num_bytes(name: str, size: int | str) -> int:
    """An option as a number of bytes: a number, or a text such as "2GiB". Raises ConfigurationError for others."""
    if isinstance(size, str):
        return parse_bytes(size)
    try:
        return operator.index(size)
    except TypeError:
        raise ConfigurationError(
            f'{name} must be a whole number of bytes, or a text such as "2GiB"; got {size!r}'
        ) from None
