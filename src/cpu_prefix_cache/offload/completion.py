"""How transfers end: what becomes of the host blocks of a store, and of the sources of a load that has failed.

landed       all ranks have reported: the device blocks are released, whether the copy went well or not
  a store    is committed, if all ranks succeeded and its parent is still on the host, and then the stores that
             follow it; else it is aborted, and they are cancelled (rule 3). One with a piece that does not fit its
             codec is committed down to that
  a load     that failed has its source chunks withdrawn, and what hangs below them, or the next lookup would find
             the same bytes and fail again (rule 10). One that went well, but for slots that a tier refused, has the
             first chunk with such a slot withdrawn, and what hangs below it
cancelled    it resolves when it has landed, and registers nothing
"""

import logging
from collections import Counter
from collections.abc import Container, Hashable, Sequence

from cpu_prefix_cache.messages.plan import Direction
from cpu_prefix_cache.offload.device import Device
from cpu_prefix_cache.offload.offload import Offload
from cpu_prefix_cache.offload.transfers import LoadTransfer, Promotion, StoreTransfer, Transfer, TransferLedger
from cpu_prefix_cache.pool.block_pool import BlockPool

logger = logging.getLogger(__name__)

FAILURES_IN_A_ROW = 5  # one copy may fail by chance, so many do not
# Of trained KV nothing was seen not to fit. More than so many, and this share of what is stored, are worth a warning.
MANY_UNFIT, UNFIT_SHARE = 20, 0.01


