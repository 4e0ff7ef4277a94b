"""Requests sent to an asynchronous engine, and when its tokens came. Names no engine: the function `ask` is one.

closed    each user sends a request when the one before has been answered
open      each request is sent at its time, whatever has been answered
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

PROGRESS_SECONDS = 10


@dataclass(frozen=True)
class Tokens:
    """Output that an engine gives at once: how many tokens of the answer, and how many of the prompt it had cached."""

    count: int
    cached: int


Ask = Callable[[Sequence[int], int], AsyncIterator[Tokens]]  # a prompt, and the tokens of its answer


@dataclass
class Answered:
    """Times are seconds since the loop began. `sent` is when the request should have been sent; `tokens` has the time
    of each token of the answer."""

    prompt: int
    sent: float
    cached: int = 0
    tokens: list[float] = field(default_factory=list)


@dataclass
class Loop:
    ask: Ask
    say: Callable[[str], None]
    total: int
    answered: list[Answered] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    @property
    def now(self) -> float:
        return time.perf_counter() - self.began

    async def closed(self, users: Sequence[Sequence[tuple[Sequence[int], int]]]) -> None:
        await self._run([self._user(share) for share in users])

    async def open(self, requests: Sequence[tuple[float, Sequence[int], int]]) -> None:
        await self._run([self._at(*request) for request in requests])

    async def _run(self, parts: Sequence[Any]) -> None:
        progress = asyncio.create_task(self._progress())
        try:
            await asyncio.gather(*parts)
        finally:
            progress.cancel()

    async def _user(self, share: Sequence[tuple[Sequence[int], int]]) -> None:
        for prompt, answer in share:
            await self._one(self.now, prompt, answer)

    async def _at(self, at: float, prompt: Sequence[int], answer: int) -> None:
        await asyncio.sleep(max(0, at - self.now))
        await self._one(at, prompt, answer)

    async def _one(self, sent: float, prompt: Sequence[int], answer: int) -> None:
        result = Answered(len(prompt), sent)
        async for tokens in self.ask(prompt, answer):
            result.cached = tokens.cached
            result.tokens += [self.now] * tokens.count
        if len(result.tokens) != answer:
            raise RuntimeError(f"a request has {len(result.tokens)} tokens, and was to have {answer}")
        self.answered.append(result)

    async def _progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            prompt_tokens = sum(each.prompt for each in self.answered)
            self.say(f"{len(self.answered)} of {self.total} answered, {prompt_tokens / self.now / 1e3:.1f}k a second")


def results(loop: Loop) -> list[dict[str, Any]]:
    return [asdict(each) for each in sorted(loop.answered, key=lambda each: each.sent)]
