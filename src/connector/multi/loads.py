"""How fast one cache loads, measured from its loads.

    seconds of a load = overhead + bytes / rate         the line through its last loads

    asked            a load begins to count as queued
    ended            those that ended together are one point: their bytes, and the seconds since the end before, or
                     since their request if nothing was under way

What is assumed of a cache counts until its first load has ended. It is also a point of the line, at no bytes: loads of
one length alone do not show the overhead. If nothing has been loaded for a long time, the assumption counts again
for one load, because a cache that was slow once would otherwise never be chosen again. As late as the load is that has
been under way longest, so late will the next one be: no more loads are given to a cache whose loads do not end.

>>> loads = Loads(assumed=Speed(rate=25e9, overhead=0.008))
>>> loads.asked("a", 10**9, now=0.0)
>>> loads.asked("b", 10**9, now=0.0)
>>> loads.speed(now=0.0)
Speed(rate=25000000000.0, overhead=0.008, queue_bytes=2000000000)
>>> loads.ended(["a"], now=0.208), loads.ended(["b"], now=0.416)  # 5 GB/s
(0.208, 0.208)
>>> speed = loads.speed(now=0.5)
>>> round(speed.rate / 1e9, 3), round(speed.overhead, 3), speed.queue_bytes
(5.0, 0.008, 0)
>>> loads.speed(now=1000.0).rate / 1e9
25.0
"""

import math
from collections import deque
from collections.abc import Hashable, Iterable
from statistics import fmean, linear_regression
from typing import NamedTuple

from connector.multi.choice import Speed

LOADS_REMEMBERED = 32
SECONDS_REMEMBERED = 600.0  # a try every ten minutes, of one load


class LoadPoint(NamedTuple):
    end: float
    num_bytes: float
    seconds: float


class Loads:
    """Loads of one cache. The caller gives each load an id of its own."""

    def __init__(self, assumed: Speed) -> None:
        self._assumed = assumed
        self._under_way: dict[Hashable, tuple[float, float]] = {}  # bytes, and when it was asked for
        self._points: deque[LoadPoint] = deque(maxlen=LOADS_REMEMBERED)
        self._line = assumed
        self._last_end = -math.inf

    def speed(self, now: float) -> Speed:
        """Speed of a load that begins now."""
        if not self._under_way:
            return self._assumed if now - self._last_end > SECONDS_REMEMBERED else self._line
        queue = sum(num_bytes for num_bytes, _ in self._under_way.values())
        num_bytes, asked = next(iter(self._under_way.values()))
        expected = self._line.overhead + num_bytes / self._line.rate
        late = max(0.0, now - max(self._last_end, asked) - expected)
        return Speed(self._line.rate, self._line.overhead + late, queue)

    def asked(self, id: Hashable, num_bytes: float, now: float) -> None:
        self._under_way[id] = num_bytes, now

    def ended(self, ids: Iterable[Hashable], now: float, seconds: float | None = None) -> float:
        """These loads have ended well, and took so many seconds; if somebody has timed them, `seconds`.

        Returns the seconds.
        """
        loads = [self._under_way.pop(id) for id in ids]
        if seconds is None:
            seconds = now - max(self._last_end, min(asked for _, asked in loads))
        if now - self._last_end > SECONDS_REMEMBERED:
            self._points.clear()
        self._points.append(LoadPoint(now, sum(num_bytes for num_bytes, _ in loads), seconds))
        self._last_end = now
        self._line = self._fit()
        return seconds

    def failed(self, id: Hashable) -> None:
        """A load that failed does not measure the speed."""
        del self._under_way[id]

    def _fit(self) -> Speed:
        sizes = [0.0, *(point.num_bytes for point in self._points)]
        seconds = [self._assumed.overhead, *(point.seconds for point in self._points)]
        slope = max(0.0, linear_regression(sizes, seconds).slope)
        overhead = max(0.0, fmean(seconds) - slope * fmean(sizes))
        return Speed(rate=1 / slope if slope else math.inf, overhead=overhead)
