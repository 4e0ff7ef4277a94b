"""Jobs of several threads, in two queues: loads first, because a request waits for a load, and none for a store.

Some threads take no stores, so that a load never waits until the stores that have begun end. A job is a few MiB.
"""

import threading
from collections import deque
from collections.abc import Iterable

from cpu_prefix_cache.copier.job_thread import Job
from cpu_prefix_cache.messages.plan import Direction


class Jobs:
    """The two queues. After `close` the threads end once both are empty."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queues: dict[Direction, deque[Job]] = {Direction.LOAD: deque(), Direction.STORE: deque()}
        self._closed = False

    def put(self, direction: Direction, jobs: Iterable[Job]) -> None:
        with self._changed:
            if self._closed:
                raise RuntimeError("the tier is closed")
            self._queues[direction].extend(jobs)
            self._changed.notify_all()

    def take(self, directions: Iterable[Direction]) -> Job | None:
        """The next job of the first of these directions that has one; waits for it. None: closed."""
        with self._changed:
            while True:
                for direction in directions:
                    if queue := self._queues[direction]:
                        return queue.popleft()
                if self._closed:
                    return None
                self._changed.wait()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
