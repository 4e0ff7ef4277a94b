"""Names: keys of all engines in one forest, and in one tier below.

An engine's key identifies a prompt, and its namespace a model, a revision and a layout. A name has both in the bytes of
a key, so that records and tiers take it for one. To find two texts that have one name in two namespaces is as hard as
to find two texts with one digest.

>>> one, other = (named(each * 16, [b"k" * KEY_BYTES])[0] for each in (b"1", b"2"))
>>> len(one), one == other
(32, False)
"""

import hashlib
import struct
from collections.abc import Sequence
from functools import lru_cache

from cpu_prefix_cache.messages.tier import KEY_BYTES

_NAME = struct.Struct(f"{KEY_BYTES}s")


def named(namespace: bytes, keys: Sequence[bytes]) -> list[bytes]:
    """The names of these keys."""
    length = len(keys) * KEY_BYTES
    mask = int.from_bytes(_mask(namespace) * len(keys))
    joined = (int.from_bytes(b"".join(keys)) ^ mask).to_bytes(length)
    return [name for (name,) in _NAME.iter_unpack(joined)]


@lru_cache
def _mask(namespace: bytes) -> bytes:
    return hashlib.sha256(namespace).digest()
