"""Questions of a KeyedTier to a store that others write, too: which of these names does it have?

    unknown  --looked up-->  new  --the next plan-->  asked  --the answer-->  there, or absent
                                                        `--the deadline-->  absent, whatever is answered later

A name is absent for ABSENT_SECONDS; then it is unknown again. One that is there is remembered by the tier, and no
concern of this file. All names that were looked up since the last plan are one question.
"""

from collections.abc import Iterable

from cpu_prefix_cache.messages.tier import Ask, BlockName, Told

ABSENT_SECONDS = 1.0


class KeyedQuestions:
    """A name is awaited for `seconds`. Times are those of `passed`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._now = 0.0
        self._new: dict[BlockName, None] = {}
        self._asked: dict[int, tuple[tuple[BlockName, ...], float]] = {}  # with deadlines, by number, in order
        self._awaited: dict[BlockName, int] = {}  # by name, the number of its question
        self._absent: dict[BlockName, float] = {}  # until when, in this order
        self._next = 0

    def awaited(self, name: BlockName) -> bool:
        """Whether the answer is still to come."""
        if name in self._absent:
            return False
        if name not in self._awaited:
            self._new[name] = None
        return True

    def passed(self, now: float) -> bool:
        """Time has come to `now`, after all reports up to then. Whether the store has let a question pass its
        deadline.
        """
        self._now = now
        while self._absent and next(iter(self._absent.values())) <= now:
            del self._absent[next(iter(self._absent))]
        late = [number for number, (_, deadline) in self._asked.items() if deadline <= now]
        for number in late:
            self._over(number)
        return bool(late)

    def take_new(self) -> tuple[Ask, ...]:
        """The question about all that was looked up since the last plan."""
        if not self._new:
            return ()
        names, self._new = tuple(self._new), {}
        number, self._next = self._next, self._next + 1
        self._asked[number] = names, self._now + self._seconds
        self._awaited.update(dict.fromkeys(names, number))
        return (Ask(number, tuple({name.key: None for name in names})),)

    @property
    def told_below(self) -> int:
        """No answer to a question with a smaller number is awaited."""
        return next(iter(self._asked), self._next)

    def told(self, answers: Iterable[Told]) -> tuple[list[BlockName], bool | None]:
        """The names that the store has, and whether it could answer; None: nothing that is awaited."""
        found: list[BlockName] = []
        is_well: bool | None = None
        for each in answers:
            if each.id in self._asked:
                is_well = each.ok and is_well is not False
                self._over(each.id)
                found += (BlockName(key, group) for key, group, _ in each.pieces)
        return found, is_well

    def reset(self) -> None:
        """The store has other names now: no answer counts any more."""
        self._asked.clear()
        self._awaited.clear()
        self._absent.clear()

    def _over(self, number: int) -> None:
        for name in self._asked.pop(number)[0]:
            if self._awaited.pop(name, None) is not None:
                self._absent[name] = self._now + ABSENT_SECONDS
