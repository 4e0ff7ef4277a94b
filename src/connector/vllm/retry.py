"""Retries failed loads with a plain copier, where vLLM cannot be told of a failed load.

That is vLLM before 0.28, in models with several KV cache groups.
"""

import logging
from collections.abc import Sequence

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.streams import Event
from cpu_prefix_cache.messages.plan import Direction, GroupCopy

logger = logging.getLogger(__name__)


class RetryingCopier(Copier):
    """Submits to `copier`; a load for which that raises is submitted to `plain`, in the same thread."""

    def __init__(self, copier: Copier, plain: Copier) -> None:
        self._copier = copier
        self._plain = plain

    def here(self) -> Event:
        return self._copier.here()

    def hold_compute(self, event: Event) -> None:
        self._copier.hold_compute(event)

    def submit(self, direction: Direction, copies: Sequence[GroupCopy], after: Event) -> Event:
        try:
            return self._copier.submit(direction, copies, after)
        except Exception:
            if direction is Direction.STORE:
                raise
            logger.exception("a load failed and is repeated by the plain copier")
        return self._plain.submit(direction, copies, after)
