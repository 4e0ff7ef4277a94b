"""Trials: when a little is read of a tier that seems slower than computing, since nothing else measures its rate again.

    it saves time    read whenever that is so
    it does not      tried after FIRST_SECONDS, then each time after as long as it has not, LONGEST_SECONDS at most

So a rate that was low for a moment, as when many engines begin to read at once, is corrected within seconds, and a tier
that stays slow delays some request once in a minute.
"""

FIRST_SECONDS, LONGEST_SECONDS = 2.0, 60.0


class Trials:
    """Times at which one tier was read.

    >>> trials = Trials()
    >>> trials.saves(100.0)
    >>> trials.is_due(101.0), trials.is_due(102.0)
    (False, True)
    >>> trials.tries(110.0)
    >>> trials.is_due(119.0), trials.is_due(120.0)
    (False, True)
    """

    def __init__(self) -> None:
        self._saved_at = self._read_at = 0.0  # when something was last read to save time, and at all

    def saves(self, now: float) -> None:
        """Something is read to save time."""
        self._saved_at = self._read_at = now

    def tries(self, now: float) -> None:
        """A little is read to measure the rate."""
        self._read_at = now

    def is_due(self, now: float) -> bool:
        pause = max(FIRST_SECONDS, self._read_at - self._saved_at)
        return now >= self._read_at + min(pause, LONGEST_SECONDS)
