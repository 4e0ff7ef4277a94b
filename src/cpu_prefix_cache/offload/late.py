"""Late: a chunk goes to the host when the device hands out its blocks, and not before.

    order of eviction     [ a ][ b ][ c ][ d ] ...
    the engine schedules  a and b are handed out to compute, c and d to a load
    the step's plan       stores a, b, c and d
    the ranks             read a and b, then compute;  read c and d, then load

The device notes what it hands out (`Device.handed_out`). Its bytes are whole until the step computes or loads. So the
ranks read them first: nothing is lost, nothing has to be held for later steps, and no chunk is on both sides because it
may leave soon.

    device   [a b c d e f]  waits: f, e, d, ...       host   . . . . . [g h i]       a prompt of nine chunks

Device and host hold a prompt together (rule 3): its end is on the host, and of its beginning the device alone has the
bytes. What leaves the device and is on the host already becomes the youngest there. A store takes the run of chunks
right above one another that leave at once, parents first.

* **Compute** waits until its step's stores have been read (`TransferPlan.holds_compute`).
* **Loads** begin after the stores of what they overwrite; where room is scarce most of it goes into the host blocks
  that the load reads (`exchange.py`).
* A chunk that the device has a second time is not stored: its other blocks leave later.
"""

from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import groupby

from cpu_prefix_cache.offload.exchange import partners
from cpu_prefix_cache.offload.offload import Offload
from cpu_prefix_cache.offload.parents import Parents
from cpu_prefix_cache.offload.running import Running
from cpu_prefix_cache.offload.stores import Chain, Stop, StorePlanner
from cpu_prefix_cache.offload.transfers import Transfer

MOST_REMEMBERED = 4  # times what the device holds


class Late(Offload):
    """Stores what the device hands out, of a model without checkpoints and into a pool that is shared with it. What a
    request had when it ends or is preempted is handed out later.
    """

    def __init__(self, stores: StorePlanner) -> None:
        super().__init__(stores)
        self._device = stores.device
        self._parents = Parents(stores.device, stores.pool, stores.planner)
        self._taken: dict[bytes, Sequence[int]] = {}  # the blocks of what was handed out in this step, by its keys
        # What has left the device, each time before the transfer with this id: a store of what hangs below finds its
        # place by the parents, so they are remembered until it has ended.
        self._gone = deque[tuple[int, list[bytes]]]()

    @property
    def lost(self) -> int:
        return self._parents.lost

    @property
    def remembered(self) -> int:
        return len(self._parents)

    # Reported

    def confirmed(self, running: Running, before: int) -> None:
        self._parents.add(running.keys, before, running.confirmed)
        self.work += running.confirmed - before

    def used(self, keys: Sequence[bytes], chunks: int) -> None:
        self._pool.duplicate_above(keys, chunks)

    def committed(self, store: Transfer) -> None:
        self._parents.saved(store.keys)

    def loaded(self, keys: Sequence[bytes], nodes: Sequence[int]) -> None:
        self._pool.duplicated(reversed(nodes))

    def invalidated(self) -> None:
        self._take()
        self._taken.clear()

    def reset(self) -> None:
        self._parents.clear()
        self._gone.clear()
        self.invalidated()

    # Asked

    def place(self, key: bytes) -> int | None:
        place = self._pool.place(key)
        if place is not None:
            return place
        outside = self._parents.missing_above(key, lambda each: self._pool.place(each) is not None)
        if outside is None:
            return None
        keys, above = outside
        parent = self._pool.root if above is None else self._pool.place(above)
        return None if parent is None else self._pool.outline(keys, parent)

    def save(self, device_blocks: Sequence[int], read: Sequence[int | None] = ()) -> list[Transfer]:
        filled = set(device_blocks)
        self._take()
        leaving = {key: blocks for key, blocks in self._taken.items() if not filled.isdisjoint(blocks)}
        for key in leaving:
            del self._taken[key]
        return self._store_leaving(leaving, device_blocks, read)

    def plan(self) -> None:
        self._take()
        leaving, self._taken = self._taken, {}
        self._store_leaving(leaving)
        while self._gone and (self._gone[0][0] <= self._stores.ledger.resolved_below or self._has_too_many):
            self._parents.handed_out(self._gone.popleft()[1])
        if not self._gone:
            self._parents.sweep()  # what has left unnoticed

    # Details

    @property
    def _has_too_many(self) -> bool:
        """Whether more parents are remembered than stores in flight can need: some transfer does not end."""
        return len(self._parents) > MOST_REMEMBERED * self._stores.device_chunks

    def _take(self) -> None:
        self._taken.update(self._device.handed_out() or ())

    def _store_leaving(
        self,
        leaving: Mapping[bytes, Sequence[int]],
        device_blocks: Sequence[int] = (),
        read: Sequence[int | None] = (),
    ) -> list[Transfer]:
        """Store those of the chunks `leaving` that are not covered. A load that fills `device_blocks` and reads the
        host chunks `read` follows the stores; compute follows those that read other blocks too.
        """
        if not leaving:
            return []
        self.work += len(leaving)
        gone = list(leaving)
        cached, missing = self._pool.split(gone)
        self._pool.renew(cached)
        sources = {key: leaving[key] for key in missing if key not in self._stores.ledger.writing}
        filled = set(device_blocks)
        overwritten = {key: blocks for key, blocks in sources.items() if filled >= set(blocks)} if filled else {}
        into = partners(overwritten, device_blocks, read)
        stores = list[Transfer]()
        for run in self._runs(sources):
            for chain in self._parts(run, overwritten, into):
                store = self._store(chain, sources, overwritten, into)
                stores += [] if store is None else [store]
                if store is None or len(store.keys) < len(chain):
                    break  # what hangs below could not be committed
        self._gone.append((self._stores.ledger.next_id, gone))
        return stores

    def _runs(self, sources: Mapping[bytes, Sequence[int]]) -> Iterator[Chain]:
        """The runs of chunks right above one another, parents first. Each chunk is asked for once: what is declined or
        finds no room is not stored.
        """
        left = set(sources)
        for key in sources:
            run = self._parents.run_above(key, left.__contains__)
            if run is not None and run[0]:
                left.difference_update(run[0])
                yield Chain(run[1], run[0])

    def _parts(self, run: Chain, overwritten: Container[bytes], into: Container[bytes]) -> Iterator[Chain]:
        """The parts of a run whose stores differ."""
        above = run.parent_key
        for _, group in groupby(run.keys, lambda key: (key in overwritten, key in into)):
            keys = list(group)
            yield Chain(above, keys)
            above = keys[-1]

    def _store(
        self,
        chain: Chain,
        sources: Mapping[bytes, Sequence[int]],
        overwritten: Container[bytes],
        into: Mapping[bytes, int],
    ) -> Transfer | None:
        """Store the chain, whose chunks are all `overwritten` by a load, or all by compute. Those of `into` take blocks
        of host chunks that the load reads.
        """
        by_load = chain.keys[0] in overwritten
        read = [into[key] for key in chain.keys if key in into]
        transfer, stop = self._stores.plan(chain, self._pool.touch(None), left=sources, read=read)
        if stop is Stop.DECLINED:
            self._parents.unwanted([each for each in chain.keys if not self._stores.is_covered(each)])
        if transfer is not None:
            self._parents.unwanted(transfer.keys)  # they have left the device, and are not lost
            used = self._device.were_used([block for copy in transfer.plan.copies for block in copy.device_blocks])
            transfer.plan = transfer.plan._replace(holds_compute=not by_load, is_early=not used)
        return transfer
