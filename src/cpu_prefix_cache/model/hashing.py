"""Keys of chunks: one chained digest for every full chunk of a token sequence.

    key[-1] = digest(identity)                                  the seed: who may share with whom
    key[i]  = digest(key[i - 1] + tokens of chunk i)            a chunk in which no item begins
    key[i]  = digest(key[i - 1] + tokens of chunk i + digest(items) + 01)   one in which images, audio, ... begin

    identity    the format, then name and value of every field, by name; each of them after its length
    items       start, end and content of every item that begins in the chunk; each of them after its length
    integers    little-endian everywhere: a token has 4 bytes, unsigned; lengths, starts and ends have 8

So equal keys mean equal prefixes (rule 14): the same tokens, for the same identity, with the same items in the same
places. The chunks before the first item are shared with the plain text. The byte at the end sets chunks with items
apart from plain ones of any size, whose bytes are words of 4.

An engine's own digests are used as they are, all of one length. If they depend on PYTHONHASHSEED or another random
value, nothing may be kept under them beyond the process.
"""

import copy
import hashlib
import operator
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any, Self

import xxhash

from cpu_prefix_cache.messages.errors import ConfigurationError, MisuseError, PrefixCacheError
from cpu_prefix_cache.messages.numbers import check_whole

TOKEN_BYTES = 4
LENGTH_BYTES = 8
FORMAT = b"cpu-prefix-cache/1"  # golden vectors in tests/unit/test_hashing.py hold what follows from it
ITEMS = b"\x01"
CHECKPOINT = b"\x02"
KEEP_APART = frozenset({"salt", "cache_salt", "tenant"})  # fields somebody may want to get around
NO_IDENTITY: Mapping[str, bytes] = {}


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


DIGESTS: Mapping[str, Callable[[bytes], bytes]] = {"xxh3_128": xxhash.xxh3_128_digest, "sha256": _sha256}
CRYPTOGRAPHIC = frozenset({"sha256"})


@dataclass(frozen=True, slots=True, order=True)
class MultimodalItem:
    """An image, a sound, ...: what stands in for the placeholder tokens [start, end) of a request.

    `digest` is the engine's own, of the content and of whatever else decides the model's input, such as the options of
    the processor; of any length, and cryptographic where tenants are kept apart. Items may overlap.

    Raises MisuseError for an item without tokens or without a digest.
    """

    start: int
    end: int
    digest: bytes

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise MisuseError(f"an item stands for at least one token, from 0 on; got [{self.start}, {self.end})")
        if not isinstance(self.digest, bytes) or not self.digest:
            raise MisuseError(f"the digest of an item must be bytes, at least one; got {self.digest!r}")


