"""Which values that came wrong are deleted from a store, so that they are put anew.

Bytes that came wrong may be right in the store: then this machine's network or memory makes wrong what it reads, and
would delete what all others have. So each deletion costs a credit, and so many values that came right give one back:
what is damaged here and there goes, and a machine that reads nothing but wrong bytes stops after the first few.
"""

import logging
import threading

logger = logging.getLogger(__name__)

CREDITS = 8
RIGHT_VALUES = 32  # for one credit


class Deletions:
    """Called by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._right = CREDITS * RIGHT_VALUES  # values, for which nothing was deleted yet; no more count
        self._is_stopped = False
        self.kept = 0  # values that came wrong and were not deleted

    def read(self, right: int, wrong: int) -> int:
        """So many values came right and wrong. How many of the latter may be deleted."""
        with self._lock:
            self._right = min(CREDITS * RIGHT_VALUES, self._right + right)
            allowed = min(wrong, self._right // RIGHT_VALUES)
            self._right -= allowed * RIGHT_VALUES
            self.kept += wrong - allowed
            stops = wrong > allowed and not self._is_stopped
            self._is_stopped = wrong > allowed or (self._is_stopped and self._right < CREDITS * RIGHT_VALUES)
        if stops:
            logger.error(
                "too many values of the shared store came with wrong bytes: they are computed, and left there from now "
                "on (%d so far). If other machines read the same store well, look at the network and the memory of "
                "this one; otherwise at the store's.",
                self.kept,
            )
        return allowed
