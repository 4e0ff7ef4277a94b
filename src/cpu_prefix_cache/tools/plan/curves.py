"""Curves of the prefill time that host memory saves, over the sizes that one can buy.

    a policy            the host evicts by it
    a policy + coded    blocks take less, and a size holds more of them
    a policy + tier     above a tier of files, on those sizes that are at most half of it

Above a size that never evicted a curve goes on level, and nothing more is replayed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.messages.sizes import parse_bytes
from cpu_prefix_cache.messages.tier import SLOTS_BY_HOST
from cpu_prefix_cache.tools.replay.outcome import Outcome, Tally
from cpu_prefix_cache.tools.replay.prefill_work import Work
from cpu_prefix_cache.tools.replay.replays import Tiers, replayed
from cpu_prefix_cache.tools.replay.tiers import HostTier
from cpu_prefix_cache.tools.replay.traces import Trace

SIZES = "64GiB:4TiB"
MOST_SIZES = 16
NEARLY = 0.005  # a share of prefill for which nobody changes a policy
CODED, TIER = "coded", "tier"  # variants of a curve


def sizes_of(text: str) -> tuple[int, ...]:
    """Bytes from the first size to the last, each twice the one before.

    >>> [size >> 30 for size in sizes_of("16GiB:64GiB")]
    [16, 32, 64]
    """
    first, colon, last = text.partition(":")
    least, most = parse_bytes(first), parse_bytes(last if colon else first)
    sizes = tuple(least << power for power in range(MOST_SIZES) if least << power <= most)
    if len(sizes) < 2 or sizes[-1] * 2 <= most:
        raise ConfigurationError(
            f"--sizes is the first and the last of 2 to {MOST_SIZES} sizes, each twice the one before, such as "
            f"{SIZES}; got {text[:40]!r}"
        )
    return sizes


@dataclass(frozen=True, slots=True)
class Curve:
    """Outcomes of one way to keep blocks, by size of the host; none of sizes too large for the tier."""

    policy: str
    outcomes: tuple[Outcome, ...]
    variant: str = ""

    @property
    def name(self) -> str:
        return f"{self.policy} + {self.variant}" if self.variant else self.policy

    @property
    def shares(self) -> list[float]:
        """Prefill time saved by each size, as a share of that of all prompts."""
        return [outcome.share_saved or 0.0 for outcome in self.outcomes]


def outcomes_by_size(trace: Trace, policy: str, capacities: Sequence[int], tiers: Tiers) -> tuple[Outcome, ...]:
    """Replay these hosts, in blocks, ascending."""
    outcomes: list[Outcome] = []
    for capacity in capacities:
        if tiers.below is not None and tiers.below.capacity < SLOTS_BY_HOST * capacity:
            break
        if outcomes and not outcomes[-1].tally.evictions:
            outcomes.append(replace(outcomes[-1], capacity=capacity))
        else:
            outcomes.append(replayed(trace, HostTier(capacity, policy), tiers))
    return tuple(outcomes)


def preferred_of(curves: Sequence[Curve]) -> Curve:
    """The first curve that saves on average as much as the best, but for `NEARLY`: defaults come first."""
    means = [sum(each.shares) / len(each.shares) for each in curves]
    return next(each for each, mean in zip(curves, means, strict=True) if mean >= max(means) - NEARLY)


def origins_of(tally: Tally, trace: Trace) -> dict[str, int]:
    """Tokens of all prompts by where their KV came from."""
    from_tier = min(tally.below_hit_blocks * trace.block_tokens, tally.loaded.tokens)
    return {
        "device": tally.hit.tokens - tally.loaded.tokens,
        "host": tally.loaded.tokens - from_tier,
        "tier": from_tier,
        "computed": trace.tokens - tally.hit.tokens,
    }


def shares_of(origins: Mapping[str, int]) -> dict[str, float]:
    return {name: count / sum(origins.values()) for name, count in origins.items()}


def computed_work(tally: Tally, trace: Trace) -> Work:
    """Work that no hit spared."""
    return _without(trace.work, tally.hit)


def _without(whole: Work, part: Work) -> Work:
    return Work(whole.tokens - part.tokens, whole.pairs - part.pairs)
