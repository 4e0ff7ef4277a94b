"""Queries of a store that others write too: once for each request, before it is read.

    asked --told--> over    what is there is noted in the tier's pool, and nothing is copied for that
      `--the deadline passes--> late    the request goes on with what the host has. An answer that comes yet is taken in

Steps may be longer than the deadline. So a query is late when it has reached the ranks and they have not answered by
the deadline; if they report nothing at all, LATE_SECONDS later.

Nobody waits for the store: a query goes out with the plan of a step, the ranks' tier makes it in a thread, and the
answer comes with a report. Where queries fail or go unanswered, again and again, the tier pauses; then one
question in `PROBE_SECONDS` that concerns no request finds out whether it is back. (A question that is late because
others are answered before it has a deadline, too, but is no reason to pause.)
"""

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from cpu_prefix_cache.messages.request import CheckpointAt, Request
from cpu_prefix_cache.messages.tier import Ask, Told
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.offload.chain import Chain
from cpu_prefix_cache.pool.coordinator import KVCacheCoordinator
from cpu_prefix_cache.tiers.expected import ExpectedPrompt

PROBE_SECONDS = 1.0
LATE_SECONDS = 1.0  # beyond its deadline a question that nobody has heard of is awaited, and an answer taken in
REMEMBERED_SECONDS = 60.0  # questions and wants of a request that is never admitted, after their deadlines
MOST_CHECKPOINTS = 8  # are taken in, from the deepest on
LOOKED_AT = 256  # chunks whose checkpoints are looked for, from the deepest on: some ms


@dataclass(slots=True, eq=False)
class StoreQuestion:
    """Question about the chunks `keys[depth:stop]`. `is_over`: nobody waits for it. `is_counted`: a request does, and
    no hint of one."""

    ask: Ask
    keys: Sequence[bytes]
    asked_at: float
    deadline: float
    is_over: bool = False
    is_counted: bool = False


