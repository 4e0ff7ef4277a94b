"""Admission: which chunks may be stored at all, whatever there is room for. Off by default.

A chunk may be stored once `store_after` requests had it in their prompts, of those prompts that have at least
`min_store_tokens` tokens. Shorter prompts count for nothing, nor do the tokens of an answer, until a later prompt has
them. A request that was preempted and is admitted again counts again.

    store_after=2      told abc     told abd     asked abd: 2, since a and ab were seen twice, abd once

Memory is bounded: of more than `remembered` keys those seen longest ago are forgotten, and of one prompt its
end before its beginning. So what is remembered is closed under prefixes, no chunk was seen more often than the one
above it, and the answer is found by bisection. What was forgotten counts from 0 again.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice

from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.options import CacheOptions

REMEMBERED_KEYS = 8  # keys, for each block of the pool


class Admission:
    """Counts the keys of every admitted request, and limits the chunks of a chain to store. See above."""

    def __init__(self, options: CacheOptions, remembered: int) -> None:
        self._store_after = options.store_after
        self._min_tokens = options.min_store_tokens
        self._remembered = remembered
        self._seen: dict[bytes, int] = {}  # how often, up to store_after; told longest ago first

    def __len__(self) -> int:
        """How many keys are remembered."""
        return len(self._seen)

    def told(self, keys: Sequence[bytes], num_tokens: int | None) -> None:
        """A request was admitted. `keys` are those of all chunks of its prompt, which has `num_tokens` tokens.

        Raises MisuseError without `num_tokens` if prompts need a minimum of them.
        """
        if self._min_tokens and num_tokens is None:
            raise MisuseError("where prompts need a number of tokens to be stored, touch is to be told theirs")
        if num_tokens is not None and num_tokens < self._min_tokens:
            return
        seen = self._seen
        for key in reversed(keys[: self._remembered]):
            seen[key] = min(seen.pop(key, 0) + 1, self._store_after)
        # Together: a dictionary is searched past all that was deleted at its front, each time it is begun anew.
        for key in list(islice(seen, max(0, len(seen) - self._remembered))):
            del seen[key]

    def admitted(self, keys: Sequence[bytes]) -> int:
        """How many chunks of a chain with these keys, from the first on, may be stored. Changes nothing. O(log n)."""
        return bisect_left(keys, True, key=lambda key: self._seen.get(key, 0) < self._store_after)
