"""Halves: both halves of the host cache for one engine, and what both kinds of host cache have in common.

It owns the host region, the copier, the copying threads, the CPUPrefixCache, the clock, and which load belongs to which
request. `host_cache.py` has the calls.
"""

import gc
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from cpu_prefix_cache.host_cache.arguments import check_id, check_keys, check_tokens, tokens_by_request
from cpu_prefix_cache.host_cache.copying_half import CopyingHalf
from cpu_prefix_cache.host_cache.destinations import Destinations
from cpu_prefix_cache.host_cache.host_tier import TierBelow, options_below
from cpu_prefix_cache.host_cache.node_pool import joined
from cpu_prefix_cache.host_cache.options import (
    USUAL_HOST,
    HostOptions,
    check_device,
    check_host_bytes,
    check_options,
    check_pool_options,
    check_tokens_of,
)
from cpu_prefix_cache.keeper.kept_cache import KeptCache
from cpu_prefix_cache.messages.errors import ConfigurationError, MisuseError
from cpu_prefix_cache.messages.numbers import Numbers
from cpu_prefix_cache.messages.request import MISS, Answer, Hit, Pending, Request
from cpu_prefix_cache.messages.stats import CacheStatistics, TierStatistics
from cpu_prefix_cache.messages.texts import check_text
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.node.settings import NodePool
from cpu_prefix_cache.offload.device import Device, check_fits, chunk_tokens
from cpu_prefix_cache.offload.engine_steps import EngineSteps, EngineTraits
from cpu_prefix_cache.prefix_cache import CPUPrefixCache
from cpu_prefix_cache.slab.tier import Tier
from cpu_prefix_cache.tiers.tiered_cache import TieredCache

if TYPE_CHECKING:
    from cpu_prefix_cache.kv_layout import KVGroup

TWINS = 256  # requests that ended lately: more than run at once with the same prompt
Blocks = Numbers  # of device blocks
# Gives the blocks that a load of tokens [start, boundary) fills, of one group or a list for each. None: no room.
Allocate = Callable[[int, int], Blocks | Sequence[Blocks] | None]
Computed = Mapping[Any, int] | Iterable[tuple[Any, int]]  # how many tokens of each request have KV


@dataclass(frozen=True, slots=True)
class HostStatistics:
    """A HostCache at one moment: its CPUPrefixCache, how many bytes are prepared, and calls that had no effect."""

    cache: CacheStatistics
    host_bytes: int
    ready_bytes: int  # grows to host_bytes while the region is pinned
    reported_not_on_device: int  # times a request ended, and the device did not have its last computed chunk
    unknown_request: int  # reports of requests that do not run
    tier: TierStatistics | None = None


@dataclass(slots=True, eq=False)
class _Started:
    """A request from `start` to `end`."""

    keys: Sequence[bytes]  # none if it ran at a reset
    num_tokens: int  # that have KV: of one that loads those that had it before; as computed only where that is timed
    load: int | None = None  # the transfer under way
    boundary: int = 0  # tokens that have KV when that has ended well
    filled: tuple[Hit, list[list[int]]] | None = None  # what it loads, and where; with `strict`, until it is checked


