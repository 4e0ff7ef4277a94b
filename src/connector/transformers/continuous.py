"""Host memory behind the paged cache of transformers' continuous batching (`generate_batch`).

Three calls of the engine's cache are ours, around its own:

    search_prefix_match    a request begins: what only the host has of its prompt is loaded into its blocks
    free_blocks            it ends: its complete blocks get keys, and wait; if it is preempted, they leave
    evict_cached_blocks    the engine is short of room: all blocks that wait leave

Blocks that leave are stored first. Each call waits for its copies, so the engine never runs beside one.
"""

from collections.abc import MutableSequence, Sequence
from contextlib import AbstractContextManager
from itertools import takewhile
from typing import Any

import torch

from connector.transformers.changes import Weights
from connector.transformers.steps import copy_all
from connector.transformers.versions import warn_if_untested
from cpu_prefix_cache import ChainHasher, ConfigurationError, HostCache, Prefix, QueueDevice, keys_and_values
from cpu_prefix_cache.deciding import num_bytes

CALLS = ("search_prefix_match", "free_blocks", "evict_cached_blocks")


class Blocks(QueueDevice):
    """The engine's blocks. Its ledger has what is where, by hashes of 64 bits, each of which has a key here."""

    def __init__(self, allocator: Any) -> None:
        super().__init__(allocator.num_blocks, hands_out_first=True)
        self._ledger = allocator.ledger
        self.names: dict[Any, Any] = {}  # a hash -> its key, and the key -> the hash

    def remember(self, blocks: Sequence[int], keys: Sequence[bytes]) -> None:
        """They hold the chunks with these keys. If two chunks have one hash, it is that of the first."""
        for hash, key in zip(map(self._ledger.block_to_hash.get, blocks), keys, strict=False):
            if self.names.setdefault(hash, key) == key:
                self.names[key] = hash

    def evicted(self, block: int) -> None:
        super().evicted(block)
        self.names.pop(self.names.pop(self._ledger.block_to_hash.get(block), None), None)

    def block(self, key: bytes) -> int | None:
        return self._ledger.hash_to_block.get(self.names.get(key))

    def key(self, block: int) -> bytes | None:
        return self.names.get(self._ledger.block_to_hash.get(block))

    def queue(self) -> MutableSequence[int]:
        return list(self._ledger.cached_blocks)

    def users(self, block: int) -> int:
        return int(block not in self._ledger.cached_blocks)

    def use(self, blocks: Sequence[int], by: int) -> None:
        """Nothing: nobody takes blocks while copies are waited for."""


class ContinuousPrefixCache(AbstractContextManager["ContinuousPrefixCache"]):
    """Prefixes of the prompts of a model's continuous batches, kept in host memory: `host`, a HostCache with `options`,
    such as `options=HostOptions(policy="arc")`.

        with ContinuousPrefixCache(model.init_continuous_batching(), host_bytes="8GiB"):
            outputs = model.generate_batch(prompts, max_new_tokens=64, persistent_manager=True)

    Raises ConfigurationError where the engine shares no prefixes, has several ranks, or prepares batches beside others.
    """

    def __init__(self, manager: Any, *, host_bytes: int | str, **options: Any) -> None:
        warn_if_untested()
        manager.warmup()
        engine, self._cache = manager.batch_processor, manager.batch_processor.cache
        if CALLS[0] in vars(self._cache):
            raise ConfigurationError("this manager has host memory already: close that ContinuousPrefixCache first")
        is_async, ranks = manager.continuous_batching_config.use_async_batching, manager.distributed_helper.tp_size
        if is_async or not self._cache.use_prefix_sharing or ranks > 1:
            raise ConfigurationError("give use_async_batching=False; for windows, ranks or no sharing: HostPrefixCache")
        manager.start()
        manager.stop(keep_for_next_session=True)  # `generate_batch` takes it
        self._scheduler, self._stream = engine.scheduler, engine.inputs_and_outputs.compute_stream
        [self._allocator] = self._cache.cache_allocators.values()
        self._blocks, self._page = Blocks(self._allocator), self._allocator.tokens_per_page
        self._hasher, self._keys = ChainHasher(self._page), dict[str, list[bytes]]()  # of requests that have begun
        kv, most = self._allocator.cache_tensor, self._page * self._blocks.num_blocks
        kv = kv.view(-1, self._allocator.pages_per_block, 2, self._page * kv[0, 0].numel()).permute(1, 2, 0, 3)
        layout = Prefix(keys_and_values(*kv, block_dim=1), block_tokens=self._page)
        options |= dict(host_bytes=num_bytes("host_bytes", host_bytes), max_model_len=most, max_step_tokens=most)
        self.host = HostCache(self._blocks, [layout], below=None, **options)
        self.host.prepare()
        forget = (self._cache.reset, self.host.reset, self._blocks.names.clear)
        self._weights = Weights(manager.model, lambda: [each() for each in forget])
        self._search, self._free, self._evict = (getattr(self._cache, name) for name in CALLS)
        vars(self._cache).update(zip(CALLS, (self._begin, self._end, self._give_up), strict=True))

    def close(self, *error: object) -> None:
        """Give the host memory back, when the manager has been stopped. It can go on without."""
        for name in CALLS:
            vars(self._cache).pop(name, None)
        self.host.close()

    __exit__ = close

    def _begin(self, request_id: str, prompt: list[int]) -> int:
        """How many tokens of a prompt are in blocks of the request."""
        gone = self._keys.keys() & {request_id}  # it had no room, and has waited
        if not self._scheduler.active_requests:
            self._weights.follow()
            gone |= self._keys.keys() - self._scheduler.waiting_requests.keys()  # a hard stop dropped them
        for id in gone:
            self.host.end(id, 0)
            del self._keys[id]
        found, request = self._search(request_id, prompt), self._scheduler.waiting_requests[request_id]
        if not self._cache.can_store_request_tokens(request, len(prompt), dry_run=True):
            self._give_up()

        def allocate(start: int, boundary: int) -> list[int] | None:
            has_room = self._cache.can_store_request_tokens(request, boundary)
            return self._allocator.block_table[request_id][start // self._page :] if has_room else None

        keys = self._keys[request_id] = self._hasher.keys(prompt)
        self.host.start(request_id, keys, num_tokens=len(prompt), on_device=found, allocate=allocate)
        resume_at = dict(self._copy()).get(request_id, found)
        if resume_at > found:
            self._allocator.mark_complete_blocks(request_id, prompt, (resume_at - found) // self._page)
        return resume_at

    def _end(self, request_id: str, no_cache: bool = False) -> None:
        table, hashes = self._allocator.block_table.get(request_id, ()), self._allocator.ledger.block_to_hash
        complete, keys = [*takewhile(hashes.__contains__, table)], self._keys.pop(request_id, None)
        if keys is not None:
            if request := self._scheduler.active_requests.get(request_id):
                self._hasher.extend(keys, request.initial_tokens + request.generated_tokens)
            self._blocks.remember(complete, keys)
            self.host.end(request_id, min(len(complete), len(keys)) * self._page, preempted=no_cache)
        self._free(request_id)
        (self._give_up if no_cache else self._copy)()

    def _give_up(self) -> bool:
        for block in self._blocks.queue():
            self._blocks.evicted(block)
        is_any = bool(self._evict())
        self._copy()
        return is_any

    def _copy(self) -> list[Any]:
        with torch.cuda.stream(self._stream):
            return copy_all(self.host)
