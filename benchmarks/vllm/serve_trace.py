"""Which requests `serve.py` replays: a trace in Mooncake's format, scaled, cut, and dealt to users.

A line has `timestamp` (ms), `input_length`, `output_length` and chained `hash_ids`; `session` is optional, and without
it each request is a session. A block of the trace becomes one of `block_tokens` tokens, so that a trace of a large
model fits one GPU; prompts shrink in proportion, and who shares what with whom does not change.
"""

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

TRACE_BLOCK = 512  # tokens of a block of Mooncake's traces


@dataclass(frozen=True)
class Request:
    """`ids` are the blocks of a prompt of `tokens` tokens, whose last one may be cut; `at` is in seconds."""

    at: float
    session: str
    ids: tuple[int, ...]
    tokens: int
    answer: int

    def pieces(self, block_tokens: int) -> list[tuple[int, int]]:
        """The prompt as seeds of random pieces with their lengths: equal ids give equal pieces of equal prefixes."""
        cut = len(self.ids) * block_tokens - self.tokens
        lengths = [block_tokens] * (len(self.ids) - 1) + [block_tokens - cut]
        return list(zip(self.ids, lengths, strict=True))


def read(path: Path, block_tokens: int, max_answer: int, max_tokens: int) -> tuple[list[Request], int]:
    """The requests in order of time, and how many were left out, because prompt and answer exceed `max_tokens`."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        requests = [_request(number, json.loads(line), block_tokens, max_answer) for number, line in enumerate(lines)]
    fitting = [request for request in requests if request.tokens + request.answer <= max_tokens]
    return sorted(fitting, key=lambda request: request.at), len(requests) - len(fitting)


def _request(number: int, line: dict, block_tokens: int, max_answer: int) -> Request:
    ids = tuple(line["hash_ids"])
    if not ids:
        raise ValueError(f"request {number} of the trace has no hash_ids")
    last = -(-(line["input_length"] - (len(ids) - 1) * TRACE_BLOCK) * block_tokens // TRACE_BLOCK)
    return Request(
        at=line["timestamp"] / 1e3,
        session=str(line.get("session", f"request {number}")),
        ids=ids,
        tokens=(len(ids) - 1) * block_tokens + min(max(1, last), block_tokens),
        answer=max(1, min(line["output_length"], max_answer)),
    )


def dealt(requests: Sequence[Request], users: int, limit: int) -> list[list[Request]]:
    """For each user the requests that they send one after the other, `limit` in all: the same for every engine.

    A user plays a session to its end, then the earliest that nobody has begun. They take turns until there are `limit`.

    >>> [one, two, other, last] = [Request(at, session, (1,), 1, 1) for at, session in enumerate("aabc")]
    >>> [[request.session for request in user] for user in dealt([one, two, other, last], users=2, limit=4)]
    [['a', 'a'], ['b', 'c']]
    """
    sessions: dict[str, list[Request]] = {}
    for request in requests:
        sessions.setdefault(request.session, []).append(request)
    waiting = iter(sessions.values())
    playing = [iter(()) for _ in range(users)]
    shares: list[list[Request]] = [[] for _ in range(users)]
    while (left := limit - sum(map(len, shares))) > 0:
        before = left
        for user in range(min(users, left)):
            request = next(playing[user], None)
            if request is None:
                playing[user] = iter(next(waiting, ()))
                request = next(playing[user], None)
            if request is not None:
                shares[user].append(request)
                left -= 1
        if left == before:
            break
    return [share for share in shares if share]


def timed(requests: Sequence[Request], rate: float, limit: int) -> list[tuple[float, Request]]:
    """The first `limit` requests with the seconds at which they are sent: the trace's times, stretched to `rate` a
    second. Requests of one millisecond or of one trace without times are spread evenly."""
    chosen = requests[:limit]
    span = chosen[-1].at - chosen[0].at
    duration = len(chosen) / rate
    if span == 0:
        return [(at / rate, request) for at, request in enumerate(chosen)]
    return [((request.at - chosen[0].at) / span * duration, request) for request in chosen]


def ideal_hit(requests: Iterable[Request], block_tokens: int) -> float:
    """The share of prompt tokens that an endless cache finds: each whole block is computed once."""
    requests = list(requests)
    different = {id for request in requests for id in request.ids}
    total = sum(request.tokens for request in requests)
    return max(0.0, 1 - len(different) * block_tokens / total)
