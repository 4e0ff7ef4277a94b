"""Lazy: what the device can hand out before a store planned now is heard of is covered.

A block that waits on the device is *covered* when it has no key, when the host has its chunk or a store of it is in
flight, or when it cannot be stored any more. Lazy stores less than eager and hits more: what the device still holds
need not be on the host too. A look reads the *stretch*, the blocks that are handed out next, and stores what is not
covered, each chunk after its missing ancestors. The next look comes in time:

    handed out next                          handed out last
    [ ][ ] ... [ ][m] [ ][ ] ... [ ][ ][ ][e] | [ ][ ] ...
    `- a quarter ---'                        |
    `- the stretch: `EngineSteps.stretch` blocks

    the next look is due when
        the watermark m or the end e waits no more   a quarter was handed out; or what is covered is not known
        a quarter was used again, or computed and    a watermark without a key may have left and come back
            given back by requests that ended
        a store has landed                           its device blocks wait before m again; or the look had to stop
        the host has grown                           the look had stopped because the host was full

    or, if less than a stretch waits, and all of it is covered, when a stretch waits again, or a store was refused

A step without any of these costs nothing. The sources of a store are held, and then wait again where they waited.

* **Whole prompts.** The deepest chunk of a prompt is handed out first and stored last. If the prompt were stored in
  portions, its end would be evicted before its turn. So a chain is stored whole, however long it is, if the device can
  spare it: if a whole stretch waits besides, and as much again as is held. Otherwise stores of the stretch hold at most
  what `report_steps` steps allocate, and never what the device has promised to running requests.
* **What was stored or declined** may be missing at the next look: declined, or evicted from a host that is smaller than
  the stretch, or whose policy found it to be worth least. So it is *settled* as long as it waits in the stretch, which
  it leaves when it is used again: neither it nor what hangs below it is stored meanwhile. Where the end of a chain is
  declined, all of that end is settled at once, because the policy has judged each chunk of it.
* **A device nearly all in use.** Where less waits than the stretch, the blocks of a request that ends are handed out in
  the same step or the next, before any look. Until more waits, lazy stores what requests compute, as eager does.
* **Loads** take blocks of the stretch too, many at once. So while one load is on the link, another waits if its
  destinations would reach beyond e (`has_room_for`); a load that finds the link free never waits. A step in which a
  load goes out does not look, since a request waits for that load. `catch_up` looks, once the plan has gone out.
* **Checkpoints.** In a model that needs them a chunk is stored with the checkpoint that is about to leave (rule 9).
"""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice, takewhile

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.offload.eager import Eager
from cpu_prefix_cache.offload.engine_steps import EngineSteps
from cpu_prefix_cache.offload.parents import Ancestry, Parents
from cpu_prefix_cache.offload.running import Running
from cpu_prefix_cache.offload.stores import Chain, Stop, StorePlanner
from cpu_prefix_cache.offload.transfers import Transfer

# What is stored must be worth so many times what leaves for it, or bytes are moved for no hit. With 1, `adaptive` on
# a small host stores more than eager; with 1.6, hits are lost where the host is large (docs/policies.md).
MARGIN = 1.25

Place = tuple[int, bytes | None]  # a device block that waits, and the key it comes with


@dataclass(frozen=True, slots=True)
class Look:
    """What the last look found. Counts are of device blocks."""

    watermark: Place | None = None  # a quarter of the stretch waits before it
    end: Place | None = None  # the last place that is covered and still waits
    quarter: int = 1  # of the stretch
    is_short: bool = False  # less waits than the stretch
    enough: int | None = None  # so many must wait to make a stretch; None: that many do, or not all is covered
    refusals: int = 0  # of stores, until then
    refused_at: int | None = None  # host blocks that were ready, if the look stopped because the host was full


