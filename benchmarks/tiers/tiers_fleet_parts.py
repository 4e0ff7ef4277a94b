"""Parts of tiers_fleet.py: an engine and a store without bytes, on a clock that is set.

    SharedStore    keys in the order of their last use, up to a capacity; queries and bytes pass through lines
    Line           a link or a server: what it is given passes one after the other, at its rate
    FleetEngine    device, host and what is remembered of the store: a TieredCache that decides as in service

    a request of an engine    waits for its turn --> looks up, and reads, while the answer is Pending --> is computed

Copies between device and host are done at once, and loads make the engine busy for as long as they take. What goes to
the store or comes from there takes the time of the lines it passes: its machine's and the store's. A call that would
wait for longer than the timeouts of `stores/keyed_values.py` fails after that time, and nothing of it passes.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cpu_prefix_cache.messages.plan import Direction, RankReport, TransferPlan
from cpu_prefix_cache.messages.request import Answer, Pending, Request
from cpu_prefix_cache.messages.tier import Ask, TierReport, Told
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.offload.device import PooledDevice
from cpu_prefix_cache.pool.placement import Placement
from cpu_prefix_cache.slab.meter import RateMeter
from cpu_prefix_cache.stores.asker import CALL_SECONDS, FIRST_PORTION
from cpu_prefix_cache.stores.keyed_values import CALL_VALUES, GET_SECONDS, PUT_SECONDS
from cpu_prefix_cache.stores.settings import ASK_SECONDS, REMEMBERED
from cpu_prefix_cache.tiers.tiered_cache import TieredCache
from cpu_prefix_cache.tools.replay.below import ThreeTierEngine
from cpu_prefix_cache.tools.replay.prefill_work import Work
from cpu_prefix_cache.tools.replay.replayed_model import of_plain_blocks
from cpu_prefix_cache.tools.replay.seconds_saved import Rates
from cpu_prefix_cache.tools.replay.tiers import BelowTier, DeviceTier, HostTier
from cpu_prefix_cache.tools.replay.traces import Trace, TraceRequest
from cpu_prefix_cache.tools.replay.two_tiers import RANK

STEP_BLOCKS = 16  # of one step: 8,192 tokens
NAME_TOKENS = 16  # of a block of vLLM: a chunk of a trace is many names in a store


class Line:
    """Passes `rate` units a second."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.free_at = 0.0
        self.passed = 0.0

    def end_of(self, amount: float, now: float) -> float:
        """When this will have passed, if it is given now."""
        self.passed += amount
        self.free_at = max(now, self.free_at) + amount / self.rate
        return self.free_at

    def delay(self, now: float) -> float:
        return max(0.0, self.free_at - now)


class SharedStore:
    """At most `blocks` values of `block_bytes` bytes, each as `block_names` values of a real store.

    In a second `link` bytes pass in each direction, and `names` names are looked up. A question is under way for
    `round_trip` seconds. What is in `hot` is there at the start, in one place: reads of it pass that place's
    `hot_link`, too.
    """

    def __init__(
        self,
        blocks: float,
        block_bytes: int,
        *,
        link: float,
        names: float,
        round_trip: float,
        block_names: int,
        hot: Iterable[bytes] = (),
        hot_link: float = math.inf,
    ) -> None:
        self.blocks = blocks
        self.block_bytes = block_bytes
        self.block_names = block_names
        self.round_trip = round_trip
        self.reads = Line(link)
        self.writes = Line(link)
        self.server = Line(names)
        self.hot, self.hot_reads = frozenset(hot), Line(hot_link)
        self.keys: OrderedDict[bytes, None] = OrderedDict.fromkeys(self.hot if blocks else ())
        self.calls = self.again = 0  # calls of any kind; values that were put though they were there

    def ask(self, keys: Sequence[bytes], now: float) -> tuple[int, float]:
        """How many of these are there from the first on, and when that is known: as `stores/asker.py` queries."""
        chunks = next((at for at, key in enumerate(keys) if key not in self.keys), len(keys))
        there, total = chunks * self.block_names, len(keys) * self.block_names
        asked, calls = 0, 0
        while (asked < total and asked <= there) or not calls:
            asked, calls = min(total, asked + (FIRST_PORTION << calls)), calls + 1
        self.calls += calls
        return chunks, self.server.end_of(max(1, asked), now) + calls * self.round_trip

    def has(self, key: bytes) -> bool:
        """This value is got, if it is there."""
        if key in self.keys:
            self.keys.move_to_end(key)
            return True
        return False

    def put(self, key: bytes) -> None:
        self.again += key in self.keys
        self.keys[key] = None
        self.keys.move_to_end(key)
        if len(self.keys) > self.blocks:
            self.keys.popitem(last=False)


