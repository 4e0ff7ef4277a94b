"""A short vocabulary for tests. A prompt is letters, one to a chunk; the key of a chunk is all the letters up to it."""

from collections.abc import Callable, Iterable
from typing import Any

from cpu_prefix_cache import Hit
from cpu_prefix_cache.deciding import (
    BlockPool,
    CPUPrefixCache,
    HybridChunkPlanner,
    Lease,
    Pin,
    PooledDevice,
    PrefixGroup,
    RankReport,
    Request,
    Resolved,
    StepPlan,
)
from cpu_prefix_cache.messages.request import Answer
from property_tests.models.engines import cache_options
from property_tests.strategies import chain

GRID = 4
ATTENTION = PrefixGroup(name="attention", block_tokens=GRID, block_bytes=100)


def make_scarce(pool: BlockPool) -> None:
    """A pool beside another one is filled, and the first chunk that it evicts is requested again."""
    keys = [b"-%d" % at for at in range(pool.capacity // max(1, pool.shape.blocks_per_chunk) + 1)]
    for key in keys:
        pool.commit(pool.allocate(1, [key]), [key], pool.root, pool.touch(None))
    pool.missed(keys[:1])


class Shelf:
    """A pool spoken to in prompts, so that a test reads as a story."""

    def __init__(self, chunks: int, blocks_per_chunk: int = 1, policy: str = "lru") -> None:
        self.pool = BlockPool(chunks * blocks_per_chunk, policy, blocks_per_chunk=blocks_per_chunk)
        self.now = 0.0

    def put(self, prompt: str, after: float = 1.0, next_use: float | None = None) -> None:
        """A request uses what is here of its prompt, and stores of the rest what the policy wants."""
        keys = chain(prompt)
        self.now += after
        have = self.pool.resident_run(keys, 0, len(keys))
        deepest = self.pool.find(keys[have - 1]) if have else None
        touch = self.pool.touch(deepest, keys, self.now, next_use=next_use)
        hold = None if deepest is None else self.pool.pin(deepest)
        parent = self.pool.root if deepest is None else deepest
        new = keys[have : have + self.pool.choose(parent, keys[have:]).accepted]
        self.pool.commit(self.pool.allocate(len(new), new), new, parent, touch)
        if hold is not None:
            self.pool.unpin(hold)
        self.pool.check_valid()

    def use(self, prompt: str) -> None:
        self.now += 1.0
        self.pool.touch(self.at(prompt), chain(prompt), self.now)

    def pin(self, prompt: str) -> Pin:
        return self.pool.pin(self.at(prompt))

    def withdraw(self, prompt: str) -> None:
        self.pool.withdraw(self.at(prompt))
        self.pool.check_valid()

    def at(self, prompt: str) -> int:
        block = self.pool.find(prompt.encode())
        assert block is not None, f"{prompt} is not here"
        return block

    @property
    def names(self) -> set[str]:
        keys = (self.pool.key(block) for block in range(self.pool.capacity))
        return {key.decode() for key in keys if key is not None}

    @property
    def order(self) -> list[str]:
        """The order in which they leave."""
        return [self.pool.key(block).decode() for block in self.pool.soonest_evicted()]


def whole_prompts(planner: HybridChunkPlanner, device: PooledDevice, **options: Any) -> CPUPrefixCache:
    """A cache that holds each chunk with all that it hangs below: its device notes nothing of what it hands out."""
    device.handed_out = lambda: None  # of this device alone
    return CPUPrefixCache(planner, device, **options)


class Engine:
    """A cache behind an engine whose device pool is a BlockPool. Nobody copies bytes; plans and reports are real."""

    def __init__(
        self,
        mode: str = "eager",
        device: int = 16,
        host: int = 16,
        ranks: int = 1,
        cache: Callable[..., CPUPrefixCache] = CPUPrefixCache,
        hands_out_first: bool = False,
        **options: Any,
    ) -> None:
        self.gpu = BlockPool(device)
        self.cache = cache(
            HybridChunkPlanner([ATTENTION], max_model_len=1_000),
            PooledDevice(self.gpu, hands_out_first=hands_out_first),
            host_blocks=host,
            **cache_options(offload=mode, ranks=ranks, **options),
        )
        self.ranks = range(ranks)
        self.now = 0.0
        self.requests: dict[str, Request] = {}
        self.slots: dict[str, list[int]] = {}
        self.pins: dict[str, Pin] = {}
        self.touches: dict[str, Any] = {}

    # requests

    def asks(self, prompt: str, n0: int = 0, extra: int = 1) -> Answer:
        return self.cache.lookup(Request("asks", chain(prompt), len(prompt) * GRID + extra), n0, self.now)

    def starts(self, id: str, prompt: str, extra: int = 1, load: bool = True, next_use: Any = None) -> int | None:
        """Admit a request with what the device has of it; load what the host has beyond. The id of the load."""
        request = Request(id, chain(prompt), len(prompt) * GRID + extra, next_use=next_use)
        self.requests[id] = request
        matched = min(self.gpu.resident_run(request.keys, 0, len(prompt)), (request.num_tokens - 1) // GRID)
        deepest = self.gpu.find(request.keys[matched - 1]) if matched else None
        if deepest is not None:
            self.pins[id] = self.gpu.pin(deepest)
        self.touches[id] = self.gpu.touch(deepest)
        path = [] if deepest is None else self.gpu.path(deepest, matched)
        self.slots[id] = path + self.gpu.allocate(len(prompt) - matched)
        answer = self.cache.lookup(request, matched * GRID, self.now)
        boundary = answer.boundary if isinstance(answer, Hit) and load else None
        self.cache.admit(request, matched * GRID, boundary, self.now)
        if boundary is None:
            return None
        return self.cache.load(id, boundary, [self.slots[id][matched : boundary // GRID]], self.now)

    def fills(self, id: str, chunks: int | None = None) -> None:
        """The device has KV for so many chunks of the request and can find them."""
        request, slots = self.requests[id], self.slots[id]
        chunks = len(request.keys) if chunks is None else chunks
        for at in range(chunks):
            if self.gpu.key(slots[at]) is None:
                self.gpu.commit(
                    [slots[at]], [request.keys[at]], slots[at - 1] if at else self.gpu.root, self.touches[id]
                )
                before = self.pins.pop(id, None)
                self.pins[id] = self.gpu.pin(slots[at])
                if before is not None:
                    self.gpu.unpin(before)

    def computes(self, id: str, chunks: int | None = None) -> None:
        self.fills(id, chunks)
        self.cache.computed(id, (len(self.requests[id].keys) if chunks is None else chunks) * GRID)

    def ends(self, id: str, chunks: int | None = None) -> None:
        """The request ends with so many chunks computed: by default, those the device has."""
        have = sum(self.gpu.key(slot) is not None for slot in self.slots[id])
        self.cache.finished(id, (have if chunks is None else chunks) * GRID)
        self.leaves(id)

    def preempts(self, id: str) -> None:
        self.cache.preempted(id)
        self.leaves(id)

    def leaves(self, id: str) -> None:
        self.gpu.abort([slot for slot in self.slots.pop(id) if self.gpu.key(slot) is None])
        if id in self.pins:
            self.gpu.unpin(self.pins.pop(id))

    def serves(self, prompt: str) -> None:
        """A whole request, alone, with all its copies."""
        self.starts(prompt, prompt)
        self.copies()
        self.computes(prompt)
        self.copies()
        self.ends(prompt)
        self.copies()

    # copies

    def stores_chunk_by_chunk(self, id: str, chunks: int) -> list[int]:
        """Compute a request a chunk at a time, with a step after each. The stores, none of which has landed."""
        ids: list[int] = []
        for end in range(1, chunks + 1):
            self.computes(id, end)
            ids += [transfer.id for transfer in self.steps().transfers]
        return ids

    def steps(self) -> StepPlan:
        plan = self.cache.step()
        self.cache.check_valid()
        return plan

    def reports(self, done: Iterable[int] = (), failed: Iterable[int] = (), rank: int = 0) -> list[Resolved]:
        resolved = self.cache.report(RankReport(rank, frozenset(done), frozenset(failed)))
        self.cache.check_valid()
        return resolved

    def copies(self) -> list[str]:
        """One step, and all its transfers end well on all ranks. What was copied: the last key of each."""
        plan = self.steps()
        moved = [self.transfer(transfer.id).keys[-1].decode() for transfer in plan.transfers]
        for rank in self.ranks:
            failed = {transfer.id for transfer in plan.transfers if transfer.failed} | set(plan.cancelled)
            self.reports({transfer.id for transfer in plan.transfers} - failed, failed, rank)
        return moved

    def transfer(self, id: int) -> Any:
        return next(each for each in self.cache.edge.ledger if each.id == id)

    def reserves(self, prompt: str) -> Lease | None:
        return self.cache.reserve(Request("reserves", chain(prompt), 1_000), len(prompt) * GRID)

    @property
    def host(self) -> set[str]:
        keys = (self.cache.pool.key(block) for block in range(len(self.cache.pool._nodes.state)))
        return {key.decode() for key in keys if key is not None}

    def device_forgets(self) -> None:
        """Everything nobody holds is evicted from the device."""
        self.gpu.abort(self.gpu.take(self.gpu.capacity))

    def is_at_rest(self) -> bool:
        now, gpu = self.cache.statistics(), self.gpu.statistics()
        idle = now.running == now.storing == now.loading == now.pool.pinned == now.pool.writing == now.pool.retired == 0
        return idle and gpu.pinned == gpu.writing == gpu.retired == 0
