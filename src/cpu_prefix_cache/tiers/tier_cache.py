"""TierCache: the tier below host memory, decided like the host cache: its edge has the host pool for a device.

What differs from the edge below an engine's device:

    device blocks are host blocks, host blocks are *slots*; a slot is as large as a host block
    requests do not come here: `read` promotes, and the host pool lists chunks to demote
    bytes outlive the process: every slot has a *label* with a *generation*, a number that is never used twice
    a slot whose bytes do not match its label is refused: a miss, not a failure
    the pool begins with what the ranks have found from before: portion by portion, while requests are served
    a tier that is not open on all ranks yet is left alone; what it holds is taken in when it is
    a tier whose reads fail is left alone for a pause, and then tried again; one that hangs, until its oldest read ends
    a tier whose writes fail is read on: a full disk, or a server without room, still has what it has

    generation     | range of 32 bits | number |      a range for each start of a process, and for each reset
                   nothing below the first generation of the last reset is ever served again

Demotion begins when all that was found is taken in: before that, new chunks would be written over old ones.

A store that several machines share is such a tier, too. Its slots are what this process remembers of it: what others
have put there is taken in with the store's answer (`questions.py`), and what it has evicted is refused when read.
"""

import logging
from collections.abc import Hashable, Iterator, Sequence
from typing import cast

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.options import CacheOptions
from cpu_prefix_cache.messages.plan import CHUNK, Direction, GroupCopy, Label, TransferPlan
from cpu_prefix_cache.messages.request import CheckpointAt, Request
from cpu_prefix_cache.messages.stats import TierStatistics
from cpu_prefix_cache.messages.tier import READ_BYTES, SLOTS_BY_HOST, TierOptions, TierPlan, TierReport
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.offload.chain import Chain
from cpu_prefix_cache.offload.completion import FAILURES_IN_A_ROW
from cpu_prefix_cache.offload.device import PooledDevice
from cpu_prefix_cache.offload.edge import Edge, Ended
from cpu_prefix_cache.offload.engine_steps import EngineSteps
from cpu_prefix_cache.offload.lazy import MARGIN
from cpu_prefix_cache.offload.stores import StorePlanner
from cpu_prefix_cache.offload.transfers import LoadTransfer, StoreTransfer, Transfer, TransferLedger
from cpu_prefix_cache.pool.block_pool import BlockPool
from cpu_prefix_cache.pool.coordinator import KVCacheCoordinator, new_pool
from cpu_prefix_cache.tiers.demotion import Demotion
from cpu_prefix_cache.tiers.found import FoundBefore
from cpu_prefix_cache.tiers.questions import StoreQuestions
from cpu_prefix_cache.tiers.slot_generations import SlotGenerations

logger = logging.getLogger(__name__)

# At most this part of the host is being written, and at most so many chunks: 1 GiB of Llama 8B, which a disk takes in
# half a second. Twice as much is the front (`EngineSteps.stretch`), and each step reads the host's order up to its end.
WRITTEN_SHARE, WRITTEN_CHUNKS = 16, 512
EAGER_FROM = 10  # times the host's blocks: from there on eager writes no more than lazy (docs/tiers.md)
# After FAILURES_IN_A_ROW a tier is left alone: long enough for a file system that hangs, short for a server's life. A
# store is tried by a question that no request waits for, so sooner.
PAUSE_SECONDS, STORE_PAUSE_SECONDS = 30.0, 5.0
USUAL_BYTES_PER_SECOND = 1e9  # for deadlines, until the rate is measured
STALL_SECONDS = 5.0  # for one read of 32 MiB, beyond its deadline: a disk that hangs, and not one that is slow


class HostDevice(PooledDevice):
    """The host pool as the device of a tier. Many pins are on it, so what waits is counted by their depths."""

    @property
    def num_waiting(self) -> int:
        return self._pool.least_available


