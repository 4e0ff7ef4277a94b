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

The host alone holds a prompt from its beginning here (rule 3): this is for models with checkpoints, for a host above a
tier, and for devices that do not note what they hand out; `late.py` needs no front.

* **Whole prompts.** The deepest chunk of a prompt is handed out first and stored last. If it were stored in portions,
  its end would be evicted before its turn. So a chain is stored with all its missing ancestors, however long it is, if
  the device can spare it: if a whole stretch waits besides, and as much again as is held. Else stores hold at most what
  `report_steps` steps allocate, and never what the device has promised to running requests.
* **Loads** that find another on the link wait if their destinations reach beyond the front.
* **A device nearly all in use.** Where less waits than the front should have, the blocks of a request that ends are
  handed out in the same step or the next, before any look. So they are stored, and held, as it ends, and what still
  runs is stored, as eager does.
* **Small hosts.** What lazy has stored or the host has declined is *settled* until it is used or computed again: a
  host that is smaller than the front, or than a chain, may have evicted it when the front comes to it.
* **Checkpoints.** In a model that needs them a chunk is stored with the checkpoint that is about to leave (rule 9).
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from itertools import islice
from typing import Any

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.offload.ancestry import Ancestry, DeviceAncestry
from cpu_prefix_cache.offload.chain import Chain
from cpu_prefix_cache.offload.eager import Eager
from cpu_prefix_cache.offload.engine_steps import EngineSteps
from cpu_prefix_cache.offload.running import Running
from cpu_prefix_cache.offload.stores import Stop, StorePlanner
from cpu_prefix_cache.offload.transfers import StoreTransfer

# Of whole prompts, what is stored must be worth so many times what leaves for it, or bytes are moved for no hit. With
# 1, `adaptive` on a small host stores more than eager; with 1.6, a large one loses hits (docs/policies.md).
MARGIN = 1.25

Name = bytes | int  # of a place in the order of eviction: its key, or the number of a block without one
Places = dict[Name, int]  # the blocks that wait there, in the order of eviction