class Completion:
    """Ends the transfers of a ledger. `running` are the requests that are admitted and have not ended."""

    def __init__(
        self,
        pool: BlockPool,
        ledger: TransferLedger,
        device: Device,
        offload: Offload,
        running: Container[Hashable],
    ) -> None:
        self._pool = pool
        self._ledger = ledger
        self._device = device
        self._offload = offload
        self._running = running
        self._failures_in_a_row = Counter[Direction]()
        self.counts = Counter[str]()  # by their names in CacheStatistics
        self._has_warned = False  # of chunks that do not fit

    def land(self, transfer: Transfer) -> Sequence[StoreTransfer]:
        """All ranks have reported. The stores whose chunks can be found since then."""
        self._count_in_a_row(transfer)
        self._device.release(transfer.hold)
        if isinstance(transfer, StoreTransfer):
            self._offload.landed(transfer)
            return self._complete_stores([transfer])
        return self._complete_load(self._ledger.loads[transfer.id])

    def has_failed_often(self, direction: Direction) -> bool:
        """Whether the last FAILURES_IN_A_ROW transfers in this direction have all failed."""
        return self._failures_in_a_row[direction] >= FAILURES_IN_A_ROW

    def forgive(self) -> None:
        """After a pause: one more failure is enough for `has_failed_often`, and one success for a fresh start."""
        for direction, failures in self._failures_in_a_row.items():
            self._failures_in_a_row[direction] = min(failures, FAILURES_IN_A_ROW - 1)

    def promoted(self, store: Promotion, ok: bool, good: int) -> Sequence[StoreTransfer]:
        """The tier below has read what `store` waits for: the first `good` of its nodes, if all went well. The stores
        whose chunks can be found since then.
        """
        self._ledger.promoted(store, ok and good > 0)
        if store.succeeded:
            self._shorten(store, good)
        return self._complete_stores([store])

    def _leave_unfit(self, store: StoreTransfer) -> None:
        """Keep of a store what comes before the first node with a piece that does not fit; nothing if it has failed."""
        keys, good = store.keys, self._first_unfit(store, store.nodes)
        if good == len(keys):
            return  # of a store that was submitted with it
        if store.succeeded:  # else a load that it follows may still read the blocks that it was to fill
            self.counts["store_unfit"] += len(keys) - good
            self._warn_of_many()
            self._shorten(store, good)
            if not good:
                self._cancel(store)
        self._offload.unfit(keys[good:])

    def _warn_of_many(self) -> None:
        stored, unfit = self.counts["chunks_stored"], self.counts["store_unfit"]
        if not self._has_warned and unfit > MANY_UNFIT + stored * UNFIT_SHARE:
            self._has_warned = True
            logger.warning(
                "%d chunks were not stored, and %d were: their bytes do not fit their codec, and are computed again; "
                'codec="none" keeps them',
                unfit,
                stored,
            )

    def _shorten(self, store: StoreTransfer, good: int) -> None:
        """Only the first `good` nodes of a store can be committed."""
        if good == len(store.nodes):
            return
        gone = set(store.keys[good:])
        for follower in self._ledger.followers(store):  # below what will never come, or it may share pieces of it
            if store.pieces or follower.chain.parent_key in gone:
                self._cancel(follower)
        self._pool.abort(store.nodes[good:])
        self._ledger.shorten(store, good)

    def _first_unfit(self, transfer: Transfer, nodes: Sequence[int]) -> int:
        """Which of its nodes is the first that has an unfit block; as many as there are, if none has."""
        blocks = (self._pool.all_blocks_of(node) for node in nodes)
        return next((at for at, each in enumerate(blocks) if not transfer.unfit.isdisjoint(each)), len(nodes))

    def late(self, id: int) -> None:
        """A load is past its deadline: it has failed, but its destinations stay held, as it may still write to them."""
        load = self._ledger.loads.get(id)
        if load is not None and not load.is_cancelled:
            self.counts["loads_failed"] += 1
            self._withdraw_sources(load)
            self._cancel(load)

    def cancel_all(self) -> None:
        """Cancel every transfer."""
        for transfer in list(self._ledger):
            self._cancel(transfer)

    def cancel_reads(self) -> None:
        """Cancel the stores that read the device."""
        for store in list(self._ledger.stores()):
            if not isinstance(store, Promotion):
                self._cancel(store)

    def _count_in_a_row(self, transfer: Transfer) -> None:
        follows = transfer.follows if isinstance(transfer, StoreTransfer) else ()
        is_exchange = any(isinstance(each, LoadTransfer) for each in follows)  # its load counts
        is_unfit = bool(transfer.unfit) and isinstance(transfer, StoreTransfer)  # what its bytes are is no failure
        if not transfer.is_cancelled and not transfer.plan.failed and not is_exchange and not is_unfit:
            direction = transfer.plan.direction
            before = self._failures_in_a_row[direction]
            self._failures_in_a_row[direction] = 0 if transfer.succeeded else before + 1

    def _complete_load(self, load: LoadTransfer) -> Sequence[StoreTransfer]:
        followers = self._ledger.remove(load)
        for id in load.plan.after if not load.succeeded else ():  # else these stores have ended
            store = self._ledger.get(id)
            if store is not None and not self._ledger.has_landed(store):
                self._cancel(store)  # from now on its sources may be computed into
        if load.succeeded:
            load.good = self._good(load)
            self.counts["chunks_loaded"] += min(load.good, len(load.keys))
            self.counts["bytes_loaded"] += load.plan.num_bytes
            self._offload.loaded(load.keys, self._sources(load))
        elif not load.is_cancelled:
            self.counts["loads_failed"] += 1
            self._withdraw_sources(load)
        self._pool.unpin(load.pin)
        return self._complete_stores(followers)

    def _good(self, load: LoadTransfer) -> int:
        """How many of its source nodes, from the first on, hold what they should. Withdraws the others."""
        if load.unfit:
            sources = self._sources(load)
            good = self._first_unfit(load, sources)
            if good < len(sources):
                self._withdraw(sources[good])
                return good
        return len(load.keys) + (load.pin is not None and load.pin.blocks[-1] in self._pool.checkpoints)

    def _sources(self, load: LoadTransfer) -> list[int]:
        """The nodes that a load reads, parents first; none if it was planned as failed."""
        if load.pin is None:
            return []
        first, *apart = load.pin.blocks  # a checkpoint that does not hang below the last chunk comes after it
        return [*self._pool.path(first, len(load.keys) + (first in self._pool.checkpoints)), *apart]

    def _withdraw_sources(self, load: LoadTransfer) -> None:
        """Withdraw the chunks that this load has read, and no others: their keys may have been stored anew since."""
        for node in self._sources(load):
            self._withdraw(node)

    def _withdraw(self, node: int) -> None:
        if self._pool.key(node) is not None:
            self._pool.withdraw(node)
            self._cancel_orphans()

    def _complete_stores(self, stores: Sequence[StoreTransfer]) -> Sequence[StoreTransfer]:
        """Commit or abort those of these stores that have landed and follow nothing, each before those that follow it.
        Those that were committed.
        """
        waiting, committed = [*reversed(stores)], list[StoreTransfer]()
        while waiting:
            store = waiting.pop()
            if store.follows or not self._ledger.has_landed(store):
                continue
            if store.unfit and not store.is_cancelled:
                self._leave_unfit(store)
            is_committed = store.succeeded and self._commit(store)
            if is_committed:
                committed.append(store)
            else:
                if not isinstance(store, Promotion):
                    self.counts["stores_failed"] += not all(store.reports.values())
                    self.counts["store_cancelled"] += len(store.keys)
                self._cancel(store)
                self._pool.abort(store.nodes)
            followers = self._ledger.remove(store)
            self._pool.unpin(store.pin)
            for follower in followers if is_committed else ():
                if not follower.is_cancelled and follower.pin is None:
                    self._pin_parent(follower)
            waiting += followers
        return committed

    def _commit(self, store: StoreTransfer) -> bool:
        """Make the chunks of a store findable, if their parent still is (rule 3)."""
        above = store.chain.parent_key
        parent = self._pool.root if above is None else self._offload.place(above)
        if parent is None:
            return False
        self._pool.commit(store.nodes, store.keys, parent, store.touch)
        if not isinstance(store, Promotion):
            has_checkpoint = store.nodes[-1] in self._pool.checkpoints
            self.counts["chunks_stored"] += len(store.keys) - has_checkpoint
            self.counts["checkpoints_stored"] += has_checkpoint
            self.counts["bytes_stored"] += store.plan.num_bytes
        self._offload.committed(store.keys)
        if store.owner is None or store.owner not in self._running:
            self._pool.resume_points.may_be_useless(store.nodes[-1])
        return True

    def _pin_parent(self, store: StoreTransfer) -> None:
        """A store that followed the one of its parent pins the parent, now that it is committed."""
        above = store.chain.parent_key
        parent = None if above is None else self._pool.place(above)
        if parent is not None:
            store.pin = self._pool.pin(parent)

    def _cancel_orphans(self) -> None:
        """Cancel the stores below withdrawn chunks: another store of the same chunks may come before they land."""
        for store in list(self._ledger.stores()):
            if store.pin is not None and not self._pool.is_placed(store.pin.blocks[0]):
                self._cancel(store)

    def _cancel(self, transfer: Transfer) -> None:
        for cancelled in self._ledger.cancel(transfer):
            if isinstance(cancelled, StoreTransfer):
                self._pool.retire(cancelled.nodes)