class TierCache:
    """A tier with the given options below `host`, the pool of a cache for `planner` that has the options `above`.

    Without a mode of offload it is eager from EAGER_FROM times the host's blocks on, and where lazy could not tell in
    time what the host evicts next, since its policy is not LRU.

    Raises ConfigurationError for a tier smaller than SLOTS_BY_HOST times the host.
    """

    def __init__(
        self,
        planner: HybridChunkPlanner,
        host: BlockPool,
        options: TierOptions,
        above: CacheOptions,
        *,
        ranks: int,
        log_boundaries: bool = False,
    ) -> None:
        if options.slots < SLOTS_BY_HOST * host.capacity:
            raise ConfigurationError(
                f"a tier needs at least {SLOTS_BY_HOST * host.capacity} slots, twice the host's blocks, because it "
                f"holds what the host has too; got {options.slots}"
            )
        self.host = host
        is_better_eager = options.slots >= EAGER_FROM * host.capacity or above.policy != "lru"
        self._is_eager = is_better_eager if options.offload is None else options.offload == "eager"
        chunks = host.capacity // max(1, host.shape.blocks_per_chunk)
        written = max(1, min(chunks // WRITTEN_SHARE, WRITTEN_CHUNKS))
        self.planner = planner.below()
        self.slice_chunks = max(1, READ_BYTES // planner.host_block_bytes // max(1, planner.host_blocks_per_chunk))
        self.pool = new_pool(
            self.planner, options.slots, options.policy, thresholds=above, log_boundaries=log_boundaries
        )
        self.coordinator = KVCacheCoordinator(self.planner, self.pool)
        stores = StorePlanner(self.coordinator, HostDevice(host), TransferLedger(ranks), MARGIN)
        steps = EngineSteps(max_tokens=written * planner.grid_tokens)
        self.demotion = Demotion(host, stores, steps, is_eager=self._is_eager)
        self.edge = Edge(stores, self.demotion)
        self._found = FoundBefore(self.coordinator)
        self._generations = SlotGenerations(options.slots, ranks)
        self._paused_at: float | None = None
        self._failing_since: float | None = None  # since then nothing is written
        self._pause_seconds = PAUSE_SECONDS if options.ask_seconds is None else STORE_PAUSE_SECONDS
        self._questions = StoreQuestions(self.coordinator, self._take, self._answered, options.ask_seconds)
        self._unanswered_in_a_row = self._learned = 0
        self.now = 0.0
        self._refused = 0

    # Questions

    @property
    def is_off(self) -> bool:
        """Whether it is left alone: it is not open on all ranks, or pauses."""
        return self.edge.is_off

    @property
    def can_be_read(self) -> bool:
        """Whether all ranks have reported, and the tier neither pauses nor hangs."""
        return self._generations.is_open and not self.is_off and not self._hangs

    @property
    def _hangs(self) -> bool:
        oldest = next(iter(self.edge.ledger.loads.values()), None)
        return oldest is not None and self.now >= oldest.deadline + STALL_SECONDS

    def awaited(self, request: Request, host_end: int) -> float | None:
        """Until when it is not known what the tier has of this request beyond token `host_end`. None: it is."""
        if not self.can_be_read:
            return None
        return self._questions.awaited(request, host_end, self.now)

    def is_asked(self, id: Hashable) -> bool:
        """Whether that is not known yet of a request for which it was awaited."""
        return self.can_be_read and self._questions.is_asked(id)

    @property
    def load_rate(self) -> float | None:
        """Bytes a second that the slowest rank reads; None until all have measured it."""
        return self.edge.break_even.load_bytes_per_second if self.edge.break_even.has_load_rate else None

    def seconds_to_read(self, num_bytes: int) -> float:
        """How long the slowest rank reads so many bytes, or a usual one until that was measured."""
        return num_bytes / (self.load_rate or USUAL_BYTES_PER_SECOND)

    @property
    def queue_bytes(self) -> int:
        """Bytes of reads before anything that is requested now."""
        return sum(load.plan.num_bytes for load in self.edge.ledger.loads.values())

    def checkpoint_at(self, keys: Sequence[bytes], depth: int) -> CheckpointAt | None:
        """The checkpoint that resuming after `depth` chunks takes, if the tier has it."""
        if not self.planner.needs_checkpoint(depth) or self.pool.find(checkpoint_key(keys[depth - 1])) is None:
            return None
        return self.coordinator.checkpoint_at(keys, depth)

    def tier_statistics(self) -> TierStatistics:
        """O(pins)."""
        return TierStatistics(
            cache=self.edge.statistics(),
            state=self._state(),
            mode="eager" if self._is_eager else "lazy",
            refused=self._refused,
            unsaved=self.demotion.lost,
            found=self._found.chunks + self._learned,
            questions=self._questions.asked,
            unanswered=self._questions.unanswered,
            read_bytes_per_second=self.load_rate,
        )

    # Events

    def passed(self, now: float) -> None:
        """Time has come to `now`, in seconds: a pause may be over."""
        self.now = now
        self._questions.passed(now)
        has_paused = self._paused_at is not None and now >= self._paused_at + self._pause_seconds
        if has_paused and self._questions.is_back(now):
            logger.info("the tier is tried again")
            self._paused_at, self.edge.is_off = None, False
            self.edge.forgive()
        if self._failing_since is not None and now >= self._failing_since + self._pause_seconds:
            logger.info("the tier is written again")
            self._failing_since, self.demotion.is_failing = None, False
            self.edge.forgive()

    def arrived(self, stores: Sequence[StoreTransfer]) -> None:
        """The chunks of these stores can be found on the host now."""
        for store in stores:
            self.demotion.arrived(store.keys)

    def admitted(self, id: Hashable) -> None:
        """A request has begun to compute, and needs nothing more."""
        self._questions.admitted(id)

    def read(self, id: Hashable, chain: Chain, nodes: Sequence[int]) -> None:
        """Read a chain that the tier has into `nodes` of the host, which are being written, for the promotion `id`."""
        copies: list[GroupCopy] = []
        count, checkpoint, sources = len(chain.keys), chain.checkpoint, []
        if count:
            node = self.pool.find(chain.keys[-1])
            path = [] if node is None else self.pool.path(node, count)
            is_here = self.pool.keys_of(path) == [*chain.keys]  # a wrong engine may have joined keys of two prompts
            sources.append(node if is_here else None)
            if is_here:
                by_group = self.coordinator.chunk_blocks_by_group(self.host.blocks_of(nodes[:count]))
                copies += self.coordinator.chunk_copies(path, by_group)
        if checkpoint is not None:
            sources.append(node := self.pool.find(checkpoint_key(checkpoint.tail[-1])))
            if node is not None:
                pieces = self.pool.checkpoints.pieces(node), self.host.checkpoints.to_write(nodes[-1])
                copies += self.coordinator.checkpoint_copies(checkpoint.depth, *pieces)
        host_blocks = [block for copy in copies for block in copy.device_blocks]
        here = [node for node in sources if node is not None]
        self.edge.load(
            id,
            Chain(chain.parent_key, chain.keys),
            here if len(here) == len(sources) else (),
            copies,
            host_blocks,
            self.now,
        )

    def plan(self) -> TierPlan:
        """Work of all ranks in this step."""
        step = self.edge.begin_step()
        if step.transfers:
            step = step._replace(transfers=tuple(map(self._labelled, step.transfers)))
        return self._generations.plan(step, self._questions.take_new(), self._questions.told_below)

    def report(self, report: TierReport) -> list[tuple[Ended, LoadTransfer]]:
        """A rank has finished transfers. The loads that end with this report. Reports may be late or repeated."""
        rank = report.transfers.rank
        if report.next_generation is None:
            self.edge.is_off = self.is_off or rank not in self._generations.unused
        elif self._generations.opens(rank, report.next_generation):
            self.edge.is_off = False
        if rank == 0 and self._generations.is_open and not self.demotion.is_open:
            self._take_in(report)
        for id, slots in report.transfers.unfit:
            load = self.edge.ledger.loads.get(id)
            self._refused += 0 if load is None else len(set(slots) - load.unfit)
        if rank == 0:
            self._questions.told(report.told, report.heard)
        loads = []
        for each in self.edge.report(report.transfers):
            if isinstance(each.transfer, LoadTransfer):
                loads.append((each, each.transfer))
            if each.is_fatal and not self.is_off:
                self._failed_often(each.transfer.plan.direction)
        self.edge.catch_up()
        return loads

    def flush(self) -> None:
        """Begin to write what the host has and the tier has not, first what would be evicted last. The engine goes on
        with steps until it `is_flushed`, or gives up.
        """
        nodes = list(self.host.soonest_evicted())
        above = set(map(self.host.parent, nodes))  # these are written with what hangs below them, as one chain
        keys = (self.host.key(node) for node in reversed(nodes) if node not in above)
        self.demotion.flush([key for key in keys if key is not None and not self.edge.stores.is_covered(key)])

    @property
    def has_transfers(self) -> bool:
        """Whether anything is read or written, or waits to be written as soon as it can be."""
        return self.edge.has_transfers or (self.demotion.is_open and not self.is_off and self.demotion.num_waiting > 0)

    @property
    def is_opening(self) -> bool:
        """Whether it is not open on all ranks yet, or what it holds is not all taken in."""
        return not self.demotion.is_open

    @property
    def is_flushed(self) -> bool:
        return not self.has_transfers and (self.is_off or not self.demotion.num_waiting)

    def reset(self, revision: str | None = None) -> None:
        self.edge.reset()
        self._found.clear()
        self._questions.reset()
        self._generations.reset(revision)

    # Details

    def _take_in(self, report: TierReport) -> None:
        for slot, generation in self._found.take_in(self._generations.take_in(report)):
            self._generations.of[slot] = generation
        if self._generations.has_all(report):
            self.demotion.is_open = True
            self._found.clear()

    def _answered(self, in_time: bool) -> None:
        """A question has ended."""
        self._unanswered_in_a_row = 0 if in_time else self._unanswered_in_a_row + 1
        if self._unanswered_in_a_row >= FAILURES_IN_A_ROW and not self.is_off:
            self._failed_often(Direction.LOAD)

    def _take(self, chain: Chain) -> None:
        """Others have stored this chain."""
        nodes = self.edge.note(chain, self.pool.touch(None))
        for slot in (slot for node in nodes for slot in self.pool.all_blocks_of(node)):
            self._generations.of[slot] = self._generations.next
        self._learned += min(len(nodes), len(chain.keys))

    def _state(self) -> str:
        if self.is_off or self._hangs:
            return "paused"
        if not self.demotion.is_open:
            return "opening"
        return "read_only" if self.demotion.is_failing else "open"

    def _failed_often(self, direction: Direction) -> None:
        """Reads, to which questions belong, or writes."""
        numbers = FAILURES_IN_A_ROW, self._pause_seconds
        if direction is Direction.LOAD:
            logger.error("the tier has failed %d times in a row: it is left alone for %.0f s", *numbers)
            self.edge.is_off, self._paused_at = True, self.now
        elif not self.demotion.is_failing:
            logger.error("%d writes to the tier have failed in a row: for %.0f s it is only read", *numbers)
            self.demotion.is_failing, self._failing_since = True, self.now

    def _labelled(self, plan: TransferPlan) -> TransferPlan:
        transfer = self.edge.ledger.get(plan.id)
        if transfer is None or plan.failed:
            return plan
        if transfer.is_cancelled:  # by a reset, perhaps: a new label would let a restart serve the old bytes
            return plan._replace(copies=())
        if plan.direction is Direction.STORE:
            self._give_generations(plan.copies)
        return plan._replace(
            copies=tuple(copy._replace(labels=tuple(self._labels(transfer, copy))) for copy in plan.copies)
        )

    def _give_generations(self, copies: Sequence[GroupCopy]) -> None:
        """One for each chunk, whatever its groups, and one for each piece of a checkpoint: in the order of a chain."""
        given: dict[Hashable, int] = {}
        for copy in sorted(copies, key=lambda copy: not self.planner.pieces[copy.group].in_chunk):
            piece = self.planner.pieces[copy.group]
            for at, slot in enumerate(copy.host_blocks):
                number = at // piece.host_blocks
                name = number if piece.in_chunk else (copy.group, number)
                self._generations.of[slot] = self._generations.next + given.setdefault(name, len(given))
        self._generations.next += len(given)

    def _labels(self, transfer: Transfer, copy: GroupCopy) -> Iterator[Label]:
        piece = self.planner.pieces[copy.group]
        if piece.in_chunk:
            parents = [transfer.chain.parent_key or b"", *transfer.keys]
            for at, slot in enumerate(copy.host_blocks):
                chunk, place = divmod(at, piece.host_blocks)
                yield Label(transfer.keys[chunk], parents[chunk], copy.group, place, CHUNK, self._generations.of[slot])
            return
        boundary = self._boundary_key(transfer)
        for at, slot in enumerate(copy.host_blocks):
            key, _, block = cast(tuple[bytes, int, int], self.pool.checkpoints.key_of(slot))
            yield Label(key, boundary, copy.group, at % piece.host_blocks, block, self._generations.of[slot])

    def _boundary_key(self, transfer: Transfer) -> bytes:
        """Key of the chunk at whose end the checkpoint is that is stored. No load needs it."""
        if isinstance(transfer, LoadTransfer):
            return b""
        return transfer.keys[-2] if len(transfer.keys) > 1 else transfer.chain.parent_key or b""
