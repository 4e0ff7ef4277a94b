"""How soon what was used is used again: survival statistics, learned while serving.

What was used is sorted into *classes* of like uses (kinds.py), and by its age into *bins*, each wider than the one
before. A *bucket* is a class and a bin:

    age in seconds   0   2   8   32   64   128   192   288  ...  16,607 ... 65,536
    bin                0   1   2    3    4     5     6      ...          17

The rate of reuse in a bucket is the reuses that happened in it, divided by the seconds that all segments have spent in
it together, those that are in it still included. Where little is known the rate leans on that of all classes, times a
factor for each *feature* of the class. Where nothing at all is known the rate falls with age: least recently used. A
class that was *hinted* to be used again in some bin begins with reuses in and near that bin, and hardly any in others.

The *worth* of a bucket is the best that keeping one block from this age on can bring: the largest ratio, over all ages
at which it may be evicted, of the chance of a reuse until then to the time that it is expected to be held (the index of
Gittins, 1979, for a stopping problem; Aalto, Ayesta and Righter, Queueing Systems 63, 2009, on its pooling). It need
not fall with age: a conversation that nobody continues within the time of a tool call is worth more after it.

Classes are learned anew one at a time, and what was seen long ago counts less each time, so that no call takes long.
"""

from collections.abc import Mapping, Sequence
from math import expm1, prod
from operator import add, getitem, mul, sub, truediv

# Where bins begin and end, in seconds: finer where caches of a useful size evict, after minutes.
EDGES = (0.0, 2.0, 8.0, 32.0, 64.0, *(128.0 * 1.5**step for step in range(13)), 65_536.0)
BINS = len(EDGES) - 1
WIDTHS = tuple(EDGES[at + 1] - EDGES[at] for at in range(BINS))
# A bin starts with 40 segments of which 8 % are used again in it, and a class with 40 that behave like all others.
PRIOR_SEGMENTS = 40.0
PRIOR_SECONDS = tuple(width * PRIOR_SEGMENTS for width in WIDTHS)
PRIOR_REUSES = 0.08 * PRIOR_SEGMENTS
# Of those that reach a bin that is two bins from the hinted one at most, a factor of 2 or so; and of the others.
HINTED_BINS, HINTED_SHARE, UNHINTED_SHARE = 2, 0.3, 0.01
FACTOR_REUSES = 10.0
HALF_LIFE_REQUESTS = 3_100  # .8 in a thousand


