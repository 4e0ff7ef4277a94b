"""JoinedPool: an engine's part in the pool of a node: its seat, the region, and its line to the keeper.

    in one process    join, region, messenger, close
    in two            the worker: join, region, give, close       the scheduler: taken, messenger, close

The worker comes first, because vLLM starts it first. Both are the same engine to the keeper (`seat.py`).
"""

import json
import mmap
from functools import partial
from typing import TYPE_CHECKING, Self

from cpu_prefix_cache.memory import mapping
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.node.messenger import SocketMessenger
from cpu_prefix_cache.node.seat import Seat
from cpu_prefix_cache.node.settings import NodePool, name_of, revision_of
from cpu_prefix_cache.slab.namespace import Namespace

if TYPE_CHECKING:
    from cpu_prefix_cache.memory.arena import HostArena


class JoinedPool:
    """Connected. `join` and `taken` make one, and raise ConfigurationError where that cannot be."""

    def __init__(self, pool: NodePool, planner: HybridChunkPlanner, namespace: Namespace, seat: Seat) -> None:
        self._pool, self._planner, self._namespace, self._seat = pool, planner, namespace, seat
        self._messenger: SocketMessenger | None = None
        self.num_slots = seat.num_slots

    @classmethod
    def join(cls, pool: NodePool, planner: HybridChunkPlanner, namespace: Namespace) -> Self:
        """With a seat of its own. `namespace` has all that decides the bytes of a block."""
        name = name_of(namespace, revision_of(namespace))
        seat = Seat.of(pool.path, name, planner.host_block_bytes, connect_seconds=pool.connect_seconds)
        return cls(pool, planner, namespace, seat)

    @classmethod
    def taken(cls, address: str, pool: NodePool, planner: HybridChunkPlanner) -> Self:
        """With the seat that another process of this engine gives at `address`, as the same `pool` and `planner`."""
        seat, note = Seat.taken(address)
        return cls(pool, planner, Namespace(tuple(json.loads(note).items())), seat)

    def give(self, address: str) -> None:
        """Have another process of this engine take the seat at `address`, and decide."""
        self._seat.give(address, json.dumps(self._namespace.spelled).encode())

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self._planner.host_block_bytes

    def region(self) -> mmap.mmap:
        """The region, mapped here."""
        return mapping.map_shared(self._seat.files[0], self.num_bytes)

    def messenger(self) -> SocketMessenger:
        """The engine's line, for what decides over the pool. Called once, in one process of the engine."""
        self._messenger = SocketMessenger(
            self._pool.path,
            self._seat,
            self._planner.host_block_bytes,
            partial(name_of, self._namespace),
            revision_of(self._namespace),  # of the process that has joined
        )
        return self._messenger

    def close_after(self, arena: "HostArena") -> None:
        """Close when nobody has the arena any more, for a HostCache that is dropped without `close`."""
        if self._messenger is not None:
            self._messenger.close_after(arena)

    def close(self) -> None:
        """No copy is under way any more. May be called again."""
        if self._messenger is None:
            self._seat.close()
        else:
            self._messenger.close()
