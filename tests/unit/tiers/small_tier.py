"""A cache with a tier below its host, driven by prompts. A chunk is a letter; "ab!" is the checkpoint after "ab".

A test moves the ranks' tiers: `works`, `tier_ends`, or not at all.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from cpu_prefix_cache import Hit
from cpu_prefix_cache.deciding import (
    Direction,
    Group,
    HybridChunkPlanner,
    PrefixGroup,
    RankReport,
    Request,
    StateGroup,
    TieredCache,
    TransferPlan,
    WindowGroup,
)
from cpu_prefix_cache.messages.plan import CHUNK, Label
from cpu_prefix_cache.messages.request import Answer
from cpu_prefix_cache.messages.tier import Ask, TierOptions, TierPlan, TierReport, Told
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.testing.engine import GRID, Engine, chain
from cpu_prefix_cache.tier import TierStatistics
from property_tests.models.tier_model import RankSlots, RankStore, carry_out

FULL = PrefixGroup(name="full", block_tokens=GRID, block_bytes=4096)
STATE = StateGroup(name="state", block_tokens=GRID, block_bytes=4096)
WINDOW = WindowGroup(name="window", block_tokens=GRID, block_bytes=4096, window_tokens=2 * GRID + 1)


def name_of(key: bytes) -> str:
    """Keys of checkpoints are made of those of chunks."""
    return key.decode() if key.isalpha() else "a checkpoint"


class Tiered(Engine):
    """An engine whose host has a tier of `slots` slots, four times as many by default. `below`: how it is written."""

    def __init__(
        self,
        *groups: Group,
        host: int = 16,
        slots: int | None = None,
        device: int = 16,
        ranks: int = 1,
        below: str | None = "eager",
        ask_seconds: float | None = None,
        **options: Any,
    ) -> None:
        planner = HybridChunkPlanner(groups or [FULL], max_model_len=100_000, in_pages=True)
        tier = TierOptions(slots or 4 * host, below, ask_seconds=ask_seconds)
        self.tiers = [self.new_tier(planner) for _ in range(ranks)]
        self.shut: set[int] = set()  # ranks whose tiers are not open
        made = partial(TieredCache, below=tier)
        super().__init__(device=device, host=host, ranks=ranks, cache=made, planner=planner, **options)

    def new_tier(self, planner: HybridChunkPlanner) -> Any:
        return RankSlots(planner)

    def begins(self) -> None:
        """The process: with nothing on the device and the host, and what the slots hold."""
        super().begins()
        self.moving: dict[int, TransferPlan] = {}  # of tiers
        self.first_generation = 0
        for _ in range(2):  # what rank 0 has found counts when all ranks have reported
            self.reports_below()

    def restarts(self, portion: int = 100, shut: Iterable[int] = ()) -> None:
        """The tiers of ranks that are `shut` cannot be opened."""
        self.shut = set(shut)
        for rank in self.ranks:
            self.tiers[rank].open(portion=portion, scans=rank == 0)
        self.begins()

    def opens(self, *ranks: int) -> None:
        self.shut -= set(ranks)
        for _ in range(2):
            self.reports_below()

    # the host

    def host_has(self, prompt: str, checkpoints: Iterable[str] = ()) -> None:
        """Put chunks there, and checkpoints at the ends of some, as if a store had landed just now."""
        pool, coordinator = self.cache.pool, self.cache.coordinator
        touch = pool.touch(None)
        new = []
        for end in range(1, len(prompt) + 1):
            name = prompt[:end]
            parent = pool.root if end == 1 else pool.find(name[:-1].encode())
            if pool.find(name.encode()) is None:
                [chunk] = pool.allocate(1, [name.encode()])
                pool.commit([chunk], [name.encode()], parent, touch)
                blocks = list(pool.blocks_of([chunk]))
                for group, piece in enumerate(self.planner.pieces):
                    width = piece.host_blocks if piece.in_chunk else 0
                    self.memory.keep(blocks[:width], self.memory.of_piece(name.encode(), group, CHUNK))
                    del blocks[:width]
                new.append(name.encode())
        if new:
            self.cache.below.demotion.arrived(new)
        for name in checkpoints:
            key = checkpoint_key(name.encode())
            if pool.find(key) is None:
                needs = coordinator.needs(coordinator.checkpoint_at(chain(name), len(name)))
                [node] = pool.allocate(0, [key], needs)
                pool.commit([node], [key], pool.find(name.encode()), touch)
                for at, piece in zip(self.planner.checkpoint(len(name)), pool.checkpoints.pieces(node), strict=True):
                    self.memory.keep(piece, self.memory.of_piece(chain(name)[at.chunk], at.group, at.block))
                self.cache.below.demotion.arrived([key])

    def host_forgets(self) -> None:
        """Everything that nobody holds is evicted from the host."""
        pool = self.cache.pool
        pool.abort(pool.take(pool.capacity // max(1, pool.shape.blocks_per_chunk)))

    def tier_has(self, prompt: str, checkpoints: Iterable[str] = ()) -> None:
        """Puts the prompt into the tier, and not into the host."""
        self.host_has(prompt, checkpoints)
        self.cache.below.flush()
        self.works_off()
        self.host_forgets()
        assert prompt in self.below, f"the tier has {self.below}"
        assert not self.host & set(chain_names(prompt))

    @property
    def below(self) -> set[str]:
        pool = self.cache.below.pool
        keys = (pool.key(slot) for slot in range(pool.capacity))
        return {name_of(key) for key in keys if key is not None}

    def has_checkpoint_below(self, name: str) -> bool:
        return self.cache.below.pool.find(checkpoint_key(name.encode())) is not None

    def has_checkpoint(self, name: str) -> bool:
        return self.cache.pool.find(checkpoint_key(name.encode())) is not None

    # requests

    def asks_as(self, id: str, prompt: str, n0: int = 0) -> Answer:
        return self.cache.lookup(Request(id, chain(prompt), len(prompt) * GRID + 1), n0, self.now)

    def admits(self, id: str, prompt: str) -> Answer:
        """It is scheduled with what it is given now, and loads it."""
        answer = self.asks_as(id, prompt)
        boundary = answer.boundary if isinstance(answer, Hit) else None
        self.cache.admit(Request(id, chain(prompt), len(prompt) * GRID + 1), 0, boundary, self.now)
        return answer

    # the tiers

    def steps_below(self) -> list[TransferPlan]:
        """An engine step, after which the tiers have their plan. What it has of transfers."""
        self.cache.passed(self.now)
        self.steps()
        return self.plans_below()

    def plans_below(self) -> list[TransferPlan]:
        plan: TierPlan = self.cache.plan_below()
        self.gets(plan)
        for rank in self.tiers:
            rank.advance(plan)
        self.tiers[0].taken = max(self.tiers[0].taken, plan.taken)
        self.first_generation = plan.first_generation
        self.moving |= {transfer.id: transfer for transfer in plan.step.transfers}
        self.check_rules()
        return list(plan.step.transfers)

    def gets(self, plan: TierPlan) -> None: ...

    def reads(self) -> dict[int, list[str]]:
        """Chunks that each load of the tiers in flight reads."""
        loads = {id: each for id, each in self.moving.items() if each.direction is Direction.LOAD}
        return {id: [name_of(label.key) for copy in load.copies for label in copy.labels] for id, load in loads.items()}

    def is_chunks(self, id: int) -> bool:
        """Whether a transfer is of chunks, and not of a checkpoint."""
        return all(label.block == CHUNK for copy in self.moving[id].copies for label in copy.labels)

    def writes(self) -> list[str]:
        """The chunks that are being written."""
        stores = [each for each in self.moving.values() if each.direction is Direction.STORE]
        return [name_of(label.key) for store in stores for copy in store.copies for label in copy.labels]

    def tier_ends(self, *ids: int, ok: bool = True) -> None:
        """These transfers, or all, end on all ranks. Slots that went bad are refused."""
        transfers = [self.moving.pop(id) for id in ids or list(self.moving)]
        for rank, tier in enumerate(self.tiers):
            carried = {each.id: carry_out(tier, each, self.memory.host[rank]) for each in transfers if ok}
            refused = [(id, lost) for id, lost in carried.items() if lost]
            done = {each.id for each in transfers if ok and not each.failed}
            failed = {each.id for each in transfers} - done
            self.reports_below(RankReport(rank, frozenset(done), frozenset(failed), unfit=tuple(refused)), ranks=[rank])

    def reports_below(self, transfers: RankReport | None = None, ranks: Iterable[int] | None = None) -> None:
        for rank in self.ranks if ranks is None else ranks:
            tier = self.tiers[rank]
            report = TierReport(transfers or RankReport(rank), tier.next_generation, *tier.portion())
            if rank in self.shut:
                report = TierReport(RankReport(rank), next_generation=None)
            self.cache.report_below(report)
        self.check_rules()

    def measures(self, rate: float, prefill: float) -> None:
        """Bytes a second that the tier is read, and tokens a second that are computed."""
        for rank in self.ranks:
            self.reports_below(RankReport(rank, load_bytes_per_second=rate), ranks=[rank])
        for _ in range(2):
            self.cache.prefilled(2_000, 2_000 / prefill)

    def works(self) -> None:
        """One step, and what it gives the tiers is done."""
        self.steps_below()
        self.tier_ends()

    def works_off(self, steps: int = 50) -> None:
        """Until nothing moves any more."""
        for _ in range(steps):
            is_idle = not self.moving and not self.steps_below()
            self.tier_ends()
            if is_idle:
                return
        raise AssertionError("the tier does not come to rest")

    def goes_bad(self, *names: str, rank: int = 0) -> None:
        """The bytes of these chunks change, under an unchanged label; "ab!": those of the checkpoint's own pieces."""
        pool = self.cache.below.pool
        for name in names:
            key = name.rstrip("!").encode()
            node = pool.find(checkpoint_key(key) if name.endswith("!") else key)
            for slot in pool.all_blocks_of(node):
                self.tiers[rank].records[slot].is_intact = False

    @property
    def seen(self) -> TierStatistics:
        return self.cache.tier_statistics()

    def is_at_rest(self) -> bool:
        below, host = self.cache.below.edge.statistics(), self.cache.statistics()
        idle = [each.pool.pinned + each.pool.writing + each.pool.retired for each in (below, host)]
        return idle == [0, 0] and not self.cache.has_transfers


