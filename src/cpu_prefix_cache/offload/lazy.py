"""Lazy: what the device hands out next is covered before, and each waiting block is examined once.

    handed out next                                      handed out last
    [ ][ ][c] ... [ ][h][ ] ... [ ][ ][x] | [ ][ ][ ] ... [ ][ ]
    `------- the front: examined --------'  `- not yet -'

A block that waits on the device is *covered* when it has no key, when the host has its chunk or a store of it is in
flight, or when it cannot be stored any more. The *front* are the blocks that were examined and wait still, or are held
by a store and will wait again where they did (h). It is as long as what the engine can hand out before a store planned
now has landed (`EngineSteps.stretch`). In each step those that were handed out leave it at one end, and as many are
read behind its last block (x) and examined: what is not covered is stored.

Invariant: all of the front was covered when it was examined. A block that is used again leaves the front, and is
examined again when it comes back. A step in which no block came or went costs nothing. The examination stops at what
must wait for room, and goes on there when there may be some (`_progress`).

    device   [a b c d e f]  waits: f, e, d, ...       host   . . . . . [g h i]       a prompt of nine chunks

Device and host hold a prompt together (rule 3): its end is on the host, and of its beginning the device alone has the
bytes. What is examined and is on the host already becomes the youngest there. A store takes the run of chunks right
above one another in the front, parents first. Stores hold at most what `report_steps` steps allocate, and never what
the device has promised to running requests.

* **Loads** save what they overwrite: `foresee` reads what the next load will be given, and `save` stores what of it the
  load was given and is not covered. The ranks begin the load after that; where room is scarce most of it goes into the
  host blocks that the load reads (`exchange.py`).
* **A device nearly all in use.** Where less waits than the front should have, the blocks of a request that ends are
  handed out in the same step or the next, before any look. So they are stored, and held, as it ends. Where room is not
  scarce what still runs is stored too, as eager does; else it would take room from what the device has no more. (In
  vLLM's scheduler, 24 users, 8,192 blocks each on device and host, .22 of the prompt tokens were found so, and .38
  without.)
* **Whole prompts**, above a tier and in models with checkpoints, where the host alone holds a prompt from its
  beginning. Its deepest chunk is handed out first and stored last. If it were stored in portions, its end would be
  evicted before its turn. So a chain is stored with all its missing ancestors, however long it is, if the device can
  spare it: if a whole stretch waits besides, and as much again as is held. Where little waits, what runs is stored too.
  A load that finds another on the link waits if its destinations reach beyond the front.
* **Small hosts.** What lazy has stored or the host has declined is *settled* until it is used, computed or loaded
  again: a host that is smaller than the front, or than a chain, may have evicted it when the front comes to it.
* **Checkpoints.** In a model that needs them a chunk is stored with the checkpoint that is about to leave (rule 9).
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from itertools import islice
from typing import Any

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.offload.engine_steps import EngineSteps
from cpu_prefix_cache.offload.exchange import partners
from cpu_prefix_cache.offload.leaving import Leaving
from cpu_prefix_cache.offload.parents import Ancestry, Parents
from cpu_prefix_cache.offload.running import Running
from cpu_prefix_cache.offload.stores import Chain, Stop, StorePlanner
from cpu_prefix_cache.offload.transfers import Transfer

# Of whole prompts, what is stored must be worth so many times what leaves for it, or bytes are moved for no hit. With
# 1, `adaptive` on a small host stores more than eager; with 1.6, a large one loses hits (docs/policies.md).
MARGIN = 1.25

Name = bytes | int  # of a place in the order of eviction: its key, or the number of a block without one
Places = dict[Name, int]  # the blocks that wait there, in the order of eviction


class Lazy(Leaving):
    """Covers what waits on the device, in time. Where little waits, stores what ends; and of whole prompts, what runs.

    `running` gives the ids of the requests that run. `parents` are those of the chunks on the device; default: what is
    remembered.

    Raises ConfigurationError for `ahead_blocks` beyond the blocks of the device.
    """

    def __init__(
        self,
        stores: StorePlanner,
        steps: EngineSteps,
        running: Callable[[], Collection[Hashable]],
        parents: Ancestry | None = None,
    ) -> None:
        device = stores.device
        super().__init__(stores, Parents(device, stores.pool, stores.planner) if parents is None else parents)
        if steps.ahead_blocks is not None and steps.ahead_blocks > device.num_blocks:
            raise ConfigurationError(
                f"ahead_blocks must be at most the {device.num_blocks} blocks of the device, got {steps.ahead_blocks}"
            )
        self._steps = steps
        self._running = running
        self._chunk_blocks = max(1, stores.chunk_blocks)
        self._front: Places = {}
        self._settled: set[bytes] = set()
        self._examined_at: tuple[Any, ...] | None = None  # `_progress` then
        self._foreseen: dict[int, bytes | None] = {}  # blocks that the next load is given, with their keys
        self._endangered: dict[bytes, Sequence[int]] = {}  # the blocks of those of them that are not covered

    # Told

    def confirmed(self, running: Running, before: int) -> None:
        self._parents.add(running.keys, before, running.confirmed)
        self._settled.difference_update(running.keys[before : running.confirmed])
        self._became_known(running.keys[before : running.confirmed])
        super().confirmed(running, before)
        self.work += running.confirmed - before

    def checkpointed(self, running: Running, checkpoint: CheckpointAt) -> None:
        self._parents.add_checkpoint(checkpoint)
        self._became_known((checkpoint_key(checkpoint.tail[-1]),))
        super().checkpointed(running, checkpoint)
        self.work += 1

    def _became_known(self, keys: Sequence[bytes]) -> None:
        """Examine the front again: what waited and was examined before its parent was known can be stored now."""
        if not self._front.keys().isdisjoint(keys):
            self._front.clear()

    def ended(self, running: Running) -> None:
        if self._is_short:  # what it had is handed out before any look
            super().ended(running)
            if self._pool.is_shared:
                self._pool.renew_prefix(running.keys, running.confirmed)
        else:
            self._due.pop(running.id, None)

    def used(self, keys: Sequence[bytes], chunks: int) -> None:
        self._pool.duplicate_above(keys, chunks)
        used = keys[:chunks]
        self._settled.difference_update(used)
        again = [key for key in used if key in self._front] if self._front else []
        for key, blocks in zip(again, self._device.find_all(again), strict=True):
            del self._front[key]
            for block in blocks or ():
                self._front.pop(block, None)

    def landed(self, transfer: Transfer) -> None:
        if transfer.owner is None and not transfer.succeeded:
            self._front.clear()  # some of it may not be covered

    def committed(self, store: Transfer) -> None:
        self._parents.saved(store.keys)
        if store.owner is None or not self._pool.is_shared:
            self._settled.update(store.keys)
        elif store.owner in self._running():
            self._duplicate(key for key in reversed(store.keys) if key not in self._front)

    def loaded(self, keys: Sequence[bytes], nodes: Sequence[int]) -> None:
        if self._pool.is_shared:
            self._settled.difference_update(keys)
            self._pool.duplicated(reversed(nodes))

    def _duplicate(self, keys: Iterable[bytes]) -> None:
        """These chunks are not about to leave the device."""
        self._pool.duplicated(place for key in keys if (place := self._pool.place(key)) is not None)

    def invalidated(self) -> None:
        self._forget_foreseen()

    def reset(self) -> None:
        self._parents.clear()
        self._settled.clear()
        self._front.clear()
        self._examined_at = None
        self._forget_foreseen()
        super().reset()

    # Asked

    def foresee(self, keys: Sequence[bytes], chunks: int, blocks: int) -> None:
        self._forget_foreseen()
        if not self._pool.is_shared or blocks > self._device.num_waiting:
            return
        used = {block for found in self._device.find_all(keys[:chunks]) for block in found or ()}
        order = (each for each in self._device.soonest_evicted() if each[0] not in used)
        self._foreseen = dict(islice(order, blocks))
        missing = self._stores.uncovered(key for key in self._foreseen.values() if key is not None)
        uncovered = [key for key in dict.fromkeys(self._foreseen.values()) if key in missing and key is not None]
        found = zip(uncovered, self._device.find_all(uncovered), strict=True)
        self._endangered = {key: blocks for key, blocks in found if blocks is not None}

    def _forget_foreseen(self) -> None:
        """The engine hands out blocks for another purpose, and computes into them, or their bytes were wrong."""
        self._foreseen, self._endangered = {}, {}

    def save(self, device_blocks: Sequence[int], read: Sequence[int | None] = ()) -> list[Transfer]:
        taken = set(device_blocks)
        leaving = [key for block, key in self._foreseen.items() if block in taken and key is not None]
        self._pool.renew(self._pool.split(leaving)[0])
        sources = {
            key: blocks
            for key, blocks in self._endangered.items()
            if not taken.isdisjoint(blocks) and all(self._is_untouched(block, key) for block in set(blocks) - taken)
        }
        self._forget_foreseen()
        into = partners(sources, device_blocks, read)
        stores = list[Transfer]()
        for run in self._runs(list(sources), self._stores.uncovered(sources)):
            self.work += len(run)
            stores += self._store_run(run, sources, into)
        return stores

    def _is_untouched(self, block: int, key: bytes) -> bool:
        """Whether this block of the chunk with this key waits. One of the blocks of a chunk comes with its key."""
        return any(self._device.is_waiting(block, each) for each in (key, None))

    def has_room_for(self, blocks: int) -> bool:
        if self._pool.is_shared:
            return True  # it saves what it overwrites
        waiting = sum(self._waits(name) for name in self._front)
        return waiting >= min(blocks, self._device.num_waiting)

    def plan(self) -> None:
        self._forget_foreseen()
        self._settled.difference_update(self._parents.sweep())
        self._examine()
        if self._is_short and not self._pool.is_scarce:
            super().plan()

    # The front

    def _waits(self, name: Name) -> bool:
        """Whether this place of the front still waits: it was not handed out, and no store holds it."""
        return self._device.is_waiting(self._front[name], None if isinstance(name, int) else name)

    @property
    def _is_short(self) -> bool:
        """Whether less waits, or is held and will wait, than the front should have."""
        return self._device.num_waiting + self._stores.ledger.held_by_walk() < self._ahead()

    def _step_blocks(self) -> int:
        return self._steps.blocks(self._stores.planner, len(self._running()))

    def _ahead(self) -> int:
        """How long the front should be, in device blocks."""
        return self._steps.ahead_blocks or self._steps.stretch(self._step_blocks(), self._device.num_blocks)

    def _examine(self) -> None:
        """Bring the front up to its length, until something has to wait."""
        if self._progress() == self._examined_at:
            return
        unseen, first = self._read_before(self._ahead())
        self._drop_handed_out(first)
        if unseen:
            front, self._front = self._front, {}
            self._cover(unseen)
            self._front |= front
        self._cover(self._read_behind(self._ahead() - len(self._front)))
        self._examined_at = self._progress()

    def _drop_handed_out(self, first: Name | None) -> None:
        """Blocks are handed out in order: so of what is before the first place that waits only held ones are left."""
        writing = self._stores.ledger.writing
        handed_out = list[Name]()
        for name in self._front:
            if name == first:
                break
            if name not in writing:
                handed_out.append(name)
        for name in handed_out:
            del self._front[name]
        keys = [name for name in handed_out if isinstance(name, bytes)]
        self._settled.difference_update(self._parents.handed_out(keys) if keys else ())

    def _progress(self) -> tuple[Any, ...]:
        """Changes when something may be left to be done: blocks came or went, stores have ended, the host has grown."""
        writing = self._stores.ledger.writing
        first = next((name for name in self._front if name not in writing), None)
        is_there = first is None or self._waits(first)
        return self._device.num_waiting, len(self._front), is_there, self._stores.ledger.num_resolved, self._pool.ready

    def _read_before(self, count: int) -> tuple[Places, Name | None]:
        """Places before the front: of what was held, or came to wait there, or of a block that moved unnoticed. And the
        first of the front that waits, if it is among the first `count`.
        """
        unseen: Places = {}
        for block, key in islice(self._device.soonest_evicted(), count):
            name = block if key is None else key
            if name in self._front:
                return unseen, name
            unseen[name] = block
        return unseen, None

    def _read_behind(self, count: int) -> Places:
        """The next places behind the front."""
        if count <= 0:
            return {}
        front, writing = self._front, self._stores.ledger.writing
        waiting = (front[name] for name in reversed(front) if name not in writing and self._waits(name))
        last = next(waiting, None)
        order = self._device.soonest_evicted() if last is None else self._device.evicted_after(last)
        unseen = ((name, block) for block, key in order if (name := block if key is None else key) not in front)
        return dict(islice(unseen, count))

    def _cover(self, places: Places) -> None:
        """Examine these places, and store what is not covered. Up to the first that has to wait they join the front."""
        if not places:
            return
        self.work += len(places)
        cached, missing = self._pool.split([name for name in places if isinstance(name, bytes)])
        if self._pool.is_shared:
            self._pool.renew(cached)
        uncovered = set(missing).difference(self._stores.ledger.writing).difference(self._settled)
        held = self._stores.ledger.held_by_walk() if uncovered else 0
        front, settled = self._front, self._settled
        for name, block in places.items():
            if name in uncovered and name not in settled:
                transfer, stop = self._store(name, uncovered, held, places)
                if transfer is not None:
                    held += transfer.held_blocks
                    uncovered.difference_update(transfer.keys)
                if stop is not None and not stop.is_final:
                    return
            front[name] = block

    # Stores

    def _store(
        self, key: bytes, uncovered: set[bytes], held: int, places: Places
    ) -> tuple[Transfer | None, Stop | None]:
        """Plan the store of this chunk or checkpoint and of what is missing above. The transfer, and what stopped it.

        `uncovered` are those of `places`, which come into the front, that are to be stored, and `held` the device
        blocks that stores hold.
        """
        budget = min(self._steps.report_steps * self._step_blocks() - held, self._unpromised())
        if budget <= 0 and not self._can_spare(self._chunk_blocks, held):
            return None, Stop.IN_FLIGHT  # before the chain is walked, which may be long
        chain = self._missing_chain(key, uncovered)
        if chain is None:
            return None, Stop.NOT_ON_DEVICE
        if not self._settled.isdisjoint(chain.keys):
            self._settled.update(chain.keys)
            return None, Stop.SETTLED
        wanted = self._stores.device_blocks(chain)
        portion = chain
        if wanted > budget and not self._can_spare(wanted, held):
            stop = self._stores.obstacle(chain)  # a part of it would be no use
            if stop is not None or budget < self._chunk_blocks:
                return None, self._noted([key], stop or Stop.IN_FLIGHT)
            chunks = budget // self._chunk_blocks
            portion = chain.last(chunks) if self._pool.is_shared else chain.first(chunks)
        # All of a run in the front are of these places, and each waits in its only block.
        is_known = self._pool.is_shared and self._chunk_blocks == 1
        found = (lambda keys: [(places[each],) for each in keys]) if is_known else None
        transfer, stop = self._stores.plan(portion, self._pool.touch(None), found=found)
        stored = 0 if transfer is None else len(transfer.keys)
        if stored == len(chain):
            return transfer, None
        # a chunk may be worth storing without a checkpoint; without those that hang below it, it was declined too
        left = [each for each in chain.keys if not self._stores.is_covered(each)] if chain.checkpoint is None else [key]
        return transfer, self._noted(left, stop or Stop.IN_FLIGHT)

    def _can_spare(self, blocks: int, held: int) -> bool:
        """Whether a stretch waits besides so many blocks, and as much again as is held then, since a longer store takes
        longer.
        """
        stretch = self._steps.stretch(self._step_blocks(), self._device.num_blocks)
        return self._unpromised() >= stretch + held + 2 * blocks

    def _unpromised(self) -> int:
        """How many device blocks wait that stores may hold."""
        return self._device.num_waiting - self._device.num_promised

    def _noted(self, left: Sequence[bytes], stop: Stop) -> Stop:
        """The stop, after which these were left."""
        if stop is Stop.DECLINED:
            self._settled.update(left)
            self._parents.unwanted(left)
        return stop

    def _missing_chain(self, key: bytes, uncovered: set[bytes]) -> Chain | None:
        """From the first chunk that is to be stored with it down to `key`; None if it cannot be stored."""
        if self._parents.is_dependent(key):
            return None  # it comes with its checkpoint
        checkpoint = self._parents.checkpoint(key)
        deepest = key if checkpoint is None else checkpoint.tail[-1]
        if self._pool.is_shared:
            missing = self._parents.run_above(deepest, uncovered.__contains__)
        else:
            missing = self._parents.missing_above(deepest, self._stores.is_covered)
        if missing is None:
            return None  # never confirmed, or an ancestor has left the device
        keys, above = missing
        self.work += len(keys)
        chain = Chain(above, keys, checkpoint)
        return chain if len(chain) else None
