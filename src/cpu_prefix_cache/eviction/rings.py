"""Rings: doubly linked lists, oldest first, which anything can leave in O(1).

An ordered dictionary would do, but for the moment at which one of a million entries grows.
"""

from collections.abc import Iterator
from typing import Self, TypeVar


class Linked:
    """A member of a ring, or the end of one, which has the oldest member as `younger` and the youngest as `older`."""

    __slots__ = ("older", "younger")

    older: Self
    younger: Self


Member = TypeVar("Member", bound=Linked)


def new_ring(end: Member) -> Member:
    """The end of a ring that has no members yet."""
    end.older = end.younger = end
    return end


def insert_after(place: Member, member: Member) -> None:
    """Link `member`, which is in no ring, as the next younger neighbour of `place`."""
    younger = place.younger
    member.older, member.younger = place, younger
    place.younger = younger.older = member


def unlink(member: Linked) -> None:
    """Close the ring behind a member that leaves it."""
    member.older.younger, member.younger.older = member.younger, member.older


def move(member: Member, end: Member) -> None:
    """Let a member of one ring be the youngest of another one."""
    member.older.younger, member.younger.older = member.younger, member.older
    youngest = end.older
    member.older, member.younger = youngest, end
    youngest.younger = end.older = member


def move_oldest(end: Member, stop: Member, other: Member) -> None:
    """Let the members of a ring that are older than `stop`, or all if that is its end, follow those of another."""
    oldest, last = end.younger, stop.older
    if last is not end:
        end.younger, stop.older = stop, end
        oldest.older, last.younger = other.older, other
        other.older.younger, other.older = oldest, last


def members(end: Member) -> Iterator[Member]:
    """From old to young."""
    member = end.younger
    while member is not end:
        yield member
        member = member.younger
