"""Planning one store: from a chain of keys to device blocks that are held and host blocks that wait for them.

A chain is a run of chunks, each the child of the one before, that the host does not have and nobody is writing.
Of a chain the longest part is stored that hangs together: without the end that the host declines, up to a chunk that
the device has lost, and as far as there is room in a pool where some cannot be evicted (rule 4). A chain may end in a
checkpoint, which is stored with all of the chain or not at all, and then nothing is (rule 9).
"""

import enum
import itertools
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

from cpu_prefix_cache.messages.errors import MisuseError
from cpu_prefix_cache.messages.plan import Direction, GroupCopy
from cpu_prefix_cache.offload.chain import Chain
from cpu_prefix_cache.offload.device import Device
from cpu_prefix_cache.offload.transfers import Promotion, StoreTransfer, Transfer, TransferLedger
from cpu_prefix_cache.pool.block_pool import Pin
from cpu_prefix_cache.pool.checkpoints import PieceNeed
from cpu_prefix_cache.pool.coordinator import KVCacheCoordinator
from cpu_prefix_cache.pool.group_copies import num_bytes

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


class _Sources(NamedTuple):
    """Device blocks of the first chunks of a chain, and of the pieces of its checkpoint."""

    chunks: list[Sequence[int]]
    pieces: Sequence[Sequence[int]] | None = None

    @property
    def num_nodes(self) -> int:
        return len(self.chunks) + (self.pieces is not None)


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

    def choose(self, chain: Chain) -> tuple[int, Stop | None]:
        """How many nodes of a chain the host wants, with a checkpoint all or none; and why not all of them."""
        checkpoint = chain.checkpoint
        if checkpoint is not None and not self._coordinator.holds(checkpoint):
            self.refusals += len(chain)
            return 0, Stop.TOO_LARGE
        wanted = self.pool.choose(self._parent(chain), chain.node_keys, self._needs(chain), margin=self._margin)
        if wanted == len(chain):
            return wanted, None
        if checkpoint is not None:
            wanted = 0
        self.declined += len(chain) - wanted
        return wanted, Stop.DECLINED

    def plan(
        self,
        chain: Chain,
        touch: Any,
        *,
        owner: Hashable | None = None,
        left: Mapping[bytes, Sequence[int]] | None = None,
        read: Sequence[int] = (),
    ) -> tuple[StoreTransfer | None, Stop | None]:
        """Plan a store of `chain`, for the request `owner`, or of what waits on the device if there is none.

        Of chunks that have left the device, `left` has the blocks. They are not held: the ranks read them before
        anything is written. With `read` the chunks take the blocks of these host chunks
        (`BlockPool.exchange`). The transfer covers as many first nodes of the chain as it has keys, and is None if
        there is nothing to store. With it comes why it is not the whole chain, if it is not.
        """
        wanted, stop = self._admitted(chain) if read else self.choose(chain)
        part = chain.first(wanted)
        sources = self._sources(part, self.device.find_all if left is None else lambda keys: [*map(left.get, keys)])
        if sources.num_nodes < len(part):
            stop = Stop.NOT_ON_DEVICE
        if not sources.num_nodes:
            return None, stop
        if left is None and self._takes_promised(sources):
            return None, Stop.PROMISED
        needs = self._needs(part)
        follows = self._writers(chain, needs or ())
        keys = part.node_keys[: sources.num_nodes]
        with self._parent_pinned(chain) as pin:
            if read:
                nodes = self.pool.exchange(read[: len(keys)], keys)
            else:
                nodes = self.pool.take(len(sources.chunks), keys, needs)
            if len(nodes) < len(keys):
                self.refusals += len(keys) - len(nodes)
                stop = Stop.POOL_FULL
            if not nodes:
                self.pool.unpin(pin)
                return None, stop
            copies, device_blocks, pieces = self._copied(part, nodes, sources)
            held = device_blocks if left is None else ()
            transfer = StoreTransfer(
                self.ledger.new_plan(Direction.STORE, copies, num_bytes(self.planner, copies)),
                part.first(len(nodes)),
                hold=self.device.hold(held, self._parent_blocks(chain) if owner is not None else ()),
                pin=pin,
                nodes=nodes,
                touch=touch,
                pieces=pieces,
                owner=owner,
                follows=follows,
            )
        self.ledger.add(transfer)
        return transfer, stop

    def receive(self, chain: Chain, touch: Any, owner: Hashable) -> Promotion | None:
        """Host blocks for as many first nodes of a chain as find room: their bytes come from elsewhere, and not from
        the device. None, if none do, or one of them is covered: a wrong engine has joined keys of two prompts.
        """
        if any(map(self.is_covered, chain.node_keys)):
            return None
        needs = self._needs(chain)
        follows = self._writers(chain, needs or ())
        missing = [need.key for need in self.pool.checkpoints.missing(needs or ())]
        keys = chain.node_keys
        with self._parent_pinned(chain) as pin:
            nodes = self.pool.take(len(chain.keys), keys, needs)
            if not nodes:
                self.pool.unpin(pin)
                return None
            transfer = Promotion(
                self.ledger.new_plan(Direction.STORE, (), 0),
                chain.first(len(nodes)),
                hold=None,
                pin=pin,
                nodes=nodes,
                touch=touch,
                pieces=missing,
                owner=owner,
                follows=follows,
            )
        self.ledger.add(transfer)
        return transfer

    def note(self, chain: Chain, touch: Any) -> Sequence[int]:
        """As many first nodes of a chain as find room, which can be found at once: others have stored them. None while
        it, or what it builds on, is being written.
        """
        needs, keys, parent = self._needs(chain), chain.node_keys, self._parent(chain)
        builds_on = (*keys, *(need.key for need in needs or ()))
        if parent is None or not self.ledger.writing.keys().isdisjoint(builds_on):
            return ()
        with self._parent_pinned(chain) as pin:
            nodes = self.pool.take(len(chain.keys), keys, needs)
            if nodes:
                self.pool.commit(nodes, keys[: len(nodes)], parent, touch)
                self.pool.resume_points.may_be_useless(nodes[-1])
        self.pool.unpin(pin)
        return nodes

    def _needs(self, chain: Chain) -> list[PieceNeed] | None:
        """The pieces of its checkpoint, if it has one."""
        return None if chain.checkpoint is None else self._coordinator.needs(chain.checkpoint)

    def _parent_pinned(self, chain: Chain) -> AbstractContextManager[Pin | None]:
        """A pin on the host chunk that a chain hangs below, before anything is evicted for the chain."""
        parent = self._parent(chain)
        return self.pool.pinned(*(() if parent is None or parent == self.pool.root else (parent,)))

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

    def _admitted(self, chain: Chain) -> tuple[int, Stop | None]:
        """How many chunks the admission does not hold back. They take the blocks of others and need no room."""
        admitted = self.pool.admitted(chain.keys)
        self.declined += len(chain) - admitted
        return admitted, Stop.DECLINED if admitted < len(chain) else None

    def _sources(self, part: Chain, found: Found) -> _Sources:
        """The device's part of a chain, with a checkpoint all or nothing."""
        chunks = self._on_device(part.keys, found)
        if part.checkpoint is None:
            return _Sources(chunks)
        pieces = self.device.find_checkpoint(part.checkpoint)
        if pieces is None or len(chunks) < len(part.keys):
            return _Sources([])
        return _Sources(chunks, pieces)

    def _takes_promised(self, sources: _Sources) -> bool:
        """Whether a hold of them would take device blocks that are promised: it may take more than them, so try."""
        if not self.device.num_promised:
            return False
        hold = self.device.hold([block for blocks in (*sources.chunks, *(sources.pieces or ())) for block in blocks])
        is_short = self.device.num_waiting < self.device.num_promised
        self.device.release(hold)
        return is_short

    def _copied(
        self, part: Chain, nodes: Sequence[int], sources: _Sources
    ) -> tuple[tuple[GroupCopy, ...], list[int], list[Hashable]]:
        """The copies that fill these nodes, the first of the chain; the device blocks they read, chunk after chunk; and
        the pieces that no other checkpoint has.
        """
        chunks = sources.chunks[: len(nodes)]
        device_blocks = [*itertools.chain.from_iterable(chunks)]
        by_group = self._coordinator.chunk_blocks_by_group(device_blocks)
        copies = self._coordinator.chunk_copies(nodes[: len(chunks)], by_group)
        if part.checkpoint is None or sources.pieces is None:
            return tuple(copies), device_blocks, []
        checkpoints, node = self.pool.checkpoints, nodes[-1]
        host_blocks, needs = checkpoints.to_write(node), checkpoints.needs(node)
        new = [at for at, blocks in enumerate(host_blocks) if blocks is not None]
        device_blocks += [block for at in new for block in sources.pieces[at]]
        pieces = self._coordinator.checkpoint_copies(part.checkpoint.depth, host_blocks, sources.pieces)
        return (*pieces, *copies), device_blocks, [needs[at].key for at in new]

    def _parent_blocks(self, chain: Chain) -> Sequence[int]:
        """The device blocks of the chunk that a chain hangs below, if there is one there."""
        return () if chain.parent_key is None else self.device.find(chain.parent_key) or ()

    def _on_device(self, keys: Sequence[bytes], found: Found) -> list[Sequence[int]]:
        """The device blocks, chunk by chunk, of the longest beginning of `keys` that the device has."""
        on_device = found(keys)
        chunks = cast(list[Sequence[int]], on_device[: on_device.index(None)] if None in on_device else on_device)
        if wrong := set(map(len, chunks)) - {self.chunk_blocks}:
            raise MisuseError(f"the device has {min(wrong)} blocks for a chunk that takes {self.chunk_blocks} of them")
        return chunks
