"""KeyedTier: a tier for an engine that keeps an index of its own host memory, and names single host blocks by keys.

Such an engine says what is stored and what is loaded, in *jobs* of its own, and no more: not which key follows which.
So the index here is flat, and the least recently used slot is given away first.

    name     a key, and the number of a group beside it: what one host block, and one slot, holds
    store    names that are neither here nor on their way get slots, for which others leave; found once written
    load     its slots are pinned until it ends; those that are refused lose their names, as do all of one that failed
    reset    nothing from before is found or served; what is under way ends, and its job has lost all its names

Each job ends exactly once, with the names that it has lost. It has also lost those that a load does not find, and that
a store leaves out: before all from before a restart is taken in, while writes fail, and where too much of the host
waits to be written. (An engine holds host blocks for as long.) A tier whose reads fail or hang finds nothing for a
while. Bytes, labels and generations are those of every tier (`tier_cache.py`). Of a store that others write, too, the
slots are what this process remembers of it, and unknown names are asked for (`keyed_questions.py`).
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from cpu_prefix_cache.messages.plan import Direction, GroupCopy, Label, TransferPlan
from cpu_prefix_cache.messages.tier import BlockName, Found, TierPlan, TierReport
from cpu_prefix_cache.offload.chain import Chain
from cpu_prefix_cache.offload.completion import FAILURES_IN_A_ROW
from cpu_prefix_cache.offload.transfers import LoadTransfer, StoreTransfer, Transfer, TransferLedger
from cpu_prefix_cache.pool.block_pool import BlockPool
from cpu_prefix_cache.tiers.keyed_questions import KeyedQuestions
from cpu_prefix_cache.tiers.slot_generations import SlotGenerations
from cpu_prefix_cache.tiers.tier_cache import PAUSE_SECONDS, STALL_SECONDS, STORE_PAUSE_SECONDS

logger = logging.getLogger(__name__)

WRITTEN_SHARE = 4  # while this part of the host waits to be written, nothing more is


class JobEnded(NamedTuple):
    """The job with this number has ended: all of it was stored, or loaded, but what it has `lost`."""

    job: int
    lost: frozenset[BlockName]


class KeyedTierStatistics(NamedTuple):
    """`held` names are found. `refused` slots did not hold what they should. Stores left out `unsaved` names."""

    held: int
    refused: int
    unsaved: int


class KeyedTier:
    """`slots` slots below `host_blocks` host blocks of `block_bytes` bytes, for one rank. With `ask_seconds` it is a
    store that others write, too, and so long an answer is awaited.
    """

    def __init__(self, slots: int, *, host_blocks: int, block_bytes: int, ask_seconds: float | None = None) -> None:
        self._pool = BlockPool(slots)
        self._block_bytes = block_bytes
        self._may_wait = max(1, host_blocks // WRITTEN_SHARE)
        self._generations = SlotGenerations(slots, ranks=1)
        self._epoch = 0  # resets
        self.is_whole = False  # whether all from before a restart is taken in, and new names are stored
        self._now = 0.0
        pause = PAUSE_SECONDS if ask_seconds is None else STORE_PAUSE_SECONDS
        self._breakers = {direction: _Breaker(direction, pause) for direction in Direction}
        self._questions = None if ask_seconds is None else KeyedQuestions(ask_seconds)
        self._ledger = TransferLedger(ranks=1)  # a node of the pool is also a slot
        self._jobs: dict[int, JobEnded] = {}  # by transfer, with what they had lost before
        self._ended: list[JobEnded] = []
        self._counts = Counter[str]()

    # Looking

    def has(self, name: BlockName) -> bool | None:
        """Whether a load of this name is worth a try. None: a store that was asked has not answered yet."""
        if not self._can_be_read:
            return False
        if self._is_known(name) or self._questions is None:
            return self._pool.find(name.spelled) is not None
        return None if self._questions.awaited(name) else False

    def statistics(self) -> KeyedTierStatistics:
        return KeyedTierStatistics(self._pool.statistics().cached, self._counts["refused"], self._counts["unsaved"])

    def check_valid(self) -> None:
        """Assert every rule that is kept here. For tests."""
        self._pool.check_valid()
        waiting = [node for store in self._ledger.stores() for node in store.nodes]
        assert len(set(waiting)) == len(waiting), "a slot is written twice"
        written = {key for store in self._ledger.stores() if not store.is_cancelled for key in store.keys}
        assert len(self._pool.missing(written)) == len(written), "a name is here and being written"

    # Jobs

    def passed(self, now: float) -> None:
        """Time has come to `now`, in seconds, after all reports up to then."""
        self._now = now
        if self._questions is not None and self._questions.passed(now):
            self._breakers[Direction.LOAD].ended(False, now)

    def touch(self, names: Sequence[BlockName]) -> None:
        """A request uses these; what it can do without first comes last."""
        for name in reversed(names):
            node = self._pool.find(name.spelled)
            if node is not None:
                self._pool.touch(node)

    def store(self, job: int, names: Sequence[BlockName], blocks: Sequence[int]) -> None:
        """Keep what these host blocks hold; until the job ends they keep it, too."""
        wanted = {name: block for name, block in zip(names, blocks, strict=True) if not self._is_known(name)}
        nodes = self._pool.take(len(wanted) if self._can_be_written else 0)
        taken = [*wanted][: len(nodes)]
        lost = [*wanted][len(nodes) :]
        self._counts["unsaved"] += len(lost)
        for node in nodes:
            self._generations.of[node] = self._generations.next
            self._generations.next += 1
        plan = self._plan(Direction.STORE, taken, nodes, [wanted[name] for name in taken])
        self._begin(JobEnded(job, frozenset(lost)), StoreTransfer(plan, _chain(taken), hold=None, nodes=nodes))

    def load(self, job: int, names: Sequence[BlockName], blocks: Sequence[int]) -> None:
        """Fill these host blocks. What those hold whose names are lost is undefined."""
        wanted = dict(zip(names, blocks, strict=True)) if self._can_be_read else {}
        here = {name: node for name in wanted if (node := self._pool.find(name.spelled)) is not None}
        plan = self._plan(Direction.LOAD, [*here], [*here.values()], [wanted[name] for name in here])
        pin, deadline = self._pool.pin(*here.values()), self._now + STALL_SECONDS
        load = LoadTransfer(plan, _chain([*here]), hold=None, pin=pin, deadline=deadline)
        self._begin(JobEnded(job, frozenset({*names} - here.keys())), load)

    def reset(self, revision: str | None = None) -> None:
        """The weights are others, or may be: those of `revision`, or nobody else's."""
        for transfer in self._ledger:
            self._ledger.cancel(transfer)
        self._pool.reset()
        if self._questions is not None:
            self._questions.reset()
        self._epoch += 1
        self._generations.reset(revision)

    # Messages

    def plan(self) -> TierPlan:
        """Work that is to begin now."""
        step = self._ledger.step(self._epoch)
        if self._questions is None:
            return self._generations.plan(step)
        return self._generations.plan(step, self._questions.take_new(), self._questions.told_below)

    def report(self, report: TierReport) -> list[JobEnded]:
        """Jobs that end with this report of the rank. Reports may be repeated."""
        if report.next_generation is not None:
            self._generations.opens(0, report.next_generation)
        if self._generations.is_open and not self.is_whole:
            for found in self._generations.take_in(report):
                self._take(found)
            self.is_whole = self._generations.has_all(report)
        if self._questions is not None:
            self._remember(*self._questions.told(report.told))
        for transfer in self._ledger.take_in(report.transfers):
            self._end(transfer)
        ended, self._ended = self._ended, []
        return ended

    # Details

    @property
    def _can_be_read(self) -> bool:
        oldest = next(iter(self._ledger.loads.values()), None)
        hangs = oldest is not None and self._now >= oldest.deadline
        return self._breakers[Direction.LOAD].is_closed(self._now) and not hangs

    @property
    def _can_be_written(self) -> bool:
        is_open = self.is_whole and self._breakers[Direction.STORE].is_closed(self._now)
        return is_open and len(self._ledger.writing) < self._may_wait

    def _is_known(self, name: BlockName) -> bool:
        return name.spelled in self._ledger.writing or self._pool.find(name.spelled) is not None

    def _begin(self, job: JobEnded, transfer: Transfer) -> None:
        """`job` as it ends if all goes well."""
        if transfer.plan.copies:
            self._jobs[transfer.id] = job
            self._ledger.add(transfer)
        else:
            self._ended.append(job)

    def _plan(
        self, direction: Direction, names: Sequence[BlockName], slots: Sequence[int], blocks: Sequence[int]
    ) -> TransferPlan:
        copies = tuple(self._copies(names, slots, blocks))
        return self._ledger.new_plan(direction, copies, len(blocks) * self._block_bytes)

    def _copies(self, names: Sequence[BlockName], slots: Sequence[int], blocks: Sequence[int]) -> Iterator[GroupCopy]:
        for number in sorted({name.number for name in names}):
            at = [at for at, name in enumerate(names) if name.number == number]
            labels = tuple(self._label(names[each], slots[each]) for each in at)
            yield GroupCopy(number, tuple(slots[each] for each in at), tuple(blocks[each] for each in at), labels)

    def _label(self, name: BlockName, slot: int) -> Label:
        return Label(name.key, b"", name.number, 0, 0, self._generations.of[slot])

    def _end(self, transfer: Transfer) -> None:
        self._ledger.remove(transfer)
        if not transfer.is_cancelled:
            self._breakers[transfer.plan.direction].ended(transfer.succeeded, self._now)
        lost: Iterable[bytes] = ()
        if isinstance(transfer, StoreTransfer):
            lost = self._end_store(transfer)
        elif isinstance(transfer, LoadTransfer):
            lost = self._end_load(transfer)
        job = self._jobs.pop(transfer.id)
        self._ended.append(job._replace(lost=job.lost.union(map(BlockName.of, lost))))

    def _end_store(self, store: StoreTransfer) -> Sequence[bytes]:
        if not store.succeeded:
            self._pool.abort(store.nodes)
            return store.keys
        for key, node in zip(reversed(store.keys), reversed(store.nodes), strict=True):
            self._pool.commit([node], [key], self._pool.root, self._pool.touch(None))
        return ()

    def _end_load(self, load: LoadTransfer) -> Sequence[bytes]:
        self._counts["refused"] += len(load.unfit)
        if load.pin is None:
            return ()
        self._pool.unpin(load.pin)
        read = zip(load.keys, load.pin.blocks, strict=True)
        lost = {key: node for key, node in read if not load.succeeded or node in load.unfit}
        for key, node in lost.items():
            if self._pool.find(key) == node:
                self._pool.withdraw(node)
        return [*lost]

    def _remember(self, found: Sequence[BlockName], has_answered: bool | None) -> None:
        """The store has these, of which answers about one key may name some twice."""
        if has_answered is not None:
            self._breakers[Direction.LOAD].ended(has_answered, self._now)
        new = [name for name in dict.fromkeys(found) if not self._is_known(name)]
        for name, node in zip(new, self._pool.take(len(new)), strict=False):
            self._pool.commit([node], [name.spelled], self._pool.root, self._pool.touch(None))
            self._generations.of[node] = self._generations.next

    def _take(self, found: Found) -> None:
        """The youngest slot of a name comes last."""
        name = BlockName(found.label.key, found.label.group)
        older = self._pool.find(name.spelled)
        if older is not None:
            self._pool.withdraw(older)
        nodes = self._pool.claim([found.slots])
        self._pool.commit(nodes, [name.spelled], self._pool.root, self._pool.touch(None))
        for slot in found.slots:
            self._generations.of[slot] = found.label.generation


def _chain(names: Sequence[BlockName]) -> Chain:
    return Chain(None, [name.spelled for name in names])


class _Breaker:
    """After FAILURES_IN_A_ROW a direction is left alone for `pause` seconds, and then tried again."""

    def __init__(self, direction: Direction, pause: float) -> None:
        self._direction = direction
        self._pause = pause
        self._failures = 0
        self._until = 0.0

    def is_closed(self, now: float) -> bool:
        return now >= self._until

    def ended(self, well: bool, now: float) -> None:
        self._failures = 0 if well else self._failures + 1
        if self._failures >= FAILURES_IN_A_ROW:
            self._failures, self._until = 0, now + self._pause
            logger.error(
                "%ss of the tier have failed %d times in a row: there are none for %.0f s",
                self._direction.value,
                FAILURES_IN_A_ROW,
                self._pause,
            )
