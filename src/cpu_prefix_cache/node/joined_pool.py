"""JoinedPool: an engine's part in the pool of a node: its seat, the region, and its line to the keeper.

    in one process    join, region, messenger, close
    in several        the first rank: join, region, give, close
                      other ranks: taken, region, close
                      the scheduler: taken, messenger, close

Ranks come first, because vLLM starts them first. All are the same engine to the keeper (`seat.py`), and a slot has the
rows of all ranks.
"""

import json
import mmap
from functools import partial
from typing import Self

from cpu_prefix_cache.keeper.shape import spelled
from cpu_prefix_cache.memory import mapping
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.node.messenger import SocketMessenger
from cpu_prefix_cache.node.seat import Seat
from cpu_prefix_cache.node.settings import NodePool, name_of, revision_of
from cpu_prefix_cache.slab.namespace import Namespace


class JoinedPool:
    """Connected. `join` and `taken` make one, and raise ConfigurationError where that cannot be."""

    def __init__(self, pool: NodePool, namespace: Namespace, seat: Seat) -> None:
        self._pool, self._namespace, self._seat = pool, namespace, seat
        self._messenger: SocketMessenger | None = None
        self.num_slots = seat.num_slots

    @classmethod
    def join(cls, pool: NodePool, block_bytes: int, namespace: Namespace, planner: HybridChunkPlanner) -> Self:
        """With a seat of its own, and slots of so many bytes. `namespace` has all that decides what is in one."""
        name = name_of(namespace, revision_of(namespace))
        seat = Seat.of(pool.path, name, block_bytes, spelled(planner), connect_seconds=pool.connect_seconds)
        return cls(pool, namespace, seat)

    @classmethod
    def taken(cls, address: str, pool: NodePool, *, decides: bool) -> Self:
        """With the seat that the first rank of this engine gives at `address`, of the same `pool`."""
        seat, note = Seat.taken(address, decides=decides)
        return cls(pool, Namespace(tuple(json.loads(note).items())), seat)

    def give(self, address: str, takers: int = 1) -> None:
        """Have so many other processes of this engine take the seat at `address`, the last of which decides."""
        self._seat.give(address, json.dumps(self._namespace.spelled).encode(), takers)

    @property
    def num_bytes(self) -> int:
        return self.num_slots * self._seat.block_bytes

    def region(self) -> mmap.mmap:
        """The region, mapped here."""
        return mapping.map_shared(self._seat.files[0], self.num_bytes)

    def messenger(self, planner: HybridChunkPlanner) -> SocketMessenger:
        """The engine's line, for what decides over the pool. Called once, in one process of the engine."""
        self._messenger = SocketMessenger(
            self._pool.path,
            self._seat,
            planner,
            partial(name_of, self._namespace),
            revision_of(self._namespace),  # of the process that has joined
        )
        return self._messenger

    def close_after(self, region: mmap.mmap) -> None:
        """Close when nobody has the region any more, or when the process ends, for a HostCache that is dropped without
        `close`. Of what ends with the process, what was made before this ends later.
        """
        if self._messenger is not None:
            self._messenger.close_after(region)

    def close(self) -> None:
        """No copy is under way any more. May be called again."""
        if self._messenger is None:
            self._seat.close()
        else:
            self._messenger.close()
