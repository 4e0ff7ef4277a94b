"""Contents of chunks, for the events that name them: the tokens, and what else vLLM has in their hashes. A router that
hashes prompts itself needs both.

    a request is queued, and each time it fills chunks    noted: the request holds them
    it ends                                               held by nobody
    a store of the chunk ends                             the event has the contents
    nobody holds it, and device and host have lost it     forgotten, a few in each step

A store may end long after the last request with the chunk: when the device evicts it, or a tier gets it. With those of
running requests about twice as many chunks are kept as device and host have.

What a request brings is kept in portions of some chunks, because a record for each would take as long as all else does.
A portion is kept as long as one of its chunks, so it has few.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys
from vllm.v1.request import Request

from connector.vllm import versions
from connector.vllm.keys import ChunkKeys
from cpu_prefix_cache.deciding import Forgetting

PORTION = 32  # chunks

ExtraKeys = tuple[Any, ...] | None


@dataclass(slots=True, eq=False)
class Portion:
    """Contents of some adjacent chunks. `extra_keys` are by chunk, in the form of vLLM's events; empty: none has any.
    `holders`: requests that have not ended.
    """

    tokens: Sequence[int]
    extra_keys: Sequence[ExtraKeys] = ()
    lora_id: int | None = None
    lora_name: str | None = None
    holders: int = 0


At = tuple[Portion, int]  # a chunk, by its place in a portion
UNKNOWN: At = Portion(()), 0  # such as a chunk that a tier has from before a restart


class KnownContents:
    """By the key of the chunk. Chunks have `chunk_tokens` tokens and `hashes_per_chunk` hashes."""

    def __init__(
        self, chunk_tokens: int, hashes_per_chunk: int, may_be_named: Callable[[Sequence[bytes]], list[bool]]
    ) -> None:
        self._chunk_tokens = chunk_tokens
        self._hashes_per_chunk = hashes_per_chunk
        self._may_be_named = may_be_named
        self._by_key = OrderedDict[bytes, At]()
        self._noted: dict[str, int] = {}  # by request: how many of its chunks
        self._held: dict[str, list[Portion]] = {}  # by request
        self._forgetting = Forgetting()

    def __len__(self) -> int:
        return len(self._by_key)

    def of(self, keys: Sequence[bytes]) -> Iterator[At]:
        return map(self._by_key.get, keys, repeat(UNKNOWN))

    def note(self, request: Request) -> None:
        """Keep the contents of chunks that the request has, and had not when it was last noted.

        Nothing is stored of a session of streaming input, and vLLM changes its tokens.
        """
        keys = ChunkKeys.of(request.block_hashes, self._hashes_per_chunk)
        start, before = self._noted.get(request.request_id, 0), len(self._by_key)
        if start == len(keys) or request.resumable:
            return
        self._noted[request.request_id] = len(keys)
        held = self._held.setdefault(request.request_id, [])
        while start < len(keys):
            stop = min(len(keys), start + PORTION)
            self._hold(held, keys[start:stop], self._portion(request, start, stop))
            start = stop
        self._forgetting.added(len(self._by_key) - before)

    def _hold(self, held: list[Portion], keys: Sequence[bytes], new: Portion) -> None:
        """A request holds these chunks: those that are not known yet as `new` has them."""
        known = [self._by_key[key][0] for key in keys if key in self._by_key]
        for portion in dict.fromkeys([*known, new]):
            portion.holders += 1
            held.append(portion)
        places = [(key, (new, place)) for place, key in enumerate(keys) if key not in self._by_key]
        self._by_key.update(places)

    def ended(self, id: str) -> None:
        """The request holds nothing any more."""
        self._noted.pop(id, None)
        for portion in self._held.pop(id, ()):
            portion.holders -= 1

    def forget(self) -> None:
        """Look at a few. To be called when all events so far are taken: they may name what is forgotten now."""
        for key in self._forgetting.gone(self._by_key, self._are_needed):
            del self._by_key[key]

    def _are_needed(self, keys: Sequence[bytes]) -> list[bool]:
        may = self._may_be_named(keys)
        return [each or self._by_key[key][0].holders > 0 for key, each in zip(keys, may, strict=True)]

    def _portion(self, request: Request, start: int, stop: int) -> Portion:
        """The contents of chunks [start, stop)."""
        width, lora = self._chunk_tokens, request.lora_request
        adapter = () if lora is None else (lora.adapter_id, lora.name)
        tokens = request.all_token_ids[start * width : stop * width]
        return Portion(tokens, self._extra_keys(request, start, stop), *adapter)

    def _extra_keys(self, request: Request, start: int, stop: int) -> Sequence[ExtraKeys]:
        if request.prompt_embeds is None and not (request.lora_request or request.mm_features or request.cache_salt):
            return ()
        found, image, width = [], 0, self._chunk_tokens  # the first image that may reach into the chunk
        for at in range(start * width, stop * width, width):
            keys, image = generate_block_hash_extra_keys(request, at, at + width, image)
            found.append(versions.event_extra_keys(keys))
        return found
