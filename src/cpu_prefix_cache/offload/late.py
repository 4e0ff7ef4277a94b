"""Late: a chunk goes to the host when the device hands out its blocks, and before only into ample room.

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

* **Room is ample** while all that the device has and the host has not would find some. Then a chunk is stored when it
  is computed: nothing leaves the host for it before its blocks are handed out, and nothing is stored, and waited for,
  at that time. (H200s, 40 GiB behind 16: eager, which waits for no store, served 9 and 11 % more prompt tokens a
  second.) What never leaves the device, as a beginning of all prompts, is on both sides then, while pins are below it.
* **Compute** waits until its step's stores have been read (`TransferPlan.holds_compute`).
* **Loads** begin after the stores of what they overwrite, large ones portion by portion; where room is scarce most of
  it goes into the host blocks that the load reads (`exchange.py`).
* A chunk that the device has a second time is not stored: its other blocks leave later.
* A chunk of several blocks may be overwritten by several loads, and compute: all of them follow its store.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from itertools import groupby, takewhile

from cpu_prefix_cache.offload.chain import Chain
from cpu_prefix_cache.offload.exchange import partners
from cpu_prefix_cache.offload.offload import Offload
from cpu_prefix_cache.offload.parents import Links, Parents, take_run
from cpu_prefix_cache.offload.running import Running
from cpu_prefix_cache.offload.stores import Stop, StorePlanner
from cpu_prefix_cache.offload.transfers import StoreTransfer

MOST_REMEMBERED = 4  # times what the device holds: more parents than stores in flight can need


class Late(Offload):
    """Stores what the device hands out, and into ample room what is computed, of a model without checkpoints and into a
    pool that is shared with it. What a request had when it ends or is preempted is handed out later.
    """

    def __init__(self, stores: StorePlanner) -> None:
        self._device = stores.device
        self._parents = Parents(lambda keys: [found is not None for found in self._device.find_all(keys)])
        super().__init__(stores, self._parents)
        self._taken: dict[bytes, Sequence[int]] = {}  # the blocks of what was handed out in this step, by its keys
        self._shared: dict[int, StoreTransfer] = {}  # device blocks of this step's stores that several may overwrite

    # Reported

    def confirmed(self, running: Running, before: int) -> None:
        self._parents.add(running.keys, before, running.confirmed)
        start = max(before, running.resumed)
        alone = max(running.confirmed - start, self._stores.device_chunks - self._pool.num_duplicates)  # at most
        if len(self._pool.free) >= alone * self._pool.shape.blocks_per_chunk:
            self._store_computed(running, start)
        self.work += running.confirmed - before

    def used(self, keys: Sequence[bytes], chunks: int) -> None:
        self._pool.duplicate_above(keys, chunks)

    def committed(self, keys: Sequence[bytes]) -> None:
        """Some are on the device still, or again."""
        self._pool.duplicated(self._pool.split([key for key in reversed(keys) if key in self._parents])[0])

    def loaded(self, keys: Sequence[bytes], nodes: Sequence[int]) -> None:
        self._pool.duplicated(reversed(nodes))

    def invalidated(self) -> None:
        self._take()
        self._pool.renew(self._pool.split([*self._taken])[0])
        self._taken.clear()

    def reset(self) -> None:
        self._parents.clear()
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

    def save(self, device_blocks: Sequence[int], read: Sequence[int | None] = ()) -> list[StoreTransfer]:
        filled = set(device_blocks)
        self._take()
        leaving = {key: blocks for key, blocks in self._taken.items() if not filled.isdisjoint(blocks)}
        for key in leaving:
            del self._taken[key]
        before = dict.fromkeys(self._shared[block] for block in device_blocks if block in self._shared)
        stores = self._store_leaving(leaving, device_blocks, read)
        for store in stores:
            if store.plan.holds_compute:
                self._shared |= {block: store for copy in store.plan.copies for block in copy.device_blocks}
        return [*before, *stores]

    def plan(self) -> None:
        self._take()
        leaving, self._taken = self._taken, {}
        self._store_leaving(leaving)
        self._shared.clear()
        self._parents.resolved(self._stores.ledger.resolved_below, MOST_REMEMBERED * self._stores.device_chunks)
        cached, missing = self._pool.split(self._parents.sweep())  # they left unnoticed
        self._pool.renew(cached)
        self._parents.lost += sum(key not in self._stores.ledger.writing for key in missing)

    # Details

    def _store_computed(self, running: Running, start: int) -> None:
        """Store its confirmed chunks from `start` on, from the first that the host lacks to the next that it has."""
        keys, is_covered = running.keys, self._stores.is_covered
        start += sum(1 for _ in takewhile(is_covered, keys[start : running.confirmed]))
        new = [*takewhile(lambda key: not is_covered(key), keys[start : running.confirmed])]
        if new:
            self._stores.plan(Chain(keys[start - 1] if start else None, new), running.touch, owner=running.id)

    def _take(self) -> None:
        self._taken.update(self._device.handed_out() or ())

    def _store_leaving(
        self,
        leaving: Mapping[bytes, Sequence[int]],
        device_blocks: Sequence[int] = (),
        read: Sequence[int | None] = (),
    ) -> list[StoreTransfer]:
        """Store those of the chunks `leaving` that are not covered. A load that fills `device_blocks` and reads the
        host chunks `read` follows the stores; compute follows those that read other blocks too.
        """
        if not leaving:
            return []
        self.work += len(leaving)
        cached, missing = self._pool.split([*leaving])
        self._pool.renew(cached)
        sources = {key: leaving[key] for key in missing if key not in self._stores.ledger.writing}
        filled = set(device_blocks)
        overwritten = {key: blocks for key, blocks in sources.items() if filled.issuperset(blocks)} if filled else {}
        into = partners(overwritten, device_blocks, read)
        stores, gone, left = list[StoreTransfer](), self._parents.take(leaving), set(sources)
        for key in sources:
            if key in left:
                links, is_whole = take_run(key, left, gone)
                if is_whole:
                    stores += self._store_run(links, sources, overwritten, into)
                else:
                    self._parents.lost += len(links)  # they have no place
        self._parents.keep(gone, self._stores.ledger.next_id)
        return stores

    def _store_run(
        self,
        links: Links,
        sources: Mapping[bytes, Sequence[int]],
        overwritten: Container[bytes],
        into: Mapping[bytes, int],
    ) -> list[StoreTransfer]:
        """Store a run of chunks right above one another, given from the deepest up, as far as the host takes it."""
        keys = [*reversed(links)]
        stores, left, stop = list[StoreTransfer](), len(keys), None
        for chain in self._parts(Chain(links[keys[0]], keys), overwritten, into):
            store, stop = self._store(chain, sources, overwritten, into)
            if store is not None:
                stores.append(store)
                left -= len(store.keys)
            if stop is not None:
                break  # what hangs below could not be committed
        self._parents.lost += 0 if stop is Stop.DECLINED else left
        return stores

    def _parts(self, run: Chain, overwritten: Container[bytes], into: Container[bytes]) -> Iterator[Chain]:
        """The parts of a run whose stores differ."""
        if not overwritten:
            yield run
            return
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
    ) -> tuple[StoreTransfer | None, Stop | None]:
        """Store the chain, whose chunks are all `overwritten` by a load, or all by compute. Those of `into` take blocks
        of host chunks that the load reads.
        """
        by_load = chain.keys[0] in overwritten
        read = [into[key] for key in chain.keys if key in into]
        transfer, stop = self._stores.plan(chain, self._pool.touch(None), left=sources, read=read)
        if transfer is not None:
            is_early = self._device.frees_after_use
            transfer.plan = transfer.plan._replace(holds_compute=not by_load, is_early=is_early)
        return transfer, stop
