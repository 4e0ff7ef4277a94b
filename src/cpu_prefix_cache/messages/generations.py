"""Generations: numbers of what a tier writes, of which none is given twice (rule 15).

The decider counts them, and begins a *range* at each start and each reset, so that a range alone tells what is from
before. Nothing has a generation of range 0: a tier that holds nothing begins with range 1, and even a reset that comes
before anything is known of it has a floor above 0.
"""

RANGE = 1 << 32
MOST = 1 << 63  # every generation is below


def range_of(generation: int) -> int:
    return generation // RANGE


def begin_of(number: int) -> int:
    """The first generation of a range."""
    return number * RANGE


FIRST = begin_of(1)
