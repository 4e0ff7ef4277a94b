"""LateSections: a copier whose loads bring each section when the test lets it."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.events import Event
from cpu_prefix_cache.deciding import GroupCopy
from cpu_prefix_cache.testing import MeddlingCopier


class LateSections(MeddlingCopier):
    """`allowed` is released once for each section; `ended` has those that have come, of all loads."""

    def __init__(self, copier: Copier, tensors: Any = ()) -> None:
        super().__init__(copier, tensors)
        self.sections = copier.sections  # type: ignore[method-assign]  # of the copier around which it stands
        self.allowed, self.ended = threading.Semaphore(0), list[Event]()

    def submit_sections(self, copies: Sequence[GroupCopy], after: Event, submitted: Callable[[Event], object]) -> None:
        def late(end: Event) -> None:
            end.until_passed()
            self.ended.append(end)
            submitted(end)
            self.allowed.acquire()

        self.allowed.acquire()
        self.copier.submit_sections(copies, after, late)