@dataclass(slots=True)
class Seen:
    """Record of what one engine has done. Blocks by where they were found; seconds."""

    blocks: int = 0
    on_device: int = 0
    on_host: int = 0
    in_store: int = 0
    busy: float = 0.0
    waited: float = 0.0  # for the store

    def count(self, blocks: int, on_device: int, on_host: int, in_store: int) -> None:
        self.blocks += blocks
        self.on_device += on_device
        self.on_host += on_host
        self.in_store += in_store


@dataclass(frozen=True, slots=True)
class Sizes:
    """In blocks, and what an engine's machine can send and receive, in bytes a second."""

    device: int
    host: int
    nic: float
    offload: str = "eager"


@dataclass(slots=True)
class _Call:
    """A call that is under way to the store or from there."""

    plan: TransferPlan
    end: float
    size: int = 0  # bytes
    ok: bool = False
    refused: tuple[int, ...] = ()


class FleetEngine(ThreeTierEngine):
    """Serves the requests of its `queue`, one after the other. `work` is what computing all of them would take."""

    def __init__(self, trace: Trace, sizes: Sizes, rates: Rates, store: SharedStore) -> None:
        self.store = store
        self.rates = rates
        self.queue = deque[TraceRequest]()
        self.seen, self.work = Seen(), Work()
        self.now, self._free_at = 0.0, 0.0
        self._serving: Iterator[float] | None = None
        self._prompt: Request | None = None  # that is looked up, with so much on the device, since then
        self._on_device, self._began = 0, 0.0
        self._sends, self._receives = Line(sizes.nic), Line(sizes.nic)
        self._calls: list[_Call] = []
        self._told: list[tuple[float, Told]] = []
        self._metered = 0.0  # when something was begun, or had ended
        self._meter = RateMeter(lambda: self._metered)
        remembered = BelowTier(REMEMBERED * sizes.host, sizes.offload)
        device = DeviceTier(sizes.device, "eager", horizon=2 * STEP_BLOCKS)
        planner = of_plain_blocks(trace, rates.block_bytes)
        super().__init__(trace, HostTier(sizes.host), device, remembered, rates, planner)

    def new_cache(self, planner: HybridChunkPlanner, device: PooledDevice, options: dict[str, Any]) -> TieredCache:
        below = replace(self.tier_options(options["host_blocks"]), ask_seconds=ASK_SECONDS)
        self.tiered = TieredCache(planner, device, below=below, **options)
        return self.tiered

    def wake(self, now: float) -> float:
        """Time has come to `now`. When it should be called next, if nothing is queued before."""
        self.now = now
        self.tiered.passed(now)
        self.step()
        while now >= self._free_at and (self._serving is not None or self.queue):
            if self._serving is None:
                prompt = self._prompt = self._prompt or self._new_prompt(self.queue[0])
                answer = self._looked_up(prompt)
                if isinstance(answer, Pending):
                    return self._next(answer.deadline)
                self._serving = self._served_by(prompt, answer, self.queue.popleft())
            seconds = next(self._serving, None)
            if seconds is None:
                self._serving = None
            else:
                self._free_at = now + seconds
        return self._next(self._free_at if self._serving is not None or self.queue else math.inf)

    def _new_prompt(self, request: TraceRequest) -> Request:
        keys = request.keys[: self.gpu.capacity]
        self._on_device, self._began = self.gpu.resident_run(keys, 0, len(keys)), self.now
        return Request(self._served, keys, len(keys) * self.block_tokens + 1)

    def _looked_up(self, prompt: Request) -> Answer:
        """Answer of the cache, after as many steps as move something at once."""
        answer = self.tiered.lookup(prompt, self._on_device * self.block_tokens, self.now)
        while isinstance(answer, Pending) and self._move():
            answer = self.tiered.lookup(prompt, self._on_device * self.block_tokens, self.now)
        return answer

    def _served_by(self, prompt: Request, answer: Answer, request: TraceRequest) -> Iterator[float]:
        """Serve a request, as `serve` does. Each step takes the time that is yielded."""
        on_device, waited = self._on_device, self.now - self._began
        seen, below = self.seen, self.tiered.tier_statistics().hit_tokens
        self._prompt = None
        self._served += 1
        with Placement(self.gpu, self._coordinator, prompt.keys, prompt.num_tokens, self.now) as place:
            self._load(prompt, place, answer, self.now)
            start = on_device * self.block_tokens
            self.loaded.add(start, max(start, min(place.length, request.tokens)))
            loaded = place.length // self.block_tokens - on_device
            in_store = (self.tiered.tier_statistics().hit_tokens - below) // self.block_tokens
            seen.count(len(request.keys), on_device, loaded - in_store, in_store)
            seen.waited += waited
            seen.busy += waited
            yield from self._spent(loaded * self.rates.block_bytes / self.rates.host_bytes)
            have, whole = place.length, len(prompt.keys) * self.block_tokens
            while have < whole:
                stop = min(whole, have + STEP_BLOCKS * self.block_tokens)
                yield from self._spent(self._seconds(have, stop))
                self._compute(prompt, place, stop)
                have = stop
            yield from self._spent(self._seconds(have, request.tokens))
            self.tiered.finished(prompt.id, whole)
        self.step()
        self.work.add(0, request.tokens)

    def _seconds(self, start: int, stop: int) -> float:
        """To compute the tokens [start, stop) of a prompt."""
        work = Work()
        work.add(min(start, stop), stop)
        return self.rates.seconds(work)

    def _spent(self, seconds: float) -> Iterator[float]:
        self.seen.busy += seconds
        yield seconds

    def _next(self, deadline: float) -> float:
        """When something ends: all that is read, all that is written, or a question."""
        reads, writes = ([call.end for call in self._calls if call.plan.direction is each] for each in Direction)
        told = [end for end, _ in self._told]
        return max(self.now, min(deadline, *told, max(reads, default=math.inf), max(writes, default=math.inf)))

    def _move(self) -> bool:
        """One engine step. Whether anything began or ended."""
        num_ended = self._report_ended()
        plan, below = self.tiered.step(), self.tiered.plan_below()
        self.tiered.report(RankReport(RANK, frozenset(transfer.id for transfer in plan.transfers)))
        for transfer in below.step.transfers:
            self._begin(transfer)
        for ask in below.asks:
            self._tell(ask)
        return bool(num_ended or plan.transfers or below.step.transfers or below.asks)

    def _tell(self, ask: Ask) -> None:
        chunks, end = self.store.ask(ask.keys, self.now)
        if end > self.now + CALL_SECONDS:
            self._told.append((self.now + CALL_SECONDS, Told(ask.id, ok=False)))
        else:
            self._told.append((end, Told(ask.id, True, chunks)))

    def _begin(self, plan: TransferPlan) -> None:
        is_read = plan.direction is Direction.LOAD
        there, here = (self.store.reads, self._receives) if is_read else (self.store.writes, self._sends)
        hot = [slot for slot, key in _values(plan) if is_read and key in self.store.hot]
        delay = max(there.delay(self.now), self.store.hot_reads.delay(self.now) if hot else 0.0)
        seconds = GET_SECONDS if is_read else PUT_SECONDS
        if is_read:
            self._metered = self.now
            self._meter.begin()
        if plan.failed or delay > seconds:
            self._calls.append(_Call(plan, self.now if plan.failed else self.now + seconds))
            return
        refused = tuple(slot for slot, key in _values(plan) if not self.store.has(key)) if is_read else ()
        size = (len(list(_values(plan))) - len(refused)) * self.rates.block_bytes
        end = max(there.end_of(size, self.now), here.end_of(size, self.now))
        if hot_size := len({*hot} - {*refused}) * self.rates.block_bytes:
            end = max(end, self.store.hot_reads.end_of(hot_size, self.now))
        self.store.calls += -(-size // self.rates.block_bytes * self.store.block_names // CALL_VALUES)
        self._calls.append(_Call(plan, end, size, True, refused))

    def _report_ended(self) -> int:
        """Report all calls that are over by now. Returns their number."""
        ended = sorted((call for call in self._calls if call.end <= self.now), key=lambda call: call.end)
        self._calls = [call for call in self._calls if call.end > self.now]
        told = tuple(told for end, told in self._told if end <= self.now)
        self._told = [each for each in self._told if each[0] > self.now]
        for call in ended:
            if call.plan.direction is Direction.LOAD:
                self._metered = call.end
                self._meter.moved(call.size)
                self._meter.end()
            elif call.ok:
                for _, key in _values(call.plan):
                    self.store.put(key)
        transfers = RankReport(
            RANK,
            frozenset(call.plan.id for call in ended if call.ok),
            frozenset(call.plan.id for call in ended if not call.ok),
            load_bytes_per_second=self._meter.bytes_per_second,
            unfit=tuple((call.plan.id, call.refused) for call in ended if call.refused),
        )
        self.tiered.report_below(TierReport(transfers, is_scanned=True, told=told))
        return len(ended) + len(told)


def _values(plan: TransferPlan) -> Iterator[tuple[int, bytes]]:
    """Each slot of a transfer, and the key of its value."""
    for copy in plan.copies:
        for slot, label in zip(copy.host_blocks, copy.labels, strict=True):
            yield slot, label.key
