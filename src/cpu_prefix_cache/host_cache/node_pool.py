"""JoinedPool: a HostCache's part in the pool of a node: what decides, the region, and the line to the keeper."""

import mmap
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from cpu_prefix_cache.host_cache.host_tier import layouts_of
from cpu_prefix_cache.keeper.kept_cache import KeptCache, check_takes
from cpu_prefix_cache.memory import mapping
from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.model.planner import HybridChunkPlanner
from cpu_prefix_cache.node.messenger import SocketMessenger
from cpu_prefix_cache.node.settings import NodePool, name_of
from cpu_prefix_cache.offload.device import Device

if TYPE_CHECKING:
    from cpu_prefix_cache.kv_layout import KVGroup
    from cpu_prefix_cache.memory.arena import HostArena


class JoinedPool:
    """Connected. Raises ConfigurationError where that cannot be, and for a model that a keeper does not take."""

    def __init__(self, pool: NodePool, planner: HybridChunkPlanner, groups: "Sequence[KVGroup]") -> None:
        if not isinstance(pool, NodePool):
            raise ConfigurationError(
                'pool must be NodePool("unix:/PATH", model=..., revision=...), since a keeper does not tell whose '
                f"KV it holds; got {pool!r}"
            )
        check_takes(planner)
        self._planner = planner
        self._namespace = pool.namespace(planner, layouts_of(groups))
        name = name_of(self._namespace, pool.identity.revision)
        self._messenger = SocketMessenger(
            pool.path, name, planner.host_block_bytes, connect_seconds=pool.connect_seconds
        )
        self.num_slots = self._messenger.num_slots

    def region(self) -> mmap.mmap:
        """The region, mapped here."""
        return mapping.map_shared(self._messenger.files[0], self.num_slots * self._planner.host_block_bytes)

    def cache(self, device: Device, *, ready_slots: int, min_load_tokens: int) -> KeptCache:
        """The deciding half. Called once, before `passed` and `reset`."""
        self._cache = KeptCache(
            self._planner,
            device,
            self._messenger,
            num_slots=self.num_slots,
            ready_slots=ready_slots,
            namespace_of=partial(name_of, self._namespace),
            min_load_tokens=min_load_tokens,
        )
        return self._cache

    def passed(self) -> None:
        """A step begins: what the keeper has answered by now is taken in."""
        self._cache.passed(time.monotonic())

    def reset(self, revision: str | None) -> None:
        self._cache.reset(revision)

    def close_after(self, arena: "HostArena") -> None:
        """Close when nobody has the arena any more, for a HostCache that is dropped without `close`."""
        self._messenger.close_after(arena)

    def close(self) -> None:
        """No copy is under way any more. May be called again."""
        self._messenger.close()
