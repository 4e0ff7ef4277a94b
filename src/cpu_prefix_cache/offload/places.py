"""Where held blocks waited: what a device needs in order to put them back there.

A device hands out blocks from the front of an order. A hold takes some of them out of it, from anywhere, and ends
later, when the engine has handed out others and added others. Then each goes back to where it waited:

    order   p a b c n       hold a, hold c; the engine hands out p and adds x
            b n x           a ends: p is gone, so a is the first
            a b n x         c ends: b waits still, and c goes behind it
            a b c n x

What is held is remembered by what it stood behind, held or waiting. So holds that stood side by side come back in their
order, whichever ends first. What stood behind a block that is gone comes back at the front: it leaves with what else
was that cold. A place is whatever tells a waiting block from what it may be later: its number and the key it waits
under, say. (A block that was used meanwhile and waits again under its key, now at the end, is still taken for that
place: what stood behind it goes there too.)
"""

from collections.abc import Callable, Hashable

FRONT = "front"  # what the first of the order stands behind


class Places:
    """The places of held blocks. `waits` says whether a place is one of a block that waits under the same key still.

    Every call takes O(1) but for `back`, which goes over those held that stood right before.
    """

    def __init__(self, waits: Callable[[Hashable], bool]) -> None:
        self._waits = waits
        self._before: dict[Hashable, Hashable] = {}  # of what is held: what it stood behind
        self._last: dict[Hashable, Hashable] = {}  # of what waits: the last of those held right behind it

    def __len__(self) -> int:
        return len(self._before)

    def is_before(self, place: Hashable) -> bool:
        """Whether something is held that stood right behind this one, which waits."""
        return place in self._last

    def leave(self, place: Hashable, before: Hashable) -> None:
        """This one waits no more: it is held. It stood right behind `before`, which waits, or was the first (FRONT)."""
        self._before[place] = self._last.get(before, before)
        self._last[before] = self._last.pop(place, place)

    def back(self, place: Hashable) -> Hashable:
        """Its hold has ended: what it waits right behind from now on, or FRONT. Forgets it."""
        behind = self._waiting_before(place)
        before, last = self._before.pop(place), self._last[behind]
        self._end_with(behind, before)
        if last != place:
            self._last[place] = last
        return behind

    def forget(self, place: Hashable) -> None:
        """The engine uses it: it will not come back here. O(those held that stood beside it)."""
        behind = self._waiting_before(place)
        before, last = self._before.pop(place), self._last[behind]
        if last == place:
            self._end_with(behind, before)
            return
        while self._before[last] != place:
            last = self._before[last]
        self._before[last] = before

    def _end_with(self, behind: Hashable, last: Hashable) -> None:
        """Of those held behind a waiting one this is the last now; itself: there are none."""
        if last == behind:
            del self._last[behind]
        else:
            self._last[behind] = last

    def _waiting_before(self, place: Hashable) -> Hashable:
        """What waits in front of a held one, beyond those held between; FRONT if that was handed out, or used."""
        first = place
        while (before := self._before[first]) in self._before:
            first = before
        if before == FRONT or self._waits(before):
            return before
        self._before[first] = self._last.get(FRONT, FRONT)
        self._last[FRONT] = self._last.pop(before)
        return FRONT
