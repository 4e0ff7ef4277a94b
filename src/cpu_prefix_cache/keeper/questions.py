"""Questions: how much of each prompt does the pool have?

    open       `run` went out; the request is answered Pending until a deadline, or the keeper is gone
    reading    the keeper reads what it has below its pool, and has told until when: that is the deadline then
    answered   with the slots that the request needs to resume, on which there is a lease
    over       taken by a load, or given up: no longer wanted, too late, or nobody came back for it

A keeper that does not answer costs UNANSWERED requests their deadline; then none is sent for a pause.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from cpu_prefix_cache.keeper.answers import NOTHING, Leased
from cpu_prefix_cache.keeper.messenger import Messenger
from cpu_prefix_cache.keeper.protocol import MICROSECOND, Kind, Message

ASK_SECONDS = 0.02  # some steps of decode; a keeper answers in less than a millisecond
LEASE_SECONDS = 2.0  # of a request that is not looked up again
PAUSE_SECONDS, UNANSWERED = 1.0, 5


@dataclass(slots=True, eq=False)
class Question:
    """One question, as it went out in a connection. `leased` is the answer; the deadline is that of the answer, and
    then of the lease.
    """

    id: int
    connection: int
    keys: Sequence[bytes]
    deadline: float
    leased: Leased | None = None


class Questions:
    """The questions of one engine, one for each request that was looked up and is not admitted."""

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self._of: dict[Hashable, Question] = {}  # by request
        self._open: dict[int, Question] = {}  # not answered yet
        self._next_deadline = math.inf  # no deadline is sooner
        self._unanswered_in_a_row = 0
        self._silent_until = 0.0

    def __len__(self) -> int:
        return len(self._of)

    def of(self, request: Hashable, keys: Sequence[bytes]) -> Question | None:
        """The question of a request with these keys. One with others is that of an earlier request, and given up, as is
        one of an earlier connection, whose slots may not be used any more.
        """
        question = self._of.get(request)
        if question is None or (question.keys == keys and question.connection == self._messenger.connection):
            return question
        del self._of[request]
        self.give_up(question)
        return None

    def ask(
        self, request: Hashable, id: int, keys: Sequence[bytes], now: float, chunk_nanoseconds: int = 0
    ) -> Question | None:
        """None while no question is sent, because nobody answers. Computing a chunk takes so long; 0: nobody knows."""
        if not self._messenger.is_up or now < self._silent_until:
            return None
        question = Question(id, self._messenger.connection, keys, now)
        self._of[request] = self._open[id] = question
        self._wait(question, now + ASK_SECONDS)
        self._messenger.send(question.connection, Message(Kind.RUN, id, (chunk_nanoseconds,), keys))
        return question

    def answered(self, connection: int, message: Message, now: float) -> None:
        """`now` is when the engine reads the answer: what it did before may have taken longer than a lease lasts."""
        question = self._open.pop(message.id, None)
        if question is not None and question.connection == connection:
            question.leased = Leased.of(message.numbers)
            self._wait(question, now + LEASE_SECONDS)
            self._unanswered_in_a_row = 0

    def reading(self, connection: int, message: Message, now: float) -> None:
        """The answer waits for a tier, so long at most. It may come as late as others."""
        question = self._open.get(message.id)
        if question is not None and question.connection == connection:
            self._wait(question, now + message.numbers[0] * MICROSECOND + ASK_SECONDS)
            self._unanswered_in_a_row = 0

    def take(self, request: Hashable, keys: Sequence[bytes]) -> Question | None:
        """The request is admitted. Its question, whose lease is the caller's now."""
        question = self._of.pop(request, None)
        if question is not None and (question.leased is None or question.keys != keys):
            self.give_up(question)
            return None
        return question

    def give_up(self, question: Question) -> None:
        """End its lease, or let it have none."""
        self._open.pop(question.id, None)
        self._messenger.send(question.connection, Message(Kind.RELEASE, question.id))

    def passed(self, now: float) -> None:
        """Time has come to `now`, in seconds."""
        lost = [each for each in self._open.values() if self._is_lost(each)]
        if now < self._next_deadline and not lost:
            return
        for request, question in list(self._of.items()):
            if question.id not in self._open and now >= question.deadline:
                self.give_up(question)
                del self._of[request]
        late = [each for each in self._open.values() if now >= each.deadline and each not in lost]
        for question in (*lost, *late):
            self.give_up(question)
            question.leased = NOTHING
            self._wait(question, now + LEASE_SECONDS)
        for _ in late:
            self._unanswered_in_a_row += 1
            if self._unanswered_in_a_row >= UNANSWERED:
                self._unanswered_in_a_row, self._silent_until = 0, now + PAUSE_SECONDS
        self._next_deadline = min((each.deadline for each in self._of.values()), default=math.inf)

    def reset(self) -> None:
        """Give up all."""
        for question in self._of.values():
            self.give_up(question)
        self._of.clear()

    def _is_lost(self, question: Question) -> bool:
        """Whether nobody is there who could answer it."""
        return not self._messenger.is_up or question.connection != self._messenger.connection

    def _wait(self, question: Question, deadline: float) -> None:
        """For an answer, or for the request that it is for."""
        question.deadline = deadline
        self._next_deadline = min(self._next_deadline, deadline)
