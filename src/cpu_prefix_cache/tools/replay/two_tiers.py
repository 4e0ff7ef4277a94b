"""Replays a trace through a device pool and a CPUPrefixCache behind it. Bytes are not copied.

Requests come one after the other. The calls for each are those of an engine:

    search the device, and pin the hit
    lookup, admit                 the hit on the host beyond that
    load, step, report            in one transfer
    computed, step, report        the rest of the prompt, in steps as large as lazy stores can cover
    finished, step, report

Every copy is reported as done before the next call. A prompt longer than the device is cut, and the rest of it counts
as missed. The device evicts by LRU, as engines do; the policy applies to the host. A hit may cover all of a prompt,
since prompts are given one more token, and lengths are whole blocks.
"""

from typing import Any

from cpu_prefix_cache.eviction import policy_of
from cpu_prefix_cache.messages.options import CacheOptions
from cpu_prefix_cache.messages.plan import RankReport
from cpu_prefix_cache.messages.request import Answer, Hit, Request
from cpu_prefix_cache.model.groups import PrefixGroup
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.offload.device import PooledDevice
from cpu_prefix_cache.offload.engine_steps import EngineSteps, EngineTraits
from cpu_prefix_cache.pool.block_pool import BlockPool, Pin
from cpu_prefix_cache.prefix_cache import CPUPrefixCache
from cpu_prefix_cache.tools.replay.meter import Meter
from cpu_prefix_cache.tools.replay.outcome import Tally
from cpu_prefix_cache.tools.replay.prefill_work import Work
from cpu_prefix_cache.tools.replay.tiers import DeviceTier, HostTier
from cpu_prefix_cache.tools.replay.traces import Trace, TraceRequest

RANK = 0


def replay_two_tiers(trace: Trace, host: HostTier, device: DeviceTier, meter: Meter) -> Tally:
    """Replay the requests one after the other."""
    engine = ReplayEngine(trace, host, device)
    tally = Tally()
    for requests in meter.slices(trace.requests):
        for request in requests:
            hit = engine.serve(request)
            tally.count(request, hit, trace.block_tokens)
    now = engine.cache.statistics()
    tally.stored_blocks = now.chunks_stored
    tally.loaded_blocks, tally.loaded = now.chunks_loaded, engine.loaded
    tally.evictions = now.pool.evictions
    tally.lost_before_store = now.lost_before_store
    return tally


