"""What to store, and when.

    eager    a chunk as soon as its tokens are confirmed computed; what is left when the request ends
    lazy     a chunk shortly before the device evicts it, its missing ancestors first; where too little waits to be
             evicted, eagerly

Lazy stores less and hits more: what the device still holds need not be held twice. It looks at the *stretch* of the
device's eviction order that the next steps may use up, and makes sure all of it is covered: without a key, on the
host, on its way there, or beyond saving. What is on its way is held, and comes back to where it waited.

    handed out next                          handed out last
    [ ][ ] ... [ ][m] [ ][ ] ... [ ][ ][ ][e] | [ ][ ] ...
    `- a quarter ---'                        |
    `- the stretch: `horizon` blocks --------'

The look is not repeated every step. As long as the mark m waits, at most the quarter before it has left since, and the
rest of the stretch is as much as can be allocated until a store planned now is heard of, and in the step after. Where
the order is shorter than the stretch, what joins it stands behind its end e. When a store has landed, what it held may
wait in front of m: look again. So a step in which nothing is allocated and nothing lands costs nothing, and the others
a few looks for each block.

Of a prompt the deepest chunk is evicted first and stored last. In portions, one heard of before the next goes out, its
end would be gone before its turn came. So what a chunk needs is stored whole, however much that is, where the device
can spare it: where what waits besides is a whole stretch, and as much again as is held.

A step that begins a load does not look: somebody waits for the load, and a long one makes a long look. That comes when
the step's reports do, and with the next step at the latest: while the load is on the link, before more is handed out.

Where the order is shorter than the stretch, the device is nearly all in use, and what a request leaves behind, at its
end or when it is preempted, is handed out in the same step or the next: nobody gets to look at it. As long as that is
so, lazy stores what running requests compute as eager does.

Loads use up the stretch as well, many blocks in one step, and several of them more than there is. So while one is on
the link, another is asked to wait if what it is given would reach behind e. The link is busy meanwhile, and nothing is
held up. A load that finds the link free never waits.

A host that cannot hold all of the stretch evicts the beginning of it for the end. So what has reached it, or what it
declined, is not stored again, nor what would need that, until the mark has been handed out or a quarter used again; or
this would never come to rest. (Our own stores move what waits, so that it moved is no reason.)

While the host is still being prepared there may be no room for what has room a moment later. So what a request leaves
behind is tried again then (`postponed.py`), and a look that ended for want of room is repeated.

In a model that needs checkpoints, a chunk is stored for the sake of a checkpoint below it: eagerly in the hope of one,
lazily with the one that is about to leave the device (rule 9).
"""

from collections.abc import Callable, Container, Iterable, Sequence
from itertools import islice, takewhile
from typing import Protocol

from cpu_prefix_cache.messages.request import CheckpointAt, Progress
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.offload.device import Device
from cpu_prefix_cache.offload.parents import Lineage
from cpu_prefix_cache.offload.retries import Postponed
from cpu_prefix_cache.offload.stores import Chain, Stop, StorePlanner
from cpu_prefix_cache.offload.transfers import Place, Transfer
from cpu_prefix_cache.pool.block_pool import BlockPool


class Offload(Protocol):
    """Told what was computed and what left the device; asked once a step to plan stores."""

    @property
    def work(self) -> int:
        """Chunks and blocks looked at so far."""

    @property
    def lost(self) -> int:
        """Chunks the device evicted before they were stored."""

    @property
    def remembered(self) -> int:
        """Chunks whose parent is remembered."""

    def confirmed(self, progress: Progress, before: int) -> None:
        """The chunks from `before` up to `progress.confirmed` hold computed tokens now."""

    def checkpointed(self, progress: Progress, checkpoint: CheckpointAt) -> None:
        """The device has this checkpoint of a confirmed boundary."""

    def ended(self, progress: Progress) -> None:
        """The request finished, and still has its blocks. Then they stay on the device until they are evicted."""

    def preempted(self, progress: Progress) -> None:
        """The request lost its blocks: store what it computed while they can still be found, in both modes."""

    def used(self, chunks: int) -> None:
        """So many chunks on the device were used again: they no longer wait to be evicted."""

    def has_room_for(self, blocks: int) -> bool:
        """Whether the device can hand out so many blocks, and none that nobody has looked at yet."""

    def plan(self, *, with_loads: bool) -> None:
        """Plan the stores of this step, in which loads go out too or not."""

    def catch_up(self) -> None:
        """The step's plan has gone out: time for what was put off for its sake, or found no room while the host was
        being prepared, to go out with the next.
        """

    def landed(self, transfer: Transfer) -> None:
        """The copy of a store has ended, and its device blocks were released."""

    def committed(self, keys: Sequence[bytes]) -> None:
        """These chunks can be found on the host now."""

    def reset(self) -> None:
        """Forget everything."""


