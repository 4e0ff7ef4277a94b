"""The engine's own prefix cache, as the deciding half sees it.

Blocks are found by key, because positions in an engine's block tables are unstable (nulls, copies on write, relocated
speculative blocks). An engine adapter implements `Device`; `PooledDevice` is the one for an engine whose device pool is
a BlockPool of this library.

All numbers are of device blocks, those that the engine hands out one by one. A block *waits* when nobody uses it, with
or without a key, so that it can be handed out. The order of eviction is the order in which waiting blocks are handed
out.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from cpu_prefix_cache.messages.errors import ConfigurationError, MisuseError
from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.model.groups import Group
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.pool.block_pool import BlockPool, Pin
from cpu_prefix_cache.pool.states import BlockState


@runtime_checkable
class Device(Protocol):
    """View of an engine's device blocks, and the holds on them. Called from the deciding thread only.

    Seven members are required. The others have defaults for a subclass: an engine with one block to a chunk, no null
    block and no checkpoints needs nothing else.
    """

    @property
    def num_blocks(self) -> int:
        """How many blocks the device can hand out when none is in use."""

    @property
    def num_waiting(self) -> int:
        """How many of them wait now."""

    def find(self, key: bytes) -> Sequence[int] | None:
        """The device blocks of the chunk with this key, group by group; None unless all of them are there.

        Only blocks whose bytes are written. An engine that gives blocks their keys before it computes them must answer
        None until then (rule 11).
        """

    def soonest_evicted(self) -> Iterator[tuple[int, bytes | None]]:
        """The waiting blocks with their keys, in the order of eviction: the first is handed out next.

        Of a chunk of several blocks the one that is handed out first has the key; the others, and blocks without
        contents, have None. A checkpoint is represented by one of its blocks, with its `checkpoint_key`. The cache
        reads as far as it needs before it holds anything.
        """

    def evicted_after(self, block: int) -> Iterator[tuple[int, bytes | None]]:
        """The same from behind `block`, which waits. Lazy goes on there, since it examines each waiting block once.

        May begin earlier, even at the front, where an order has no such cursor or puts blocks before it that it has not
        seen: what was examined is skipped. A block that comes with several keys comes with all of them again.
        """
        return self.soonest_evicted()

    def is_waiting(self, block: int, key: bytes | None) -> bool:
        """Whether the order of eviction still has `block` with this key, or with None."""

    def hold(self, blocks: Sequence[int], parent: Sequence[int] = ()) -> Any:
        """Keep `blocks` from being handed out until `release`, to which the answer is given back.

        They are the sources of a store, the deepest chunk last, or the destinations of a load. Those that wait leave
        the order of eviction. `parent` are the blocks of the parent chunk of the first of them, or empty.

        A hold may keep more than them, such as their ancestors, if that waits where it did when the hold has ended.
        """

    def release(self, hold: Any) -> None:
        """End a hold. Of the blocks that nobody else uses, those that waited when it began wait again where they did.

        The others become the last in the order, the deepest chunk before its ancestors, as when the engine frees a
        request; or, if a block of `parent` waits already, they wait right before that. (If all became the last, the
        hit ratio would be 6 points lower. `places.py` remembers where blocks waited.)
        """

    def handed_out(self) -> Mapping[bytes, Sequence[int]] | None:
        """The keys of the chunks that handed-out blocks held since the last call, in that order, each with the blocks
        of the chunk then; without those that the device has a second time. None, always, from an engine that does not
        note them; it may begin with the first call.

        An engine that does calls `step` when all blocks of the step are handed out, and before anything is written to
        them; its compute waits for stores that hold it (`TransferPlan.holds_compute`; a CopyWorker sees to it).
        """
        return None

    @property
    def frees_after_use(self) -> bool:
        """Whether no step under way uses a block when it is handed out, and nothing writes to it before the next plan.
        What is copied to or from handed-out blocks need not wait for such a step then.
        """
        return False

    @property
    def null_block(self) -> int | None:
        """The block that means "no block" in the engine's tables, if there is one. Never copied."""
        return None

    @property
    def blocks_per_chunk(self) -> int | None:
        """How many blocks `find` answers with; None: as many as the groups need for the least chunk they can share."""
        return None

    @property
    def shares_unfinished(self) -> bool:
        """Whether requests with the same prefix have blocks in common before these are computed or loaded.

        Then each of them waits for what fills such a block, and `find` answers when it is written.
        """
        return False

    def check_own(self, blocks: Sequence[int]) -> None:
        """Raise MisuseError, with a sentence, where a load must not fill these blocks, as far as the device knows: one
        is not in use, others read it, or it is found by a key. Called with `strict`, before they are held.
        """
        return

    @property
    def num_promised(self) -> int:
        """How many waiting blocks running requests will be given, in an engine that admits by reservation.

        No hold of a store takes them: `num_waiting` stays at least as large.
        """
        return 0

    def find_all(self, keys: Sequence[bytes]) -> list[Sequence[int] | None]:
        """`find` of each key. Called with thousands of keys."""
        return [self.find(key) for key in keys]

    def find_checkpoint(self, checkpoint: CheckpointAt) -> Sequence[Sequence[int]] | None:
        """The device blocks of the pieces of a checkpoint, in the planner's order; None unless all of them are there.

        `HybridChunkPlanner.checkpoint(checkpoint.depth)` names the pieces. Their boundary is the end of the chunks of
        `checkpoint.tail`, or, where prefix groups look ahead, before that what they see. Only pieces whose bytes are
        written, and of a state only the page at exactly that boundary (rule 8).
        """
        return None


