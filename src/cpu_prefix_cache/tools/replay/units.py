"""Parses capacities in blocks or bytes, and formats bytes and seconds for people.

>>> parse_capacity("3000", None), parse_capacity("10GiB", 2**20), parse_capacity("1.5GB", 10**6)
(3000, 10240, 1500)
>>> show_bytes(3 * 2**30), show_bytes(512)
('3.0 GiB', '512 B')
>>> show_seconds(0.5), show_seconds(1022), show_seconds(94_935)
('0.5 s', '17.0 minutes', '26.4 hours')
"""

import re

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.sizes import MOST_DIGITS, parse_bytes

BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def parse_capacity(text: str, block_bytes: int | None) -> int:
    """A capacity in blocks, from a number of blocks or from bytes with a unit (10GiB, 10GB).

    Raises ConfigurationError for any other text, for bytes if `block_bytes` is not known, and for less than a block.
    """
    number = text.strip()
    if re.fullmatch(r"[\d.]+", number, re.ASCII):
        return _blocks(number)
    try:
        size = parse_bytes(text)
    except ConfigurationError as error:
        raise ConfigurationError(f"a capacity is a number of blocks, or a size: {error}") from error
    if block_bytes is None:
        raise ConfigurationError(f"{text} needs --bytes-per-token or --model, to turn bytes into blocks")
    if size < block_bytes:
        raise ConfigurationError(f"{text} is less than a block, which takes {show_bytes(block_bytes)}")
    return size // block_bytes


def _blocks(number: str) -> int:
    if len(number) > MOST_DIGITS:
        raise ConfigurationError(f"a capacity has at most {MOST_DIGITS} digits, got {len(number)}")
    if not number.isdecimal() or int(number) < 1:
        raise ConfigurationError(f"a capacity is at least one block, and whole blocks; got {number!r}")
    return int(number)


def show_bytes(count: float) -> str:
    """Bytes in the largest binary unit that makes at least 1."""
    power = 0
    while count >= 1024 and power < len(BINARY) - 1:
        count /= 1024
        power += 1
    return f"{count:.1f} {BINARY[power]}" if power else f"{count:.0f} B"


def show_seconds(seconds: float) -> str:
    """Seconds in the largest of seconds, minutes, hours and days that makes at least 2."""
    for name, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {name}"
    return f"{seconds:.1f} s"