class ReplayEngine:
    """An engine that serves one request at a time. Its steps take no time. `loaded` is what the host saved it."""

    block_bytes = 1  # nothing is copied

    def __init__(self, trace: Trace, host: HostTier, device: DeviceTier) -> None:
        horizon = device.looks_ahead
        self.block_tokens = trace.block_tokens
        self._step_blocks = max(1, horizon // 2)  # blocks that lazy stores have covered before each step
        self._served = 0
        self.loaded = Work()
        longest = max(len(request.keys) for request in trace.requests)
        block = PrefixGroup(name="blocks", block_tokens=trace.block_tokens, block_bytes=self.block_bytes)
        # if all of the trace fits, the blocks that lazy looks ahead at must be free, as on a larger device
        self.gpu = self.new_pool(min(device.capacity, trace.usable(device.capacity) + horizon), device.policy)
        planner = HybridChunkPlanner([block], max_model_len=(longest + 1) * trace.block_tokens)
        options: dict[str, Any] = dict(
            host_blocks=trace.usable(host.capacity),
            options=CacheOptions(
                offload=device.offload,
                policy=host.policy,
                store_after=host.store_after,
                min_store_tokens=host.min_store_tokens,
            ),
            engine=EngineTraits(
                steps=EngineSteps(
                    max_tokens=self.gpu.capacity * trace.block_tokens,  # so large that it limits no transfers in flight
                    ahead_blocks=horizon,
                ),
                exchanges=True,
            ),
        )
        self.cache = self.new_cache(planner, PooledDevice(self.gpu, hands_out_first=True), options)

    def new_pool(self, capacity: int, policy: str) -> BlockPool:
        return BlockPool(capacity, policy_of(policy, self.block_tokens))

    def new_cache(self, planner: HybridChunkPlanner, device: PooledDevice, options: dict[str, Any]) -> CPUPrefixCache:
        return CPUPrefixCache(planner, device, **options)

    def serve(self, request: TraceRequest) -> int:
        """Serve one request. Returns how many blocks were found, on the device and then on the host."""
        self._served += 1
        keys = request.keys[: self.gpu.capacity]
        prompt = Request(str(self._served), keys, len(keys) * self.block_tokens + 1, next_use=request.next_use)
        on_device = self.gpu.resident_run(keys, 0, len(keys))
        answer = self.lookup(prompt, on_device * self.block_tokens, request.now)
        running = ReplayedRequest(self, prompt, on_device, request.now)
        if isinstance(answer, Hit):
            running.load(answer.boundary, request.now)
            stop = running.blocks * self.block_tokens
            self.loaded.add(on_device * self.block_tokens, min(stop, request.tokens))
        else:
            self.cache.admit(prompt, on_device * self.block_tokens, now=request.now)
        hit = running.blocks
        while running.blocks < len(keys):
            running.compute(min(len(keys), running.blocks + self._step_blocks))
        running.finish()
        return hit

    def lookup(self, prompt: Request, n0: int, now: float) -> Answer:
        return self.cache.lookup(prompt, n0, now)

    def step(self) -> None:
        """One engine step whose copies are done at once, and further steps for stores that a load delayed."""
        transfers = self.cache.step().transfers
        while transfers:
            self.cache.report(RankReport(RANK, frozenset(transfer.id for transfer in transfers)))
            transfers = self.cache.step().transfers if self.cache.has_transfers else ()


class ReplayedRequest:
    """A running request, whose first `blocks` blocks are cached and pinned on the device."""

    def __init__(self, engine: ReplayEngine, prompt: Request, on_device: int, now: float) -> None:
        self.blocks = on_device
        self._engine = engine
        self._gpu = engine.gpu
        self._cache = engine.cache
        self._prompt = prompt
        deepest = self._gpu.find(prompt.keys[on_device - 1]) if on_device else None
        self._deepest = self._gpu.root if deepest is None else deepest
        self._pin: Pin | None = None if deepest is None else self._gpu.pin(deepest)
        self._touch = self._gpu.touch(deepest, prompt.keys, now, next_use=prompt.next_use)

    def load(self, boundary: int, now: float) -> None:
        """Load from the host up to token `boundary`."""
        blocks = self._take(boundary // self._engine.block_tokens)
        self._cache.admit(self._prompt, self._tokens, boundary, now)
        self._cache.load(self._prompt.id, boundary, [blocks], now)
        self._engine.step()
        self._fill(blocks)

    def compute(self, stop: int) -> None:
        """Compute the blocks before the one with this index, in one step."""
        self._fill(self._take(stop))
        self._engine.step()

    def finish(self) -> None:
        self._cache.finished(self._prompt.id, self._tokens)
        if self._pin is not None:
            self._gpu.unpin(self._pin)
        self._engine.step()

    @property
    def _tokens(self) -> int:
        return self.blocks * self._engine.block_tokens

    def _take(self, stop: int) -> list[int]:
        return self._gpu.allocate(stop - self.blocks, self._prompt.keys[self.blocks : stop])

    def _fill(self, blocks: list[int]) -> None:
        """Commit these blocks, which hold the KV of the next chunks now."""
        keys = self._prompt.keys[self.blocks : self.blocks + len(blocks)]
        self._gpu.commit(blocks, keys, self._deepest, self._touch)
        before, self._pin = self._pin, self._gpu.pin(blocks[-1])
        if before is not None:
            self._gpu.unpin(before)
        self._deepest = blocks[-1]
        self.blocks += len(blocks)
        self._cache.computed(self._prompt.id, self._tokens)
