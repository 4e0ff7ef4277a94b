"""Hints of the next use for a trace, as clients would give them: what `replay --hints` adds to its requests.

    exact                  the seconds until the next prompt begins like this one; infinity: none does
    noisy:FACTOR:SHARE     these, each FACTOR times as long or as short (one standard deviation), and in a share of the
                           requests wrong about whether it is used again at all

A prompt begins like this one if it has all of its blocks but the last, which may have been cut short. The wrong ones
are infinity where the prompt is used again, and where it is not, the time of another one that is.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, inf, isfinite, log

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.tools.replay.traces import Trace, TraceRequest

EXACT, NOISY = "exact", "noisy"
SEED = 1  # of what is wrong: the same in each replay


@dataclass(frozen=True, slots=True)
class Hints:
    """How wrong the hints are. `factor` 1 and `share` 0: not at all."""

    factor: float = 1.0
    share: float = 0.0


def hints_of(text: str) -> Hints:
    """Read `--hints`. Raises ConfigurationError."""
    if text == EXACT:
        return Hints()
    name, *given = text.split(":")
    try:
        factor, share = map(float, given)
    except ValueError:
        factor = share = inf
    if name == NOISY and 1 <= factor < inf and 0 <= share <= 1:
        return Hints(factor, share)
    raise ConfigurationError(
        f"--hints is {EXACT} or {NOISY}:FACTOR:SHARE, such as {NOISY}:2.7:0.1 for times that are wrong by a factor of "
        f"2.7 and a tenth that is wrong about whether there is a next use; got {text[:40]!r}"
    )


def with_hints(trace: Trace, hints: Hints) -> Trace:
    """The trace, with a hint in each request."""
    exact = list(next_uses(trace.requests))
    given = _wrong(exact, hints)
    requests = [request._replace(next_use=each) for request, each in zip(trace.requests, given, strict=True)]
    return replace(trace, requests=requests)


def describe_hints(hints: Hints) -> str:
    if hints == Hints():
        return "each request has the time until its next use for a hint, which only `adaptive` uses"
    return (
        f"each request has a hint of the time until its next use, wrong by a factor of {hints.factor:g}, and of "
        f"{hints.share:.0%} of them wrong about whether there is one; only `adaptive` uses it"
    )


def next_uses(requests: Sequence[TraceRequest]) -> list[float]:
    """The seconds until a later prompt has all blocks but the last of each of these; infinity: none has."""
    found = [inf] * len(requests)
    used: dict[bytes, float] = {}  # by key: the next use of what it ends
    for number in range(len(requests) - 1, -1, -1):
        request = requests[number]
        if request.keys:
            found[number] = used.get(request.keys[-2:][0], inf) - request.now
        used.update(dict.fromkeys(request.keys, request.now))
    return found


def _wrong(exact: Sequence[float], hints: Hints) -> Iterator[float]:
    """These hints, as wrong as `hints` says."""
    chance, deviation = random.Random(SEED), log(hints.factor)
    finite = [each for each in exact if isfinite(each)] or [inf]
    for each in exact:
        is_wrong, error, other = chance.random() < hints.share, exp(chance.gauss(0.0, deviation)), chance.choice(finite)
        if is_wrong:
            each = inf if isfinite(each) else other
        yield each * error
