"""Where held blocks waited, so that a device can put them back there.

A hold takes blocks out of the order of eviction, from anywhere. Until it ends, the engine hands out blocks from the
front and adds others at the end:

    order   p a b c n       hold a, hold c; the engine hands out p and adds x
            b n x           the hold of a ends: p is gone, so a becomes the first
            a b n x         the hold of c ends: b still waits, and c goes behind it
            a b c n x

Of each held block the one before it is remembered, held or waiting. So blocks that waited side by side come back in
their order, whichever hold ends first. If the block before it is gone, a block comes back at the front, where the
coldest are: behind those that were held at the front before that, and before those that are held there later. A place
must distinguish a waiting block from its later uses, such as its number with the key it waits under. (A block that was
used meanwhile and waits again under its key, now at the end, still counts as that place.)
"""

from collections.abc import Callable, Collection, Hashable

FRONT = "front"  # before the first of the order


class Places:
    """The places of held blocks. `waits` is true of a place whose block still waits under the same key.

    Every call takes O(1), but `back`, `forget` and `rename` go over the held blocks next to the place, and `leave` at
    the front over the waiting ones that have held ones right behind them.
    """

    def __init__(self, waits: Callable[[Hashable], bool]) -> None:
        self._waits = waits
        self._before: dict[Hashable, Hashable] = {}  # of a held place: the one before it
        self._last: dict[Hashable, Hashable] = {}  # of a waiting place: the last of those held right behind it

    def __len__(self) -> int:
        return len(self._before)

    def with_held_behind(self) -> Collection[Hashable]:
        """The waiting places, and FRONT, that a held one is right behind. O(1) to look up a place among them."""
        return self._last.keys()

    def leave(self, place: Hashable, before: Hashable) -> None:
        """Hold this place, which waited right behind `before`, a place that waits or FRONT."""
        if before == FRONT:
            for gone in [each for each in self._last if each not in (FRONT, place) and not self._waits(each)]:
                self._waiting_before(self._last[gone])  # moves what is behind it to the front
        self._before[place] = self._last.get(before, before)
        self._last[before] = self._last.pop(place, place)

    def back(self, place: Hashable) -> Hashable:
        """End its hold. The place right behind which it waits from now on, or FRONT."""
        behind = self._waiting_before(place)
        before, last = self._before.pop(place), self._last[behind]
        self._end_with(behind, before)
        if last != place:
            self._last[place] = last
        return behind

    def forget(self, place: Hashable) -> None:
        """The engine uses the block: it does not come back here."""
        behind = self._waiting_before(place)
        self._replace(place, self._before[place], behind)
        del self._before[place]

    def rename(self, place: Hashable, new: Hashable) -> None:
        """A held place has another name: that of a run whose last block the engine uses, so that the one before ends
        it.
        """
        self._replace(place, new, self._waiting_before(place))
        self._before[new] = self._before.pop(place)

    def _replace(self, place: Hashable, by: Hashable, behind: Hashable) -> None:
        """Put another in the place before those held right behind one. `behind` waits before both."""
        last = self._last[behind]
        if last == place:
            self._end_with(behind, by)
            return
        while self._before[last] != place:
            last = self._before[last]
        self._before[last] = by

    def _end_with(self, behind: Hashable, last: Hashable) -> None:
        """Make `last` the last of the places held behind a waiting one; none are if it is the waiting one itself."""
        if last == behind:
            del self._last[behind]
        else:
            self._last[behind] = last

    def _waiting_before(self, place: Hashable) -> Hashable:
        """The waiting place before a held one, with only held ones between; FRONT if it was handed out, or used."""
        first = place
        while (before := self._before[first]) in self._before:
            first = before
        if before == FRONT or self._waits(before):
            return before
        self._before[first] = self._last.get(FRONT, FRONT)
        self._last[FRONT] = self._last.pop(before)
        return FRONT
