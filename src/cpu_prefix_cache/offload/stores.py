"""Planning one store: from a chain of keys to device blocks that are held and host blocks that wait for them.

A chain is a run of chunks, each the child of the one before, that the host does not have and nobody is writing.
Of a chain the longest part is stored that hangs together: it ends before a chunk the device has lost, and where the
pool is full of what cannot be evicted (rule 4). A chain may end in a checkpoint, which is stored with all of the chain
or not at all, and then nothing is (rule 9). A policy may decline the end of a chain, which then is not stored either.
"""

import enum
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.plan import Direction, GroupCopy
from cpu_prefix_cache.messages.request import CheckpointAt
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.offload.device import Device
from cpu_prefix_cache.offload.transfers import Transfer, TransferLedger
from cpu_prefix_cache.pool.block_pool import Pin
from cpu_prefix_cache.pool.checkpoints import PieceNeed
from cpu_prefix_cache.pool.coordinator import KVCacheCoordinator, num_bytes

Found = Callable[[Sequence[bytes]], Sequence[Sequence[int] | None]]  # the device blocks of each of these chunks


class Stop(enum.Enum):
    """Why a chain was not stored to its end. Where the reason `is_final`, nothing comes of waiting for another."""

    NOT_ON_DEVICE = "not on the device", True  # it cannot be stored at all until it is computed again
    TOO_LARGE = "larger than the pool", True  # with its checkpoint it never fits
    DECLINED = "declined", True  # not worth the room to the policy, or held back by the admission
    SETTLED = "settled", True  # it was stored or declined, and nothing has changed since
    POOL_FULL = "pool full", False  # until pins and stores end, or the host grows
    IN_FLIGHT = "too much in flight", False  # until stores have landed
    PROMISED = "promised", False  # the device has promised its blocks to running requests

    @property
    def is_final(self) -> bool:
        return self.value[1]


@dataclass(frozen=True, slots=True)
class Chain:
    """Chunks with these keys, each below the one before it, the first below `parent_key` (None: a first chunk).

    `checkpoint` is to hang below the last of them, or below the parent if there are none.
    """

    parent_key: bytes | None
    keys: Sequence[bytes]
    checkpoint: CheckpointAt | None = None

    def __len__(self) -> int:
        return len(self.keys) + (self.checkpoint is not None)

    def first(self, count: int) -> "Chain":
        """Its first `count` nodes, which is without the checkpoint if there are more."""
        return self if count >= len(self) else Chain(self.parent_key, self.keys[:count])


class _Sources(NamedTuple):
    """The part of a chain that can be stored now: device blocks of its first chunks, and of its checkpoint's pieces."""

    chunks: list[Sequence[int]]
    pieces: Sequence[Sequence[int]] = ()
    stopped_by: Stop | None = None
    read: Sequence[int] = ()  # host chunks, one for each chunk here, whose blocks it takes


class _Destinations(NamedTuple):
    """The host nodes to be written, and of a checkpoint the pieces that no other checkpoint has."""

    nodes: list[int]
    new_pieces: Sequence[Hashable] = ()
    piece_blocks: Sequence[int] = ()  # their device blocks
    piece_copies: Sequence[GroupCopy] = ()


