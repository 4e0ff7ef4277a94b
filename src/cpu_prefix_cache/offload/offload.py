"""Offload: when the chunks of a device are stored on the host.

    Eager    as soon as their tokens are confirmed computed (`eager.py`)
    Late     when the device hands out their blocks, or into ample room before (`late.py`)
    Lazy     shortly before that, whole prompts (`lazy.py`)

Events are reported to it, and it plans stores when it is called.
"""

from collections.abc import Sequence

from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.offload.ancestry import Ancestry
from cpu_prefix_cache.offload.parents import Parents
from cpu_prefix_cache.offload.running import Running
from cpu_prefix_cache.offload.stores import StorePlanner
from cpu_prefix_cache.offload.transfers import StoreTransfer


class Offload:
    """Stores nothing. Counts are of chunks unless noted otherwise. `parents` are those it remembers, if it does."""

    def __init__(self, stores: StorePlanner, parents: Ancestry | Parents | None = None) -> None:
        self._stores = stores
        self._pool = stores.pool
        self._memory = parents
        self.work = 0  # chunks and blocks looked at so far

    @property
    def lost(self) -> int:
        """Chunks the device evicted before they were stored."""
        return 0 if self._memory is None else self._memory.lost

    @property
    def remembered(self) -> int:
        """Chunks whose parent is remembered."""
        return 0 if self._memory is None else len(self._memory)

    # Reported

    def confirmed(self, running: Running, before: int) -> None:
        """The chunks from `before` up to `running.confirmed` hold computed tokens now."""

    def checkpointed(self, running: Running, checkpoint: CheckpointAt) -> None:
        """The device has this checkpoint of a confirmed boundary."""

    def ended(self, running: Running) -> None:
        """The request finished, and still has its blocks. Then they stay on the device until they are evicted."""

    def preempted(self, running: Running) -> None:
        """The request lost its blocks, in which what it computed can still be found."""

    def used(self, keys: Sequence[bytes], chunks: int) -> None:
        """The first `chunks` chunks with these keys were used again on the device: they wait no longer."""

    def landed(self, transfer: StoreTransfer) -> None:
        """The copy of a store has ended, and its device blocks were released."""

    def committed(self, keys: Sequence[bytes]) -> None:
        """Chunks with these keys, or a checkpoint, can be found on the host now."""

    def unfit(self, keys: Sequence[bytes]) -> None:
        """Chunks with these keys, or a checkpoint, were not stored, as some bytes of them do not fit their codec."""

    def loaded(self, keys: Sequence[bytes], nodes: Sequence[int]) -> None:
        """A load has brought chunks with these keys to the device. `nodes` are its sources, parents first."""

    def invalidated(self) -> None:
        """Some device blocks hold other bytes than was thought."""

    def reset(self) -> None:
        """Forget everything."""

    # Asked

    def place(self, key: bytes) -> int | None:
        """The node of the chunk with this key, below which something is to be committed at once."""
        return self._pool.place(key)

    def save(self, device_blocks: Sequence[int], read: Sequence[int | None] = ()) -> Sequence[StoreTransfer]:
        """Store what these blocks, the destinations of a load, held until they were handed out. Stores that it must
        follow.

        With `read`, the host chunks of the load in its order, some go into their blocks; not into those that are None.
        """
        return ()

    def has_room_for(self, blocks: int) -> bool:
        """Whether the device can hand out so many device blocks, and none that still has to be stored."""
        return True

    def plan(self) -> None:
        """Plan the stores of this step."""

    def catch_up(self) -> None:
        """Do what would have delayed the step's plan, which has gone out. The next has what is planned now."""
