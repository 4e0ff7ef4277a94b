"""Edge: every copy between a device and the pool below it, from its plan to its end.

    planned     `load`, and what the offload stores
    moving      `begin_step` has the plans for the ranks
    landed      `report`: every rank has copied
    committed   a store: its chunks can be found in the pool
    resolved    and nothing is held any more; where the copy failed, its chunks are withdrawn

A host cache has an edge below its engine's device. A tier has one below the host pool, which is the device there.
"""

from collections.abc import Container, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.plan import Direction, GroupCopy, RankReport, StepPlan
from cpu_prefix_cache.messages.stats import CacheStatistics
from cpu_prefix_cache.offload.break_even import BreakEven
from cpu_prefix_cache.offload.chain import Chain
from cpu_prefix_cache.offload.completion import Completion
from cpu_prefix_cache.offload.offload import Offload
from cpu_prefix_cache.offload.stores import StorePlanner
from cpu_prefix_cache.offload.transfers import LoadTransfer, Promotion, StoreTransfer, Transfer
from cpu_prefix_cache.pool.group_copies import num_bytes
from cpu_prefix_cache.pool.states import BlockState

# A second request for a prefix that is being loaded waits for it this long, beyond twice the time on the link of all
# loads under way: long enough for a few engine steps, short enough that a lost report delays nobody noticeably
# (rule 12).
PENDING_GRACE_SECONDS = 0.05


class Ended(NamedTuple):
    """A transfer that all ranks have reported, and the stores whose chunks can be found since then. It `is_fatal` if
    with it the last FAILURES_IN_A_ROW in its direction have failed.
    """

    transfer: Transfer
    ok: bool
    committed: Sequence[StoreTransfer]
    is_fatal: bool