class Lazy(Eager):
    """Covers what waits on the device, in time; stores as `Eager` does while less than a stretch waits.

    `running` says how many requests run. `parents` are those of the chunks on the device; default: what is remembered.

    Raises ConfigurationError for `ahead_blocks` beyond the blocks of the device.
    """

    def __init__(
        self, stores: StorePlanner, steps: EngineSteps, running: Callable[[], int], parents: Ancestry | None = None
    ) -> None:
        super().__init__(stores)
        self._device = device = stores.device
        if steps.ahead_blocks is not None and steps.ahead_blocks > device.num_blocks:
            raise ConfigurationError(
                f"ahead_blocks must be at most the {device.num_blocks} blocks of the device, got {steps.ahead_blocks}"
            )
        self._steps = steps
        self._running = running
        self._parents: Ancestry = Parents(device, self._pool, stores.planner) if parents is None else parents
        self._chunk_blocks = max(1, stores.chunk_blocks)
        self._last = Look()
        self._used = 0  # device blocks used again since the last look, or computed and given back
        self._computed = 0  # device blocks computed, and not in `_used` yet
        self._has_landed = False  # a store of what waits, since the last look
        self._settled: set[bytes] = set()
        self._behind: int | None = None  # blocks that wait behind the end of what is covered; None: to be counted
        self._is_put_off = False  # a load went out in the last step, so it did not look
        self._is_swept = False  # since the last step

    @property
    def lost(self) -> int:
        return self._parents.lost

    @property
    def remembered(self) -> int:
        return len(self._parents)

    # Told

    def confirmed(self, running: Running, before: int) -> None:
        saved = self._pool.resident_run(running.keys, 0, running.confirmed)
        self._parents.add(running.keys, before, running.confirmed, saved)
        super().confirmed(running, before)
        self._computed += max(0, running.confirmed - max(before, running.resumed)) * self._chunk_blocks
        self.work += running.confirmed - before

    def checkpointed(self, running: Running, checkpoint: CheckpointAt) -> None:
        self._parents.add_checkpoint(checkpoint)
        super().checkpointed(running, checkpoint)
        self.work += 1

    def ended(self, running: Running) -> None:
        self._behind = None  # its blocks will wait there
        self._give_back()
        if self._last.is_short:
            super().ended(running)
        else:
            self._due.pop(running.id, None)

    def preempted(self, running: Running) -> None:
        self._behind = None
        self._give_back()
        super().preempted(running)

    def _give_back(self) -> None:
        """The request's blocks wait again. If the watermark is one without a key, it may have been in use unnoticed."""
        if self._last.watermark is not None and self._last.watermark[1] is None:
            self._used += self._computed
            self._computed = 0

    def used(self, chunks: int) -> None:
        self._used += chunks * self._chunk_blocks
        self._behind = None  # they may have been before the end

    def landed(self, transfer: Transfer) -> None:
        self._behind = None
        self._has_landed |= transfer.owner is None

    def committed(self, keys: Sequence[bytes]) -> None:
        self._settled.update(keys)
        self._parents.saved(keys)

    def reset(self) -> None:
        self._parents.clear()
        self._settled.clear()
        self._last = Look()
        super().reset()

    # Asked

    def has_room_for(self, blocks: int) -> bool:
        if self._last.enough is not None:
            return not self._lacks_cover()
        if self._behind is None:
            self._behind = self._device.num_waiting - self._count_room()
        return blocks <= self._device.num_waiting - self._behind

    def _count_room(self) -> int:
        """How many blocks wait up to the end of what is covered."""
        if not self._waits(self._last.end):
            return 0  # not known before the next look
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
        super().catch_up()
        if self._is_put_off:
            self._is_put_off = False
            self._plan()

    def _sweep(self) -> None:
        """Forget chunks that have left the device. Once a step."""
        if not self._is_swept:
            self._parents.sweep()
            self._is_swept = True

    def _plan(self) -> None:
        if self._is_due():
            self._look()
        if self._last.is_short:
            super().plan(with_loads=False)

    # Looking

    def _is_due(self) -> bool:
        """Whether another look is due: see the table above."""
        last = self._last
        if self._has_landed or self._used >= last.quarter or last.refused_at not in (None, self._pool.ready):
            return True
        if last.enough is not None:
            return self._device.num_waiting >= last.enough or self._lacks_cover()
        return not self._waits(last.watermark) or (last.end is not None and not self._waits(last.end))

    def _waits(self, place: Place | None) -> bool:
        return place is not None and self._device.is_waiting(*place)

    def _lacks_cover(self) -> bool:
        """Whether something may wait that is not covered, if all was at the last look: a store was refused since."""
        return self._stores.refusals != self._last.refusals

    def _step_blocks(self) -> int:
        return self._steps.blocks(self._stores.planner, self._running())

    def _ahead(self) -> int:
        """The length of the stretch, in device blocks."""
        return self._steps.ahead_blocks or self._steps.stretch(self._step_blocks(), self._device.num_blocks)

    def _look(self) -> None:
        """Cover the stretch from its beginning, as far as possible now."""
        self._used = self._computed = 0
        self._has_landed = False
        self._behind = None
        ahead = self._ahead()
        held, held_ahead = self._stores.ledger.held_by_walk()
        stretch = list(islice(self._device.soonest_evicted(), max(0, ahead - held_ahead)))
        self._settled.intersection_update([key for _, key in stretch if key is not None])
        is_short = len(stretch) + held < ahead  # what is held waits too
        self.work += len(stretch)
        taken: set[int | bytes] = set()
        stopped_at, stop, held = self._cover(stretch, held, taken)
        covered = stretch[:stopped_at]
        quarter = max(1, ahead // 4)
        self._last = Look(
            watermark=_watermark(stretch, stopped_at, quarter, taken),
            end=_first_left(reversed(covered), taken),
            quarter=quarter,
            is_short=is_short,
            enough=ahead - held if is_short and stop is None else None,
            refusals=self._stores.refusals,
            refused_at=self._pool.ready if stop is Stop.POOL_FULL else None,
        )

    def _cover(self, stretch: Sequence[Place], held: int, taken: set[int | bytes]) -> tuple[int, Stop | None, int]:
        """Store what is not covered, from the front. Returns the position in the stretch where that stopped, why, and
        how many device blocks are held by stores then.

        `held` of them are held before. The blocks and keys of new stores are added to `taken`.
        """
        missing = self._stores.uncovered(key for _, key in stretch if key is not None)
        blocks = {block for block, _ in stretch} if missing else set()
        for at in [at for at, (_, key) in enumerate(stretch) if key in missing]:
            key = stretch[at][1]
            if key is None or key not in missing or key in self._settled:
                continue  # stored with one that waits before it, or settled
            transfer, stop = self._store(key, held)
            if transfer is not None:
                device_blocks = {block for copy in transfer.plan.copies for block in copy.device_blocks}
                transfer.ahead = len(blocks & device_blocks)
                held += transfer.held_blocks
                taken.update(transfer.keys, device_blocks)
                missing.difference_update(transfer.keys)  # the next look sees what the host evicted for it
            if stop is not None and not stop.is_final:
                return at, stop, held
        return len(stretch), None, held

    def _store(self, key: bytes, held: int) -> tuple[Transfer | None, Stop | None]:
        """Plan the store of this chunk or checkpoint and its missing ancestors. The transfer, and what stopped it."""
        budget = min(self._steps.report_steps * self._step_blocks() - held, self._unpromised())
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
            stop = self._stores.obstacle(chain)  # a part of it would be no use
            if stop is not None or budget < self._chunk_blocks:
                return None, self._noted([key], stop or Stop.IN_FLIGHT)
            portion = chain.first(budget // self._chunk_blocks)
        transfer, stop = self._stores.plan(portion, self._pool.touch(None))
        stored = 0 if transfer is None else len(transfer.keys)
        if stored == len(chain):
            return transfer, None
        # a chunk may be worth storing without a checkpoint; without those that hang below it, it was declined too
        left = chain.keys[stored:] if chain.checkpoint is None else [key]
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

    def _missing_chain(self, key: bytes) -> Chain | None:
        """From the first chunk that is not covered down to `key`; None if it is covered or cannot be stored."""
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


def _watermark(
    stretch: Sequence[Place], stopped_at: int, quarter: int, taken: Container[int | bytes | None]
) -> Place | None:
    """As long as this place waits, no look is due. One of those that are not held.

    Where the look stopped, the first, or else the one it stopped at. Otherwise the last of the quarter, with a key if
    possible: a block without a key may be handed out and wait again, unchanged, between two steps.
    """
    if stopped_at < len(stretch):
        return _first_left(stretch[:stopped_at], taken) or stretch[stopped_at]
    first = stretch[:quarter]
    with_key = _first_left((place for place in reversed(first) if place[1] is not None), taken)
    return with_key or _first_left(reversed(first), taken) or _first_left(stretch[quarter:], taken)


def _first_left(places: Iterable[Place], taken: Container[int | bytes | None]) -> Place | None:
    """The first place of which neither the block nor the key is taken."""
    return next((place for place in places if place[0] not in taken and place[1] not in taken), None)
