"""Steps of a host cache for an engine that waits for its copies."""

from collections.abc import Hashable, Sequence
from typing import Any

from cpu_prefix_cache import HostCache
from cpu_prefix_cache.deciding import PooledDevice


class WaitingDevice(PooledDevice):
    """Device pool whose blocks nobody is given between the plan of a copy and its end, so that nothing holds them."""

    def hold(self, blocks: Sequence[int], parent: Sequence[int] = ()) -> Any:
        """Nothing: a pin of each block took a tenth of what a hit takes beside its copies."""

    def release(self, hold: Any) -> None:
        """Nothing."""


def copy_all(host: HostCache) -> list[tuple[Hashable, int]]:
    """A step of the host cache and the end of all its copies. The loads that have ended, as from `HostCache.drain`."""
    host.drain()  # what a second interrupt, in the wait below, has left under way: nothing holds its blocks
    try:
        host.begin_step()
    finally:  # also after an interrupt, wait for the transfers and resolve them
        ended = host.drain()
    return ended
