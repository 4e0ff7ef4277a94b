"""Loads that must not fail: what one copier could not load is loaded again by another, the plain one.

vLLM before 0.28 cannot be told that a load failed where a model has several KV cache groups.
"""

import logging
from collections.abc import Sequence

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.streams import Event
from cpu_prefix_cache.messages.plan import Direction, GroupCopy

logger = logging.getLogger(__name__)


class RetryingCopier(Copier):
    """`copier`, and for loads that it refuses `plain`. The thread that submits loads is then that of `plain`, too."""

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
            logger.exception("a load failed and is repeated the plain way")
        return self._plain.submit(direction, copies, after)
