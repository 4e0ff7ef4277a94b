"""Turns the prompts of logs into the lines of a trace: when, how many tokens, and numbers of blocks."""

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from cpu_prefix_cache.tools.replay.lines import BadLine, TraceError
from cpu_prefix_cache.tools.replay.request_bodies import Content
from cpu_prefix_cache.tools.replay.request_logs import Recorded, RequestLog
from cpu_prefix_cache.tools.replay.sharing import Apart, ApartHasher
from cpu_prefix_cache.tools.replay.tokenizer import FolderTokenizer

MADE_UP, OF_DAY, NUMBERS = "missing", "a time of the day", "a number"


class Converted(NamedTuple):
    """A line of the trace to be. `now` is in the unit of the log; the request came `later` seconds after it."""

    now: float
    later: float
    tokens: int
    ids: list[int]


class Converter:
    """Turns prompts into numbers of blocks.

    times     what those of the log are, once a request was seen
    aparts    what keeps prompts apart: the different values of it
    paused    questions that came --pause seconds after the one before, because their conversation has one time for all
    """

    def __init__(self, tokenizer: FolderTokenizer | None, block_tokens: int, every: float, pause: float) -> None:
        self._tokenizer = tokenizer
        self._hasher = ApartHasher(block_tokens)
        self._numbers: dict[bytes, int] = {}
        self._every, self._pause = every, pause
        self.times: str | None = None
        self.paused = 0

    @property
    def aparts(self) -> Collection[Apart]:
        return self._hasher.aparts

    @property
    def different(self) -> int:
        return len(self._numbers)

    def convert(self, log: RequestLog) -> Iterable[Converted]:
        for request in log.read():
            try:
                yield self._converted(request)
            except BadLine as error:
                log.lines.refuse(request.line, error)

    def _converted(self, request: Recorded) -> Converted:
        now, tokens = self._time(request), self._tokens(request.content)
        keys = self._hasher.keys(tokens, request.apart)
        ids = [self._numbers.setdefault(key, len(self._numbers)) for key in keys]
        self.paused += request.turn > 0
        return Converted(now, request.turn * self._pause, len(tokens), ids)

    def _time(self, request: Recorded) -> float:
        kind = MADE_UP if request.time is None else OF_DAY if request.time.is_of_day else NUMBERS
        if self.times is None:
            self.times = kind
        if self.times != kind:
            raise BadLine(f"its time is {kind}, and those before are {self.times}")
        if request.time is None:
            return (request.line - 1) * self._every
        return request.time.value

    def _tokens(self, content: Content) -> Sequence[int]:
        if isinstance(content, list):
            return content
        if self._tokenizer is None:
            raise TraceError("the log has texts, not token ids: give the model's folder by --tokenizer")
        tokens = self._tokenizer.ids(content)
        if not tokens:
            raise BadLine("its text has no tokens")
        return tokens