class Survival:
    """Rates and worths of the buckets of all classes. `features[c]` are the levels of the features of class c, and
    `hinted[c]` is the bin in which it is expected to be used again, if it was hinted at all; BINS: never.

    Callers keep `reuses`, `inside` (how many are in a bucket now) and `seconds`: when something enters a bucket, the
    time is subtracted from `seconds`, and when it leaves, added; a reuse counts in the bucket it ends. Nothing of class
    c may leave before `since[c]`, when it was last learned: its time until then counts less already.
    """

    def __init__(self, features: Sequence[tuple[int, ...]], hinted: Mapping[int, int]) -> None:
        self._features = features
        self._expected = {each: expected_reuses(bin) for each, bin in hinted.items()}
        buckets = len(features) * BINS
        self.reuses = [0.0] * buckets
        self.inside = [0] * buckets
        self.seconds = [0.0] * buckets
        self.since = [0.0] * len(features)
        self.worth = [0.0] * buckets
        self.known: dict[int, None] = {}  # classes, in the order in which they came
        self._learned_at = [0] * len(features)  # in requests
        self._requests = 0
        self._seen = [([0.0] * BINS, [0.0] * BINS)] * len(features)  # reuses and seconds, when a class was last learned
        self._rate: list[float] = []  # of all classes
        self._prior: list[float] = []  # the reuses that a class begins with, were it like all
        self._came = [(0.0, 0.0)] * len(features)  # reuses of a class, and how many there would be if it were like all
        self._factors = [dict.fromkeys(levels, 1.0) for levels in zip(*features, strict=True)]
        self._product = [1.0] * len(features)  # of the factors of a class
        self._rounds = 0
        self._set_rate()

    def begin(self, each: int) -> None:
        """Something of class `each` is there for the first time."""
        self.known[each] = None
        self._product[each] = prod(map(getitem, self._factors, self._features[each]))
        self._learned_at[each] = self._requests

    def begin_round(self, requests: int) -> list[int]:
        """All classes that are known, each to be learned anew. So many requests have come so far."""
        self._requests = requests
        self._set_rate()
        self._fit_factor(self._rounds % len(self._factors))
        self._rounds += 1
        return list(self.known)

    def learn(self, each: int, now: float) -> None:
        """Set the worth of the buckets of a class from what is known at `now`."""
        first, stop = each * BINS, (each + 1) * BINS
        decay = 0.5 ** ((self._requests - self._learned_at[each]) / HALF_LIFE_REQUESTS)
        self._learned_at[each] = self._requests
        self.since[each] = now
        inside = [count * now for count in self.inside[first:stop]]
        reuses = [count * decay for count in self.reuses[first:stop]]
        seconds = [spent * decay for spent in map(add, self.seconds[first:stop], inside)]
        self.reuses[first:stop] = reuses
        self.seconds[first:stop] = map(sub, seconds, inside)
        self._seen[each] = reuses, seconds
        self._came[each] = sum(reuses), sum(map(mul, seconds, self._rate))
        leaning = self._expected.get(each) or map(self._product[each].__mul__, self._prior)
        self.worth[first:stop] = worths(list(map(truediv, map(add, reuses, leaning), map(add, seconds, PRIOR_SECONDS))))

    def check_valid(self, now: float) -> None:
        """Assert that nothing has spent less than no time anywhere. For tests."""
        for spent, inside in filter(any, zip(self.seconds, self.inside, strict=True)):  # a few of thousands
            assert spent + inside * now > -1e-6 * max(1.0, inside * now), "time was taken back"

    def _set_rate(self) -> None:
        """The rate of all classes, as they were when they were last learned."""
        reuses, seconds = [PRIOR_REUSES] * BINS, list(PRIOR_SECONDS)
        for each in self.known:
            came, spent = self._seen[each]
            reuses, seconds = list(map(add, reuses, came)), list(map(add, seconds, spent))
        self._rate = list(map(truediv, reuses, seconds))
        self._prior = list(map(mul, self._rate, PRIOR_SECONDS))

    def _fit_factor(self, feature: int) -> None:
        """A step of backfitting: the reuses of each level come out right, given what the other features are worth."""
        factors, product = self._factors[feature], self._product
        sums: dict[int, tuple[float, float]] = {}
        for each in self.known:
            level = self._features[each][feature]
            came, expected = self._came[each]
            all_came, all_expected = sums.get(level, (FACTOR_REUSES, FACTOR_REUSES))
            sums[level] = all_came + came, all_expected + expected * product[each] / factors[level]
        change = {level: came / expected / factors[level] for level, (came, expected) in sums.items()}
        for each in self.known:
            product[each] *= change[self._features[each][feature]]
        factors.update((level, factors[level] * by) for level, by in change.items())


def expected_reuses(hinted: int) -> list[float]:
    """The reuses that a class begins with in each bin, if it is expected to be used again in bin `hinted`."""
    shares = (HINTED_SHARE if abs(bin - hinted) <= HINTED_BINS else UNHINTED_SHARE for bin in range(BINS))
    return [PRIOR_SEGMENTS * share for share in shares]


def worths(rates: Sequence[float]) -> list[float]:
    """The worth of each bin, if reuse comes at these rates, a bin. O(bins), by pooling from the last one.

    >>> [round(worth, 3) for worth in worths([0.1] * 17 + [0.3])]  # worth waiting for, from where it is near
    [0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.3]
    """
    found = [0.0] * len(rates)
    pooled: list[tuple[float, float, float, float]] = []  # (worth, chance, seconds, chance of none) of runs of bins
    for bin in range(len(rates) - 1, -1, -1):
        worth = rates[bin]
        chance = -expm1(-worth * WIDTHS[bin])
        seconds, none = chance / worth, 1.0 - chance
        while pooled and pooled[-1][0] > worth:
            _, more, longer, and_none = pooled.pop()
            chance += none * more
            seconds += none * longer
            none *= and_none
            worth = chance / seconds
        found[bin] = worth
        pooled.append((worth, chance, seconds, none))
    return found