class Halves(CopyingHalf):
    """All of a HostCache but how an engine reports what it has computed: for `_end_step` and `_end` of a subclass."""

    def __init__(
        self,
        device: Device,
        groups: "Sequence[KVGroup]",
        *,
        max_model_len: int,
        host_bytes: int | None = None,
        max_step_tokens: int = 8192,
        options: HostOptions = USUAL_HOST,
        below: Tier | None = None,
        pool: NodePool | None = None,
    ) -> None:
        from cpu_prefix_cache.kv_layout import check_layout

        check_device(device)
        check_options(options)
        check_tokens_of(max_model_len=max_model_len, max_step_tokens=max_step_tokens)
        if pool is None:
            check_host_bytes(host_bytes)
        else:
            check_pool_options(host_bytes, below, options)
        check_layout(groups, device.num_blocks)
        _check_only_one_behind(device)
        planner = HybridChunkPlanner(
            [each.group for each in groups],
            max_model_len=max_model_len,
            grid_tokens=chunk_tokens(device, [each.group for each in groups]),
            in_pages=below is not None,
        )
        check_fits(device, planner)  # as the cache does, but before the region is allocated
        self._joined = None if pool is None else joined(pool, planner, groups)
        self._kept: KeptCache | None = None
        with ExitStack() as undo:
            if self._joined is None:
                num_blocks, region, messenger = _num_blocks(planner, host_bytes), None, None
            else:
                undo.callback(self._joined.close)
                num_blocks, region = self._joined.num_slots, self._joined.region()
                messenger = self._joined.messenger(planner)
                self._joined.close_after(region)  # first: what is made later ends earlier, and copies have to
            self._begin_copying(planner, groups, num_blocks, options, null_block=device.null_block, region=region)
            engine = EngineTraits(
                steps=EngineSteps(max_tokens=max_step_tokens, asks_in_decode=False),
                exchanges=options.wrap_copier is None,  # a wrapper of a copier need not know of portions
            )
            ready = self._arena.ready_blocks
            self.cache: CPUPrefixCache | KeptCache  # which has its pool here; or not
            self._tier: TierBelow | None = None
            if below is not None:
                self.cache = tiered = TieredCache(
                    planner,
                    device,
                    host_blocks=num_blocks,
                    below=options_below(below, planner, num_blocks),
                    ready_blocks=ready,
                    options=options,
                    engine=engine,
                )
                self._tier = TierBelow(below, tiered, groups, self._arena.blocks)
            elif messenger is not None:
                least = options.min_load_tokens or 0
                self.cache = self._kept = KeptCache(
                    planner, device, messenger, ready_slots=ready, min_load_tokens=least
                )
            else:
                self.cache = CPUPrefixCache(
                    planner, device, host_blocks=num_blocks, ready_blocks=ready, options=options, engine=engine
                )
            self._destinations = Destinations(self.cache, device, groups, strict=options.strict)
            undo.pop_all()
        self._device = device
        self._strict = options.strict
        self._max_model_len = max_model_len
        self._running: dict[Hashable, _Started] = {}
        self._is_timed = self._tier is not None or self._kept is not None  # to read files only where that is sooner
        self._began = 0.0  # when the last step did
        # Requests that ended in the last step and in this one: end_step may report them, in an engine that overlaps.
        self._left: deque[set[Hashable]] = deque([set(), set()], maxlen=2)
        self._ended: deque[Sequence[bytes]] = deque(maxlen=TWINS)  # keys of computed chunks
        self._not_on_device = self._unknown = 0
        _behind[id(device)] = self

    def start(
        self,
        id: Hashable,
        keys: Sequence[bytes],
        *,
        num_tokens: int,
        on_device: int,
        allocate: Allocate,
        next_use: float | None = None,
    ) -> Answer:
        """Start a request of `num_tokens` tokens of which the device has the first `on_device`.

        `keys[i]` is the key of chunk i, at least 16 bytes; the list may grow while the request runs. After Hit and Miss
        the request runs until `end`; after Pending nothing has changed. If tokens [start, boundary) can be loaded,
        `allocate` gives the device blocks that they fill, which nobody else reads, and after Hit they are being loaded;
        None: there is no room, a Miss. Where `on_device` lies in the middle of a chunk, the whole chunk is loaded.
        `next_use` is a hint: the seconds from the end of the request until its prefix is used again, infinity for
        never, None where that is not known. One that cannot be used is counted (`CacheStatistics.hints`).

        Raises MisuseError for a request that runs already, numbers of tokens that cannot be, keys that are no digests
        or more than the tokens have chunks, and destinations that are not given by group, do not exist, are too few,
        null, or named twice; with `strict` also for those that another request or load uses, and for a key that comes
        twice.
        """
        self._check_usable()
        self._check_start(id, keys, num_tokens, on_device)
        request, now = Request(id, keys, num_tokens, next_use=next_use), time.monotonic()
        answer = self.cache.lookup(request, on_device, now)
        if isinstance(answer, Pending):
            return answer
        destinations = self._destinations_of(allocate, answer) if isinstance(answer, Hit) else None
        running = self._running[id] = _Started(keys, on_device)
        if destinations is None or not isinstance(answer, Hit):
            self.cache.admit(request, on_device, now=now)
            return MISS
        self.cache.admit(request, on_device, answer.boundary, now)
        running.load = self.cache.load(id, answer.boundary, destinations, now)
        running.boundary = answer.boundary
        running.filled = (answer, destinations) if self._strict else None
        return answer

    def begin_step(self) -> None:
        """An engine step begins: submit its copies. Call it before compute of the step is submitted."""
        self._check_usable()
        self._left.append(set())
        if self._kept is not None:
            self._kept.passed(time.monotonic())
        self._worker.run(self.cache.step())
        if self._is_timed:
            self._began = time.monotonic()
        if self._tier is not None:
            self._tier.run()
        self.cache.catch_up()

    def drain(self) -> list[tuple[Hashable, int]]:
        """Wait for all copies that have begun. Loads that have ended, as from `end_step`. For an engine at rest.

        What a shared store does not answer ends by its timeouts, some seconds.
        """
        self._check_usable()
        self._worker.drain()
        if self._tier is not None:
            self._tier.drain()
        return self._report()

    def boundaries(self, id: Hashable) -> list[int]:
        """Tokens of a running request's prompt where steps should end, so that the device has checkpoints there.

        Ascending; none in a model that needs no checkpoints. Raises MisuseError for a request that does not run.
        """
        self._check_usable()
        return self.cache.boundaries(id)

    @property
    def is_busy(self) -> bool:
        """Whether copies are planned or under way: an engine at rest keeps stepping until none is."""
        return self.cache.has_transfers

    def statistics(self) -> HostStatistics:
        return HostStatistics(
            self.cache.statistics(),
            host_bytes=self._host_bytes,
            ready_bytes=self._ready_bytes,
            reported_not_on_device=self._not_on_device,
            unknown_request=self._unknown,
            tier=None if self._tier is None else self._tier.statistics(),
        )

    def reset(self, revision: str | None = None) -> None:
        """Nothing cached before now may be used again: new weights, for example.

        A `revision` names the weights from now on: what is in a store or a pool under the same one is found again, also
        what this process has stored there. Without one, what it stores from now on is found by nobody else.

        Raises ConfigurationError for a revision that is no text, or empty.
        """
        if revision is not None:
            check_text("the revision of a reset", revision)
        self._check_usable()
        for running in self._running.values():
            running.keys = ()
        named = self._tier or self._kept
        if named is None:
            self.cache.reset()
        else:
            named.reset(revision)

    def _close(self) -> None:
        if self._tier is not None:
            self._tier.flush(self._step_at_rest)
            self._tier.close()
        super()._close()
        if self._joined is not None:
            self._joined.close()

    def _end_step(self, computed: Computed) -> list[tuple[Hashable, int]]:
        self._check_usable()
        due = self.cache.due()
        if due or self._is_timed or self._strict:
            tokens = tokens_by_request(computed)
            if self._strict:
                self._check_computed(tokens)
            for id in due:
                if id in tokens:
                    self.cache.computed(id, tokens[id])
            if self._is_timed:
                self.cache.prefilled(self._newly_computed(tokens), time.monotonic() - self._began)
        return self._report()

    def _end(self, id: Hashable, num_tokens: int, preempted: bool) -> None:
        self._check_usable()
        # In serving, a request that has outgrown its own `num_tokens` must still come to its end.
        check_tokens("num_tokens", num_tokens, self._max_model_len if self._strict else sys.maxsize)
        if id not in self._running:
            self._unknown_request(id)
            return
        self._check_filled(id, num_tokens)
        keys = self._running.pop(id).keys
        self._left[-1].add(id)
        chunks = min(self.cache.planner.full_chunks(num_tokens), len(keys))
        is_here = not chunks or self._is_known(keys[chunks - 1]) or self._had_twin(keys[chunks - 1], chunks)
        self._ended.append(keys[:chunks])
        if preempted:
            self.cache.preempted(id, num_tokens)
        else:
            self.cache.finished(id, num_tokens)
        if not is_here:
            self._not_on_device += 1
            self._misused(
                f"request {id!r} has {num_tokens} computed tokens, but the device does not find its last chunk"
            )

    def _step_at_rest(self) -> None:
        self.begin_step()
        self._report()

    def _report(self) -> list[tuple[Hashable, int]]:
        ended: list[tuple[Hashable, int]] = []
        if self._tier is not None:
            self._tier.report()
        for resolved in self.cache.report(self._worker.report()):
            running = self._running.get(resolved.request_id)
            if running is not None and running.load == resolved.id:
                running.load = None
                if resolved.ok:
                    running.num_tokens = running.boundary
                else:
                    running.filled = None  # its blocks may be freed, and others computed into
                ended.append((resolved.request_id, running.num_tokens))
        return ended

    def _newly_computed(self, tokens: Mapping[Any, int]) -> int:
        """How many tokens running requests have computed, which have these now."""
        new = 0
        for id, num_tokens in tokens.items():
            running = self._running.get(id)
            if running is not None and running.load is None:
                new += num_tokens - running.num_tokens
                running.num_tokens = num_tokens
        return new

    def _is_known(self, key: bytes) -> bool:
        """Whether the device has this chunk. Or the host: an index that knows one block of a key may have known that of
        another request, which was evicted meanwhile.
        """
        return self._device.find(key) is not None or self.cache.may_have(key)

    def _had_twin(self, key: bytes, chunks: int) -> bool:
        """Whether a request that ended lately had this chunk, number `chunks`. Then the device may have known that
        one's block alone, and have handed it out since.
        """
        return any(len(keys) >= chunks and keys[chunks - 1] == key for keys in self._ended)

    def _destinations_of(self, allocate: Allocate, hit: Hit) -> list[list[int]] | None:
        """The blocks that a load fills, by group. None: there is no room for them."""
        given = allocate(hit.start, hit.boundary)
        return None if given is None else self._destinations.given(given, hit)

    def _check_start(self, id: Hashable, keys: Sequence[bytes], num_tokens: int, on_device: int) -> None:
        check_id(id)
        if id in self._running:
            raise MisuseError(f"request {id!r} runs already; end it first")
        check_tokens("num_tokens", num_tokens, self._max_model_len)
        check_tokens("on_device", on_device, num_tokens)
        grid = self.cache.planner.grid_tokens
        outlives = self._tier is not None or self._kept is not None
        every = self._strict or self._kept is not None  # other processes take what they lead to
        check_keys(keys, num_tokens, grid, persist=outlives, every=every)

    def _check_computed(self, tokens: Mapping[Any, int]) -> None:
        for id, num_tokens in tokens.items():
            if id not in self._running and not any(id in ended for ended in self._left):
                raise MisuseError(f"request {id!r} is reported as computed, and does not run")
            check_tokens(f"what request {id!r} has computed", num_tokens, self._max_model_len)
            self._check_filled(id, num_tokens)

    def _check_filled(self, id: Hashable, num_tokens: int) -> None:
        """Once for each load: when the request that it was for goes on behind it."""
        running = self._running.get(id)
        if running is not None and running.filled is not None and num_tokens >= running.boundary:
            (hit, destinations), running.filled = running.filled, None
            self._destinations.check_found(running.keys, hit, destinations)

    def _unknown_request(self, id: Hashable) -> None:
        self._unknown += 1
        self._misused(f"request {id!r} does not run")

    def _misused(self, what: str) -> None:
        if self._strict:
            raise MisuseError(what)


_behind: WeakValueDictionary[int, Halves] = WeakValueDictionary()  # by the id of the device, which a cache keeps alive


def _check_only_one_behind(device: Device) -> None:
    if _is_taken(device):
        gc.collect()  # a cache that nobody has any more, and that was not closed
    if _is_taken(device):
        raise ConfigurationError(
            "this device has a HostCache already, and holds of two would mix: close that one first"
        )


def _is_taken(device: Device) -> bool:
    cache = _behind.get(id(device))
    return cache is not None and not cache._is_closed and cache._process == os.getpid()


def _num_blocks(planner: HybridChunkPlanner, host_bytes: int | None) -> int:
    num_blocks = (host_bytes or 0) // planner.host_block_bytes
    least = planner.fewest_blocks
    if num_blocks < least:
        raise ConfigurationError(
            f"host_bytes must hold at least one chunk and its checkpoint, {least * planner.host_block_bytes} bytes, "
            f"got {host_bytes}"
        )
    return num_blocks
