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
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cpu_prefix_cache.messages.generations import begin_of, range_of
from cpu_prefix_cache.messages.plan import Direction, GroupCopy, Label, StepPlan, TransferPlan
from cpu_prefix_cache.messages.tier import BlockName, Found, TierPlan, TierReport
from cpu_prefix_cache.offload.completion import FAILURES_IN_A_ROW
from cpu_prefix_cache.pool.block_pool import BlockPool, Pin
from cpu_prefix_cache.tiers.keyed_questions import KeyedQuestions
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


@dataclass(slots=True)
class _Moving:
    """A job on its way: `nodes[i]` of the pool, which is also a slot, holds `names[i]`."""

    job: int
    names: Sequence[BlockName]
    nodes: Sequence[int]
    lost: Collection[BlockName]
    epoch: int
    since: float
    pin: Pin | None = None  # of a load


class KeyedTier:
    """`slots` slots below `host_blocks` host blocks of `block_bytes` bytes, for one rank. With `ask_seconds` it is a
    store that others write, too, and so long an answer is awaited.
    """

    def __init__(self, slots: int, *, host_blocks: int, block_bytes: int, ask_seconds: float | None = None) -> None:
        self._pool = BlockPool(slots)
        self._block_bytes = block_bytes
        self._may_wait = max(1, host_blocks // WRITTEN_SHARE)
        self._generations = array("Q", bytes(8 * slots))  # of each slot
        self._first = self._next = 0  # generations: the first that is served, the next that is given
        self._epoch = 0  # resets
        self._was_reset = False  # before it was open
        self._is_open = self._is_whole = False  # whole: all from before a restart is taken in
        self._taken = 0  # portions of that
        self._now = 0.0
        pause = PAUSE_SECONDS if ask_seconds is None else STORE_PAUSE_SECONDS
        self._breakers = {direction: _Breaker(direction, pause) for direction in Direction}
        self._questions = None if ask_seconds is None else KeyedQuestions(ask_seconds)
        self._revision: str | None = None  # as the last reset has named it
        self._transfers: dict[int, _Moving] = {}  # by their numbers, in the order in which they began
        self._loads: dict[int, float] = {}  # of these, when each began
        self._writing: dict[BlockName, None] = {}
        self._new: list[TransferPlan] = []
        self._resolved: list[int] = []
        self._ended: list[JobEnded] = []
        self._next_id = 0
        self._counts = Counter[str]()

    # Looking

    def has(self, name: BlockName) -> bool | None:
        """Whether a load of this name is worth a try. None: a store that was asked has not answered yet."""
        if not self._can_be_read:
            return False
        if self._is_known(name) or self._questions is None:
            return self._pool.find(name.spelled) is not None
        return None if self._questions.awaited(name) else False

    @property
    def is_whole(self) -> bool:
        """Whether all from before a restart is taken in, and new names are stored."""
        return self._is_whole

    def statistics(self) -> KeyedTierStatistics:
        return KeyedTierStatistics(self._pool.statistics().cached, self._counts["refused"], self._counts["unsaved"])

    def check_valid(self) -> None:
        """Assert every rule that is kept here. For tests."""
        self._pool.check_valid()
        waiting = [node for each in self._transfers.values() if each.pin is None for node in each.nodes]
        assert len(set(waiting)) == len(waiting), "a slot is written twice"
        assert all(self._pool.find(name.spelled) is None for name in self._writing), "a name is here and being written"

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
            self._generations[node] = self._next
            self._next += 1
        self._writing.update(dict.fromkeys(taken))
        transfer = _Moving(job, taken, nodes, lost, self._epoch, self._now)
        self._begin(Direction.STORE, transfer, [wanted[name] for name in taken])

    def load(self, job: int, names: Sequence[BlockName], blocks: Sequence[int]) -> None:
        """Fill these host blocks. What those hold whose names are lost is undefined."""
        wanted = dict(zip(names, blocks, strict=True)) if self._can_be_read else {}
        here = {name: node for name in wanted if (node := self._pool.find(name.spelled)) is not None}
        nodes = [*here.values()]
        transfer = _Moving(job, [*here], nodes, {*names} - here.keys(), self._epoch, self._now)
        if nodes:
            transfer.pin = self._pool.pin(*nodes)
        self._begin(Direction.LOAD, transfer, [wanted[name] for name in here])

    def reset(self, revision: str | None = None) -> None:
        """The weights are others, or may be: those of `revision`, or nobody else's."""
        self._pool.reset()
        self._revision = revision
        if self._questions is not None:
            self._questions.reset()
        self._epoch += 1
        self._was_reset = not self._is_open
        self._first = self._next = begin_of(range_of(self._next) + 1)
        self._writing.clear()

    # Messages

    def plan(self) -> TierPlan:
        """Work that is to begin now."""
        oldest = next(iter(self._transfers), self._next_id)
        step = StepPlan(self._epoch, tuple(self._new), (), oldest, tuple(self._resolved))
        self._new, self._resolved = [], []
        plan = TierPlan(step, self._first, self._taken, revision=self._revision)
        if self._questions is None:
            return plan
        return plan._replace(asks=self._questions.take_new(), told_below=self._questions.told_below)

    def report(self, report: TierReport) -> list[JobEnded]:
        """Jobs that end with this report of the rank. Reports may be repeated."""
        if report.next_generation is not None and not self._is_open:
            self._open(report.next_generation)
        if self._is_open and not self._is_whole:
            self._take_in(report)
        if self._questions is not None:
            self._remember(*self._questions.told(report.told))
        transfers = report.transfers
        refused = dict(transfers.unfit)
        for id in sorted((transfers.done | transfers.failed) & self._transfers.keys()):
            self._end(id, id in transfers.done, refused.get(id, ()))
        ended, self._ended = self._ended, []
        return ended

    # Details

    @property
    def _can_be_read(self) -> bool:
        oldest = next(iter(self._loads.values()), self._now)
        return self._breakers[Direction.LOAD].is_closed(self._now) and self._now < oldest + STALL_SECONDS

    @property
    def _can_be_written(self) -> bool:
        is_open = self._is_whole and self._breakers[Direction.STORE].is_closed(self._now)
        return is_open and len(self._writing) < self._may_wait

    def _is_known(self, name: BlockName) -> bool:
        return name in self._writing or self._pool.find(name.spelled) is not None

    def _begin(self, direction: Direction, transfer: _Moving, blocks: Sequence[int]) -> None:
        if not transfer.nodes:
            self._ended.append(JobEnded(transfer.job, frozenset(transfer.lost)))
            return
        copies = tuple(self._copies(transfer, blocks))
        self._new.append(TransferPlan(self._next_id, direction, copies, len(blocks) * self._block_bytes))
        self._transfers[self._next_id] = transfer
        if direction is Direction.LOAD:
            self._loads[self._next_id] = transfer.since
        self._next_id += 1

    def _copies(self, transfer: _Moving, blocks: Sequence[int]) -> Iterator[GroupCopy]:
        for number in sorted({name.number for name in transfer.names}):
            at = [at for at, name in enumerate(transfer.names) if name.number == number]
            slots = tuple(transfer.nodes[each] for each in at)
            labels = tuple(self._label(transfer.names[each], transfer.nodes[each]) for each in at)
            yield GroupCopy(number, slots, tuple(blocks[each] for each in at), labels)

    def _label(self, name: BlockName, slot: int) -> Label:
        return Label(name.key, b"", name.number, 0, 0, self._generations[slot])

    def _end(self, id: int, is_done: bool, refused: Collection[int]) -> None:
        transfer = self._transfers.pop(id)
        self._loads.pop(id, None)
        self._resolved.append(id)
        direction = Direction.STORE if transfer.pin is None else Direction.LOAD
        self._breakers[direction].ended(is_done, self._now)
        is_good = is_done and transfer.epoch == self._epoch
        lost = (
            self._end_store(transfer, is_good)
            if transfer.pin is None
            else self._end_load(transfer, transfer.pin, is_good, refused)
        )
        self._ended.append(JobEnded(transfer.job, frozenset([*transfer.lost, *lost])))

    def _end_store(self, transfer: _Moving, is_good: bool) -> Sequence[BlockName]:
        if transfer.epoch == self._epoch:
            for name in transfer.names:
                del self._writing[name]
        if not is_good:
            self._pool.abort(transfer.nodes)
            return transfer.names
        for name, node in zip(reversed(transfer.names), reversed(transfer.nodes), strict=True):
            self._pool.commit([node], [name.spelled], self._pool.root, self._pool.touch(None))
        return ()

    def _end_load(self, transfer: _Moving, pin: Pin, is_good: bool, refused: Collection[int]) -> Sequence[BlockName]:
        self._counts["refused"] += len(refused)
        self._pool.unpin(pin)
        lost = [
            (name, node)
            for name, node in zip(transfer.names, transfer.nodes, strict=True)
            if not is_good or node in refused
        ]
        for name, node in lost:
            if self._pool.find(name.spelled) == node:
                self._pool.withdraw(node)
        return [name for name, _ in lost]

    def _remember(self, found: Sequence[BlockName], has_answered: bool | None) -> None:
        """The store has these, of which answers about one key may name some twice."""
        if has_answered is not None:
            self._breakers[Direction.LOAD].ended(has_answered, self._now)
        new = [name for name in dict.fromkeys(found) if not self._is_known(name)]
        for name, node in zip(new, self._pool.take(len(new)), strict=False):
            self._pool.commit([node], [name.spelled], self._pool.root, self._pool.touch(None))
            self._generations[node] = self._next

    def _open(self, next_generation: int) -> None:
        self._is_open = True
        self._next = max(next_generation, self._next)
        if self._was_reset:
            self._first = self._next

    def _take_in(self, report: TierReport) -> None:
        if report.portion == self._taken + 1:
            self._taken += 1
            for found in report.found:
                if found.label.generation >= self._first:
                    self._take(found)
        self._is_whole = report.is_scanned

    def _take(self, found: Found) -> None:
        """The youngest slot of a name comes last."""
        name = BlockName(found.label.key, found.label.group)
        older = self._pool.find(name.spelled)
        if older is not None:
            self._pool.withdraw(older)
        nodes = self._pool.claim([found.slots])
        self._pool.commit(nodes, [name.spelled], self._pool.root, self._pool.touch(None))
        for slot in found.slots:
            self._generations[slot] = found.label.generation


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
