"""Dictionaries of keys, several in place of a large one, which is rebuilt now and then: at a million keys in 55 to 270
ms. A key is in the dictionary of its first byte, and neighbouring first bytes share one.

CPython rebuilds a dictionary that is full, deletions included, with the least power of two of slots that is three times
its keys or more. So one that has just fewer takes 56 to 61 bytes a key, and one that has just more takes 108 and above.
"""

import math

MOST_KEYS = 2**17 // 3  # in a dictionary: one of so many is rebuilt in 3 ms


def new_shards(num_keys: int | None) -> list[dict[bytes, int]]:
    """By first byte, the empty dictionary for it, where so many keys take little memory together. None: of any number,
    each has its own.
    """
    if num_keys is None:
        return [{} for _ in range(256)]
    most = max(1, min(256, 256 * MOST_KEYS // num_keys))
    together = min(range(1, most + 1), key=lambda first_bytes: _bytes_a_key(first_bytes * num_keys / 256))
    dictionaries: list[dict[bytes, int]] = [{} for _ in range(0, 256, together)]
    return [dictionaries[first // together] for first in range(256)]


def distinct(shards: list[dict[bytes, int]]) -> list[dict[bytes, int]]:
    """Each of the dictionaries once."""
    return [*{id(shard): shard for shard in shards}.values()]


def _bytes_a_key(num_keys: float) -> float:
    """In a dictionary that has so many keys on average, and hardly ever three standard deviations more."""
    slots = 1 << math.ceil(3 * (num_keys + 3 * math.sqrt(num_keys))).bit_length()
    return (slots * (2 if slots < 2**16 else 4) + 24 * (2 * slots // 3)) / num_keys