class StorePlanner:
    """Plans stores from a device into the coordinator's pool, through the ledger.

    `margin`: to a policy that knows it, what is stored must be worth so many times what would have to leave.
    """

    def __init__(
        self, coordinator: KVCacheCoordinator, device: Device, ledger: TransferLedger, margin: float = 1.0
    ) -> None:
        self._coordinator = coordinator
        self._margin = margin
        self.pool = coordinator.pool
        self.device = device
        self.ledger = ledger
        self.planner = coordinator.planner
        self.chunk_blocks = coordinator.planner.device_blocks_per_chunk
        self.device_chunks = device.num_blocks // max(1, self.chunk_blocks)  # how many the device holds at most
        self.refusals = 0
        self.declined = 0

    def is_covered(self, key: bytes) -> bool:
        """Whether the host has this chunk or checkpoint, or will when a store in flight ends well."""
        return self.pool.find(key) is not None or key in self.ledger.writing

    def covered_run(self, keys: Sequence[bytes], start: int, stop: int) -> int:
        """The end of the run of covered ones in `keys[start:stop]`; all of `keys[:start]` is taken to be.

        By bisection: what is being written hangs below what is here, or is being written too (rule 3).
        """
        return start + bisect_left(range(start, stop), True, key=lambda at: not self.is_covered(keys[at]))

    def device_blocks(self, chain: Chain) -> int:
        """How many device blocks a store of the chain holds, pieces that are shared included."""
        blocks = len(chain.keys) * self.chunk_blocks
        if chain.checkpoint is not None:
            at_boundary = self.planner.checkpoint(chain.checkpoint.depth)
            blocks += sum(self.planner.pieces[at.group].device_blocks for at in at_boundary)
        return blocks

    def obstacle(self, chain: Chain) -> Stop | None:
        """Why the host does not take a chain with a checkpoint; None if it does, or if there is no checkpoint."""
        checkpoint = chain.checkpoint
        if checkpoint is None:
            return None
        needs = self._coordinator.needs(checkpoint)
        if not self.pool.has_room(len(chain.keys), needs):
            self.refusals += len(chain)
            return Stop.POOL_FULL if self._coordinator.holds(checkpoint) else Stop.TOO_LARGE
        keys = [*chain.keys, checkpoint_key(checkpoint.tail[-1])]
        if self.pool.accepted(self._parent(chain), keys, needs, margin=self._margin) < len(keys):
            self.declined += len(keys)
            return Stop.DECLINED
        return None

    def plan(
        self,
        chain: Chain,
        touch: Any,
        *,
        owner: Hashable | None = None,
        left: Mapping[bytes, Sequence[int]] | None = None,
        read: Sequence[int] = (),
    ) -> tuple[Transfer | None, Stop | None]:
        """Plan a store of `chain`, for the request `owner`, or of what waits on the device if there is none.

        Of chunks that have left the device, `left` has the blocks. They are not held: the ranks read them before
        anything is written. With `read` the chunks take the blocks of these host chunks
        (`BlockPool.exchange`). The transfer covers as many first nodes of the chain as it has keys, and is None if
        there is nothing to store. With it comes why it is not the whole chain, if it is not.
        """
        parent = self._parent(chain)
        pin = None if parent in (None, self.pool.root) else self.pool.pin(parent)  # before anything is evicted for it
        found = self.device.find_all if left is None else lambda keys: [*map(left.get, keys)]
        sources = self._exchanged(chain.keys, found, read) if read else self._sources(chain, found)
        stop = Stop.PROMISED if left is None and self._takes_promised(sources) else sources.stopped_by
        if stop is Stop.PROMISED or not (sources.chunks or sources.pieces):
            if pin is not None:
                self.pool.unpin(pin)
            return None, stop
        transfer = self._transfer(chain, sources, pin=pin, touch=touch, owner=owner, holds=left is None)
        self.ledger.add(transfer)
        return transfer, stop

    def receive(self, chain: Chain, touch: Any, owner: Hashable) -> Transfer | None:
        """Host blocks for a chain whose bytes come from the tier below, and not from the device.

        None, and nothing is changed, if there is no room for all of it.
        """
        needs = None if chain.checkpoint is None else self._coordinator.needs(chain.checkpoint)
        keys = [*chain.keys]
        if chain.checkpoint is not None:
            keys.append(checkpoint_key(chain.checkpoint.tail[-1]))
        parent = self._parent(chain)
        pin = None if parent in (None, self.pool.root) else self.pool.pin(parent)  # before anything is evicted for it
        if not self.pool.has_room(len(chain.keys), needs or ()):
            if pin is not None:
                self.pool.unpin(pin)
            return None
        follows = self._writers(chain, needs or ())
        missing = [need.key for need in self.pool.checkpoints.missing(needs or ())]
        transfer = Transfer(
            self.ledger.new_plan(Direction.STORE, (), 0),
            tuple(keys),
            self.pool.allocate(len(chain.keys), keys, needs),
            hold=self.device.hold(()),
            pin=pin,
            touch=touch,
            parent_key=chain.parent_key,
            pieces=missing,
            owner=owner,
            follows=follows,
            is_promotion=True,
        )
        self.ledger.add(transfer)
        return transfer

    def _transfer(
        self, chain: Chain, sources: _Sources, *, pin: Pin | None, touch: Any, owner: Hashable | None, holds: bool
    ) -> Transfer:
        keys = list(chain.keys[: len(sources.chunks)])
        needs: list[PieceNeed] = []
        if chain.checkpoint is not None:
            keys.append(checkpoint_key(chain.checkpoint.tail[-1]))
            needs = self._coordinator.needs(chain.checkpoint)
        follows = self._writers(chain, needs)
        to = self._allocate(chain, keys, sources, needs)
        device_blocks = [block for blocks in sources.chunks for block in blocks]
        by_group = self._coordinator.chunk_blocks_by_group(device_blocks)
        chunks = to.nodes[: len(sources.chunks)]
        copies = (*to.piece_copies, *self._coordinator.chunk_copies(chunks, by_group))
        device_blocks += to.piece_blocks
        held = device_blocks if holds else ()
        return Transfer(
            self.ledger.new_plan(Direction.STORE, copies, num_bytes(self.planner, copies)),
            tuple(keys),
            to.nodes,
            hold=self.device.hold(held, self._parent_blocks(chain) if owner is not None else ()),
            held_blocks=len(held),
            pin=pin,
            touch=touch,
            parent_key=chain.parent_key,
            pieces=to.new_pieces,
            owner=owner,
            follows=follows,
        )

    def _writers(self, chain: Chain, needs: Sequence[PieceNeed]) -> list[Transfer]:
        """The stores that write what a chain builds on: its parent, and pieces that its checkpoint shares."""
        builds_on: list[Hashable] = [need.key for need in needs]
        if self._parent(chain) is None:
            builds_on.append(chain.parent_key)
        writing = self.ledger.writing
        return list(dict.fromkeys(writing[key] for key in builds_on if key in writing))

    def _parent(self, chain: Chain) -> int | None:
        """The node that a chain hangs below, or None: that is being written, or the device alone has it."""
        return self.pool.root if chain.parent_key is None else self.pool.place(chain.parent_key)

    def _sources(self, chain: Chain, found: Found) -> _Sources:
        """How much of the chain the device has and the pool has room for."""
        if chain.checkpoint is not None:
            return self._sources_with_checkpoint(chain, chain.checkpoint)
        room = self.pool.available(len(chain.keys))
        accepted = self.pool.accepted(self._parent(chain), chain.keys[:room], margin=self._margin)
        chunks = self._on_device(chain.keys[:accepted], found)
        if len(chunks) < accepted:
            return _Sources(chunks, stopped_by=Stop.NOT_ON_DEVICE)
        if accepted < room:
            self.declined += room - accepted
            return _Sources(chunks, stopped_by=Stop.DECLINED)
        self.refusals += len(chain.keys) - room
        return _Sources(chunks, stopped_by=Stop.POOL_FULL if room < len(chain.keys) else None)

    def _exchanged(self, keys: Sequence[bytes], found: Found, read: Sequence[int]) -> _Sources:
        """The same of chunks that take the blocks of others: they need no room."""
        admitted = self.pool.admitted(keys)
        self.declined += len(keys) - admitted
        chunks = self._on_device(keys[:admitted], found)
        stopped_by = Stop.DECLINED if admitted < len(keys) else None
        return _Sources(chunks, stopped_by=stopped_by, read=read[: len(chunks)])

    def _sources_with_checkpoint(self, chain: Chain, checkpoint: CheckpointAt) -> _Sources:
        pieces = self.device.find_checkpoint(checkpoint)
        chunks = self._on_device(chain.keys, self.device.find_all)
        if pieces is None or len(chunks) < len(chain.keys):
            return _Sources([], stopped_by=Stop.NOT_ON_DEVICE)
        stop = self.obstacle(chain)
        return _Sources(chunks, pieces) if stop is None else _Sources([], stopped_by=stop)

    def _takes_promised(self, sources: _Sources) -> bool:
        """Whether a hold of them would take device blocks that are promised: it may take more than them, so try."""
        if not self.device.num_promised:
            return False
        hold = self.device.hold([block for blocks in (*sources.chunks, *sources.pieces) for block in blocks])
        is_short = self.device.num_waiting < self.device.num_promised
        self.device.release(hold)
        return is_short

    def _allocate(
        self, chain: Chain, keys: Sequence[bytes], sources: _Sources, needs: list[PieceNeed]
    ) -> _Destinations:
        """Host blocks for what is to be stored under `keys`."""
        if sources.read:
            return _Destinations(self.pool.exchange(sources.read, keys))
        if chain.checkpoint is None:
            return _Destinations(self.pool.allocate(len(keys), keys))
        nodes = self.pool.allocate(len(sources.chunks), keys, needs)
        host_blocks = self.pool.checkpoints.to_write(nodes[-1])
        new = [at for at, blocks in enumerate(host_blocks) if blocks is not None]
        return _Destinations(
            nodes,
            [needs[at].key for at in new],
            [block for at in new for block in sources.pieces[at]],
            self._coordinator.checkpoint_copies(chain.checkpoint.depth, host_blocks, sources.pieces),
        )

    def _parent_blocks(self, chain: Chain) -> Sequence[int]:
        """The device blocks of the chunk that a chain hangs below, if there is one there."""
        return () if chain.parent_key is None else self.device.find(chain.parent_key) or ()

    def _on_device(self, keys: Sequence[bytes], found: Found) -> list[Sequence[int]]:
        """The device blocks, chunk by chunk, of the longest beginning of `keys` that the device has."""
        chunks: list[Sequence[int]] = []
        for blocks in found(keys):
            if blocks is None:
                break
            chunks.append(blocks)
        if wrong := set(map(len, chunks)) - {self.chunk_blocks}:
            raise MisuseError(f"the device has {min(wrong)} blocks for a chunk that takes {self.chunk_blocks} of them")
        return chunks
