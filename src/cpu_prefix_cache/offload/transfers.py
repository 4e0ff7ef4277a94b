"""Every copy that is planned or moving.

    PLANNED --launch--> MOVING --last rank reports--> LANDED ----> RESOLVED, once, as done or failed (rule 10)
                                                        `-- a store, until the one it follows is resolved

A copy that has begun cannot be stopped, so only the reports of all ranks end a MOVING transfer. A *cancelled* transfer
resolves like any other, and registers nothing.

A store whose parent chunk, or a piece that its checkpoint shares, is still being written follows the stores that write
it, and is committed after them (rule 3):

    store 7   chunks 0..3    moving
    store 8   chunks 4..7    follows 7; landed, and not committed before 7 is; cancelled if 7 fails

A store that takes the blocks which a load reads follows that load: until it has ended, nobody else may have them.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.plan import Direction, GroupCopy, RankReport, StepPlan, TransferPlan
from cpu_prefix_cache.offload.chain import Chain
from cpu_prefix_cache.pool.block_pool import Pin


@dataclass(slots=True, eq=False)
class Transfer:
    """A copy that is planned or moving, as a StoreTransfer or a LoadTransfer. Keys are those at planning (rule 13)."""

    plan: TransferPlan
    chain: Chain
    hold: Any  # on its device blocks, until it has landed (rule 11)
    pin: Pin | None = None  # a load's deepest chunk; the cached chunk that a store hangs below
    owner: Hashable | None = None  # the request it is planned for; None: lazy stores blocks that wait
    deadline: float = 0.0  # seconds until which other requests wait for it (rule 12)
    is_cancelled: bool = False
    reports: dict[int, bool] = field(default_factory=dict)  # rank -> whether it succeeded
    unfit: set[int] = field(default_factory=set)  # blocks of the pool that do not hold what they should

    @property
    def id(self) -> int:
        return self.plan.id

    @property
    def keys(self) -> Sequence[bytes]:
        """The keys of what it copies."""
        return self.chain.node_keys

    @property
    def succeeded(self) -> bool:
        return not self.is_cancelled and all(self.reports.values())


@dataclass(slots=True, eq=False, kw_only=True)
class StoreTransfer(Transfer):
    """`nodes[i]` is the host chunk, or last the checkpoint, of `keys[i]`."""

    nodes: Sequence[int]
    touch: Any = None  # the use that its chunks belong to
    pieces: Sequence[Hashable] = ()  # the keys of the pieces it writes for its checkpoint
    follows: list[Transfer] = field(default_factory=list)  # to be committed after these

    @property
    def device_blocks(self) -> int:
        """How many device blocks it reads."""
        return sum(len(copy.device_blocks) for copy in self.plan.copies)


class Promotion(StoreTransfer):
    """A store whose bytes come from elsewhere: the tier below host memory, or an engine of a keeper. No rank gets it:
    it is MOVING from the beginning, and lands when that reports it.
    """

    __slots__ = ()


@dataclass(slots=True, eq=False, kw_only=True)
class LoadTransfer(Transfer):
    good: int = 0  # number of nodes, from the first on, that a successful load read right


class TransferLedger:
    """The transfers that are not resolved, by id, by the keys they write or load (rule 12), and by what they follow.

    Raises ConfigurationError for fewer ranks than 1.
    """

    def __init__(self, ranks: int) -> None:
        if ranks < 1:
            raise ConfigurationError(f"ranks must be at least 1, got {ranks}")
        self.ranks = ranks
        self._next_id = 0
        self._open: dict[int, Transfer] = {}
        self.loads: dict[int, LoadTransfer] = {}  # the loads among them
        self._planned: dict[int, Transfer] = {}
        self._cancelled: list[int] = []
        self._resolved: list[int] = []  # since the last plan
        self.writing: dict[Hashable, StoreTransfer] = {}  # by the keys of chunks, checkpoints, and pieces
        self.loading: dict[bytes, LoadTransfer] = {}
        self._followers = defaultdict[int, list[StoreTransfer]](list)

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self._open.values())

    def __len__(self) -> int:
        return len(self._open)

    def get(self, id: int) -> Transfer | None:
        return self._open.get(id)

    def is_planned(self, transfer: Transfer) -> bool:
        """Whether it has not gone out to the ranks yet."""
        return transfer.id in self._planned

    def has_landed(self, transfer: Transfer) -> bool:
        """Whether all ranks have reported it. A store may have to wait then for the one it follows."""
        return len(transfer.reports) == self.ranks and transfer.id in self._open

    def held_by_walk(self) -> int:
        """How many device blocks the stores of lazy hold. O(open)."""
        walked = (each for each in self.stores() if each.owner is None and not self.has_landed(each))
        return sum(each.device_blocks for each in walked)

    def stores(self) -> Iterator[StoreTransfer]:
        return (each for each in self if isinstance(each, StoreTransfer))

    @property
    def num_resolved(self) -> int:
        return self._next_id - len(self._open)

    @property
    def next_id(self) -> int:
        """The id that the next transfer is given."""
        return self._next_id

    @property
    def resolved_below(self) -> int:
        """Every transfer with a smaller id is resolved. Ids are given out in ascending order and never reused."""
        return next(iter(self._open), self._next_id)

    def new_plan(
        self,
        direction: Direction,
        copies: tuple[GroupCopy, ...],
        num_bytes: int,
        failed: bool = False,
        after: tuple[int, ...] = (),
    ) -> TransferPlan:
        self._next_id += 1
        return TransferPlan(self._next_id - 1, direction, copies, num_bytes, failed, after)

    def add(self, transfer: Transfer) -> None:
        self._open[transfer.id] = transfer
        if isinstance(transfer, StoreTransfer):
            self.writing.update(dict.fromkeys((*transfer.keys, *transfer.pieces), transfer))
            for followed in transfer.follows:
                self._followers[followed.id].append(transfer)
            if isinstance(transfer, Promotion):
                return
        elif isinstance(transfer, LoadTransfer):
            self.loads[transfer.id] = transfer
            for key in transfer.keys:
                self.loading.setdefault(key, transfer)  # other requests wait for the first (rule 12)
        self._planned[transfer.id] = transfer

    def follow(self, store: StoreTransfer, followed: Transfer) -> None:
        """Commit `store` after `followed`."""
        store.follows.append(followed)
        self._followers[followed.id].append(store)

    def followers(self, transfer: Transfer) -> Sequence[StoreTransfer]:
        """Stores that are to be committed after this transfer."""
        return self._followers.get(transfer.id, ())

    def filling(self) -> dict[int, Hashable | None]:
        """The device blocks that loads fill which no rank, or not every one, has reported; each with its request."""
        loads = self.loads.values()
        return {block: load.owner for load in loads for copy in load.plan.copies for block in copy.device_blocks}

    def step(self, epoch: int) -> StepPlan:
        """The plan that goes out to the ranks now. `epoch` counts resets."""
        plans = tuple(transfer.plan for transfer in self._planned.values())
        plan = StepPlan(epoch, plans, tuple(self._cancelled), self.resolved_below, tuple(self._resolved))
        self._planned, self._cancelled, self._resolved = {}, [], []
        return plan

    def take_in(self, report: RankReport) -> list[Transfer]:
        """A rank has finished transfers. Those for which it was the last rank."""
        for id, blocks in report.unfit:
            if (transfer := self.get(id)) is not None:
                transfer.unfit.update(blocks)
        landed = [*self.report(report.rank, report.failed, done=False)]
        return [*landed, *self.report(report.rank, report.done, done=True)]

    def report(self, rank: int, ids: Iterable[int], done: bool) -> Iterator[Transfer]:
        """Note what a rank has finished. Yields the transfers for which it was the last rank.

        Repeated and unknown ids are ignored. If a rank reports both success and failure, the failure counts.
        """
        for id in sorted(ids):
            transfer = self._open.get(id)
            if transfer is None or self.is_planned(transfer) or self.has_landed(transfer):
                continue
            transfer.reports[rank] = transfer.reports.get(rank, True) and done
            if self.has_landed(transfer):
                yield transfer

    def promoted(self, store: Promotion, ok: bool) -> None:
        """The tier below has reported this, in the place of all ranks."""
        store.reports = dict.fromkeys(range(self.ranks), ok)

    def cancel(self, transfer: Transfer) -> list[Transfer]:
        """Cancel a transfer and the stores that follow it. Those that were not cancelled before."""
        cancelled = []
        waiting: list[Transfer] = [transfer]
        while waiting:
            each = waiting.pop()
            waiting += self.followers(each)
            if not each.is_cancelled:
                each.is_cancelled = True
                self._forget_keys(each)
                cancelled.append(each)
                if isinstance(each, LoadTransfer):
                    self._cancelled.append(each.id)
        return cancelled

    def shorten(self, store: StoreTransfer, count: int) -> None:
        """Only the first `count` nodes of a store will be committed. Its followers look for their parent then."""
        for key in chain(store.keys[count:], store.pieces):
            if self.writing.get(key) is store:
                del self.writing[key]
        store.chain, store.nodes, store.pieces = store.chain.first(count), store.nodes[:count], ()

    def remove(self, transfer: Transfer) -> Sequence[StoreTransfer]:
        """Forget a transfer that is resolved. The stores that followed it, which do so no more."""
        if not isinstance(transfer, Promotion):
            self._resolved.append(transfer.id)
        del self._open[transfer.id]
        self.loads.pop(transfer.id, None)
        self._forget_keys(transfer)
        followers = self._followers.pop(transfer.id, ())
        for store in followers:
            store.follows.remove(transfer)
        return followers

    def _forget_keys(self, transfer: Transfer) -> None:
        if isinstance(transfer, StoreTransfer):
            _drop(self.writing, transfer, (*transfer.keys, *transfer.pieces))
        elif isinstance(transfer, LoadTransfer):
            _drop(self.loading, transfer, transfer.keys)


def _drop(moving: dict[Any, Any], transfer: Transfer, keys: Iterable[Hashable]) -> None:
    for key in keys:
        if moving.get(key) is transfer:
            del moving[key]
