"""Loads that an engine relies on before their end, so that it computes as soon as they end.

An engine needs milliseconds from the report of a load until it computes. It may begin earlier, or wait for no report:

    ends_soon       the loads to announce to it: by the pace of earlier ones they end within this time
    still_open      before each plan: those of them that have not ended
    hold_compute    before anything reads what they bring: compute runs after them
"""

import time
from collections.abc import Callable, Iterable

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.worker import CopyWorker

NAP_SECONDS = 100e-6


class EarlyEnds:
    """The ends of one worker's loads before they come, by the worker's `clock`. Called by the thread that calls it."""

    def __init__(self, worker: CopyWorker, copier: Copier, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._worker, self._copier, self._clock = worker, copier, clock

    def ends_soon(self, seconds: float) -> set[int]:
        """The loads that will end within `seconds`, by the pace of earlier ones, and are more than half over. None
        without threads. Transfers are done only when they are in `report`."""
        pace, soon = self._worker.pace.seconds_per_byte, set[int]()
        for load in self._worker.open_loads():  # one at a time is on the link
            if pace is None or load.taken_up is None or load.is_late:
                break
            passed, expected = self._clock() - load.taken_up, load.transfer.num_bytes * pace
            if passed < max(expected - seconds, expected / 2):
                break
            soon.add(load.transfer.id)
        return soon

    def still_open(self, ids: Iterable[int]) -> set[int]:
        """Which of these loads have not ended. Called before each plan, because a plan may have an end forgotten.
        Raises RuntimeError if one has failed or is late: the engine relies on the blocks that it was to fill."""
        report = self._worker.report()
        lost = sorted((report.failed | report.late).intersection(ids))
        if lost:
            raise RuntimeError(_failed(lost[0]))
        return {load.transfer.id for load in self._worker.open_loads()}.intersection(ids)

    def hold_compute(self, ids: Iterable[int]) -> None:
        """Have what compute is given from now on run after these loads, once submitted. Raises like `still_open`."""
        wanted = self.still_open(ids)
        for load in [load for load in self._worker.open_loads() if load.transfer.id in wanted]:
            while (event := load.event) is None:
                time.sleep(NAP_SECONDS)
                self.still_open(ids)
            try:
                event.hold(self._copier.hold_compute)
            except Exception as error:
                raise RuntimeError(f"{_failed(load.transfer.id)}: {error}") from error


def _failed(id: int) -> str:
    return f"load {id} has failed, and the engine relies on what it was to load: it must stop, and be started again"
