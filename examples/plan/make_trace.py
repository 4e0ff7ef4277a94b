"""A synthetic trace of coding agents, in Mooncake's format, from a fixed seed. Nobody recorded it.

    python examples/plan/make_trace.py examples/plan/synthetic.jsonl.gz

Sessions begin all over an hour, each with a system prompt that many have and a repository that some have. Each turn
repeats the prompt so far and adds to it; pauses between turns are mostly half a minute, and often a quarter of an hour.
"""

import gzip
import heapq
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HOUR, BLOCK_TOKENS = 3600.0, 512
SESSIONS, REPOSITORIES = 320, 40
SYSTEM_BLOCKS = 8
SEED = 20


class Session:
    """A prompt that grows. `ids` are chained: equal ids are equal prefixes."""

    def __init__(self, draw: random.Random, shared: list[int], starts: float) -> None:
        self.now = starts
        self.turns = 1 + int(draw.expovariate(1 / 6))
        self.ids = list(shared)

    def turn(self, draw: random.Random, fresh: Iterator[int]) -> dict[str, Any]:
        """The next request; then a pause."""
        self.ids += [next(fresh) for _ in range(1 + int(draw.expovariate(1 / 8)))]
        request = {
            "timestamp": int(self.now * 1000),
            "input_length": BLOCK_TOKENS * len(self.ids),
            "output_length": 300,
            "hash_ids": list(self.ids),
        }
        self.turns -= 1
        self.now += draw.expovariate(1 / 40) if draw.random() < 0.6 else draw.expovariate(1 / 900)
        return request


def requests(seed: int = SEED) -> Iterator[dict[str, Any]]:
    """Requests of one hour, in order of time."""
    draw, fresh = random.Random(seed), iter(range(10**9))
    system = [next(fresh) for _ in range(SYSTEM_BLOCKS)]
    repositories = [system + [next(fresh) for _ in range(draw.randint(4, 30))] for _ in range(REPOSITORIES)]
    sessions = [Session(draw, draw.choice(repositories), draw.uniform(0, HOUR)) for _ in range(SESSIONS)]
    waiting = [(session.now, at) for at, session in enumerate(sessions)]
    heapq.heapify(waiting)
    while waiting and waiting[0][0] < HOUR:
        _, at = heapq.heappop(waiting)
        yield sessions[at].turn(draw, fresh)
        if sessions[at].turns:
            heapq.heappush(waiting, (sessions[at].now, at))


def lines() -> str:
    return "".join(json.dumps(request, separators=(",", ":")) + "\n" for request in requests())


def main(path: str) -> None:
    Path(path).write_bytes(gzip.compress(lines().encode(), mtime=0))


if __name__ == "__main__":
    main(*sys.argv[1:])