def with_tier(*prompts: str, **options: Any) -> Tiered:
    """An engine whose tier has these prompts, and whose host has none."""
    engine = Tiered(**{"host": 32} | options)
    for prompt in prompts:
        engine.tier_has(prompt)
    return engine


def chain_names(prompt: str) -> list[str]:
    return [prompt[: end + 1] for end in range(len(prompt))]


SECONDS = 1 / 64  # that a request waits for an answer: sums of it are exact


class Shared(Tiered):
    """Its tier is a store that others write, too. A test answers the queries."""

    def __init__(self, *groups: Group, **options: Any) -> None:
        self.asks: dict[int, Ask] = {}
        super().__init__(*groups, ask_seconds=SECONDS, **options)

    def new_tier(self, planner: HybridChunkPlanner) -> RankStore:
        return RankStore(planner)

    def gets(self, plan: TierPlan) -> None:
        self.told_below = plan.told_below
        self.asks |= {ask.id: ask for ask in plan.asks}

    def others_have(self, *prompts: str, checkpoints: Iterable[str] = (), ranks: Iterable[int] | None = None) -> None:
        """All chunks of these prompts, and of the checkpoints after some chunks all pieces."""
        for prompt in prompts:
            for name in chain_names(prompt):
                self.others_have_only(name, ranks=ranks)
        for name in checkpoints:
            for at in self.planner.checkpoint(len(name)):
                self.others_have_piece(name[: at.chunk + 1], at.group, at.block)

    def others_have_only(self, name: str, ranks: Iterable[int] | None = None) -> None:
        """One chunk, and nothing above it."""
        for group, piece in enumerate(self.planner.pieces):
            if piece.in_chunk:
                self.others_have_piece(name, group, CHUNK, ranks)

    def others_have_piece(self, name: str, group: int, block: int, ranks: Iterable[int] | None = None) -> None:
        places = self.planner.pieces[group].host_blocks
        contents = self.memory.on_host(self.memory.of_piece(name.encode(), group, block), places)
        for rank in self.ranks if ranks is None else ranks:
            for place in range(places):
                label = Label(name.encode(), b"", group, place, block, 0)
                self.tiers[rank].others_write(label, contents[place])

    @property
    def asked(self) -> list[str]:
        """The deepest chunk of each question that has gone out and was not answered."""
        return [ask.keys[-1].decode() if ask.keys else "" for ask in self.asks.values()]

    def answers(self, *ids: int, ok: bool = True, heard: int | None = None) -> list[Told]:
        """To these questions, or to all: what the store has now."""
        asks = [self.asks.pop(id) for id in ids or list(self.asks)]
        told = [self.tiers[0].answer(ask) if ok else Told(ask.id, ok=False) for ask in asks]
        self.hears(told, heard=heard)
        return told

    def hears(self, told: Iterable[Told], rank: int = 0, heard: int | None = None) -> None:
        tier = self.tiers[rank]
        self.cache.report_below(
            TierReport(RankReport(rank), tier.next_generation, is_scanned=True, told=tuple(told), heard=heard)
        )
        self.check_rules()

    def is_told(self, id: str, prompt: str, n0: int = 0) -> Answer:
        """The answer to a request for which the store is queried and answers at once."""
        self.asks_as(id, prompt, n0)
        self.steps_below()
        self.answers()
        return self.asks_as(id, prompt, n0)
