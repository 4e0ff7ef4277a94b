"""Contents of chunks, for the events that name them: the tokens, and what else vLLM has in their hashes. A router that
hashes prompts itself needs both.

    a request is queued, and each time it fills chunks    noted: the request holds them
    it ends                                               held by nobody
    a store of the chunk ends                             the event has the contents
    nobody holds it, and device and host have lost it     forgotten, a few in each step

A store may end long after the last request with the chunk: when the device evicts it, or a tier gets it. With those of
running requests about twice as many chunks are kept as device and host have, in some 300 bytes each.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.request import Request

from connector.vllm import versions
from connector.vllm.keys import ChunkKeys
from cpu_prefix_cache.deciding import Forgetting


@dataclass(slots=True)
class Contents:
    """Contents of one chunk. `extra_keys` are in the form of vLLM's events. `holders`: requests that have not ended."""

    tokens: "array[int]"
    extra_keys: tuple[Any, ...] | None = None
    lora_id: int | None = None
    lora_name: str | None = None
    holders: int = 0


UNKNOWN = Contents(array("I"))  # such as a chunk that a tier has from before a restart


class KnownContents:
    """By the key of the chunk. Chunks have `chunk_tokens` tokens and `hashes_per_chunk` hashes."""

    def __init__(
        self, chunk_tokens: int, hashes_per_chunk: int, may_be_named: Callable[[Sequence[bytes]], list[bool]]
    ) -> None:
        self._chunk_tokens = chunk_tokens
        self._hashes_per_chunk = hashes_per_chunk
        self._may_be_named = may_be_named
        self._by_key = OrderedDict[bytes, Contents]()
        self._held: dict[str, list[Contents]] = {}  # by request
        self._forgetting = Forgetting()

    def __len__(self) -> int:
        return len(self._by_key)

    def of(self, keys: Sequence[bytes]) -> list[Contents]:
        find = self._by_key.get
        return [find(key, UNKNOWN) for key in keys]

    def note(self, request: Request) -> None:
        """Keep the contents of chunks that the request has, and had not when it was last noted.

        Nothing is stored of a session of streaming input, and vLLM changes its tokens.
        """
        keys = ChunkKeys.of(request.block_hashes, self._hashes_per_chunk)
        held = self._held.setdefault(request.request_id, [])
        if len(held) == len(keys) or request.resumable:
            return
        start, before = len(held), len(self._by_key)
        for key, contents in zip(keys[start:], self._new(request, start, len(keys)), strict=True):
            contents = self._by_key.setdefault(key, contents)
            contents.holders += 1
            held.append(contents)
        self._forgetting.added(len(self._by_key) - before)

    def ended(self, id: str) -> None:
        """The request holds nothing any more."""
        for contents in self._held.pop(id, ()):
            contents.holders -= 1

    def forget(self) -> None:
        """Look at a few. To be called when all events so far are taken: they may name what is forgotten now."""
        for key in self._forgetting.gone(self._by_key, self._are_needed):
            del self._by_key[key]

    def _are_needed(self, keys: Sequence[bytes]) -> list[bool]:
        may = self._may_be_named(keys)
        return [each or self._by_key[key].holders > 0 for key, each in zip(keys, may, strict=True)]

    def _new(self, request: Request, start: int, stop: int) -> Iterator[Contents]:
        """The contents of chunks [start, stop)."""
        width, lora = self._chunk_tokens, request.lora_request
        adapter = () if lora is None else (lora.adapter_id, lora.name)
        tokens = array("I", request.all_token_ids[start * width : stop * width])
        extra_keys = self._extra_keys(request, start, stop)
        for at, keys in zip(range(0, len(tokens), width), extra_keys, strict=True):
            yield Contents(tokens[at : at + width], keys, *adapter)

    def _extra_keys(self, request: Request, start: int, stop: int) -> Iterator[tuple[Any, ...] | None]:
        has_none = request.prompt_embeds is None and not (
            request.lora_request or request.mm_features or request.cache_salt
        )
        image = 0  # the first that may reach into the chunk
        for at in range(start * self._chunk_tokens, stop * self._chunk_tokens, self._chunk_tokens):
            keys = None
            if not has_none:
                keys, image = generate_block_hash_extra_keys(request, at, at + self._chunk_tokens, image)
            yield versions.event_extra_keys(keys)
