"""Small traces for tests. A prompt is letters, one to a block, and equal letters up to one mean an equal prefix."""

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cpu_prefix_cache.tools.replay.traces import Trace, TraceRequest


def trace_of(prompts: Iterable[str], block_tokens: int = 1) -> Trace:
    """A prompt a second. Keys are long enough for the forest, whose keys are digests."""
    requests = [
        TraceRequest(
            float(at),
            [prompt[:end].rjust(16, "-").encode() for end in range(1, len(prompt) + 1)],
            len(prompt) * block_tokens,
        )
        for at, prompt in enumerate(prompts)
    ]
    return Trace(["made up"], block_tokens, requests)


def random_prompts(seed: int, count: int, letters: str = "ab", longest: int = 7) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(letters, k=draw.randint(1, longest))) for _ in range(count)]


def ids_of(prompts: Iterable[str]) -> list[list[int]]:
    """The same prompts as chained ids."""
    known: dict[str, int] = {}
    return [[known.setdefault(prompt[:end], len(known)) for end in range(1, len(prompt) + 1)] for prompt in prompts]


def mooncake_lines(prompts: Iterable[str], block_tokens: int = 512) -> list[dict[str, Any]]:
    return [
        {"timestamp": at * 1000, "input_length": len(ids) * block_tokens, "output_length": 1, "hash_ids": ids}
        for at, ids in enumerate(ids_of(prompts))
    ]


def write(path: Path, lines: Sequence[Any]) -> str:
    """Lines that are not text are written as JSON."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)