class StoreQuestions:
    """`take` takes a chain into the tier's pool. `ended` gets whether the store answers: with each answer, and with
    a query that failed, or is late without any answer since. A request waits `seconds`.
    None: nobody else writes to the tier, so nothing is ever queried.
    """

    def __init__(
        self,
        coordinator: KVCacheCoordinator,
        take: Callable[[Chain], None],
        ended: Callable[[bool], None],
        seconds: float | None,
    ) -> None:
        self._coordinator, self._pool, self._planner = coordinator, coordinator.pool, coordinator.planner
        self._take, self._ended, self._seconds = take, ended, seconds
        self._of: dict[Hashable, StoreQuestion] = {}  # by request, in the order in which they came
        self._open: dict[int, StoreQuestion] = {}  # may still be answered, in the order of their numbers
        self._new: list[Ask] = []  # since the last plan
        self._probe: StoreQuestion | None = None
        self._has_answered = False  # the probe, however late
        self._next = 0
        self._heard: int | None = None  # the ranks have questions with smaller numbers; None: with any
        self._now, self._told_at = 0.0, -math.inf
        self.asked = self.unanswered = 0

    def awaited(self, request: Request, host_end: int, now: float) -> float | None:
        """Until when it is not known what the store has of this request beyond token `host_end`. None: it is."""
        question = self._of.get(request.id)
        if question is None:
            question = self._question_for(request, host_end, now)
            if question is None:
                return None
            self._of[request.id] = question
            question.is_counted = not isinstance(request, ExpectedPrompt)
            self.asked += question.is_counted
        self.passed(now)
        if question.is_over:
            return None
        return question.deadline + (LATE_SECONDS if now >= question.deadline else 0.0)

    def is_asked(self, id: Hashable) -> bool:
        """Whether a request waits for an answer."""
        return id in self._of and not self._of[id].is_over

    def admitted(self, id: Hashable) -> None:
        """The request will not be looked up again."""
        self._of.pop(id, None)

    def passed(self, now: float) -> None:
        """Time has come to `now`: questions may be late."""
        self._now = now
        for question in self._open.values():
            if now < question.deadline:
                break
            if not self._is_heard(question) and now < question.deadline + LATE_SECONDS:
                continue
            if self._over(question, in_time=False) and self._told_at <= question.asked_at:
                self._ended(False)
        while self._open and now >= (first := next(iter(self._open.values()))).deadline + LATE_SECONDS:
            del self._open[first.ask.id]
        while self._of and now >= next(iter(self._of.values())).deadline + REMEMBERED_SECONDS:
            del self._of[next(iter(self._of))]

    def is_back(self, now: float) -> bool:
        """Whether the store answers again. Sends a probe, if that is due."""
        if self._seconds is None:
            return True
        if self._has_answered:
            self._probe, self._has_answered = None, False
            return True
        if self._probe is None or now >= self._probe.deadline:
            self._probe = self._ask((), 0, 0, now, PROBE_SECONDS)
            self._probe.is_over = True
        return False

    def told(self, answers: Sequence[Told], heard: int | None = None) -> None:
        self._heard = heard
        for told in answers:
            question = self._open.pop(told.id, None)
            if question is None:
                continue
            has_waited = self._over(question, in_time=told.ok)
            if told.ok or has_waited:  # one that was late before it failed has ended once
                self._ended(told.ok)
            if told.ok:
                self._told_at = self._now
                self._has_answered |= question is self._probe
                self._take_in(question, told)

    def take_new(self) -> tuple[Ask, ...]:
        """Questions that are new since the last call."""
        new, self._new = tuple(self._new), []
        return new

    @property
    def told_below(self) -> int:
        """Nobody waits for answers to questions with smaller numbers."""
        return next(iter(self._open), self._next)

    def reset(self) -> None:
        """Forget what was answered before, or is being answered."""
        self._of.clear()
        self._open.clear()
        self._new.clear()
        self._probe, self._has_answered = None, False

    def _question_for(self, request: Request, host_end: int, now: float) -> StoreQuestion | None:
        """None if there is nothing that the store could add."""
        if self._seconds is None:
            return None
        planner, keys = self._planner, request.keys
        stop = self._coordinator.findable(keys, request.num_tokens)
        known = self._pool.resident_run(keys, 0, stop)
        depth = known
        if planner.has_checkpoints and stop:
            depth = max(0, min(known, planner.full_chunks(host_end)) - planner.reach(stop))
        if planner.resumable_chunks(stop) * planner.grid_tokens <= host_end or depth == stop:
            return None
        return self._ask(keys, depth, stop, now, self._seconds)

    def _ask(self, keys: Sequence[bytes], depth: int, stop: int, now: float, seconds: float) -> StoreQuestion:
        ask = Ask(self._next, tuple(keys[depth:stop]), depth, self._planner.grid_tokens)
        self._next += 1
        self._new.append(ask)
        self._open[ask.id] = question = StoreQuestion(ask, keys, now, now + seconds)
        return question

    def _is_heard(self, question: StoreQuestion) -> bool:
        return self._heard is None or question.ask.id < self._heard

    def _over(self, question: StoreQuestion, *, in_time: bool) -> bool:
        """Nobody waits for it any more. Whether somebody did."""
        has_waited, question.is_over = not question.is_over, True
        self.unanswered += has_waited and question.is_counted and not in_time
        return has_waited

    def _take_in(self, question: StoreQuestion, told: Told) -> None:
        keys, depth = question.keys, question.ask.depth
        stop = depth + told.chunks
        known = self._pool.resident_run(keys, 0, stop)
        if known < depth or not self._are_new(keys[known:stop]):
            return  # what was known has been forgotten meanwhile: nobody has asked for it. Or it is of several prompts
        if known < stop and self._pool.shape.blocks_per_chunk:  # bare chunks are of no use
            self._take(_chain(keys, known, stop))
        for at in self._checkpoints(question, stop, set(told.pieces)):
            known = self._pool.resident_run(keys, 0, at)
            self._take(_chain(keys, known, at, self._coordinator.checkpoint_at(keys, at)))

    def _are_new(self, keys: Sequence[bytes]) -> bool:
        """Whether the pool has none of these, and each is there once, as in one prompt."""
        return len(set(keys)) == len(self._pool.missing(keys)) == len(keys)

    def _checkpoints(self, question: StoreQuestion, stop: int, pieces: set[tuple[bytes, int, int]]) -> Iterator[int]:
        """The depths at which a checkpoint is there with all of its pieces, from the deepest on."""
        keys, found = question.keys, 0
        ends = {key for key, _, _ in pieces}  # a checkpoint has pieces in the chunk behind which it resumes
        for depth in range(stop, max(question.ask.depth, stop - LOOKED_AT), -1):
            key, resumed = checkpoint_key(keys[depth - 1]), self._planner.resumable_chunks(depth)
            if not resumed or keys[resumed - 1] not in ends or self._pool.find(key) is not None:
                continue
            needs = self._coordinator.needs(self._coordinator.checkpoint_at(keys, depth))
            missing = self._pool.checkpoints.missing(needs)
            if needs and all(need.key in pieces for need in missing):
                yield depth
                found += 1
            if found == MOST_CHECKPOINTS:
                return


def _chain(keys: Sequence[bytes], start: int, stop: int, checkpoint: CheckpointAt | None = None) -> Chain:
    return Chain(keys[start - 1] if start else None, keys[start:stop], checkpoint)
