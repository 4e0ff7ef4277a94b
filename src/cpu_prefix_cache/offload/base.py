"""What both modes of offload answer to: told what was computed and what was used, asked once a step for stores."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.offload.running import Running
from cpu_prefix_cache.offload.transfers import Transfer


class Offload(ABC):
    """Decides what to store, and when. Counts are of chunks unless said otherwise. By default it looks at nothing."""

    @property
    @abstractmethod
    def work(self) -> int:
        """Chunks and blocks looked at so far."""

    @property
    def lost(self) -> int:
        """Chunks the device evicted before they were stored."""
        return 0

    @property
    def remembered(self) -> int:
        """Chunks whose parent is remembered."""
        return 0

    @abstractmethod
    def confirmed(self, running: Running, before: int) -> None:
        """The chunks from `before` up to `running.confirmed` hold computed tokens now."""

    @abstractmethod
    def checkpointed(self, running: Running, checkpoint: CheckpointAt) -> None:
        """The device has this checkpoint of a confirmed boundary."""

    @abstractmethod
    def ended(self, running: Running) -> None:
        """The request finished, and still has its blocks. Then they stay on the device until they are evicted."""

    @abstractmethod
    def preempted(self, running: Running) -> None:
        """The request lost its blocks: store what it computed while they can still be found, in both modes."""

    def used(self, chunks: int) -> None:  # noqa: B027
        """So many chunks on the device were used again: they no longer wait to be evicted."""

    def has_room_for(self, blocks: int) -> bool:
        """Whether the device can hand out so many device blocks, and none that nobody has looked at yet."""
        return True

    @abstractmethod
    def plan(self, *, with_loads: bool) -> None:
        """Plan the stores of this step, in which loads go out too or not."""

    @abstractmethod
    def catch_up(self) -> None:
        """The step's plan has gone out: time for what was put off for its sake, or found no room while the host was
        being prepared, to go out with the next.
        """

    def landed(self, transfer: Transfer) -> None:  # noqa: B027
        """The copy of a store has ended, and its device blocks were released."""

    def committed(self, keys: Sequence[bytes]) -> None:  # noqa: B027
        """These chunks can be found on the host now."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything."""
