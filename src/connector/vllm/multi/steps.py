"""Loads on their way through vLLM's steps: when each has ended, and how long steps take.

    asynchronous    a load has ended when every rank has named its request in `finished_recving`
    synchronous     a load ends in its step. How long that step waited for it is what the ranks have timed
    failed          named in `failed_recving`, or one of its blocks in `invalid_block_ids`

Long steps without synchronous loads measure how fast prompts are computed.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from connector.multi.chooser import Chooser, Load
from cpu_prefix_cache.deciding import MIN_TIMED_TOKENS, PrefillRate


@dataclass(frozen=True)
class Step:
    tokens: int
    began: float
    loads: Sequence[Load]  # synchronous ones


class Steps:
    def __init__(self, chooser: Chooser, prefill: PrefillRate, clock: Callable[[], float] = time.monotonic) -> None:
        self._chooser = chooser
        self._prefill = prefill
        self._clock = clock
        self._receiving: dict[str, Load] = {}  # asynchronous loads, by request
        self._planned: list[Load] = []  # synchronous ones of the step that is being planned
        self._number = 0
        self._begun: dict[int, Step] = {}

    def begins(self, load: Load, is_async: bool) -> None:
        if is_async:
            self._receiving[load.request] = load
        else:
            self._planned.append(load)

    def begin(self, tokens: int) -> int | None:
        """The number of the step that begins now, if it is to be timed."""
        loads, self._planned = self._planned, []
        if not loads and tokens < MIN_TIMED_TOKENS:
            return None
        self._number += 1
        self._begun[self._number] = Step(tokens, self._clock(), loads)
        return self._number

    def received(self, ids: Collection[str], failed: Collection[str], invalid_blocks: Collection[int]) -> None:
        """Take the reports of loads from the output of a step, before `end`."""
        if invalid_blocks:
            self._invalidate(invalid_blocks)
        loads = [self._receiving.pop(id) for id in ids if id in self._receiving]
        for load in loads:
            load.has_failed |= load.request in failed
        self._chooser.ended(loads)

    def _invalidate(self, blocks: Collection[int]) -> None:
        synchronous = (load for step in self._begun.values() for load in step.loads)
        for load in (*self._receiving.values(), *synchronous):
            load.has_failed |= not load.blocks.isdisjoint(blocks)

    def end(self, number: int, seconds: Sequence[float]) -> None:
        """This step has ended, and all before it: vLLM drops some outputs. `seconds` as in TimedWorkerMetadata."""
        while self._begun and (first := next(iter(self._begun))) <= number:
            step = self._begun.pop(first)
            self._chooser.ended(step.loads, seconds)
            if first == number and not step.loads:
                self._prefill.timed(step.tokens, self._clock() - step.began)
