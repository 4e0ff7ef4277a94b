"""The tier of a rank that opens itself, in a thread of its own and as often as it takes.

What it opens is a disk or a server, which may be missing, read-only, full, in use, or silent for ever. None of that may
keep an engine from starting, or hold its thread. So until it is open, this reports no generation, and does nothing.

    at first    whoever makes it waits for one attempt, for some seconds at most: what only the operator can change is
                raised then, and what can be opened is open for the first request
    later       it is tried again after a pause, ever longer; each reason is logged once
"""

import logging
import threading
import weakref
from collections.abc import Callable

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.plan import RankReport
from cpu_prefix_cache.messages.tier import TierPlan, TierReport
from cpu_prefix_cache.slab.rank_tier import RankTier
from cpu_prefix_cache.slab.tier_copier import SlotStatistics

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 5.0  # for the first attempt
PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0  # the first pause; each is twice the one before
CLOSE_SECONDS = 1.0  # for an attempt that is under way
NOTHING_MOVED = SlotStatistics(0, 0, 0.0, 0.0, 0)


class OpeningTier:
    """The tier of `rank` that `open` opens; `name` is for people. One thread calls it.

    Raises ConfigurationError when the first attempt does.
    """

    def __init__(self, rank: int, name: str, open: Callable[[], RankTier]) -> None:
        self._rank = rank
        self._attempts = _Attempts(name, open)
        self._end = weakref.finalize(self, self._attempts.give_up)
        error = self._attempts.first_error(PATIENCE_SECONDS)
        if error is not None:
            self._end()
            raise error

    @property
    def tier(self) -> RankTier | None:
        """None: it is not open."""
        return self._attempts.tier

    def run(self, plan: TierPlan) -> None:
        tier = self.tier or self._attempts.missed(plan)
        if tier is not None:
            tier.run(plan)

    def report(self) -> TierReport:
        if self.tier is None:
            return TierReport(RankReport(self._rank), next_generation=None)
        return self.tier.report()

    @property
    def is_busy(self) -> bool:
        return self.tier is not None and self.tier.is_busy

    def statistics(self) -> SlotStatistics:
        return NOTHING_MOVED if self.tier is None else self.tier.statistics()

    def drain(self) -> None:
        if self.tier is not None:
            self.tier.drain()

    def close(self) -> None:
        """Close it, or give up opening it. An attempt that hangs ends by itself. May be called again."""
        self._end()
        if self.tier is not None:
            self.tier.close()
        else:
            self._attempts.join(CLOSE_SECONDS)


class _Attempts(threading.Thread):
    """Opens a tier, which is `tier` from then on."""

    def __init__(self, name: str, open: Callable[[], RankTier]) -> None:
        super().__init__(name="tier-opening", daemon=True)
        self.tier: RankTier | None = None
        self._what, self._open = name, open
        self._lock, self._over, self._tried = threading.Lock(), threading.Event(), threading.Event()
        self._missed: TierPlan | None = None  # the first that follows the last reset
        self._first_error: ConfigurationError | None = None
        self._said = ""
        self.start()

    def first_error(self, seconds: float) -> ConfigurationError | None:
        """The first attempt's, without its frames, waiting so long for it. Other errors are no reason to stop."""
        if not self._tried.wait(seconds):
            self._say(f"nothing has answered within {seconds:.0f} s")
        return self._first_error

    def missed(self, plan: TierPlan) -> RankTier | None:
        """The tier, if it is open by now. If not, it is given the plan before it is, if that follows a reset."""
        with self._lock:
            if self.tier is None and plan.step.epoch > (self._missed.step.epoch if self._missed else 0):
                self._missed = plan
            return self.tier

    def give_up(self) -> None:
        """Do not open it any more."""
        with self._lock:
            self._over.set()

    def run(self) -> None:
        pause = PAUSE_SECONDS
        try:
            while not self._over.is_set() and not self._attempt():
                self._tried.set()
                self._over.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
        finally:
            self._tried.set()

    def _attempt(self) -> bool:
        """Whether nothing is left to do."""
        try:
            tier = self._open()
            try:
                is_wanted = self._hand_over(tier)
            except BaseException:
                tier.close()
                raise
        except Exception as error:
            self._failed(error)
            return False
        if not is_wanted:
            tier.close()
        elif self._said:
            logger.warning("%s is open now", self._what)
        return True

    def _hand_over(self, tier: RankTier) -> bool:
        """Whether anybody wants it. No plan is carried out with the lock, for which the engine's thread may wait."""
        carried_out: TierPlan | None = None
        while True:
            with self._lock:
                if self._over.is_set():
                    return False
                plan = self._missed
                if plan is None or plan is carried_out:
                    self.tier = tier
                    return True
            tier.run(plan)
            carried_out = plan

    def _failed(self, error: Exception) -> None:
        if not self._tried.is_set() and isinstance(error, ConfigurationError):
            self._first_error = error.with_traceback(None)  # said by whoever waits for it, or next time
            return
        self._say(str(error), None if isinstance(error, OSError | ConfigurationError) else error)

    def _say(self, reason: str, unexpected: Exception | None = None) -> None:
        if reason != self._said:
            self._said = reason
            logger.error(
                "%s cannot be opened: %s. The cache goes on without it, and tries again at least every %.0f s",
                self._what,
                reason,
                LONGEST_PAUSE_SECONDS,
                exc_info=unexpected,
            )
