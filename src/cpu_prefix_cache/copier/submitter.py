"""Hands the transfers of one direction to the copier, in order, in a thread of its own or at once.

    waiting  --taken up-->  moving: submitted, and its mark not passed  --passed-->  done
        |                                                            `--raised-->  failed
        `--cancelled, abandoned, or the copier raised-->  failed

The thread never dies: whatever is raised fails the transfer it is about, and the next one is taken up. Without a thread
an interrupt goes on to the caller, after it has failed its transfer.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.queues import Mark
from cpu_prefix_cache.copier.turns import short_turns
from cpu_prefix_cache.messages.plan import TransferPlan

logger = logging.getLogger(__name__)


class _Job(NamedTuple):
    transfer: TransferPlan
    after: Mark


class _Moving(NamedTuple):
    id: int
    mark: Mark


class Submitter:
    """`name` is the thread's; without one, `put` does the work itself. What `is_cancelled` is not begun, and fails."""

    def __init__(
        self,
        copier: Copier,
        is_cancelled: Callable[[int], bool],
        name: str | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._copier = copier
        self._is_cancelled = is_cancelled
        self._clock = clock
        self._taken_up: dict[int, float] = {}  # when, until somebody has heard of its end
        self._submitted: dict[int, float] = {}  # the same, in how many seconds
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._moving: deque[_Moving] = deque()  # in the order of their ends
        self._failed: deque[int] = deque()
        self._waiting: set[int] = set()
        self._unheard: set[int] = set()  # whatever was put, until somebody has heard of its end
        self._taking = threading.Lock()  # what is abandoned is not taken up, and what is taken up not abandoned
        self._closed = False
        self._thread: threading.Thread | None = None
        if name is not None:
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def put(self, transfer: TransferPlan, after: Mark) -> None:
        """Have `transfer` carried out after those put before it. After `close` it fails."""
        self._unheard.add(transfer.id)
        self._waiting.add(transfer.id)
        if self._closed:
            self._failed.append(transfer.id)
        elif self._thread is None:
            self._take_up(_Job(transfer, after))
        else:
            self._jobs.put(_Job(transfer, after))

    def abandon(self, id: int) -> bool:
        """Whether a transfer has not begun, and now never will: it fails."""
        with self._taking:
            if id not in self._waiting:
                return False
            self._waiting.discard(id)
        self._failed.append(id)
        return True

    @property
    def is_busy(self) -> bool:
        """Whether something has not ended, or nobody has heard that it has."""
        return bool(self._unheard)

    def taken_up(self, id: int) -> float | None:
        """When a transfer was, if there is a `clock`; None if it was not yet, or somebody has heard of its end."""
        return self._taken_up.get(id)

    def submitted_in(self, id: int) -> float | None:
        """How many seconds that has taken, if there is a `clock`: None before, and when its end was heard of."""
        return self._submitted.get(id)

    def mark(self, id: int) -> Mark | None:
        """That of a transfer that is submitted, until somebody has heard of its end."""
        return next((moving.mark for moving in list(self._moving) if moving.id == id), None)

    def ended(self) -> Iterator[tuple[int, bool]]:
        """The transfers that have ended since this was asked last, and whether they went well."""
        while self._failed:
            yield self._failed[0], False
            self._was_heard(self._failed.popleft())  # after it was: an interrupt has it said again
        while self._moving:
            went_well = _has_passed(self._moving[0])
            if went_well is None:
                return
            yield self._moving[0].id, went_well
            self._was_heard(self._moving.popleft().id)

    def drain(self) -> None:
        """Until all that was put has ended."""
        self._jobs.join()
        for each in list(self._moving):
            try:
                each.mark.until_passed()
            except Exception:  # `ended` will hear of it too, and say whom it concerns
                logger.debug("transfer %d cannot be waited for", each.id, exc_info=True)

    def close(self) -> None:
        """End the thread, once all that was put has ended. What is put later fails."""
        self._closed = True
        self.drain()
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _was_heard(self, id: int) -> None:
        self._unheard.discard(id)
        self._taken_up.pop(id, None)
        self._submitted.pop(id, None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                with short_turns():
                    self._take_up(job)
            except BaseException:  # nobody else would, and those who wait for the next would wait for ever
                logger.exception("transfer %d was interrupted", job.transfer.id)
            finally:
                self._jobs.task_done()
        self._jobs.task_done()

    def _take_up(self, job: _Job) -> None:
        id = job.transfer.id
        with self._taking:
            if id not in self._waiting:
                return  # abandoned, and said to have failed
            self._waiting.discard(id)
        if self._is_cancelled(id):
            self._failed.append(id)
            return
        if self._clock is not None:
            self._taken_up[id] = self._clock()
        try:
            mark = self._copier.submit(job.transfer.direction, job.transfer.copies, job.after)
        except Exception:  # whatever it is, the transfer must resolve (rule 11)
            logger.exception("transfer %d failed", id)
            self._failed.append(id)
        except BaseException:
            self._failed.append(id)
            raise
        else:
            if self._clock is not None:
                self._submitted[id] = self._clock() - self._taken_up[id]
            self._moving.append(_Moving(id, mark))


def _has_passed(moving: _Moving) -> bool | None:
    """None: not yet. False: it never will, or nobody can tell any more."""
    try:
        return moving.mark.passed() or None
    except Exception:
        logger.exception("transfer %d failed", moving.id)
        return False
