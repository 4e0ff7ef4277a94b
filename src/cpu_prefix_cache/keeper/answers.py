"""Answers of a keeper to `run` and `take`, as numbers of a message and back.

    ran     chunks that are here, chunks after which the request resumes, their slots, those of the checkpoint there
    took    is it worth another try, first chunk, how many slots for chunks, and these; where the checkpoint is granted,
            for each of its pieces how many slots, and these: none for a piece that is there already

An engine checks each answer before it uses a slot of it.
"""

from collections.abc import Sequence
from itertools import chain, islice
from typing import NamedTuple, Self

from cpu_prefix_cache.keeper.protocol import ANSWERS, MOST_MICROSECONDS, NUM_COUNTED, Kind, Message, ProtocolError
from cpu_prefix_cache.model.planner import HybridChunkPlanner


class Leased(NamedTuple):
    """The pool has `present` chunks of a prompt, and a request can resume after `depth` of them. There is a lease on
    all that this takes, in `slots`: the chunks, and then the pieces of the checkpoint.
    """

    present: int
    depth: int
    slots: Sequence[int]

    @property
    def numbers(self) -> Sequence[int]:
        return (self.present, self.depth, *self.slots)

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Self:
        return cls(numbers[0], numbers[1], numbers[2:])


NOTHING = Leased(0, 0, ())


class Granted(NamedTuple):
    """Slots for the chunks of a prompt from number `first` on, and for the `pieces` of the checkpoint after its last
    one; None: not for that. Without slots it may be worth it to `try_again`: another engine is writing some of it, or
    the keeper does not know yet which slots are free.
    """

    first: int
    slots: Sequence[int]
    try_again: bool = False
    pieces: Sequence[Sequence[int]] | None = None

    @property
    def all_slots(self) -> list[int]:
        return [*self.slots, *chain.from_iterable(self.pieces or ())]

    @property
    def numbers(self) -> Sequence[int]:
        pieces = (number for piece in self.pieces or () for number in (len(piece), *piece))
        return (self.try_again, self.first, len(self.slots), *self.slots, *pieces)

    @classmethod
    def of(cls, numbers: Sequence[int]) -> Self:
        rest, most = iter(numbers), len(numbers)
        try_again, first, slots = next(rest), next(rest), tuple(islice(rest, min(next(rest), most)))
        pieces = [tuple(islice(rest, min(count, most))) for count in rest]
        return cls(first, slots, bool(try_again), pieces or None)


NO_SLOTS = Granted(0, ())


def check_answered(asked: Message | None, answer: Message, pool_slots: int, planner: HybridChunkPlanner) -> None:
    """Raise ProtocolError unless this is an answer to that question, of this model in a pool of so many slots."""
    if asked is not None and (asked.kind, answer.kind) == (Kind.RUN, Kind.READING):
        if len(answer.numbers) != 1 or answer.numbers[0] > MOST_MICROSECONDS:
            raise ProtocolError(f"got {answer.kind.name} of {list(answer.numbers)}")
        return
    if asked is None or answer.kind is not ANSWERS[asked.kind]:
        raise ProtocolError(f"got {answer.kind.name} {answer.id}, and no question with this number")
    least = {Kind.RAN: 2, Kind.TOOK: 3, Kind.COUNTED: NUM_COUNTED}[answer.kind]
    if len(answer.numbers) < least:
        raise ProtocolError(f"got {answer.kind.name} of {len(answer.numbers)} numbers")
    if answer.kind is Kind.RAN:
        leased = Leased.of(answer.numbers)
        is_right = leased.depth <= leased.present <= len(asked.keys)
        is_right = is_right and len(leased.slots) == planner.resume_blocks(leased.depth)
        _check_slots(leased.slots, pool_slots, is_right)
    elif answer.kind is Kind.TOOK:
        granted = Granted.of(answer.numbers)
        _check_slots(granted.all_slots, pool_slots, _fits(asked, granted, answer, planner))
    elif len(answer.numbers) != NUM_COUNTED:
        raise ProtocolError(f"got {answer.kind.name} of {len(answer.numbers)} numbers")


def _fits(asked: Message, granted: Granted, answer: Message, planner: HybridChunkPlanner) -> bool:
    """Whether these are slots for chunks, and for the checkpoint that a `take` is for."""
    chunks, rest = divmod(len(granted.slots), planner.host_blocks_per_chunk)
    end = granted.first + chunks
    if rest or end > len(asked.keys) or tuple(granted.numbers) != tuple(answer.numbers):
        return False
    if granted.pieces is None:
        return True
    widths = planner.checkpoint_widths(len(asked.keys))
    is_whole = end == len(asked.keys) and len(granted.pieces) == len(widths) and bool(asked.numbers[0])
    return is_whole and all(len(piece) in (0, width) for piece, width in zip(granted.pieces, widths, strict=True))


def _check_slots(slots: Sequence[int], pool_slots: int, is_right: bool) -> None:
    if not is_right or max(slots, default=0) >= pool_slots or len(set(slots)) < len(slots):
        raise ProtocolError(f"got {len(slots)} slots that are not those of the question, or one not in the pool")