class Lazy(Eager):
    """Covers what waits on the device, in time. Where little waits, stores what ends and what runs.

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
        self._parents = DeviceAncestry(stores) if parents is None else parents
        super().__init__(stores, self._parents)
        self._device = device
        if steps.ahead_blocks is not None and steps.ahead_blocks > device.num_blocks:
            raise ConfigurationError(
                f"ahead_blocks must be at most the {device.num_blocks} blocks of the device, got {steps.ahead_blocks}"
            )
        self._steps = steps
        self._running = running
        self._chunk_blocks = max(1, stores.chunk_blocks)
        self._front: Places = {}
        self._examined_at: tuple[Any, ...] | None = None  # `_progress` then

    # Reported

    def confirmed(self, running: Running, before: int) -> None:
        self._parents.add(running.keys, before, running.confirmed)
        self._parents.settled.difference_update(running.keys[before : running.confirmed])
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
        else:
            self._due.pop(running.id, None)

    def used(self, keys: Sequence[bytes], chunks: int) -> None:
        used = keys[:chunks]
        self._parents.settled.difference_update(used)
        again = [key for key in used if key in self._front] if self._front else []
        for key, blocks in zip(again, self._device.find_all(again), strict=True):
            del self._front[key]
            for block in blocks or ():
                self._front.pop(block, None)

    def landed(self, transfer: StoreTransfer) -> None:
        if transfer.owner is None and not transfer.succeeded:
            self._front.clear()  # some of it may not be covered

    def committed(self, keys: Sequence[bytes]) -> None:
        self._parents.settled.update(keys)

    def unfit(self, keys: Sequence[bytes]) -> None:
        super().unfit(keys)
        self._parents.settled.update(keys)

    def reset(self) -> None:
        self._parents.clear()
        self._front.clear()
        self._examined_at = None
        super().reset()

    # Asked

    def has_room_for(self, blocks: int) -> bool:
        waiting = sum(self._waits(name) for name in self._front)
        return waiting >= min(blocks, self._device.num_waiting)

    def plan(self) -> None:
        self._parents.sweep()
        self._examine()
        if self._is_short:
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
        if first is None:  # nothing of the front waits; what is held will wait where it did, mostly before these
            self._cover(unseen)
        elif unseen:
            front, self._front = self._front, {}
            self._cover(unseen)
            self._front |= front
        self._cover(self._read_behind(self._ahead() - len(self._front)))
        self._examined_at = self._progress()

    def _drop_handed_out(self, first: Name | None) -> None:
        """Blocks are handed out in order: so of what is before the first place that waits only held ones are left. A
        block without a key may have come back to the head, and what went with it follows it in the front.
        """
        writing, is_behind = self._stores.ledger.writing, False
        handed_out = list[Name]()
        for name in self._front:
            is_behind = is_behind or name == first
            if is_behind and self._waits(name):
                if isinstance(name, bytes):
                    break
            elif name not in writing:
                handed_out.append(name)
        for name in handed_out:
            del self._front[name]
        if keys := [name for name in handed_out if isinstance(name, bytes)]:
            self._parents.handed_out(keys)

    def _progress(self) -> tuple[Any, ...]:
        """Changes when something may be left to be done: blocks came or went, stores have ended, the host has grown."""
        writing = self._stores.ledger.writing
        first = islice((name for name in self._front if name not in writing), 2)  # one of them may have come back
        is_there = all(map(self._waits, first))
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
        missing = self._pool.missing(name for name in places if isinstance(name, bytes))
        uncovered = set(missing).difference(self._stores.ledger.writing).difference(self._parents.settled)
        held = self._stores.ledger.held_by_walk() if uncovered else 0
        front, settled = self._front, self._parents.settled
        for name, block in places.items():
            if name in uncovered and name not in settled:
                transfer, stop = self._store(name, held)
                if transfer is not None:
                    held += transfer.device_blocks
                    uncovered.difference_update(transfer.keys)
                if stop is not None and not stop.is_final:
                    return
            front[name] = block

    # Stores

    def _store(self, key: bytes, held: int) -> tuple[StoreTransfer | None, Stop | None]:
        """Plan the store of this chunk or checkpoint and of what is missing above. The transfer, and what stopped it.

        `held` are the device blocks that stores hold.
        """
        budget = min(self._steps.report_steps * self._step_blocks() - held, self._unpromised())
        if budget <= 0 and not self._can_spare(self._chunk_blocks, held):
            return None, Stop.IN_FLIGHT  # before the chain is walked, which may be long
        chain = self._missing_chain(key)
        if chain is None:
            return None, Stop.NOT_ON_DEVICE
        if not self._parents.settled.isdisjoint(chain.keys):
            self._parents.settled.update(chain.keys)
            return None, Stop.SETTLED
        wanted = self._stores.device_blocks(chain)
        portion = chain
        if wanted > budget and not self._can_spare(wanted, held):
            stop = None if chain.checkpoint is None else self._stores.choose(chain)[1]  # a part of it would be no use
            if stop is not None or budget < self._chunk_blocks:
                return None, self._noted([key], stop or Stop.IN_FLIGHT)
            portion = chain.first(budget // self._chunk_blocks)
        transfer, stop = self._stores.plan(portion, self._pool.touch(None))
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
            self._parents.settled.update(left)
        return stop

    def _missing_chain(self, key: bytes) -> Chain | None:
        """From the first chunk that is to be stored with it down to `key`; None if it cannot be stored."""
        if self._parents.is_dependent(key):
            return None  # it comes with its checkpoint
        checkpoint = self._parents.checkpoint(key)
        deepest = key if checkpoint is None else checkpoint.tail[-1]
        missing = self._parents.missing_above(deepest, self._stores.is_covered)
        if missing is None:
            return None  # never confirmed, or an ancestor has left the device
        keys, above = missing
        self.work += len(keys)
        chain = Chain(above, keys, checkpoint)
        return chain if len(chain) else None
