"""Lazy: what the device can hand out before a store planned now is heard of is covered.

A block that waits on the device is *covered* when it has no key, when the host has what it holds or is being sent it,
or when that cannot be saved any more. Lazy stores less than eager and hits more: what the device still holds need not
be held twice. It looks at the *stretch*, the blocks that are handed out next, covers all of it, each chunk after its
missing ancestors, and looks again in time:

    handed out next                          handed out last
    [ ][ ] ... [ ][m] [ ][ ] ... [ ][ ][ ][e] | [ ][ ] ...
    `- a quarter ---'                        |
    `- the stretch: `EngineSteps.stretch` blocks

    one look, and then none until
        the watermark m waits no more, or e     a quarter was handed out, or what is covered is not known
        a quarter was used again, or computed   by requests that ended: a watermark without a key may be back unseen
        a store has landed                      what it held waits in front of m now, or made the look stop
        more waits, where e was the last        the order was shorter than the stretch
        the host has grown                      the look had ended for want of room

A step without any of these costs nothing. What waits and is being stored is held, and comes back to where it waited.

* **Whole prompts.** Of a prompt the deepest chunk is handed out first and stored last. In portions, one heard of before
  the next goes out, its end would be gone before its turn came. So a chain is stored whole, however long it is, where
  the device can spare it: where what waits besides is a whole stretch, and as much again as is held. Else stores of the
  stretch hold at most what `report_steps` steps allocate.
* **Coming to rest.** A host that cannot hold all of the stretch evicts the beginning of it for the end. So what reached
  it, or was declined, is *settled*: it is not stored again, nor what would need that, until the watermark has been
  handed out or a quarter of the stretch used again.
* **A device nearly all in use.** Where less waits than the stretch, what a request leaves behind is handed out in the
  same step or the next, and no look would see it. For as long, lazy stores what requests compute as eager does.
* **Loads.** They use up the stretch as well, many blocks at once. So while one is on the link, another waits if what it
  is given would reach behind e (`has_room_for`); one that finds the link free never waits. A step in which a load
  goes out does not look: somebody waits for that load. `catch_up` does, once the plan has gone out.
* **Checkpoints.** In a model that needs them a chunk is stored with the checkpoint that is about to leave (rule 9).
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.offload.base import Offload
from cpu_prefix_cache.offload.device import Device
from cpu_prefix_cache.offload.eager import Eager
from cpu_prefix_cache.offload.engine_steps import EngineSteps
from cpu_prefix_cache.offload.parents import Parents
from cpu_prefix_cache.offload.running import Running
from cpu_prefix_cache.offload.stores import Chain, Stop, StorePlanner
from cpu_prefix_cache.offload.transfers import Transfer, TransferLedger
from cpu_prefix_cache.pool.block_pool import BlockPool

Place = tuple[int, bytes | None]  # a device block that waits, and the key it comes with


@dataclass(frozen=True, slots=True)
class Look:
    """What the last look found. Counts are of device blocks."""

    watermark: Place | None = None  # a quarter of the stretch stands before it
    end: Place | None = None  # the last that is covered and was left to wait
    quarter: int = 1  # of the stretch
    is_short: bool = False  # less waits than the stretch
    waiting: int | None = None  # how many waited when `end` was the last of all; None: others stand behind it
    refused_at: int | None = None  # host blocks that were ready when the look ended for want of room


class Lazy(Offload):
    """Covers what waits on the device, in time. See Offload. `running` says how many requests run.

    Raises ConfigurationError for `ahead_blocks` beyond the blocks of the device.
    """

    def __init__(
        self,
        pool: BlockPool,
        stores: StorePlanner,
        ledger: TransferLedger,
        device: Device,
        steps: EngineSteps,
        running: Callable[[], int],
    ) -> None:
        if steps.ahead_blocks is not None and steps.ahead_blocks > device.num_blocks:
            raise ConfigurationError(
                f"ahead_blocks must be at most the {device.num_blocks} blocks of the device, got {steps.ahead_blocks}"
            )
        self._pool = pool
        self._stores = stores
        self._ledger = ledger
        self._device = device
        self._steps = steps
        self._running = running
        self._parents = Parents(
            lambda keys: [found is not None for found in device.find_all(keys)],
            lambda key: pool.find(key) is not None,
            lambda checkpoint: device.find_checkpoint(checkpoint) is not None,
            needs_checkpoint=stores.planner.needs_checkpoint if stores.planner.has_checkpoints else None,
        )
        self._chunk_blocks = max(1, stores.chunk_blocks)
        self._eager = Eager(pool, stores)  # while less than a stretch waits
        self._last = Look()
        self._used = 0  # device blocks used again since the last look, or computed and given back
        self._computed = 0  # since then, while no request has ended
        self._has_landed = False  # a store of what waits, since the last look
        self._settled: set[bytes] = set()
        self._room: tuple[Place | None, int] = (None, 0)  # blocks up to the end, as long as this place is the next
        self._is_put_off = False  # the last step did not look, for the sake of a load
        self._is_swept = False  # what left the device was forgotten since the last step
        self._work = 0

    @property
    def work(self) -> int:
        return self._work + self._eager.work

    @property
    def remembered(self) -> int:
        return len(self._parents)

    @property
    def lost(self) -> int:
        return self._parents.lost

    # Told

    def confirmed(self, request: Running, before: int) -> None:
        saved = self._pool.resident_run(request.keys, 0, request.confirmed)
        self._parents.add(request.keys, before, request.confirmed, saved)
        self._eager.confirmed(request, before)
        self._computed += max(0, request.confirmed - max(before, request.resumed)) * self._chunk_blocks
        self._work += request.confirmed - before

    def checkpointed(self, request: Running, checkpoint: CheckpointAt) -> None:
        self._parents.add_checkpoint(checkpoint)
        self._eager.checkpointed(request, checkpoint)
        self._work += 1

    def ended(self, request: Running) -> None:
        self._give_back()
        if self._last.is_short:
            self._eager.ended(request)
        else:
            self._eager.forget(request)

    def preempted(self, request: Running) -> None:
        self._give_back()
        self._eager.preempted(request)

    def _give_back(self) -> None:
        """Blocks join the order again: a watermark without a key among them stands there as if never handed out."""
        if self._last.watermark is not None and self._last.watermark[1] is None:
            self._used += self._computed
            self._computed = 0

    def used(self, chunks: int) -> None:
        self._used += chunks * self._chunk_blocks
        self._room = (None, 0)  # they may have been before the end

    def landed(self, transfer: Transfer) -> None:
        self._has_landed |= transfer.owner is None

    def committed(self, keys: Sequence[bytes]) -> None:
        self._settled.update(keys)
        self._parents.saved(keys)

    def reset(self) -> None:
        self._parents.clear()
        self._settled.clear()
        self._last = Look()
        self._eager.reset()

    # Asked

    def has_room_for(self, blocks: int) -> bool:
        if self._last.waiting is not None:
            return self._waits(self._last.end) and not self._has_joined()
        soonest = next(self._device.soonest_evicted(), None)
        if self._room[0] != soonest:
            self._room = soonest, self._count_room()
        return blocks <= self._room[1]

    def _count_room(self) -> int:
        """How many blocks wait up to the end of what is covered."""
        if not self._waits(self._last.end):
            return 0  # it was handed out, or used: nobody knows before the next look
        order = islice(self._device.soonest_evicted(), self._ahead())
        return 1 + sum(1 for _ in takewhile(self._last.end.__ne__, order))

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
            self._parents.sweep()
            self._is_swept = True

    def _plan(self) -> None:
        if self._is_due():
            if self._used >= self._last.quarter or self._was_handed_out(self._last.watermark):
                self._settled.clear()
            self._look()
        if self._last.is_short:
            self._eager.plan(with_loads=False)

    # Looking

    def _is_due(self) -> bool:
        """Whether anything has happened since the last look that asks for another."""
        last = self._last
        return (
            self._has_landed
            or self._used >= last.quarter
            or not self._waits(last.watermark)
            or (last.end is not None and not self._waits(last.end))
            or self._has_joined()
            or last.refused_at not in (None, self._pool.ready)
        )

    def _waits(self, place: Place | None) -> bool:
        return place is not None and self._device.is_waiting(*place)

    def _was_handed_out(self, place: Place | None) -> bool:
        """Whether a block left the order for good: of one that waits no more the device may still have the key."""
        if place is None or self._waits(place):
            return False
        key = place[1]
        return key is None or not self._parents.are_here((key,))[0]

    def _has_joined(self) -> bool:
        """Whether more waits than did, where nothing waited behind the end."""
        return self._last.waiting is not None and self._device.num_waiting > self._last.waiting

    def _step_blocks(self) -> int:
        return self._steps.blocks(self._stores.planner, self._running())

    def _ahead(self) -> int:
        """How many blocks are looked at."""
        return self._steps.ahead_blocks or self._steps.stretch(self._step_blocks(), self._device.num_blocks)

    def _look(self) -> None:
        """Cover the whole stretch, from its beginning, or as much of it as can be now."""
        self._used = self._computed = 0
        self._has_landed = False
        self._room = (None, 0)
        ahead = self._ahead()
        held, held_ahead = self._ledger.held_by_walk()
        stretch = list(islice(self._device.soonest_evicted(), max(0, ahead - held_ahead)))
        is_short = len(stretch) + held < ahead  # what is held is not missing because it is in use
        self._work += len(stretch)
        taken: set[int | bytes] = set()
        stopped_at, stop = self._cover(stretch, held, taken)
        covered = stretch[:stopped_at]
        quarter = max(1, ahead // 4)
        is_all = is_short and stop is None
        self._last = Look(
            watermark=_watermark(stretch, stopped_at, quarter, taken),
            end=_first_left(reversed(covered), taken),
            quarter=quarter,
            is_short=is_short,
            waiting=self._device.num_waiting if is_all else None,
            refused_at=self._pool.ready if stop is Stop.POOL_FULL else None,
        )

    def _cover(self, stretch: Sequence[Place], held: int, taken: set[int | bytes]) -> tuple[int, Stop | None]:
        """Store what is missing, from the front. Where that had to end in the stretch, and why, if it had to.

        `held`: device blocks on their way by then. What is held from now on, blocks and keys, is added to `taken`.
        """
        missing = self._stores.uncovered(key for _, key in stretch if key is not None)
        blocks = {block for block, _ in stretch} if missing else set()
        for at in [at for at, (_, key) in enumerate(stretch) if key in missing]:
            key = stretch[at][1]
            if key is None or key not in missing or key in self._settled:
                continue  # it went with one that waits before it, or is not stored again
            transfer, stop = self._store(key, held)
            if transfer is not None:
                device_blocks = {block for copy in transfer.plan.copies for block in copy.device_blocks}
                transfer.ahead = len(blocks & device_blocks)
                held += transfer.held_blocks
                taken.update(transfer.keys, device_blocks)
                missing.difference_update(transfer.keys)  # what the host evicted for it the next look will see
            if stop is not None and not stop.is_final:
                return at, stop
        return len(stretch), None

    def _store(self, key: bytes, held: int) -> tuple[Transfer | None, Stop | None]:
        """Plan the store of the chunk or checkpoint with this key and its missing ancestors; and what stopped it."""
        budget = self._steps.report_steps * self._step_blocks() - held
        if budget <= 0 and not self._can_spare(self._chunk_blocks, held):
            return None, Stop.IN_FLIGHT  # before the chain is walked, which may be long
        chain = self._missing_chain(key)
        if chain is None:
            return None, Stop.NOT_ON_DEVICE
        if not self._settled.isdisjoint(chain.keys):
            self._settled.update(chain.keys)
            return None, Stop.SETTLED
        wanted = self._stores.device_blocks(chain)
        portion = chain
        if wanted > budget and not self._can_spare(wanted, held):
            stop = self._stores.obstacle(chain)  # a part of it would be of no use
            if stop is not None or budget < self._chunk_blocks:
                return None, self._noted(key, stop or Stop.IN_FLIGHT)
            portion = chain.first(budget // self._chunk_blocks)
        decision = self._stores.plan(portion, self._pool.touch(None))
        if decision.planned == len(chain):
            return decision.transfer, None
        return decision.transfer, self._noted(key, decision.stopped_by or Stop.IN_FLIGHT)

    def _can_spare(self, blocks: int, held: int) -> bool:
        """Whether a stretch waits besides so many blocks, and as much again as is held then: the longer a store, the
        longer it takes.
        """
        stretch = self._steps.stretch(self._step_blocks(), self._device.num_blocks)
        return self._device.num_waiting >= stretch + held + 2 * blocks

    def _noted(self, key: bytes, stop: Stop) -> Stop:
        if stop is Stop.DECLINED:
            self._settled.add(key)
            self._parents.unwanted(key)
        return stop

    def _missing_chain(self, key: bytes) -> Chain | None:
        """From the first chunk the host lacks down to `key`; None if that is covered, beyond saving or not worth it."""
        if self._parents.is_dependent(key):
            return None  # it comes with its checkpoint
        checkpoint = self._parents.checkpoint(key)
        deepest = key if checkpoint is None else checkpoint.tail[-1]
        missing = self._parents.missing_above(deepest, self._stores.is_covered)
        if missing is None:
            return None  # never confirmed, or an ancestor is gone from the device: nothing can be stored
        keys, above = missing
        self._work += len(keys)
        chain = Chain(above, keys, checkpoint)
        return chain if len(chain) else None


def _watermark(
    stretch: Sequence[Place], stopped_at: int, quarter: int, taken: Container[int | bytes | None]
) -> Place | None:
    """The place that says by waiting that no look is due, of those that are left to wait.

    Where the look had to stop, the first, or else the one it stopped at. Otherwise the last of the quarter, if it can
    be one with a key: one without may be handed out and come back as it was between two steps.
    """
    if stopped_at < len(stretch):
        return _first_left(stretch[:stopped_at], taken) or stretch[stopped_at]
    first = stretch[:quarter]
    with_key = _first_left((place for place in reversed(first) if place[1] is not None), taken)
    return with_key or _first_left(reversed(first), taken) or _first_left(stretch[quarter:], taken)


def _first_left(places: Iterable[Place], taken: Container[int | bytes | None]) -> Place | None:
    """The first place of which neither the block nor the key is taken."""
    return next((place for place in places if place[0] not in taken and place[1] not in taken), None)
