"""Cost of computing a chunk again, by its depth, in *levels*: depths of about the same cost.

    level                 0      1      2      3 ...
    cost, at least        1   1.25   1.56   1.95        of what a chunk at the beginning of a prompt costs

>>> levels = Levels(even_depth=52)  # chunks: of 512 tokens, in Llama 3.1 8B
>>> [levels.of(depth) for depth in (1, 12, 13, 50, 52, 250)]
[0, 0, 1, 3, 3, 7]
>>> Levels(inf).costs  # what the depth does not change
[1.0]
"""

from bisect import bisect_left, bisect_right
from math import inf

STEP = 1.25  # with 1.1 and 1.5 the time saved is within .9 points (docs/policies.md)
DEEPEST = range(1, 1 << 22)  # chunks


class Levels:
    """At `even_depth`, in chunks, the attention of a chunk costs as much as everything else of it; infinite: all depths
    cost the same. `costs` are those of the levels.
    """

    def __init__(self, even_depth: float = inf) -> None:
        def cost(depth: int) -> float:
            return 1 + depth / even_depth

        self.costs = [1.0]
        self._begins: list[int] = []  # of all levels but the first
        while (at := bisect_left(DEEPEST, self.costs[-1] * STEP, key=cost)) < len(DEEPEST):
            self.costs.append(self.costs[-1] * STEP)
            self._begins.append(DEEPEST[at])

    def of(self, depth: int) -> int:
        """The level of the chunk that is the `depth`-th of its prompt."""
        return bisect_right(self._begins, depth)
