"""Makes keys of the blocks of a trace, so that equal keys mean equal prefixes.

    IdKeys       ids that are chained: equal id, equal prefix. The key of an id is its digest
    ContentKeys  ids of the content of a block alone. The key of an id is its digest with the key before it

Token ids are hashed as an engine does (`sharing.ApartHasher`).

Equal keys are one object, which saves memory. Prompts that may not share have different keys, by `apart`.
"""

from collections.abc import Sequence

import xxhash

CHAINED, CONTENT = "chained", "content"
Id = int | str


class NotChainedError(Exception):
    """Ids of which equal ones do not mean equal prefixes. No line of such a trace is right by itself."""


class IdKeys:
    """The keys of ids that belong together by `name`. Remembers which id each id follows."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._keys: dict[Id, bytes] = {}
        self._above: dict[Id, Id | None] = {}

    def keys(self, ids: Sequence[Id]) -> list[bytes]:
        """Raises NotChainedError, also for an id that follows another one than before."""
        if len(set(ids)) < len(ids):
            raise NotChainedError("hash_ids names a block twice")
        follows = list(zip([None, *ids], ids, strict=False))
        for above, id in follows:
            if self._above.get(id, above) != above:
                here, before = (_place(id) for id in (above, self._above[id]))
                raise NotChainedError(f"id {id} {here} here and {before} before")
        self._above.update((id, above) for above, id in follows)
        return [self._keys.get(id) or self._new_key(id) for id in ids]

    def _new_key(self, id: Id) -> bytes:
        key = self._keys[id] = xxhash.xxh3_128_digest(f"{self._name}/{id!r}".encode())
        return key


class ContentKeys:
    """The keys of ids that belong together by `name`: each is chained to the key before it."""

    def __init__(self, name: str) -> None:
        self._seed = xxhash.xxh3_128_digest(name.encode())
        self._known: dict[bytes, bytes] = {}

    def keys(self, ids: Sequence[Id]) -> list[bytes]:
        keys, above = [], self._seed
        for id in ids:
            key = xxhash.xxh3_128_digest(above + repr(id).encode())
            above = self._known.setdefault(key, key)
            keys.append(above)
        return keys


def _place(above: Id | None) -> str:
    return "begins a prompt" if above is None else f"follows {above}"