class Eager:
    """Stores what is confirmed, request by request, oldest first."""

    def __init__(self, pool: BlockPool, stores: StorePlanner, device_chunks: int) -> None:
        self._pool = pool
        self._stores = stores
        self._due: dict[str, Progress] = {}
        self._postponed = Postponed(pool, device_chunks, self._missing)
        self.work = 0

    @property
    def lost(self) -> int:
        return 0

    @property
    def remembered(self) -> int:
        return 0

    def confirmed(self, progress: Progress, before: int) -> None:
        self._due[progress.id] = progress

    def checkpointed(self, progress: Progress, checkpoint: CheckpointAt) -> None:
        self._due[progress.id] = progress

    def forget(self, progress: Progress) -> None:
        """The request ended, and what it computed is not to be stored."""
        self._due.pop(progress.id, None)

    def ended(self, progress: Progress) -> None:
        self.forget(progress)
        self._store_ended(progress)

    preempted = ended

    def _store_ended(self, progress: Progress) -> None:
        refusals = self._stores.refusals
        self.work += store_confirmed(self._pool, self._stores, progress, ended=True)
        if self._stores.refusals > refusals:
            self._postponed.add(progress)

    def _missing(self, progress: Progress) -> int:
        """How many of its chunks the host has not, and nobody is writing."""
        return progress.confirmed - self._stores.covered_run(progress.keys, 0, progress.confirmed)

    def used(self, chunks: int) -> None:
        pass

    def has_room_for(self, blocks: int) -> bool:
        return True

    def plan(self, *, with_loads: bool) -> None:
        due, self._due = self._due, {}
        for progress in due.values():
            self.work += store_confirmed(self._pool, self._stores, progress)

    def catch_up(self) -> None:
        for progress in self._postponed.that_fit():
            self._store_ended(progress)

    def landed(self, transfer: Transfer) -> None:
        pass

    def committed(self, keys: Sequence[bytes]) -> None:
        pass

    def reset(self) -> None:
        self._due.clear()
        self._postponed.clear()


def store_confirmed(pool: BlockPool, stores: StorePlanner, progress: Progress, *, ended: bool = False) -> int:
    """Store the confirmed chunks and checkpoints of a request that the host lacks. How many nodes were looked at.

    Begins at the first chunk missing, wherever it is: what the pool evicted since, or had no room for, is mended here.
    Checkpoints that were stored once are looked at again when the request has `ended`; chunks beyond its last place to
    resume from are not stored then (rule 9).
    """
    keys, stop = progress.keys, progress.confirmed
    start = present = pool.resident_run(keys, 0, stop)
    if ended:
        kept = max((checkpoint.depth for checkpoint in progress.checkpoints), default=0)
        while stop > max(start, kept) and pool.needs_checkpoint(stop):
            stop -= 1
    start = stores.covered_run(keys, start, stop)
    if start < stop:
        chain = Chain(keys[start - 1] if start else None, keys[start:stop])
        stores.plan(chain, progress.touch, owner=progress.id)
    checkpoints = progress.checkpoints if ended else tuple(progress.unsaved)
    for checkpoint in checkpoints:
        chunk = checkpoint.tail[-1]
        if stores.is_covered(chunk) and not stores.is_covered(checkpoint_key(chunk)):
            stores.plan(Chain(chunk, (), checkpoint), progress.touch, owner=progress.id)
    if checkpoints:
        progress.unsaved[:] = [
            each for each in progress.unsaved if not stores.is_covered(checkpoint_key(each.tail[-1]))
        ]
    return progress.confirmed - present + len(checkpoints)


