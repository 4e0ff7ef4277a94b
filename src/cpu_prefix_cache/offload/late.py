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
from collections.abc import Mapping, Sequence

from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.offload.exchange import partners
from cpu_prefix_cache.offload.leaving import Leaving
from cpu_prefix_cache.offload.parents import Parents
from cpu_prefix_cache.offload.running import Running
from cpu_prefix_cache.offload.stores import StorePlanner
from cpu_prefix_cache.offload.transfers import Transfer

MOST_REMEMBERED = 4  # times what the device holds


class Late(Leaving):
    """Stores what the device hands out, of a model without checkpoints and into a pool that is shared with it."""

    def __init__(self, stores: StorePlanner) -> None:
        super().__init__(stores, Parents(stores.device, stores.pool, stores.planner))
        self._taken: dict[bytes, Sequence[int]] = {}  # the blocks of what was handed out in this step, by its keys
        # What has left the device, each time before the transfer with this id: a store of what hangs below finds its
        # place by the parents, so they are remembered until it has ended.
        self._gone = deque[tuple[int, list[bytes]]]()

    # Told

    def confirmed(self, running: Running, before: int) -> None:
        self._parents.add(running.keys, before, running.confirmed)
        self.work += running.confirmed - before

    def checkpointed(self, running: Running, checkpoint: CheckpointAt) -> None:
        """Ignored: the model needs none."""

    def ended(self, running: Running) -> None:
        """Store nothing: the device hands out later what it had."""

    def preempted(self, running: Running) -> None:
        """Store nothing: the device hands out later what it had."""

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
        self.invalidated()
        super().reset()

    # Asked

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
        """Store what has left the device and is not covered. A load that fills `device_blocks` and reads the host
        chunks `read` follows the stores; compute follows those that read other blocks too.
        """
        if not leaving:
            return []
        self.work += len(leaving)
        gone = [key for key, here in zip(leaving, self._device.find_all(list(leaving)), strict=True) if here is None]
        cached, missing = self._pool.split(gone)
        self._pool.renew(cached)
        sources = {key: leaving[key] for key in missing if key not in self._stores.ledger.writing}
        filled = set(device_blocks)
        overwritten = {key: blocks for key, blocks in sources.items() if filled >= set(blocks)}
        into = partners(overwritten, device_blocks, read)
        stores = list[Transfer]()
        for run in self._runs(list(sources), set(sources)):
            stores += self._store_run(run, sources, into)
        for store in stores:
            blocks = [block for copy in store.plan.copies for block in copy.device_blocks]
            holds_compute = not filled >= set(blocks)
            is_early = not any(map(self._device.was_used, blocks))
            store.plan = store.plan._replace(holds_compute=holds_compute, is_early=is_early)
        self._gone.append((self._stores.ledger.next_id, gone))
        return stores
