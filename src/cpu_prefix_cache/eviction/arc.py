"""ARC, after Megiddo and Modha, FAST '03: a balance between what was used once and what was used again.

    T1   chunks that one request used       B1   ghosts: keys of chunks that were evicted from T1
    T2   chunks that several used           B2   ghosts: keys of chunks that were evicted from T2
    p    how many chunks T1 is to have, 0 to c, the blocks of the pool. A new chunk that is in B1 raises it, one that
         is in B2 lowers it

and a chunk moves between them only here:

    evict        (none) -> on its way to T1, or to T2 if it is a ghost, which it is no more. It counts as there
    inserted     on its way -> T1 or T2. Without having been announced: as above, now
    retired      on its way -> (none)
    admitted     T1 -> T2, with all that is above it
    evict        T1 -> B1, T2 -> B2, one for each chunk that comes and finds no room
    removed      T1, T2 -> (none): what is withdrawn leaves no ghost

How T1 and T2 are kept is in two_lists.py. Where this departs from the paper, because a chunk leaves only when nothing
hangs below it (rule 3):

  * The oldest of a list is the oldest of its *ends*, chunks with no child in the same list. An end of T2 may have
    children in T1; while the oldest one has, T1 gives the victim. A list that can give none, because of pins, leaves it
    to the other.
  * A batch of n chunks is n singles: for each p is adapted first, and then one chunk evicted if there is no room.
  * A prompt is not its own victim. Where T1 has more than p chunks and none to give but those of the prompt that comes,
    the paper evicts these; here the end of the prompt is declined. But T1 can have a fifth of the blocks in any case,
    or there are no ghosts to learn from. docs/policies.md has what this changes.

Consecutive *strangers*, new chunks that are in no ghost list, leave p unchanged, and their effect on the ghosts can be
computed beforehand. So strangers are dealt with together, as far as their victims are one run.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from cpu_prefix_cache.eviction.ghosts import Ghosts
from cpu_prefix_cache.eviction.outlook import AGAIN, ONCE, Outlook
from cpu_prefix_cache.eviction.touches import TouchRing, renew
from cpu_prefix_cache.eviction.two_lists import ArcTouch, TwoLists
from cpu_prefix_cache.index.forest import NONE, Forest

LONGEST_ROW = 32  # ghosts that come back together: what is compared beyond the victims they find is lost time
LEAST_SHARE = 5  # T1 can have a fifth of the blocks in any case. With a tenth some sizes had .4 points fewer hits


class Arc(TwoLists):
    """Evicts from T1 while it has more than p chunks, else from T2. See EvictionPolicy."""

    def __init__(self, forest: Forest) -> None:
        super().__init__(forest)
        self._capacity = forest.capacity  # c
        self._keys: list[Any] = forest.key  # of the chunks that are here
        self._target = 0.0  # p
        self._ghosts = Ghosts()
        self._destinations: list[TouchRing] = []  # of the chunks that were incoming in the last `evict`

    def anew(self, forest: Forest) -> "Arc":
        other = Arc(forest)
        self._leave_to(other)
        other._target, other._ghosts = self._target, self._ghosts
        return other

    def choose(self, parent: int, incoming: Sequence[bytes], count: int, margin: float = 1.0) -> int:
        once = self._once
        due = max(0, max(int(self._target) + 1, self._capacity // LEAST_SHARE) - once.size)
        strangers = max(0, len(incoming) - count + once.size - once.coming + due)
        if strangers >= len(incoming):
            return len(incoming)
        at = 0
        while at < len(incoming):
            ghost = self._ghosts.first_ghost(incoming, at)
            if ghost - at > strangers:
                return at + strangers
            strangers -= ghost - at
            at = ghost if ghost == len(incoming) else ghost + self._ghosts.row(incoming, ghost, len(incoming))[1]
        return len(incoming)

    def announced(self, blocks: Sequence[int]) -> None:
        mark = self._mark
        for block, ring in zip(blocks, self._destinations, strict=False):
            mark[block] = ring
        for ring in self._destinations[len(blocks) :]:
            ring.expect(-1)

    def retired(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            ring = self._mark[block]
            if ring is not None:
                ring.expect(-1)
                self._mark[block] = None

    def inserted(self, blocks: Sequence[int], touch: ArcTouch, *, ends_in_checkpoint: bool = False) -> None:
        mark = self._mark
        rings = [mark[block] for block in blocks]
        if None not in rings:
            self._insert(blocks, rings, touch)
            return
        for block, ring in zip(blocks, rings, strict=True):
            if ring is None:  # it was not announced
                self.evict(0, [self._keys[block]])
                [ring] = self._destinations
            self._insert([block], [ring], touch)

    def evict(self, count: int, incoming: Sequence[bytes] = ()) -> list[int]:
        self._once.passed, self._again.passed = self._once, self._again
        if incoming:
            self._destinations = []
        victims: list[int] = []
        room = len(incoming) - count  # so many find room
        at = ghost = 0
        while at < len(incoming):
            if at == ghost:
                ghost = self._ghosts.first_ghost(incoming, at)
            if at == ghost:
                victims += self._let_in_ghosts(incoming, at, room)
                ghost = len(self._destinations)
            else:
                stop = min(ghost, room) if at < room else ghost
                victims += self._let_in_strangers(stop - at, has_room=at < room)
            if at == len(self._destinations):
                return victims  # the others find no room
            at = len(self._destinations)
        while len(victims) < count and (run := self._evict_for_nobody(count - len(victims))):
            victims += run
        return victims

    def soonest_evicted(self) -> Iterator[int]:
        return Outlook(self._forest, self._rings, self._forks, self._target).order()

    def check_valid(self) -> None:
        super().check_valid()
        self._ghosts.check_valid()
        once, again = self._once.size, self._again.size
        counts, capacity = self._ghosts.counts, self._capacity
        assert 0 <= self._target <= capacity, "p is out of bounds"
        assert once + counts[ONCE] <= max(once, capacity), "T1 and B1 are too large"
        assert once + again + sum(counts) <= max(once + again, 2 * capacity), "the ghosts are too many"
        ghosts = self._ghosts.keys(ONCE) + self._ghosts.keys(AGAIN)
        assert set(self._forest.nodes().values()).isdisjoint(ghosts), "a chunk that is here is a ghost"

    def _insert(self, blocks: Sequence[int], rings: list[TouchRing], touch: ArcTouch) -> None:
        """Chunks arrive in the list they were announced for. Those above a ghost that came back go where it goes."""
        mark, once, again, added = self._mark, self._once, self._again, touch.added
        renew(touch.found, again)
        renew(added, once)
        returned = rings.count(again)
        again.expect(-returned)
        once.expect(returned - len(blocks))
        once.size += len(blocks)
        for block in blocks:
            mark[block] = added
        if returned:
            after = len(blocks) - rings[::-1].index(again)
            self._use_again(blocks[after - 1], touch.found)
        if mark[blocks[-1]] is added:
            if added.block != NONE and self._forest.child[added.block] == NONE:
                self._branch_off(added)
            if added.block == NONE:
                once.enter_young(added, blocks[-1])
            added.block = blocks[-1]
        self._end_ghosts([self._keys[block] for block in blocks])

    def _end_ghosts(self, keys: Sequence[bytes]) -> None:
        """End those that became ghosts since they were announced: others wrote them too, faster, and were evicted."""
        at = self._ghosts.first_ghost(keys, 0)
        while at < len(keys):
            self._ghosts.take(keys[at])
            at = self._ghosts.first_ghost(keys, at + 1)

    def _let_in_ghosts(self, incoming: Sequence[bytes], at: int, room: int) -> list[int]:
        """Ghosts come back, to T2: the chunk `at` and some after it. Their victims, if they are beyond `room`."""
        which, count = self._ghosts.row(incoming, at, LONGEST_ROW)
        victims: list[int] = []
        leaving = NONE
        if at < room:
            count = min(count, room - at)
        else:
            leaving, same = self._gives_for_ghosts(which)
            victims = self._take(min(count, same), leaving, others=1)
            count = len(victims)
            if not victims:
                return []
        self._learn_row(which, count, leaving)
        self._ghosts.take(incoming[at], count)
        if victims:
            self._evict_run(victims)
        self._again.expect(count)
        self._destinations += [self._again] * count
        return victims

    def _gives_for_ghosts(self, which: int) -> tuple[int, int]:
        """Which of T1 and T2 gives the victims of ghosts of a list that come back; and for how many, at least.

        Each one moves p by the same step, or by one that grows, and a victim makes its list smaller.
        """
        target = self._adapted(which, self._target, self._ghosts.counts)
        once, step = self._once.size, abs(target - self._target)
        leaving = ONCE if once > target or (which == AGAIN and once == int(target)) else AGAIN
        if min(self._room_for_ghosts()) < 0:
            return leaving, 1  # there may be no room for the ghosts of their victims
        if leaving != which:
            return leaving, LONGEST_ROW  # p moves away from the size of T1
        steps = (once - target) / (step + 1) if leaving == ONCE else (target - once - 1) / step
        return leaving, max(1, int(steps))

    def _learn_row(self, which: int, count: int, leaving: int) -> None:
        """Adapt p for `count` ghosts of a list that come back, while as many of the list `leaving` become ghosts."""
        counts = list(self._ghosts.counts)
        for _ in range(count):
            self._target = self._adapted(which, self._target, counts)
            counts[which] -= 1
            if leaving != NONE:
                counts[leaving] += 1

    def _let_in_strangers(self, count: int, has_room: bool) -> list[int]:
        """Strangers come, to T1: `count`, or the first few of them. Their victims. For each one a ghost may end."""
        ending, same = self._ghost_to_end()
        count = min(count, same)
        victims: list[int] = []
        if not has_room:
            room = int(self._target) - self._once.size + 1  # until T1 is too large
            count = min(count, room) if room > 0 else count
            victims = self._take(count, AGAIN if room > 0 else ONCE, others=count)
            count = len(victims)
            if not victims:
                return []
        if ending != NONE:
            self._ghosts.drop_oldest(ending, count)
        self._once.expect(count)
        self._destinations += [self._once] * count
        if victims:
            self._evict_run(victims)
        return victims

    def _evict_for_nobody(self, count: int) -> list[int]:
        """Up to `count` victims, while nothing comes."""
        excess = self._once.size - self._target
        count = min(count, math.ceil(excess)) if excess > 0 else count
        victims = self._take(count, ONCE if excess > 0 else AGAIN, others=count)
        if victims:
            self._evict_run(victims)
        return victims

    def _evict_run(self, run: Sequence[int]) -> None:
        """The victims become ghosts, if there is room: none where all is T1, as the paper deletes the page for good."""
        spare, room = self._room_for_ghosts()
        which = AGAIN if self._last.ring is self._again else ONCE
        room = min(spare, room) if which == ONCE else room
        if room > 0:
            keys = self._keys
            self._ghosts.add(which, [keys[block] for block in run[-room:]], keys[self._forest.parent[run[-1]]])
        super()._evict_run(run)

    def _adapted(self, which: int, target: float, counts: Sequence[int]) -> float:
        """The new p when a ghost of a list comes back, which `counts` still has."""
        b1, b2 = counts
        if which == ONCE:
            more = target + (b2 / b1 if b2 > b1 else 1.0)
            return more if more < self._capacity else float(self._capacity)
        less = target - (b1 / b2 if b1 > b2 else 1.0)
        return less if less > 0 else 0.0

    def _ghost_to_end(self) -> tuple[int, int]:
        """The list whose oldest ghost ends when a stranger comes (the paper's case IV), and for how many it is so.

        Chunks without blocks may be more than the pool has blocks, which the paper's pages never are.
        """
        b1, b2 = self._ghosts.counts
        spare, room = self._room_for_ghosts()
        if spare > 0 and room > 0:
            return NONE, min(spare, room)
        if b1 and (spare <= 0 or not b2):
            return ONCE, b1
        if b2 and room <= 0:
            return AGAIN, min(spare, b2) if spare > 0 else b2
        return NONE, max(spare, room) if spare > 0 or room > 0 else self._capacity

    def _room_for_ghosts(self) -> tuple[int, int]:
        """By how much T1 and B1 are less than c, and all four lists less than 2 c."""
        b1, b2 = self._ghosts.counts
        spare = self._capacity - self._once.size - b1
        return spare, spare + self._capacity - self._again.size - b2
