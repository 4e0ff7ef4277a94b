"""Guesses facts of a trace that no field of it has: the unit of its timestamps, and the tokens of a block."""

from collections.abc import Sequence

MOONCAKE_BLOCK_TOKENS = 512
LOG_BLOCK_TOKENS = 16
# Sizes that engines and published traces have; the first is taken where several fit.
LIKELY_BLOCK_TOKENS = (MOONCAKE_BLOCK_TOKENS, 16, 32, 64, 128, 256, 8, 4, 1, 1024, 2048)
UNITS_A_SECOND = {"s": 1, "ms": 1000}
SHORTEST_MS = 600_000  # a span is taken for milliseconds if that makes ten minutes; in seconds it would be a week
SINCE_1970_S, SINCE_1970_MS = 10**9, 10**12  # a day in 2001


def time_unit_of(span: float, first: float = 0) -> str:
    """Guess the unit of timestamps from the difference of the last and the first, and from the first.

    It is milliseconds, as in Mooncake's traces, unless that makes less than ten minutes; also for a difference of 0.
    Timestamps that are large enough count from 1970, and show their own unit.

    >>> time_unit_of(3_600_000), time_unit_of(3_600), time_unit_of(0)  # an hour, an hour, nothing
    ('ms', 's', 'ms')
    >>> time_unit_of(3_600_000, 1.7e9), time_unit_of(3_600, 1.7e12)  # 41 days, 4 seconds
    ('s', 'ms')
    """
    if first >= SINCE_1970_S:
        return "s" if first < SINCE_1970_MS else "ms"
    return "s" if 0 < span < SHORTEST_MS else "ms"


def block_tokens_of(prompts: Sequence[tuple[int, int]]) -> int:
    """Guess the tokens of a block from prompts, each given as its tokens and the number of its ids.

    It is the size, of those that are common, that fits most prompts: with the last block that is not full, or without.

    >>> block_tokens_of([(1100, 3), (512, 1)]), block_tokens_of([(1100, 69), (512, 32)]), block_tokens_of([(9, 1)])
    (512, 16, 512)
    """
    return max(LIKELY_BLOCK_TOKENS, key=lambda size: sum(fits(size, *prompt) for prompt in prompts))


def fits(block_tokens: int, tokens: int, blocks: int) -> bool:
    """Whether so many blocks of this size are a prompt of so many tokens, its last block being full or not."""
    return 0 < tokens - (blocks - 1) * block_tokens < 2 * block_tokens