class ChainHasher:
    """Turns tokens into chunk keys, incrementally. An engine has one, for all of its tenants.

    >>> hasher = ChainHasher(chunk_tokens=2, algorithm="sha256", identity={"model": b"llama"}, tenants=True)
    >>> keys: list[bytes] = []
    >>> hasher.extend(keys, [1, 2, 3])
    >>> hasher.extend(keys, [1, 2, 3, 4])  # only the new chunk is hashed
    >>> keys == hasher.keys([1, 2, 3, 4]) and len(keys)
    2

    What only one request has is given once, when it arrives:

    >>> mine = hasher.for_request({"salt": b"mine"}, [MultimodalItem(start=2, end=4, digest=b"a picture")])
    >>> set(mine.keys([1, 2, 3, 4])) & set(keys)
    set()

    Tokens are integers from 0 to 2**32 - 1 in any sequence; arrays of 4 and 8 bytes (array, numpy) are read fastest.
    """

    def __init__(
        self,
        chunk_tokens: int,
        algorithm: str = "xxh3_128",
        identity: Mapping[str, bytes] | None = None,
        *,
        tenants: bool = False,
    ) -> None:
        """`identity` is what all requests have in common, such as the model and its revision: bytes by name.

        sha256, a cryptographic digest, is needed where tenants are kept apart, or keys are shared with other processes
        or kept on disk (rule 14). With `tenants=True` another one is refused here, else when the first salt arrives.

        Raises ConfigurationError for an unknown algorithm, a chunk of less than one token, an identity that is not
        bytes by name, or tenants without a cryptographic digest.
        """
        if algorithm not in DIGESTS:
            raise ConfigurationError(f"hash algorithm must be one of {', '.join(DIGESTS)}; got {algorithm!r}")
        check_whole("chunk_tokens", chunk_tokens, least=1)
        if tenants and algorithm not in CRYPTOGRAPHIC:
            raise ConfigurationError(f"tenants need algorithm 'sha256': {algorithm} is not a cryptographic digest")
        self.chunk_tokens = chunk_tokens
        self.algorithm = algorithm
        self._digest = DIGESTS[algorithm]
        self._identity = dict(identity or {})
        _check_fields(self._identity, algorithm, ConfigurationError)
        self._seed = self._digest(_canonical(self._identity))
        self._items: Mapping[int, bytes] = {}

    @property
    def cryptographic(self) -> bool:
        """Whether the keys may keep tenants apart, be shared with other processes, or persist (rule 14)."""
        return self.algorithm in CRYPTOGRAPHIC

    def for_request(self, identity: Mapping[str, bytes] = NO_IDENTITY, items: Iterable[MultimodalItem] = ()) -> Self:
        """The hasher of one request, to be kept with it while it decodes.

        `identity` is what another request must have too to share KV with this one: its LoRA, salt, tenant. Names are
        free, in any order, and an empty field differs from an absent one. A LoRA that is loaded anew under its old
        name is another one: give its version too, or reset the cache (rule 13). `items` are all of the request's, in
        any order. Fields named `salt`, `cache_salt` or `tenant` keep tenants apart and need sha256.

        Raises MisuseError for such a field without sha256, one that the hasher has already, or one that is not bytes.
        """
        both = self._identity.keys() & identity.keys()
        if both:
            raise MisuseError(f"identity fields of the hasher itself cannot be given by a request: {sorted(both)}")
        _check_fields(identity, self.algorithm, MisuseError)
        request = copy.copy(self)
        if identity:
            request._identity = {**self._identity, **identity}
            request._seed = self._digest(_canonical(request._identity))
        request._items = self._items_by_chunk(items)
        return request

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        """One key for each full chunk of `tokens`. Raises MisuseError for what is no token."""
        keys: list[bytes] = []
        self.extend(keys, tokens)
        return keys

    def extend(self, keys: list[bytes], tokens: Sequence[int]) -> None:
        """Append to `keys`, the keys of the first chunks of `tokens`, those of the chunks that follow.

        Nothing is hashed again. Raises MisuseError for what is no token, and appends nothing then.
        """
        stop = len(tokens) // self.chunk_tokens
        data = _token_bytes(tokens, len(keys) * self.chunk_tokens, stop * self.chunk_tokens)
        digest, width = self._digest, self.chunk_tokens * TOKEN_BYTES
        read = BytesIO(data).read  # chunk after chunk: faster than slices, see benchmarks/deciding/hashing.py
        key = keys[-1] if keys else self._seed
        for index in [index for index in self._items if len(keys) <= index < stop]:
            keys += [key := digest(key + read(width)) for _ in range(len(keys), index)]
            key = digest(key + read(width) + self._items[index])
            keys.append(key)
        keys += [key := digest(key + read(width)) for _ in range(len(keys), stop)]

    def _items_by_chunk(self, items: Iterable[MultimodalItem]) -> dict[int, bytes]:
        """Bytes that items add to the chunk in which they begin, by its index, in ascending order."""
        fields: dict[int, list[bytes]] = {}
        for item in sorted(items):
            chunk = fields.setdefault(item.start // self.chunk_tokens, [])
            chunk += (_integer(item.start), _integer(item.end), item.digest)
        return {index: self._digest(_prefixed(each)) + ITEMS for index, each in fields.items()}


def checkpoint_key(chunk_key: bytes) -> bytes:
    """The key of the checkpoint at the end of the chunk `chunk_key`.

    It is the chunk's and one byte more. As the digests in one cache have one length, no chunk has such a key.
    """
    return chunk_key + CHECKPOINT


def _check_fields(identity: Mapping[str, bytes], algorithm: str, error: type[PrefixCacheError]) -> None:
    for name, value in identity.items():
        if not isinstance(name, str) or not isinstance(value, bytes):
            raise error(f"identity fields must be bytes by name; {name!r} is {type(value).__name__}")
        if name in KEEP_APART and algorithm not in CRYPTOGRAPHIC:
            raise error(
                f"identity field {name!r} keeps tenants apart, and {algorithm} is not a cryptographic digest: "
                "build the hasher with algorithm='sha256'"
            )


def _canonical(identity: Mapping[str, bytes]) -> bytes:
    fields = [field for name in sorted(identity) for field in (name.encode(), identity[name])]
    return _prefixed([FORMAT, *fields])


def _prefixed(fields: Iterable[bytes]) -> bytes:
    """The fields, each after its length: no two lists of fields give the same bytes."""
    return b"".join(_integer(len(field)) + field for field in fields)


def _integer(value: int) -> bytes:
    return value.to_bytes(LENGTH_BYTES, "little")


def _token_bytes(tokens: Sequence[int], begin: int, end: int) -> bytes:
    """`tokens[begin:end]` as unsigned 32-bit little-endian words."""
    try:
        if len(tokens):
            operator.index(tokens[0])  # a row of a batch is none, and would go unseen in less than a chunk of rows
        view = _integers_in_memory(tokens)
        words = array("I", tokens[begin:end]).tobytes() if view is None else _words(view[begin:end])
    except (OverflowError, TypeError) as error:
        raise MisuseError(f"tokens must be integers from 0 to 2**32 - 1: {error}") from error
    if sys.byteorder == "little":
        return words
    swapped = array("I", words)
    swapped.byteswap()
    return swapped.tobytes()


def _integers_in_memory(tokens: Any) -> memoryview | None:
    """The buffer of an array of integers of 1, 4 or 8 bytes; None for whatever else `tokens` is."""
    if isinstance(tokens, list | tuple):
        return None
    try:
        view = memoryview(tokens)
    except TypeError:
        return None
    return view if view.ndim == 1 and view.format in ("I", "i", "L", "l", "Q", "q", "B") else None


def _words(view: memoryview) -> bytes:
    """The integers as native words of 4 bytes. Of those with 4 or 8 bytes no Python integer is made."""
    if view.itemsize == 1:
        return array("I", list(view)).tobytes()
    data, is_little = view.tobytes(), sys.byteorder == "little"
    if view.itemsize == TOKEN_BYTES:
        highest = data[TOKEN_BYTES - 1 :: TOKEN_BYTES] if is_little else data[::TOKEN_BYTES]
        if view.format in ("i", "l") and not highest.isascii():  # ASCII has no highest bit
            raise OverflowError("one of them is negative")
        return data
    lower, upper = (0, TOKEN_BYTES) if is_little else (TOKEN_BYTES, 0)  # halves of 64-bit words
    words, nothing = bytearray(len(data) // 2), bytes(len(view))
    for at in range(TOKEN_BYTES):  # byte by byte of all words: faster than a cast with a stride
        if data[upper + at :: 2 * TOKEN_BYTES] != nothing:
            raise OverflowError("one of them is negative or larger")
        words[at::TOKEN_BYTES] = data[lower + at :: 2 * TOKEN_BYTES]
    return bytes(words)
