"""Replays a trace through a device pool and a CPUPrefixCache behind it. Bytes are not copied.

Requests come one after the other. The calls for each are those of an engine:

    place                         search the device, and pin the hit
    lookup, admit                 the hit on the host beyond that
    load, step, report            in one transfer
    computed, step, report        the rest of the prompt, in steps as large as lazy stores can cover
    finished, step, report

Every copy is reported as done before the next call. A prompt longer than the device is cut, and the rest of it counts
as missed. The device evicts by LRU, as engines do; the policy applies to the host. A hit may cover all of a prompt,
since prompts are given one more token, and lengths are whole blocks.

Of a model with windows, states or local chunks the device also keeps checkpoints: at the end of each prompt, and where
a second continuation of a prefix appears (rule 9). A trace has no tokens of answers, so there are none at their ends.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cpu_prefix_cache.messages.plan import Direction, RankReport, TransferPlan
from cpu_prefix_cache.messages.request import Answer, Hit, Request
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.offload.device import PooledDevice
from cpu_prefix_cache.offload.engine_steps import EngineSteps, EngineTraits
from cpu_prefix_cache.pool.block_pool import BlockPool
from cpu_prefix_cache.pool.coordinator import KVCacheCoordinator, new_pool
from cpu_prefix_cache.pool.placement import Placement
from cpu_prefix_cache.pool.taken import TakenCheckpoints
from cpu_prefix_cache.prefix_cache import CPUPrefixCache
from cpu_prefix_cache.tools.replay.meter import Meter
from cpu_prefix_cache.tools.replay.outcome import Tally
from cpu_prefix_cache.tools.replay.prefill_work import Work
from cpu_prefix_cache.tools.replay.replayed_model import chunks_beside, most_blocks, of_plain_blocks, widest_checkpoint
from cpu_prefix_cache.tools.replay.tiers import DeviceTier, HostTier
from cpu_prefix_cache.tools.replay.traces import Trace, TraceRequest

RANK = 0


def replay_two_tiers(
    trace: Trace, host: HostTier, device: DeviceTier, meter: Meter, planner: HybridChunkPlanner | None = None
) -> Tally:
    """Replay the requests one after the other. `planner`: of a model with checkpoints (replayed_model.py)."""
    engine = ReplayEngine(trace, host, device, planner)
    tally = Tally()
    tally.count_all(trace, meter, engine.serve)
    engine.count_copies(tally)
    return tally


def replay_device(trace: Trace, device: DeviceTier, meter: Meter, planner: HybridChunkPlanner | None = None) -> Tally:
    """Replay the requests on the device alone."""
    least = of_plain_blocks(trace) if planner is None else planner
    engine = ReplayEngine(trace, HostTier(least.fewest_blocks), device, planner)
    engine.cache.turn_off()
    tally = Tally()
    tally.count_all(trace, meter, engine.serve)
    return tally


class ReplayEngine:
    """An engine that serves one request at a time. Its steps take no time.

    `loaded` is what the host saved it, and `loaded_blocks` are the host blocks that came for that.
    """

    def __init__(
        self, trace: Trace, host: HostTier, device: DeviceTier, planner: HybridChunkPlanner | None = None
    ) -> None:
        self.planner = of_plain_blocks(trace) if planner is None else planner
        self.block_tokens = trace.block_tokens
        self.most_blocks = most_blocks(trace, self.planner)
        self.loaded, self.loaded_blocks = Work(), 0
        self._served = 0
        chunk, checkpoint = max(1, self.planner.host_blocks_per_chunk), widest_checkpoint(trace, self.planner)
        horizon = replace(device, capacity=device.capacity // chunk).looks_ahead
        self._step_tokens = max(1, horizon // 2) * trace.block_tokens  # that lazy stores have covered before each step
        ahead = min(device.capacity, horizon * chunk + 2 * checkpoint)
        # if all of the trace fits, the blocks that lazy looks ahead at must be free, as on a larger device
        self.gpu = self.new_pool(min(device.capacity, self.most_blocks + ahead), device.policy)
        self._longest = chunks_beside(self.planner, self.gpu.capacity, 2 * checkpoint)
        coordinator = KVCacheCoordinator(self.planner, self.gpu, on_device=True)
        self._coordinator, self._checkpoints = coordinator, _Checkpoints(coordinator)
        # so many tokens in a step that they limit no transfers in flight
        steps = EngineSteps(max_tokens=self.gpu.capacity * trace.block_tokens, ahead_blocks=ahead)
        options: dict[str, Any] = dict(
            host_blocks=min(host.capacity, self.most_blocks),
            options=host.options(device.offload),
            engine=EngineTraits(steps=steps, exchanges=True),
        )
        self.cache = self.new_cache(self.planner, PooledDevice(self.gpu, hands_out_first=True), options)

    def new_pool(self, capacity: int, policy: str) -> BlockPool:
        return new_pool(self.planner, capacity, policy, on_device=True)

    def new_cache(self, planner: HybridChunkPlanner, device: PooledDevice, options: dict[str, Any]) -> CPUPrefixCache:
        return CPUPrefixCache(planner, device, **options)

    def serve(self, request: TraceRequest) -> int:
        """Serve one request. Returns how many blocks were found, on the device and then on the host."""
        self._served += 1
        keys = request.keys[: self._longest]
        whole = len(keys) * self.block_tokens
        prompt = Request(str(self._served), keys, whole + 1, next_use=request.next_use)
        with Placement(self.gpu, self._coordinator, keys, whole + 1, request.now, request.next_use) as place:
            on_device = place.length
            self._load(prompt, place, self.lookup(prompt, on_device, request.now), request.now)
            hit = place.length
            self.loaded.add(on_device, max(on_device, min(hit, request.tokens)))
            kept = self._kept(prompt, hit)
            for end in sorted({*range(hit, whole, self._step_tokens), whole, *kept} - {hit}):
                self._compute(prompt, place, end, with_checkpoint=end in kept)
            self.cache.finished(prompt.id, whole)
        self.step()
        return hit // self.block_tokens

    def count_copies(self, tally: Tally) -> None:
        """Add what the host has stored, loaded, evicted and lost."""
        now = self.cache.statistics()
        tally.stored_blocks = now.chunks_stored
        tally.loaded_blocks, tally.loaded = self.loaded_blocks, self.loaded
        tally.evictions = now.pool.evictions
        tally.lost_before_store = now.lost_before_store

    def lookup(self, prompt: Request, n0: int, now: float) -> Answer:
        return self.cache.lookup(prompt, n0, now)

    def _load(self, prompt: Request, place: Placement, answer: Answer, now: float) -> None:
        """Admit the prompt, and load what the host has beyond the device's."""
        n0 = place.length
        room = place.room(self._checkpoints, n0, answer.boundary) if isinstance(answer, Hit) else None
        if not isinstance(answer, Hit) or room is None:
            self.cache.admit(prompt, n0, now=now)
            return
        self.cache.admit(prompt, n0, answer.boundary, now)
        self.cache.load(prompt.id, answer.boundary, room, now)
        self.step()
        place.loaded(answer.boundary, answer.boundary, self._checkpoints)
        self.cache.computed(prompt.id, place.length)

    def _compute(self, prompt: Request, place: Placement, end: int, *, with_checkpoint: bool = False) -> None:
        """Compute the prompt up to this token, in one step."""
        place.grow(end)
        place.commit(end)
        if with_checkpoint:
            place.take_checkpoint(self._checkpoints, None, end)
        self.cache.computed(prompt.id, end)
        self.step()

    def _kept(self, prompt: Request, hit: int) -> set[int]:
        """Boundaries behind `hit` at which the device, or the host, wants a checkpoint."""
        if not self.planner.has_checkpoints:
            return set()
        depths = self._coordinator.wanted_checkpoints(prompt.keys, hit, prompt.num_tokens)
        wanted = {*self.cache.boundaries(prompt.id), *(depth * self.block_tokens for depth in depths)}
        return {each for each in wanted if each > hit and self._checkpoints.are_needed(each)}

    def step(self) -> None:
        """One engine step whose copies are done at once, and further steps for stores that a load delayed."""
        transfers = self.cache.step().transfers
        while transfers:
            self.loaded_blocks += blocks_loaded(transfers)
            self.cache.report(RankReport(RANK, frozenset(transfer.id for transfer in transfers)))
            transfers = self.cache.step().transfers if self.cache.has_transfers else ()


def blocks_loaded(transfers: Sequence[TransferPlan]) -> int:
    """Host blocks that these loads read."""
    loads = [transfer for transfer in transfers if transfer.direction is Direction.LOAD]
    return sum(len(copy.host_blocks) for load in loads for copy in load.copies)


class _Checkpoints(TakenCheckpoints):
    """Checkpoints without bytes."""

    def write(self, state: Any, depth: int, node: int) -> None:
        pass