class Edge:
    """The copies of the ledger of `stores`. `offload` decides what is stored; `running` are the requests that have not
    ended, which may still use what they stored. `min_load_tokens` is the shortest load that is worth it; None: it
    follows from the rates that are reported.

    While it `is_off` nothing is stored.
    """

    def __init__(
        self,
        stores: StorePlanner,
        offload: Offload,
        *,
        min_load_tokens: int | None = 0,
        running: Container[Hashable] = (),
    ) -> None:
        self.pool, self.device, self.ledger = stores.pool, stores.device, stores.ledger
        self.stores, self.offload = stores, offload
        bytes_per_token = stores.planner.chunk_bytes / stores.planner.grid_tokens
        self.break_even = BreakEven(min_load_tokens, bytes_per_token, self.ledger.ranks)
        self.epoch = 0
        self.is_off = False
        self._completion = Completion(self.pool, self.ledger, self.device, offload, running)
        self._ready: dict[int, int] = {}  # rank -> host blocks it has prepared

    @property
    def has_transfers(self) -> bool:
        """Whether any transfer is planned or in flight."""
        return len(self.ledger) > 0

    def statistics(self, work: int = 0, **counts: Any) -> CacheStatistics:
        """Counts of the pool and of all copies, and its owner's `work` and other `counts`. O(pins)."""
        loading = len(self.ledger.loads)
        return CacheStatistics(
            pool=self.pool.statistics(),
            storing=len(self.ledger) - loading,
            loading=loading,
            store_refusals=self.stores.refusals,
            store_declined=self.stores.declined,
            lost_before_store=self.offload.lost,
            remembered=self.offload.remembered,
            work=self.offload.work + work,
            **{**self._completion.counts, **counts},
        )

    def load(
        self,
        request_id: Hashable,
        chain: Chain,
        nodes: Sequence[int],
        copies: Sequence[GroupCopy],
        device_blocks: Sequence[int],
        now: float,
        read: Sequence[int | None] = (),
        holds_compute: bool = False,
    ) -> LoadTransfer:
        """Plan the load of the chunks of a chain, and of a checkpoint. `nodes` are the last of the chunks, if it has
        any, and the checkpoint; none: they are gone. It follows the stores of what `device_blocks` hold, some of which
        go into host chunks that it has `read`.
        """
        carried = num_bytes(self.stores.planner, copies)
        open_loads = (load for load in self.ledger.loads.values() if now < load.deadline)
        under_way = carried + sum(load.plan.num_bytes for load in open_loads)
        with self.pool.pinned(*nodes) as pin:  # before anything is evicted for what it overwrites
            before = self.offload.save(device_blocks, read) if nodes else ()  # else they are computed into
            after = tuple(store.id for store in before)
            plan = self.ledger.new_plan(Direction.LOAD, tuple(copies), carried, pin is None, after)
            transfer = LoadTransfer(
                plan._replace(holds_compute=holds_compute, is_early=self.device.frees_after_use),
                chain,
                hold=self.device.hold(device_blocks),
                pin=pin,
                owner=request_id,
                deadline=now + 2 * under_way / self.break_even.load_bytes_per_second + PENDING_GRACE_SECONDS,
            )
        self.ledger.add(transfer)
        sources = {block for copy in copies for block in copy.host_blocks} if before else set()
        for store in before:
            if not sources.isdisjoint(block for copy in store.plan.copies for block in copy.host_blocks):
                store.plan = store.plan._replace(after=(transfer.id,))
                self.ledger.follow(store, transfer)
        return transfer

    def begin_step(self) -> StepPlan:
        """Plan the stores of this step. The plan of all that moves from now on."""
        if self.is_off:
            self.offload.invalidated()  # blocks that leave the device are not stored
        else:
            self.offload.plan()
        return self.ledger.step(self.epoch)

    def catch_up(self) -> None:
        """Do what would have delayed the step's plan."""
        if not self.is_off:
            self.offload.catch_up()

    def report(self, report: RankReport) -> Iterator[Ended]:
        """A rank has finished transfers. Ends those for which it was the last rank, one at each step of the iterator.

        Raises MisuseError for a rank that does not exist.
        """
        if not 0 <= report.rank < self.ledger.ranks:
            raise MisuseError(f"rank {report.rank} reported, but there are {self.ledger.ranks} ranks")
        if report.ready_blocks is not None and report.ready_blocks != self._ready.get(report.rank):
            self._ready[report.rank] = report.ready_blocks
            if len(self._ready) == self.ledger.ranks:
                self.pool.grow(min(self._ready.values()))
        if report.load_bytes_per_second is not None:
            self.break_even.loads_at(report.rank, report.load_bytes_per_second)
        for id in report.late:
            self._completion.late(id)
        for transfer in self.ledger.take_in(report):
            ok, committed = transfer.succeeded, self._completion.land(transfer)
            yield Ended(transfer, ok, committed, self._completion.has_failed_often(transfer.plan.direction))

    def note(self, chain: Chain, touch: Any) -> Sequence[int]:
        """Others have stored this chain, so nothing is copied. Its nodes that can be found from now on: fewer where
        there is no room, and none while it, or what it builds on, is being written.
        """
        nodes = self.stores.note(chain, touch)
        self.offload.committed(chain.node_keys[: len(nodes)])
        return nodes

    def promoted(self, store: Promotion, ok: bool, good: int) -> Sequence[StoreTransfer]:
        """The edge below has read what `store` waits for: the first `good` of its nodes, if all went well. The stores
        whose chunks can be found since then.
        """
        return self._completion.promoted(store, ok, good)

    def invalidated(self, device_blocks: Iterable[int]) -> None:
        """These device blocks hold wrong bytes, and so may all that was computed over them: if there are any, no store
        of this moment registers anything (rule 13). A load whose hit was found before saves nothing.
        """
        self.offload.invalidated()
        if list(device_blocks):
            self._completion.cancel_reads()

    def forgive(self) -> None:
        """After a pause: one more failure `is_fatal`."""
        self._completion.forgive()

    def reset(self) -> None:
        """Nothing in the pool may be used again. What is in flight resolves and registers nothing (rule 13)."""
        self.epoch += 1
        self._completion.cancel_all()
        self.pool.reset()
        self.offload.reset()

    def check_valid(self) -> None:
        """Assert that the transfers and the pool agree. For tests: O(blocks)."""
        self.pool.check_valid()
        writing = [chunk for store in self.ledger.stores() for chunk in store.nodes]
        assert len(set(writing)) == len(writing), "a block is written by two stores"
        for node in writing:
            assert self.pool.state(node) in (BlockState.WRITING, BlockState.RETIRED), "a store lost its blocks"
        for key, store in self.ledger.writing.items():
            assert not isinstance(key, bytes) or self.pool.find(key) is None, "a chunk is stored twice (rule 12)"
            assert not store.is_cancelled, "a store that will register nothing stands in the way of another"
        for store in self.ledger.stores():
            for key in store.keys if not store.is_cancelled else ():
                assert self.ledger.writing.get(key) is store, "a chunk is stored twice at once (rule 12)"
        for transfer in self.ledger:
            waits = isinstance(transfer, StoreTransfer) and transfer.follows
            assert waits or not self.ledger.has_landed(transfer), f"transfer {transfer.id} was not resolved (rule 10)"
