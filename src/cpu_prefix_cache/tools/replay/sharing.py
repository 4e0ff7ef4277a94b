"""Reads who may share KV with whom: requests of different models, adapters or salts share none, however equal.

    model                                               which weights
    lora_path, lora_name, lora_id, adapter_id, ...      and which adapter on them
    cache_salt, extra_key                               who may see whose prompts

A request's `Apart` is the values that it has of these fields. It goes into the keys of its blocks.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.model.hashing import ChainHasher
from cpu_prefix_cache.tools.replay.lines import BadLine

ADAPTERS = ("lora_path", "lora_name", "lora_id", "lora_request", "lora", "adapter", "adapter_id", "adapters")
SALTS = ("cache_salt", "extra_key")
FIELDS = ("model", *ADAPTERS, *SALTS)
NOTHING: tuple[Any, ...] = (None, "", [], {})
MOST_NAMES = 5

Apart = tuple[tuple[str, str], ...]


def apart_of(*places: Mapping[str, Any]) -> Apart:
    """The fields found in these objects; of a field that several have, that of the first."""
    found = {}
    for name in FIELDS:
        value = next((place[name] for place in places if place.get(name) not in NOTHING), None)
        if value is not None:
            found[name] = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return tuple(found.items())


def describe_sharing(aparts: Collection[Apart]) -> str:
    """Which fields keep requests apart; nothing if none do. Values of salts are secrets, and are not shown."""
    fields = []
    for name in FIELDS:
        values = {dict(apart).get(name) for apart in aparts}
        if len(values) < 2:
            continue
        shown = sorted("none" if value is None else value for value in values)[:MOST_NAMES]
        more = ", ..." if len(values) > MOST_NAMES else ""
        fields.append(f"{name}: {len(values):,}" + ("" if name in SALTS else f" ({', '.join(shown)}{more})"))
    return f"requests that differ in these share nothing: {'; '.join(fields)}" if fields else ""


class ApartHasher:
    """Keys of token ids, in blocks of this many; prompts that are kept apart have no key in common."""

    def __init__(self, block_tokens: int) -> None:
        self._hasher = ChainHasher(chunk_tokens=block_tokens)
        self._hashers: dict[Apart, ChainHasher] = {}

    @property
    def aparts(self) -> Collection[Apart]:
        """The different values seen."""
        return self._hashers.keys()

    def keys(self, tokens: Sequence[int], apart: Apart) -> list[bytes]:
        """Raises BadLine for what is no token."""
        if apart not in self._hashers:
            # One field for all: these keys keep out no stranger, so a salt among them needs no other digest.
            self._hashers[apart] = self._hasher.for_request({"apart": repr(apart).encode()} if apart else {})
        try:
            return self._hashers[apart].keys(tokens)
        except MisuseError as error:
            raise BadLine(str(error)) from error
