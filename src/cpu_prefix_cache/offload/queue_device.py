"""QueueDevice: a Device for an engine with a queue of free blocks and reference counts, one device block to a chunk.

    in use     users > 0, not in the queue
    waits      users == 0, in the queue; the first is handed out next
    held       a hold counts as a user: a block that waited leaves the queue, and comes back to where it waited

The engine takes blocks from the front of its queue and appends the blocks of a request, the last one first, when
nobody uses them any more. It does so with the same counts and the same queue as before; a held block is one more block
in use to it.
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from itertools import islice
from typing import NamedTuple

from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.numbers import check_whole
from cpu_prefix_cache.offload.device import Device
from cpu_prefix_cache.offload.places import FRONT, Places
from cpu_prefix_cache.pool.notes import Notes

JUST_FREED = 256  # blocks: a search of 4,096 takes 40 us, one of 256 takes 3


class _QueueHold(NamedTuple):
    in_use: list[int]  # blocks, the deepest chunk first
    waited: list[tuple[int, bytes | None]]  # places
    parent: Sequence[int]


class QueueDevice(Device):
    """A subclass has five members of one line each; `num_blocks` are all the blocks the engine hands out.

    `hands_out_first`: the engine hands out all blocks of a step before `CPUPrefixCache.step` or `HostCache.begin_step`,
    writes to them after it, and calls `evicted`. Then device and host hold prompts together: a chunk is stored
    when it leaves, or into ample room before (rule 3).

    Raises ConfigurationError for a `num_blocks` below 1.
    """

    def __init__(self, num_blocks: int, *, hands_out_first: bool = False) -> None:
        check_whole("num_blocks", num_blocks, least=1)
        self._num_blocks = num_blocks
        self._hands_out_first = hands_out_first
        self._notes = Notes(num_blocks)
        self._places = Places(lambda place: isinstance(place, tuple) and self.is_waiting(*place))

    @abstractmethod
    def block(self, key: bytes) -> int | None:
        """The block of the chunk with this key, if it is computed; else None."""

    @abstractmethod
    def key(self, block: int) -> bytes | None:
        """The key of the chunk in this block, whether or not `block` finds another with it; None if it has none."""

    @abstractmethod
    def queue(self) -> MutableSequence[int]:
        """The engine's own queue of free blocks, which holds take from and put back into."""

    @abstractmethod
    def users(self, block: int) -> int:
        """How many requests and holds use this block."""

    @abstractmethod
    def use(self, blocks: Sequence[int], by: int) -> None:
        """Change that number of each of them by +1 or -1. The queue is left as it is."""

    def evicted(self, block: int) -> None:
        """The engine hands out this block, which still has its key.

        Raises MisuseError without `hands_out_first`.
        """
        if not self._hands_out_first:
            raise MisuseError("evicted() is for a QueueDevice made with hands_out_first=True")
        if (key := self.key(block)) is not None and self.block(key) == block:  # else a second copy, or not computed
            self._notes.add(key, (block,))

    def handed_out(self) -> Mapping[bytes, Sequence[int]] | None:
        return self._notes.take(self.find_all) if self._hands_out_first else None

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_waiting(self) -> int:
        return len(self.queue())

    @property
    def blocks_per_chunk(self) -> int:
        return 1

    def check_own(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            users = self.users(block)
            if not users:
                raise MisuseError(f"block {block} is in the queue: blocks that a load fills are in use by its request")
            if self.key(block) is not None:
                raise MisuseError(f"block {block} has the key of a chunk: others may read it while a load fills it")
            if users > 1 and not self.shares_unfinished:
                raise MisuseError(
                    f"block {block} has {users} users: a load fills blocks that are in use by one request"
                )

    def find(self, key: bytes) -> Sequence[int] | None:
        block = self.block(key)
        return None if block is None else (block,)

    def find_all(self, keys: Sequence[bytes]) -> list[Sequence[int] | None]:
        return [None if (block := self.block(key)) is None else (block,) for key in keys]

    def soonest_evicted(self) -> Iterator[tuple[int, bytes | None]]:
        return zip(self.queue(), map(self.key, self.queue()), strict=True)

    def evicted_after(self, block: int) -> Iterator[tuple[int, bytes | None]]:
        queue = self.queue()
        for each in islice(queue, queue.index(block) + 1, None):
            yield each, self.key(each)

    def is_waiting(self, block: int, key: bytes | None) -> bool:
        return not self.users(block) and self.key(block) == key

    def hold(self, blocks: Sequence[int], parent: Sequence[int] = ()) -> _QueueHold:
        in_use, waited = [], []
        queue, at = self.queue(), 0
        for block in reversed(blocks):
            if self.users(block):
                in_use.append(block)
            else:
                at = self._leave(queue, block, at)
                waited.append((block, self.key(block)))
        self.use(blocks, +1)
        return _QueueHold(in_use, waited, parent)

    def _leave(self, queue: MutableSequence[int], block: int, at: int) -> int:
        """Take a block out of the queue, from position `at` if it is there: a prompt's blocks wait side by side."""
        if at >= len(queue) or queue[at] != block:
            at = queue.index(block)
        del queue[at]
        before = queue[at - 1] if at else None
        self._places.leave((block, self.key(block)), FRONT if before is None else (before, self.key(before)))
        return at

    def release(self, hold: _QueueHold) -> None:
        queue = self.queue()
        last = list(hold.in_use)
        for place in hold.waited:
            block = place[0]
            if self.users(block) > 1 or self.key(block) != place[1]:  # used or written anew meanwhile
                self._places.forget(place)
                last.append(block)
                continue
            behind = self._places.back(place)
            self.use((block,), -1)
            queue.insert(queue.index(behind[0]) + 1 if isinstance(behind, tuple) else 0, block)
        self.use(last, -1)
        free = [block for block in last if not self.users(block)]
        if free:
            at = next((_position(queue, block) for block in hold.parent if not self.users(block)), len(queue))
            for block in reversed(free):
                queue.insert(at, block)


def _position(queue: MutableSequence[int], block: int) -> int:
    """Where a block waits: most likely near the end, as a request has just freed it."""
    try:
        return queue.index(block, max(0, len(queue) - JUST_FREED))
    except ValueError:
        return queue.index(block)
