"""Every copy that is planned or moving: one record and one phase each.

    PLANNED --launch--> MOVING --last rank reports--> LANDED ----> RESOLVED, once, as done or failed (rule 10)
                                                        `-- a store, until the one it follows is resolved

A copy that has begun cannot be stopped, so only the reports of all ranks end a MOVING transfer. A *cancelled* transfer
resolves like any other, and registers nothing.

A store whose parent chunk, or a piece that its checkpoint shares, is still being written follows the stores that write
it, and is committed after them (rule 3):

    store 7   chunks 0..3    moving
    store 8   chunks 4..7    follows 7; landed, and not committed before 7 is; cancelled if 7 fails

A store that takes the blocks which a load reads follows that load: until it has ended, nobody else may have them.

A *promotion* is a store whose bytes the tier below host memory reads. It is MOVING from the beginning, and lands when
the tier reports it.
"""

import enum
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.plan import Direction, GroupCopy, TransferPlan
from cpu_prefix_cache.pool.block_pool import Pin


class Phase(enum.Enum):
    PLANNED = "planned"
    MOVING = "moving"
    LANDED = "landed"  # all ranks have reported; a store may have to wait for the one it follows
    RESOLVED = "resolved"


@dataclass(slots=True, eq=False)
class Transfer:
    """A copy that is planned or moving, as a StoreTransfer or a LoadTransfer. Keys are those at planning (rule 13)."""

    plan: TransferPlan
    keys: Sequence[bytes]
    hold: Any  # on its device blocks, until it has landed (rule 11)
    pin: Pin | None = None  # a load's deepest chunk; the cached chunk that a store hangs below
    deadline: float = 0.0  # seconds until which other requests wait for it (rule 12)
    phase: Phase = Phase.PLANNED
    is_cancelled: bool = False
    reports: dict[int, bool] = field(default_factory=dict)  # rank -> whether it succeeded
    refused: set[int] = field(default_factory=set)  # blocks of the pool whose bytes were refused: unfit, or bad
    followers: list["StoreTransfer"] = field(default_factory=list)

    @property
    def id(self) -> int:
        return self.plan.id

    @property
    def succeeded(self) -> bool:
        return not self.is_cancelled and all(self.reports.values())


@dataclass(slots=True, eq=False, kw_only=True)
class StoreTransfer(Transfer):
    """`nodes[i]` is the host chunk, or last the checkpoint, of `keys[i]`."""

    nodes: Sequence[int]
    held_blocks: int = 0  # device blocks that its hold has
    touch: Any = None  # the use that its chunks belong to
    parent_key: bytes | None = None  # of the chunk it hangs below, None for the root
    pieces: Sequence[Hashable] = ()  # the keys of the pieces it writes for its checkpoint
    owner: Hashable | None = None  # the request it was planned for; None: lazy stores blocks that wait
    follows: list[Transfer] = field(default_factory=list)  # to be committed after these
    is_promotion: bool = False  # its bytes come from the tier below, not from the device: no rank gets it


@dataclass(slots=True, eq=False, kw_only=True)
class LoadTransfer(Transfer):
    request_id: Hashable | None
    good: int = 0  # number of nodes, from the first on, that a successful load read right


class TransferLedger:
    """The transfers that are not resolved, by id and by the keys they write or load (rule 12).

    Raises ConfigurationError for fewer ranks than 1.
    """

    def __init__(self, ranks: int) -> None:
        if ranks < 1:
            raise ConfigurationError(f"ranks must be at least 1, got {ranks}")
        self.ranks = ranks
        self._next_id = 0
        self._open: dict[int, Transfer] = {}
        self.loads: dict[int, LoadTransfer] = {}  # the loads among them
        self._planned: list[Transfer] = []
        self._cancelled: list[int] = []
        self._resolved: list[int] = []  # since the last plan
        self.writing: dict[Hashable, StoreTransfer] = {}  # by the keys of chunks, checkpoints, and pieces
        self.loading: dict[bytes, LoadTransfer] = {}

    def __iter__(self) -> Iterator[Transfer]:
        return iter(self._open.values())

    def __len__(self) -> int:
        return len(self._open)

    def get(self, id: int) -> Transfer | None:
        return self._open.get(id)

    def held_by_walk(self) -> int:
        """How many device blocks the stores of lazy hold. O(open)."""
        walked = (each for each in self.stores() if each.owner is None and each.phase is not Phase.LANDED)
        return sum(each.held_blocks for each in walked)

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
                followed.followers.append(transfer)
            if transfer.is_promotion:
                transfer.phase = Phase.MOVING
                return
        elif isinstance(transfer, LoadTransfer):
            self.loads[transfer.id] = transfer
            for key in transfer.keys:
                self.loading.setdefault(key, transfer)  # other requests wait for the first (rule 12)
        self._planned.append(transfer)

    def launch(self) -> tuple[tuple[TransferPlan, ...], tuple[int, ...]]:
        """The plans that go out now, and the ids of loads that are not to be started any more."""
        if not self._planned and not self._cancelled:
            return (), ()
        for transfer in self._planned:
            transfer.phase = Phase.MOVING
        plans, cancelled = tuple(transfer.plan for transfer in self._planned), tuple(self._cancelled)
        self._planned, self._cancelled = [], []
        return plans, cancelled

    def take_resolved(self) -> tuple[int, ...]:
        """The ids that were resolved since the last call."""
        if not self._resolved:
            return ()
        resolved, self._resolved = tuple(self._resolved), []
        return resolved

    def report(self, rank: int, ids: Iterable[int], done: bool) -> Iterator[Transfer]:
        """Note what a rank has finished. Yields the transfers for which it was the last rank.

        Repeated and unknown ids are ignored. If a rank reports both success and failure, the failure counts.
        """
        for id in sorted(ids):
            transfer = self._open.get(id)
            if transfer is None or transfer.phase is not Phase.MOVING:
                continue
            transfer.reports[rank] = transfer.reports.get(rank, True) and done
            if len(transfer.reports) == self.ranks:
                transfer.phase = Phase.LANDED
                yield transfer

    def cancel(self, transfer: Transfer) -> list[Transfer]:
        """Cancel a transfer and the stores that follow it. Those that were not cancelled before."""
        cancelled = []
        waiting: list[Transfer] = [transfer]
        while waiting:
            each = waiting.pop()
            waiting += each.followers
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
        store.keys, store.nodes, store.pieces = store.keys[:count], store.nodes[:count], ()

    def remove(self, transfer: Transfer) -> None:
        """Forget a transfer that is resolved."""
        transfer.phase = Phase.RESOLVED
        self._resolved.append(transfer.id)
        del self._open[transfer.id]
        self.loads.pop(transfer.id, None)
        self._forget_keys(transfer)

    def _forget_keys(self, transfer: Transfer) -> None:
        if isinstance(transfer, StoreTransfer):
            _drop(self.writing, transfer, (*transfer.keys, *transfer.pieces))
        elif isinstance(transfer, LoadTransfer):
            _drop(self.loading, transfer, transfer.keys)


def _drop(moving: dict[Any, Any], transfer: Transfer, keys: Iterable[Hashable]) -> None:
    for key in keys:
        if moving.get(key) is transfer:
            del moving[key]
