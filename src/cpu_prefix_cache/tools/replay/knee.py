"""Where a curve over doubled memory bends.

>>> saved = [0.437, 0.669, 0.864, 0.906, 0.914, 0.915]  # of 64 to 2,048 GiB
>>> flat_from(saved)  # 512 GiB
3
"""

from collections.abc import Sequence
from itertools import pairwise

FLAT = 0.02


def flat_from(values: Sequence[float], flat: float = FLAT) -> int | None:
    """Index from which on each step to the next adds less than `flat`; None if the last step adds more."""
    gains = [more - less for less, more in pairwise(values)]
    return next((at for at in range(len(gains)) if max(gains[at:]) < flat), None)
