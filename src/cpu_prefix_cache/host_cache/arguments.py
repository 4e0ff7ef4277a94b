"""Checks of an engine's arguments for a request, before anything changes."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.numbers import is_whole
from cpu_prefix_cache.messages.tier import KEY_BYTES

LEAST_KEY_BYTES = 16  # rule 14


def check_id(id: object) -> None:
    if not isinstance(id, Hashable):
        raise MisuseError(f"a request is named by something hashable, got {id!r}")


def check_tokens(name: str, tokens: object, most: int) -> None:
    if not is_whole(tokens) or tokens > most:
        raise MisuseError(f"{name} must be a whole number of tokens from 0 to {most}, got {tokens!r}")


def check_keys(keys: Sequence[bytes], num_tokens: int, chunk_tokens: int, *, persist: bool, every: bool) -> None:
    """Keys are those of full chunks, and digests of one length. `every` one is looked at, or the first and the last.
    What they lead to may `persist` beyond the process.
    """
    try:
        ends = [*keys[:1], *keys[-1:]]
    except (TypeError, KeyError) as error:
        raise MisuseError(f"keys are a list, which may grow, of the keys of full chunks, got {keys!r}") from error
    if len(keys) > num_tokens // chunk_tokens:
        raise MisuseError(
            f"{num_tokens} tokens fill {num_tokens // chunk_tokens} chunks of {chunk_tokens}, but {len(keys)} keys are "
            "given: a key is that of the tokens of a chunk, so hash as many at a time"
        )
    for key in keys if every else ends:
        if not isinstance(key, bytes) or len(key) < LEAST_KEY_BYTES:
            raise MisuseError(f"keys are at least {LEAST_KEY_BYTES} bytes (rule 14), got {key!r}")
        if persist and len(key) != KEY_BYTES:
            raise MisuseError(
                f"with a tier or a pool keys are sha256 digests, {KEY_BYTES} bytes (rule 14), as of "
                f"ChainHasher(..., algorithm='sha256'); got {key!r}"
            )
        if len(key) != len(keys[0]):
            raise MisuseError(f"keys are digests of one length (rule 14), got {keys[0]!r} and {key!r}")
    if every and len(set(keys)) < len(keys):
        at = next(at for at, key in enumerate(keys) if key in keys[:at])
        raise MisuseError(
            f"chunks {keys.index(keys[at])} and {at} have the same key: a key is that of all tokens up to the end of "
            "its chunk (rule 14)"
        )


def tokens_by_request(computed: Mapping[Any, int] | Iterable[tuple[Any, int]]) -> dict[Any, int]:
    try:
        return dict(computed)
    except (TypeError, ValueError) as error:
        raise MisuseError(
            f"computed is a mapping of requests to tokens, or pairs of both, got {computed!r}: {error}"
        ) from error