def check_fits(device: Device, planner: HybridChunkPlanner) -> None:
    """Raise ConfigurationError for a device that cannot find what a request needs to resume."""
    kind = type(device)
    if planner.has_checkpoints and kind.find_checkpoint is Device.find_checkpoint:
        kinds = ", ".join(f"{group.name!r} ({group.kind})" for group in planner.groups)
        raise ConfigurationError(
            f"the groups are {kinds}, and {kind.__name__} has no find_checkpoint: nothing of a window, a local chunk "
            "or a state would ever be stored. Take a PooledDevice, or a Device that finds and names checkpoints"
        )
    wanted, given = planner.device_blocks_per_chunk, device.blocks_per_chunk
    if given not in (None, wanted):
        raise ConfigurationError(
            f"a chunk of {planner.grid_tokens} tokens takes {wanted} device blocks, but {kind.__name__} has {given} to "
            "a chunk: the planner's grid must be the tokens of so many blocks"
        )


def chunk_tokens(device: Device, groups: Sequence[Group]) -> int:
    """The tokens of a chunk of as many blocks as `find` answers with. If that is no multiple of what the groups need,
    as if the device did not tell: `check_fits` refuses it.
    """
    least = math.lcm(*(group.block_tokens for group in groups))
    needed = sum(group.device_blocks * least // group.block_tokens for group in groups if group.is_prefix)
    blocks = device.blocks_per_chunk
    return least if blocks is None or not needed or blocks % needed else least * (blocks // needed)


class PooledDevice(Device):
    """A device pool that is a BlockPool. A hold is a pin and moves nothing.

    A checkpoint counts as one block of the order, whatever it takes. `hands_out_first`: the engine allocates all blocks
    of a step before `CPUPrefixCache.step`, and writes to them after it.
    """

    def __init__(self, pool: BlockPool, *, hands_out_first: bool = False) -> None:
        self._pool = pool
        self._hands_out_first = hands_out_first

    @property
    def num_blocks(self) -> int:
        return self._pool.capacity

    @property
    def num_waiting(self) -> int:
        return self._pool.num_available

    @property
    def blocks_per_chunk(self) -> int:
        return self._pool.shape.blocks_per_chunk

    def find(self, key: bytes) -> Sequence[int] | None:
        block = self._pool.find(key)
        return None if block is None else self._pool.blocks_of((block,))

    def find_checkpoint(self, checkpoint: CheckpointAt) -> Sequence[Sequence[int]] | None:
        node = self._pool.find(checkpoint_key(checkpoint.tail[-1]))
        return None if node is None else self._pool.checkpoints.pieces(node)

    def soonest_evicted(self) -> Iterator[tuple[int, bytes | None]]:
        for block in self._pool.free:
            yield block, None
        for node in self._pool.soonest_evicted():
            if node in self._pool.checkpoints:
                yield node, self._pool.key(node)
                continue
            for at, block in enumerate(self._pool.blocks_of((node,))):  # none where only checkpoints take blocks
                yield block, None if at else self._pool.key(node)

    def is_waiting(self, block: int, key: bytes | None) -> bool:
        if key is not None:
            return self._pool.key(block) == key and not self._pool.is_pinned(block)
        chunk = self._pool.chunk_of(block)
        if chunk == block:
            return block in self._pool.free
        return self._pool.key(chunk) is not None and not self._pool.is_pinned(chunk)

    def handed_out(self) -> Mapping[bytes, Sequence[int]] | None:
        return self._pool.take_evicted() if self._hands_out_first else None

    def check_own(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if not self._is_own(block):
                raise MisuseError(f"block {block} is no block that was allocated and is not committed yet")

    def _is_own(self, block: int) -> bool:
        if self._pool.checkpoints.has_block(block):
            return not self._pool.checkpoints.is_written(block)
        return self._pool.state(self._pool.chunk_of(block)) is BlockState.WRITING

    def hold(self, blocks: Sequence[int], parent: Sequence[int] = ()) -> Pin:
        return self._pool.pin(*dict.fromkeys(map(self._pool.chunk_of, blocks)))

    def release(self, hold: Pin) -> None:
        self._pool.unpin(hold)
