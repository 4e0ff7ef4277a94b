"""An engine that computes nothing, around a CPUPrefixCache: stories about a policy, an option or a device, in prompts.

A prompt is letters, one to a chunk, and the key of a chunk is all the letters up to it. Tokens do not exist: `computes`
writes patterns into blocks, and copies move them (patterns.py), so a load that brings other bytes is noticed.

    asks                a lookup, and nothing else
    starts              what the device has, and a load of what the host has beyond it
    computes            more chunks, and the checkpoints that the cache wants
    ends, preempts      the device keeps what was computed, as long as it has room
    steps               the plan of a step, which goes to all ranks
    reports             some transfers ended on one rank, well or not: late, in any order, or never
    copies              both: a step, and all its copies end well

>>> engine = Engine(device=4)
>>> engine.serves("abc")
>>> engine.device_forgets()
>>> engine.asks("abcd")
Hit(boundary=12, start=0)
>>> load = engine.starts("again", "abcd")
>>> engine.copies()
['abc']
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from cpu_prefix_cache.messages.errors import MisuseError, PoolExhausted
from cpu_prefix_cache.messages.options import CacheOptions
from cpu_prefix_cache.messages.plan import RankReport, StepPlan, TransferPlan
from cpu_prefix_cache.messages.request import Answer, Hit, Request
from cpu_prefix_cache.model.groups import PrefixGroup
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.offload.engine_steps import EngineSteps, EngineTraits
from cpu_prefix_cache.pool.block_pool import BlockPool, Pin
from cpu_prefix_cache.prefix_cache import CPUPrefixCache, Resolved
from cpu_prefix_cache.testing.patterns import POISON, Patterns
from cpu_prefix_cache.testing.slots import Holding, PoolSlots, Slots

GRID = 4
ATTENTION = PrefixGroup(name="attention", block_tokens=GRID, block_bytes=100)
MAX_MODEL_LEN = 100_000
Transfers = Iterable[int | TransferPlan]
Filled = list[tuple[Sequence[int], Sequence[Any]]]  # device blocks, and the patterns that a load brings there


def chain(prompt: str) -> list[bytes]:
    """The keys of a prompt."""
    return [prompt[: end + 1].encode() for end in range(len(prompt))]


def cache_options(**options: Any) -> dict[str, Any]:
    """Arguments of a CPUPrefixCache, with the fields of its values by their own names."""
    for name, kind in (("steps", EngineSteps), ("options", CacheOptions), ("engine", EngineTraits)):
        own = {each.name: options.pop(each.name) for each in fields(kind) if each.name in options}
        if own:
            options[name] = kind(**own)
    return options


class Engine:
    """An engine with a cache of its own. `options` are fields of CacheOptions, EngineTraits and EngineSteps.

    `device` is the number of its blocks, in a pool of ours, or a device of another kind. `planner` is its model: by
    default one group of full attention. `cache` makes the cache.
    """

    checks = True  # that the cache keeps its own rules, after each step and report: looks at all of its pool

    def __init__(
        self,
        mode: str = "eager",
        device: int | Slots = 16,
        host: int = 16,
        ranks: int = 1,
        cache: Callable[..., CPUPrefixCache] = CPUPrefixCache,
        hands_out_first: bool = False,
        planner: HybridChunkPlanner | None = None,
        **options: Any,
    ) -> None:
        self.planner = planner or HybridChunkPlanner([ATTENTION], max_model_len=MAX_MODEL_LEN)
        self.grid = self.planner.grid_tokens
        self.ranks = range(ranks)
        self.now = 0.0
        self._device, self._hands_out_first = device, hands_out_first
        arguments = cache_options(offload=mode, ranks=ranks, **options)
        self._cache = partial(cache, self.planner, host_blocks=host, **arguments)
        self.begins()

    def begins(self) -> None:
        """Start the process, with nothing on the device and the host."""
        self.device: Any = self._device
        if isinstance(self._device, int):
            self.device = PoolSlots(self.planner, self._device, hands_out_first=self._hands_out_first)
        self.cache = self._cache(self.device.device)
        self.memory = Patterns(self.planner, len(self.ranks))
        self.requests: dict[str, Request] = {}
        self.holdings: dict[str, Holding] = {}
        self._stages: dict[str, int] = {}  # checkpoints that loads fill, by request
        self._loads: dict[int, Filled] = {}

    # Requests

    def asks(self, prompt: str, n0: int = 0, extra: int = 1) -> Answer:
        """The answer to a prompt with so many tokens behind its last chunk, of which the device has `n0` tokens."""
        return self.cache.lookup(Request("asks", chain(prompt), len(prompt) * self.grid + extra), n0, self.now)

    def starts(
        self, id: str, prompt: str, extra: int = 1, load: bool = True, chunks: int | None = None, **hints: Any
    ) -> int | None:
        """Admit a request with what the device has of it. The id of its load of what the host has, if there is one.

        It takes blocks for `chunks` chunks, by default for all, and later for others. `hints` are fields of a Request.
        Raises PoolExhausted where the device has no room.
        """
        request = self.requests[id] = Request(id, chain(prompt), len(prompt) * self.grid + extra, **hints)
        matched = self._found(request)
        answer = self.cache.lookup(request, matched * self.grid, self.now)
        self.holdings[id] = self._take(request.keys, matched, len(prompt) if chunks is None else chunks)
        self._check_bytes(id, matched)
        boundary = answer.boundary if load and isinstance(answer, Hit) else None
        self.cache.admit(request, matched * self.grid, boundary, self.now)
        return None if boundary is None else self.loads(id, boundary, matched)

    def loads(self, id: str, boundary: int, matched: int = 0) -> int:
        """Load a request that is admitted up to `boundary`, behind its first `matched` chunks. The id of the load."""
        depth, keys = boundary // self.grid, self.requests[id].keys
        destinations: list[list[int]] = [[] for _ in self.planner.pieces]
        filled: Filled = []
        for slot, key in list(zip(self.holdings[id].slots, keys, strict=False))[matched:depth]:
            blocks = list(self.device.blocks_of(slot))
            filled.append((tuple(blocks), self.memory.of_chunk(key)))
            for lane, piece in zip(destinations, self.planner.pieces, strict=True):
                width = piece.device_blocks if piece.in_chunk else 0
                lane += blocks[:width]
                del blocks[:width]
        end = self.planner.chunks_to_resume(depth)
        needed = self.planner.checkpoint(end) if self.planner.needs_checkpoint(end) else ()
        places = [at for at in needed if at.chunk >= matched]
        if places:
            widths = [self.planner.pieces[at.group].device_blocks for at in places]
            node, pieces = self.device.stage((id, boundary, self.now), widths)
            self._stages[id] = node
            for at, piece_blocks in zip(places, pieces, strict=True):
                destinations[at.group] += piece_blocks
                filled.append((piece_blocks, self.memory.of_piece(keys[at.chunk], at.group, at.block)))
        load = self.cache.load(id, boundary, destinations, self.now)
        self._loads[load] = filled
        return load

    def fills(self, id: str, chunks: int | None = None) -> None:
        """Write so many chunks of a request to the device, where others find them, having read those before."""
        holding, keys = self.holdings[id], self.requests[id].keys
        self._check_bytes(id, holding.published)
        chunks = len(keys) if chunks is None else chunks
        if chunks > len(holding.slots):
            holding.slots += self._take([], 0, chunks - len(holding.slots)).slots
        for at in range(holding.published, chunks):
            self.memory.write(self.device.blocks_of(holding.slots[at]), self.memory.of_chunk(keys[at]))
        self.device.publish(holding, keys, chunks)

    def computes(self, id: str, chunks: int | None = None, keep: Collection[int] | None = None) -> None:
        """Compute so many chunks, with checkpoints after those in `keep`: by default where the cache wants them."""
        chunks = len(self.requests[id].keys) if chunks is None else chunks
        self.fills(id, chunks)
        for depth in self.wants(id) if keep is None else keep:
            if depth <= chunks:
                self.keeps(self.requests[id].keys, depth)
        self.cache.computed(id, chunks * self.grid)

    def wants(self, id: str) -> list[int]:
        """The chunks after which the cache wants checkpoints of a request."""
        return [boundary // self.grid for boundary in self.cache.boundaries(id)]

    def ends(self, id: str, chunks: int | None = None) -> None:
        """End a request with so many chunks computed: by default those that the device has."""
        self.cache.finished(id, (self.holdings[id].published if chunks is None else chunks) * self.grid)
        self.leaves(id)

    def preempts(self, id: str) -> None:
        self.cache.preempted(id)
        self.leaves(id)

    def leaves(self, id: str) -> None:
        """The device takes back what a request has of it."""
        self.device.let_go(self.holdings.pop(id))
        if id in self._stages:
            self.gpu.abort([self._stages.pop(id)])

    def serves(self, prompt: str, keep: Collection[int] | None = None) -> None:
        """A whole request, alone, with all its copies."""
        self.starts(prompt, prompt)
        self.copies()
        self.computes(prompt, keep=keep)
        self.copies()
        self.ends(prompt)
        self.copies()

    def reserves(self, prompt: str) -> Pin | None:
        return self.cache.reserve(Request("reserves", chain(prompt), 1_000), len(prompt) * self.grid)

    # Copies

    def steps(self) -> StepPlan:
        """Plan a step. What its loads are to fill holds nothing from then on."""
        plan = self.cache.step()
        self.memory.begin(plan)
        for transfer in plan.transfers:
            for blocks, _ in self._loads.get(transfer.id, ()):
                self.memory.write(blocks, [POISON] * len(blocks))
        self.check_rules()
        return plan

    def reports(
        self,
        done: Transfers = (),
        failed: Transfers = (),
        rank: int = 0,
        late: Transfers = (),
        unfit: tuple[tuple[int, tuple[int, ...]], ...] = (),
        **measured: Any,
    ) -> list[Resolved]:
        """Report transfers of a rank. In stores that are `unfit` the first host blocks of what did not fit.

        `measured` are the other fields of a RankReport.
        """
        ended, lost = _ids(done), _ids(failed)
        resolved = self.cache.report(RankReport(rank, ended, lost, late=_ids(late), unfit=unfit, **measured))
        self.check_rules()
        self.memory.end(rank, ended, lost, torn=[block for _, blocks in unfit for block in blocks])
        for each in resolved:
            self._resolved(each)
        return resolved

    def copies(self) -> list[str]:
        """One step, and all its transfers end well on all ranks. The last key of each."""
        plan = self.steps()
        moved = [self.transfer(transfer.id).keys[-1].decode() for transfer in plan.transfers]
        failed = {transfer.id for transfer in plan.transfers if transfer.failed} | set(plan.cancelled)
        for rank in self.ranks:
            self.reports({transfer.id for transfer in plan.transfers} - failed, failed, rank)
        return moved

    def stores_chunk_by_chunk(self, id: str, chunks: int) -> list[int]:
        """Compute a request a chunk at a time, with a step after each. The stores, none of which has landed."""
        ids: list[int] = []
        for end in range(1, chunks + 1):
            self.computes(id, end)
            ids += [transfer.id for transfer in self.steps().transfers]
        return ids

    def transfer(self, id: int) -> Any:
        return next(each for each in self.cache.edge.ledger if each.id == id)

    # Both pools

    @property
    def gpu(self) -> BlockPool:
        """The device, where it is a pool of ours."""
        pool: BlockPool = self.device.pool
        return pool

    @property
    def slots(self) -> dict[str, list[int]]:
        """The slots of each request."""
        return {id: holding.slots for id, holding in self.holdings.items()}

    @property
    def host(self) -> set[str]:
        """Names of what the host has; "ab!" is the checkpoint after "ab"."""
        keys = (self.cache.pool.key(node) for node in range(len(self.cache.pool._nodes.state)))
        return {key.decode().replace("\x02", "!") for key in keys if key is not None}

    @property
    def checkpoints(self) -> set[str]:
        return {name for name in self.host if name.endswith("!")}

    def device_has(self, prompt: str, checkpoint: bool = False) -> int:
        """Put the last chunk of a prompt there, whose others are there, or the checkpoint after it, too. Its node."""
        keys = chain(prompt)
        node = self.gpu.find(keys[-1])
        if node is None:
            parent = self._node(keys[-2]) if len(keys) > 1 else self.gpu.root
            [node] = self.gpu.allocate(1, keys[-1:])
            self.memory.write(self.gpu.blocks_of([node]), self.memory.of_chunk(keys[-1]))
            self.gpu.commit([node], keys[-1:], parent, self.gpu.touch(None))
        if checkpoint:
            self.keeps(keys, len(keys))
        return node

    def keeps(self, keys: Sequence[bytes], depth: int) -> None:
        """Put the checkpoint after `depth` chunks on the device, if one is needed to resume there."""
        name = checkpoint_key(keys[depth - 1])
        if not self.planner.needs_checkpoint(depth) or self.gpu.find(name) is not None:
            return
        coordinator = self.device.coordinator
        [node] = self.gpu.allocate(0, [name], coordinator.needs(coordinator.checkpoint_at(keys, depth)))
        for at, blocks in zip(self.planner.checkpoint(depth), self.gpu.checkpoints.pieces(node), strict=True):
            self.memory.write(blocks, self.memory.of_piece(keys[at.chunk], at.group, at.block))
        self.gpu.commit([node], [name], self._node(keys[depth - 1]), self.gpu.touch(None))

    def device_forgets(self) -> None:
        """Everything nobody holds is evicted from the device."""
        self.gpu.abort(self.gpu.take(self.gpu.capacity))

    def is_at_rest(self) -> bool:
        now, gpu = self.cache.statistics(), self.gpu.statistics()
        idle = now.running == now.storing == now.loading == now.pool.pinned == now.pool.writing == now.pool.retired == 0
        return idle and gpu.pinned == gpu.writing == gpu.retired == 0

    # Details

    def _found(self, request: Request) -> int:
        """How many chunks of a request the device has to resume from."""
        if self.planner.has_checkpoints:
            boundary: int = self.device.coordinator.longest_boundary(request.keys, 0, request.num_tokens)
            return boundary // self.grid
        matched: int = self.device.match(request.keys)
        return min(self.planner.resumable_chunks(matched), self.planner.hittable_chunks(request.num_tokens))

    def _take(self, keys: Sequence[bytes], matched: int, total: int) -> Holding:
        holding: Holding | None = self.device.take(keys, matched, total)
        if holding is None:
            raise PoolExhausted(total - matched, 0)
        return holding

    def _node(self, key: bytes) -> int:
        node = self.gpu.find(key)
        if node is None:
            raise MisuseError(f"put {key.decode()} on the device first")
        return node

    def check_rules(self) -> None:
        if self.checks:
            self.cache.check_valid()

    def _check_bytes(self, id: str, chunks: int) -> None:
        for slot, key in list(zip(self.holdings[id].slots, self.requests[id].keys, strict=False))[:chunks]:
            if not self.memory.holds(self.device.blocks_of(slot), self.memory.of_chunk(key)):
                raise AssertionError(f"{id} reads other bytes than those of {key.decode()}")

    def _resolved(self, each: Resolved) -> None:
        """Compare what a load has brought, and give back what it filled of checkpoints: its request has them now."""
        for blocks, patterns in self._loads.pop(each.id, ()):
            if each.ok and not self.memory.holds(blocks, patterns):
                raise AssertionError(f"load {each.id} brought other bytes than {patterns}")
        if each.request_id in self._stages:
            self.gpu.abort([self._stages.pop(each.request_id)])


def _ids(transfers: Transfers) -> frozenset[int]:
    return frozenset(each if isinstance(each, int) else each.id for each in transfers)
