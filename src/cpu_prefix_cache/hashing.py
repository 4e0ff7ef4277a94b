"""Keys of chunks: one chained digest for every full chunk of a token sequence.

    key[i] = digest(key[i - 1] + tokens of chunk i)        tokens as unsigned 32-bit, little-endian
    key[-1] = digest(identity fields)                      the seed: who may share with whom

Because the chain begins at the first token, equal keys mean equal prefixes, not merely equal chunks (rule 17).
An engine that already hashes its blocks uses its own digests and never comes here.
"""

import hashlib
import sys
from array import array
from collections.abc import Callable, Mapping, Sequence

import xxhash

from cpu_prefix_cache.errors import ConfigurationError, MisuseError

TOKEN_BYTES = 4
FORMAT = b"cpu-prefix-cache/1"  # golden vectors in tests/test_hashing.py hold what follows from it


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


DIGESTS: Mapping[str, Callable[[bytes], bytes]] = {"xxh3_128": xxhash.xxh3_128_digest, "sha256": _sha256}


class ChainHasher:
    """Turns tokens into chunk keys, incrementally.

    >>> hasher = ChainHasher(chunk_tokens=2)
    >>> keys: list[bytes] = []
    >>> hasher.extend(keys, [1, 2, 3])
    >>> hasher.extend(keys, [1, 2, 3, 4])  # only the new chunk is hashed
    >>> keys == hasher.keys([1, 2, 3, 4]) and len(keys)
    2
    """

    def __init__(
        self, chunk_tokens: int, algorithm: str = "xxh3_128", identity: Mapping[str, bytes] | None = None
    ) -> None:
        """`identity` fields enter the seed by name, each length-prefixed, so that no two of them can be confused.

        xxh3_128 is fast and not cryptographic: whoever chooses prompts could in principle construct a collision.
        Use sha256 wherever tenants are kept apart by salt, or keys are shared or persist.

        Raises ConfigurationError for an unknown algorithm or a chunk of less than one token.
        """
        if algorithm not in DIGESTS:
            raise ConfigurationError(f"hash algorithm must be one of {', '.join(DIGESTS)}; got {algorithm!r}")
        if chunk_tokens < 1:
            raise ConfigurationError(f"chunk_tokens must be at least 1, got {chunk_tokens}")
        self.chunk_tokens = chunk_tokens
        self._digest = DIGESTS[algorithm]
        self._seed = self._digest(_canonical(identity or {}))

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """One key for each full chunk of `tokens`."""
        keys: list[bytes] = []
        self.extend(keys, tokens)
        return keys

    def extend(self, keys: list[bytes], tokens: Sequence[int]) -> None:
        """Append to `keys`, the keys of the first chunks of `tokens`, those of the chunks that follow."""
        digest, width = self._digest, self.chunk_tokens * TOKEN_BYTES
        begin = len(keys) * self.chunk_tokens
        data = _token_bytes(tokens[begin : len(tokens) - len(tokens) % self.chunk_tokens])
        key = keys[-1] if keys else self._seed
        for at in range(0, len(data), width):
            key = digest(key + data[at : at + width])
            keys.append(key)


def _canonical(identity: Mapping[str, bytes]) -> bytes:
    fields = [FORMAT]
    for name in sorted(identity):
        fields += [name.encode(), identity[name]]
    return b"".join(len(field).to_bytes(8, "little") + field for field in fields)


def _token_bytes(tokens: Sequence[int]) -> bytes:
    try:
        words = tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise MisuseError(f"tokens must be integers from 0 to 2**32 - 1: {error}") from error
    if sys.byteorder == "big":
        words = words[:]
        words.byteswap()
    return words.tobytes()