class Lazy:
    """Keeps the soonest evicted `horizon()` blocks of the device covered, at most `chunks_in_flight()` on their way.

    More of them, up to `most_in_flight`, where the device can spare them with `reserve()` blocks left. All but that
    bound are asked at each look.
    """

    def __init__(
        self,
        pool: BlockPool,
        stores: StorePlanner,
        device: Device,
        *,
        horizon: Callable[[], int],
        chunks_in_flight: Callable[[], int],
        reserve: Callable[[], int],
        most_in_flight: int,
    ) -> None:
        self._pool = pool
        self._stores = stores
        self._device = device
        self._horizon = horizon
        self._quarter = 1  # of the stretch, as it was at the last look
        self._chunks_in_flight = chunks_in_flight
        self._reserve = reserve
        self._most_in_flight = most_in_flight
        self._lineage = Lineage(
            lambda keys: [found is not None for found in device.find_all(keys)],
            lambda key: pool.find(key) is not None,
            lambda checkpoint: device.find_checkpoint(checkpoint) is not None,
            needs_checkpoint=pool.needs_checkpoint if pool.has_checkpoints else None,
        )
        self._mark: Place | None = None
        self._end: Place | None = None  # the last one covered that was left to wait
        self._is_whole = False  # behind it there was nothing: the order was shorter than the stretch
        self._eager = Eager(pool, stores, device.num_chunks)  # does its work for as long as
        self._is_short = False  # the order is shorter than the stretch, by the last look
        self._room: tuple[Place | None, int] = (None, 0)  # blocks up to the end, as long as this one is the next
        self._used = 0  # chunks used again since the last look
        self._walking: dict[int, int] = {}  # stores of this walk that have not landed: chunks of the stretch in each
        self._held = 0  # all chunks they keep from being reused, wherever these stood
        self._has_landed = False  # a store of this walk, since the last look
        self._refused_at: int | None = None  # blocks that were ready when the last look ended for want of room
        self._is_put_off = False  # the last step did not look, for the sake of a load
        self._is_swept = False  # since the last step: there the device looks behind what is still to be computed
        self._settled: set[bytes] = set()  # what reached the host, was declined, or would need that: not to be stored
        self._work = 0

    @property
    def work(self) -> int:
        return self._work + self._eager.work

    @property
    def remembered(self) -> int:
        return len(self._lineage)

    @property
    def lost(self) -> int:
        return self._lineage.lost

    def confirmed(self, progress: Progress, before: int) -> None:
        saved = self._pool.resident_run(progress.keys, 0, progress.confirmed)
        self._lineage.add(progress.keys, before, progress.confirmed, saved)
        self._eager.confirmed(progress, before)
        self._work += progress.confirmed - before

    def checkpointed(self, progress: Progress, checkpoint: CheckpointAt) -> None:
        self._lineage.add_checkpoint(checkpoint)
        self._eager.checkpointed(progress, checkpoint)
        self._work += 1

    def ended(self, progress: Progress) -> None:
        if self._is_short:
            self._eager.ended(progress)
        else:
            self._eager.forget(progress)

    def preempted(self, progress: Progress) -> None:
        self._eager.preempted(progress)

    def used(self, chunks: int) -> None:
        self._used += chunks
        self._room = (None, 0)  # they may have been before the end

    def has_room_for(self, blocks: int) -> bool:
        if self._is_whole:
            return not self._has_another_end()
        soonest = next(self._device.soonest_evicted(None), None)
        if self._room[0] != soonest:
            self._room = soonest, self._count_room()
        return blocks <= self._room[1]

    def _count_room(self) -> int:
        if not self._waits(self._end):
            return 0  # it was handed out, or used: nobody knows before the next look
        order = islice(self._device.soonest_evicted(None), self._horizon())
        return 1 + sum(1 for _ in takewhile(self._end.__ne__, order))

    def plan(self, *, with_loads: bool) -> None:
        self._sweep()
        self._is_swept = False
        self._is_put_off = with_loads and not self._is_put_off
        if not self._is_put_off:
            self._plan()

    def catch_up(self) -> None:
        self._sweep()
        self._eager.catch_up()
        if self._is_put_off:
            self._is_put_off = False
            self._plan()

    def _sweep(self) -> None:
        """Once a step, whoever asks first."""
        if not self._is_swept:
            self._lineage.sweep()
            self._is_swept = True

    def _plan(self) -> None:
        has_changed = self._used >= self._quarter or not self._waits(self._mark) or self._has_another_end()
        if has_changed and (self._used >= self._quarter or self._has_left(self._mark)):
            self._settled.clear()
        if has_changed or self._has_landed or self._refused_at not in (None, self._pool.ready):
            self._look()
        if self._is_short:
            self._eager.plan(with_loads=False)

    def landed(self, transfer: Transfer) -> None:
        if transfer.id in self._walking:
            del self._walking[transfer.id]
            self._held -= len(transfer.keys)
            self._has_landed = True  # what it held waits in front of the mark now, or made the last look stop

    def committed(self, keys: Sequence[bytes]) -> None:
        self._settled.update(keys)
        self._lineage.saved(keys)

    def reset(self) -> None:
        self._lineage.clear()
        self._settled.clear()
        self._mark = self._end = None
        self._is_whole = False
        self._eager.reset()

    def _waits(self, place: Place | None) -> bool:
        return place is not None and self._device.is_waiting(*place)

    def _has_left(self, place: Place | None) -> bool:
        """Whether a block was handed out: of one that a store of ours holds the device still has the key."""
        if place is None or self._waits(place):
            return False
        key = place[1]
        return key is None or not self._lineage.are_here((key,))[0]

    def _has_another_end(self) -> bool:
        """Whether the last block covered waits no more, or others have joined behind it where there was nothing."""
        if self._end is None:
            return False
        if not self._waits(self._end):
            return True
        return self._is_whole and any(True for _ in self._device.soonest_evicted(self._end[0]))

    def _look(self) -> None:
        """Cover the whole stretch, from its beginning.

        What cannot be stored yet is looked at again when a store has landed or the first of the stretch is handed out.
        """
        self._mark = self._end = None
        self._is_whole = False
        self._room = (None, 0)
        self._used = 0
        self._has_landed = False
        self._refused_at = None
        horizon = self._horizon()
        self._quarter = max(1, horizon // 4)
        length = max(0, horizon - sum(self._walking.values()))
        stretch = list(islice(self._device.soonest_evicted(None), length))
        self._is_short = len(stretch) + self._held < horizon  # what is held is not missing because it is in use
        self._work += len(stretch)
        missing = self._stores.uncovered(key for _, key in stretch if key is not None)
        taken: set[int | bytes] = set()  # blocks, and keys, of what is held in this look
        for at in [at for at, (_, key) in enumerate(stretch) if key in missing]:
            place, key = stretch[at], stretch[at][1]
            if key is None or key not in missing or key in self._settled:
                continue  # it went with one that waits before it, or is not stored again
            before = stretch[at - 1] if at else None  # if it is taken, it is back by then
            is_settled, transfer = self._cover(place, key, before)
            if transfer is not None:
                taken.update(transfer.keys, *(copy.device_blocks for copy in transfer.plan.copies))
                self._held += len(transfer.keys)
                self._walking[transfer.id] = len(missing.intersection(transfer.keys))
                missing.difference_update(transfer.keys)  # what the host evicted for it the next look will see
            if not is_settled:
                self._mark = _first_left(stretch[:at], taken) or place
                self._end = _first_left(reversed(stretch[:at]), taken)
                return
        quarter = stretch[: self._quarter]
        self._mark = _first_left(reversed(quarter), taken) or _first_left(stretch[len(quarter) :], taken)
        self._end = _first_left(reversed(stretch), taken)
        self._is_whole = self._is_short

    def _cover(self, place: Place, key: bytes, before: Place | None) -> tuple[bool, Transfer | None]:
        """Plan the store of the chunk at `place` and its missing ancestors. Whether no more is to be done, and the
        store.

        `before` is the block that it waits behind.
        """
        budget, reserve = self._chunks_in_flight() - self._held, self._reserve()
        if budget <= 0 and not self._stores.can_spare(1, reserve, self._held):
            return False, None  # before the chain is walked, which may be long
        chain = self._missing_chain(key)
        if chain is None:
            return True, None
        if not self._settled.isdisjoint(chain.keys):
            self._settled.update(chain.keys)
            return True, None
        if self._stores.can_spare(len(chain), reserve, self._held):
            budget = max(budget, self._most_in_flight - self._held)
        if budget <= 0:
            return False, None
        if len(chain) > budget and (stop := self._stores.obstacle(chain)) is not None:
            return self._is_settled(key, stop), None  # a part of it would be of no use
        touch = self._pool.touch(None)
        decision = self._stores.plan(chain.first(budget), touch, in_place=True, behind=before)
        if decision.transfer is not None and decision.planned < len(chain):
            decision.transfer.behind = place  # ancestors stored without it stay behind it
        is_settled = decision.planned == len(chain) or self._is_settled(key, decision.stopped_by)
        return is_settled, decision.transfer

    def _is_settled(self, key: bytes, stop: Stop | None) -> bool:
        """Whether a chunk that was not stored is not to be stored later either."""
        if stop is Stop.DECLINED:
            self._settled.add(key)
            self._lineage.unwanted(key)
        if stop is Stop.POOL_FULL:
            self._refused_at = self._pool.ready
        return stop in (Stop.NOT_ON_DEVICE, Stop.TOO_LARGE, Stop.DECLINED)

    def _missing_chain(self, key: bytes) -> Chain | None:
        """From the first chunk the host lacks down to `key`; None if that is covered, beyond saving or not worth it."""
        if self._lineage.is_dependent(key):
            return None  # it comes with its checkpoint
        checkpoint = self._lineage.checkpoint(key)
        deepest = key if checkpoint is None else checkpoint.tail[-1]
        missing = self._lineage.missing_above(deepest, self._stores.is_covered)
        if missing is None:
            return None  # never confirmed, or an ancestor is gone from the device: nothing can be stored
        keys, above = missing
        self._work += len(keys)
        chain = Chain(above, keys, checkpoint)
        return chain if len(chain) else None


def _first_left(places: Iterable[Place], taken: Container[int | bytes | None]) -> Place | None:
    """The first place of which neither the block nor the key is taken."""
    return next((place for place in places if place[0] not in taken and place[1] not in taken), None)
