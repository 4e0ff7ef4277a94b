"""When the host is emptied: with vLLM's own resets, by the option `reset`.

vLLM empties the device by giving its block pool another map of hashes, and notifies connectors only on request:

    vLLM's call                                       another map   reset_cache   with_device   with_connector   never
    reset_prefix_cache()                              yes                         empty         kept             kept
    reset_prefix_cache(reset_connector=True)          yes           yes           empty         empty            kept
    sleep at level 1 or 2; pause with clear_cache     yes           yes           empty         empty            kept
    any of them that fails, as requests have blocks   no            perhaps       vLLM's caller repeats it

vLLM resets the device if no block is in use, and trainers do not look whether it did. So blocks that only our copies
use do not count. They lose their hashes, and are handed out when their copies have ended, not before. If the host is
emptied, what was copied is found by nobody.

A sleep gives back the memory that is copied from. So `reset_cache` answers False while blocks are held, and vLLM stays
awake. An engine that has a process of its own does not get that far: it waits until there are no transfers.

Trainers call the first after new weights, so `with_device` is the default. `never` is for weights that stay as they
are: a sleep at level 1 brings the same ones back.
"""

import logging
from collections.abc import Callable

from connector.vllm import versions
from connector.vllm.pool_view import PoolView

logger = logging.getLogger(__name__)

RESET = "reset"
WITH_DEVICE, WITH_CONNECTOR, NEVER = "with_device", "with_connector", "never"
RESETS = {  # each with what the start line says
    WITH_DEVICE: "emptied with the device",
    WITH_CONNECTOR: "emptied by reset_connector=True alone",
    NEVER: "never emptied, also by new weights",
}
UNTIL = {  # each with what brings an adapter back whose files have changed
    WITH_DEVICE: "until vLLM's reset_prefix_cache() is called",
    WITH_CONNECTOR: "until vLLM's reset_prefix_cache(reset_connector=True) is called",
    NEVER: f"as long as the engine runs, because the option {RESET} is {NEVER}; load it under another name",
}


class Resets:
    """Calls `reset` at most once for each reset of vLLM's."""

    def __init__(self, mode: str, pool: PoolView, reset: Callable[[], object]) -> None:
        self._mode = mode
        self._pool = pool
        self._reset = reset
        self._contents = pool.contents
        if versions.sleeps_can_be_refused():
            pool.reset_around_holds()

    def follow(self) -> None:
        """The device may have been reset since the last call of ours."""
        if self._pool.contents is self._contents:
            return
        self._contents = self._pool.contents
        if self._mode == WITH_DEVICE:
            self._reset()
            logger.info("the host prefix cache is empty, because vLLM has reset its own")

    def requested(self) -> bool:
        """vLLM resets its connectors. Whether no copy uses the device's memory any more."""
        self._contents = self._pool.contents
        if self._mode == NEVER:
            logger.warning("the host prefix cache keeps what it has: its option %s is %s", RESET, NEVER)
        else:
            self._reset()
        return not self._pool.holds_any
