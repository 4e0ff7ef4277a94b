"""Follows requests from the first question to the end of their loads, and remembers how each cache has done.

    answered      answers of the caches for a request in this step; decides (choice.py)
    admitted      the request goes ahead, with so many tokens from the one that was chosen, or none
    ended         its load has ended, well or not (loads.py)
    gone          the request has ended

Each question ends in one of these ways for each cache: it *wins* (its load ended well), it *misses*, or another one, or
computing, saved more time. It misses if it has

    nothing       no token beyond what the device has
    late          not known in time what it has
    error         raised an error at the query
    failed        failed to load what it had

A request whose load failed is looked up again, without the cache that failed. A cache that has missed a deadline is
not waited for until it has answered again, so one that never answers costs one deadline.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from connector.multi.choice import Answer, Decision, Prompt, Speed, decide
from connector.multi.loads import Loads

MISSES = ("nothing", "late", "error", "failed")
ERROR = -1  # in place of a number of tokens
NOBODY = Decision(None, ())


@dataclass
class Count:
    """Counts of what has become of the questions to one cache."""

    queries: int = 0
    wins: int = 0
    tokens: int = 0  # of what it has won
    misses: dict[str, int] = field(default_factory=lambda: dict.fromkeys(MISSES, 0))
    seconds: float = 0.0  # of the loads it has won
    pending: int = 0  # requests that wait for its answer now


@dataclass
class Asked:
    """A request that was not admitted yet. `tokens` has the last answer of each cache."""

    since: float
    tokens: Sequence[int | None] = ()
    choice: Decision = NOBODY


@dataclass(eq=False)
class Load:
    """One load of one request by one cache. `blocks` are those of the device that it may fill."""

    request: str
    cache: int
    tokens: int
    blocks: frozenset[int] = frozenset()
    has_failed: bool = False


class Chooser:
    """`deadlines` and `assumed` have an entry for each cache. `prefill` is the number of tokens computed in a second.

    In each step all caches are queried for each request that waits, also those which are not waited for.
    """

    def __init__(
        self,
        deadlines: Sequence[float],
        assumed: Sequence[Speed],
        bytes_per_token: float,
        prefill: Callable[[], float],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counts = [Count() for _ in assumed]
        self._loads = [Loads(speed) for speed in assumed]
        self._deadlines = deadlines
        self._bytes_per_token = bytes_per_token
        self._prefill = prefill
        self._clock = clock
        self._asked: dict[str, Asked] = {}
        self._admitted: set[str] = set()  # and not gone
        self._failed: defaultdict[str, set[int]] = defaultdict(set)  # request -> caches that it does not hear
        self._silent: set[int] = set()  # caches that have missed a deadline and not answered since

    def answered(self, id: str, tokens: Sequence[int | None], most_tokens: int) -> Decision:
        now = self._clock()
        asked = self._asked.setdefault(id, Asked(now))
        self._silent -= {at for at, each in enumerate(tokens) if each is not None}
        unheard = self._failed.get(id, ())
        answers = [self._answer(at, 0 if at in unheard else each, now) for at, each in enumerate(tokens)]
        prompt = Prompt(most_tokens, self._bytes_per_token, self._prefill())
        waited = now - asked.since
        choice = decide(answers, prompt, waited)
        before = asked.choice.waits_for
        self._silent |= {at for at in before if tokens[at] is None and waited >= self._deadlines[at]}
        self._note_waits(before, choice.waits_for)
        asked.tokens, asked.choice = tokens, choice
        return choice

    def _answer(self, at: int, tokens: int | None, now: float) -> Answer:
        patience = 0 if at in self._silent else self._deadlines[at]
        return Answer(tokens, self._loads[at].speed(now), patience)

    def admitted(self, id: str, tokens: int, blocks: Iterable[int] = ()) -> Load | None:
        """The load that begins, if one does. The engine may take fewer tokens than were offered, or none."""
        asked = self._forget(id)
        if asked is None:
            return None  # the engine says it again when the load has ended
        self._admitted.add(id)
        for at, said in enumerate(asked.tokens):
            if at not in self._failed.get(id, ()):
                self._count(at, said)
        winner = asked.choice.winner
        if winner is None or tokens <= 0:
            return None
        load = Load(id, winner, tokens, frozenset(blocks))
        self._loads[winner].asked(load, tokens * self._bytes_per_token, self._clock())
        return load

    def _count(self, at: int, tokens: int | None) -> None:
        count = self.counts[at]
        count.queries += 1
        if tokens is None:
            count.misses["late"] += 1
        elif tokens == ERROR:
            count.misses["error"] += 1
        elif tokens <= 0:
            count.misses["nothing"] += 1

    def ended(self, loads: Collection[Load], seconds: Sequence[float] | None = None) -> None:
        """Loads that ended together. `seconds`, where somebody has timed them: for each cache, of all its loads."""
        now = self._clock()
        for at, measured in enumerate(self._loads):
            good = [load for load in loads if load.cache == at and not load.has_failed]
            if good:
                count = self.counts[at]
                count.wins += len(good)
                count.tokens += sum(load.tokens for load in good)
                count.seconds += measured.ended(good, now, None if seconds is None else seconds[at])
        for load in loads:
            if load.has_failed:
                self._loads[load.cache].failed(load)
                self.counts[load.cache].misses["failed"] += 1
                if load.request in self._admitted:
                    self._failed[load.request].add(load.cache)

    def gone(self, id: str) -> None:
        self._forget(id)
        self._admitted.discard(id)
        self._failed.pop(id, None)

    def _forget(self, id: str) -> Asked | None:
        asked = self._asked.pop(id, None)
        if asked is not None:
            self._note_waits(asked.choice.waits_for, ())
        return asked

    def _note_waits(self, before: Sequence[int], after: Sequence[int]) -> None:
        for at in before:
            self.counts[at].pending -= 1
        for at in after:
            self.counts[at].pending += 1
