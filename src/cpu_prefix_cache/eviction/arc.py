"""ARC, after Megiddo and Modha, FAST '03: a balance between what was used once and what was used again.

    T1   chunks that one request used       B1   ghosts: keys of chunks that were evicted from T1
    T2   chunks that several used           B2   ghosts: keys of chunks that were evicted from T2
    p    how many chunks T1 is to have, 0 to c, the blocks of the pool. A new chunk that is in B1 raises it, one that
         is in B2 lowers it

and a chunk moves between them only here:

    evict        (none) -> on its way to T1, or to T2 if it is a ghost, which it is no more. It counts as there
    inserted     on its way -> T1 or T2. Without having been announced: as above, now
    abandoned    on its way -> (none)
    admitted     T1 -> T2, with all that is above it
    evict        T1 -> B1, T2 -> B2, one for each that finds no room
    removed      T1, T2 -> (none): what is withdrawn has not been worth anything, and leaves no ghost

T1 and T2 are rings of touches (see touches.py): a chunk is in the list whose touch it carries. A request has one stamp
and two touches, one in T2 for the prefix it found, one in T1 for the chunks it adds. T2 is closed under prefixes:
who used a chunk again used what is above it, and a ghost that returns takes what is above it along.

Where this departs from the paper, because a chunk leaves only when nothing hangs below it (rule 3):

  * The oldest of a list is the oldest of its *ends*, chunks with no child in the same list. An end of T1 is childless,
    as all below T1 is in T1. An end of T2 may have children in T1; while the oldest one has, T1 gives the victim. So a
    chunk in T2 outlives its children in T1. A list that cannot give one, because of pins, leaves it to the other.
  * A batch of n chunks is n singles: for each p is adapted first, and then one chunk evicted if there is no room.

To make that as fast as a batch, a *run* of victims, each the parent of the one before it, is collected while the
decisions fall on one list, and leaves the forest together.
"""

from collections.abc import Iterator, Sequence

from cpu_prefix_cache.errors import InternalError
from cpu_prefix_cache.eviction.ghosts import Ghosts
from cpu_prefix_cache.eviction.outlook import AGAIN, ONCE, Outlook
from cpu_prefix_cache.eviction.touches import Ring, Touch, TouchPolicy, leave, linked
from cpu_prefix_cache.forest import NONE, Forest


class ArcTouch:
    """One request: `found` for what it used again, `added` for what it used first. One stamp."""

    __slots__ = ("added", "found")

    def __init__(self, found: Touch, added: Touch) -> None:
        self.found = found
        self.added = added


class Arc(TouchPolicy):
    """Evicts from T1 while it has more than p chunks, else from T2. See EvictionPolicy."""

    def __init__(self, forest: Forest) -> None:
        super().__init__(forest, rings=2)
        self._once, self._again = self._rings
        self._capacity = forest.root  # c
        self._target = 0.0  # p
        self._ghosts = Ghosts(forest.root)
        self._announced: list[Ring] = []  # where the chunks of the last `evict` go
        self._forks: dict[int, int] = {}  # how many children in T2 a chunk has, where it is more than one
        self._run: list[int] = []  # victims that have yet to leave the forest, deepest first
        self._last = Touch(0, self._once)  # the touch of those
        self._passed = [self._once.end, self._again.end]  # during `evict`: up to here nobody can go

    def admitted(self, deepest: int) -> ArcTouch:
        self._stamp += 1
        touch = ArcTouch(Touch(self._stamp, self._again), Touch(self._stamp, self._once))
        if deepest != NONE:
            self._use_again(deepest, touch.found)
        return touch

    def announced(self, blocks: Sequence[int]) -> None:
        for block, ring in zip(blocks, self._announced, strict=True):
            self._mark[block] = ring

    def abandoned(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            ring = self._mark[block]
            if ring is not None:
                ring.coming -= 1
                self._mark[block] = None

    def inserted(self, blocks: Sequence[int], touch: ArcTouch) -> None:
        mark, keys, ghosts = self._mark, self._forest.key, self._ghosts
        once, added = self._once, touch.added
        for block in blocks:
            ring = mark[block]
            if ring is not None:
                ring.coming -= 1
            key = keys[block]
            if key is None:
                raise InternalError(f"block {block} holds no chunk")
            if ring is None:
                ring = self._rings[ONCE if self._learn(key) == NONE else AGAIN]
            elif ghosts.find(key) != NONE:
                ghosts.discard(key)  # another writer of it was faster, and what it wrote was evicted
            mark[block] = added
            once.chunks += 1
            if ring is not once:
                self._use_again(block, touch.found)
        if mark[blocks[-1]] is added:
            added.block = blocks[-1]
            if added.older is None:
                once.enter_young(added)

    def evict(self, count: int, incoming: Sequence[bytes] = ()) -> list[int]:
        self._passed = [self._once.end, self._again.end]
        self._announced = []
        victims: list[int] = []
        room = len(incoming) - count
        for at, key in enumerate(incoming):
            full = self._once.chunks + self._once.coming >= self._capacity
            ghost = self._learn(key)
            if at >= room:
                victims.append(self._evict_one(from_ghost=ghost, leaves_ghost=not (full and ghost == NONE)))
            ring = self._rings[ONCE if ghost == NONE else AGAIN]
            ring.coming += 1
            self._announced.append(ring)
        while len(victims) < count:
            victims.append(self._evict_one())
        self._end_run()
        return victims

    def soonest_evicted(self) -> Iterator[int]:
        return Outlook(self._forest, self._rings, self._forks, self._target).order()

    def check_valid(self) -> None:
        super().check_valid()
        self._ghosts.check_valid()
        forest, (once, twice), capacity = self._forest, self._ghosts.counts, self._capacity
        sizes = [ring.chunks + ring.coming for ring in self._rings]
        assert 0 <= self._target <= capacity, "p is out of bounds"
        assert sizes[ONCE] + once <= capacity, "T1 and B1 are too large"
        assert sum(sizes) + once + twice <= 2 * capacity, "the ghosts are too many"
        assert not self._run, "victims have not left the forest"
        children: dict[int, int] = {}
        for block, key in enumerate(forest.key):
            if key is not None:
                assert self._ghosts.find(key) == NONE, f"the chunk in block {block} is a ghost"
                if self._is_again(block):
                    parent = forest.parent[block]
                    children[parent] = children.get(parent, 0) + 1
                    assert parent == forest.root or self._is_again(parent), f"block {block} is in T2, its parent in T1"
        children.pop(forest.root, None)
        assert self._forks == {block: count for block, count in children.items() if count > 1}, "forks are miscounted"
        for block, key in enumerate(forest.key):
            if key is not None and self._is_again(block):
                assert self._is_end(block) == (block not in children), f"block {block} stands wrongly in T2"

    def _learn(self, key: bytes) -> int:
        """A new chunk comes: adapt p if it is a ghost, and end it; make room for one more ghost if not. What it was."""
        ghosts, counts = self._ghosts, self._ghosts.counts
        which = ghosts.find(key)
        if which == NONE:
            once = self._once.chunks + self._once.coming
            if once + counts[ONCE] >= self._capacity:
                if counts[ONCE]:
                    ghosts.drop_oldest(ONCE)
            elif once + self._again.chunks + self._again.coming + sum(counts) >= 2 * self._capacity:
                ghosts.drop_oldest(AGAIN)
            return NONE
        step = max(counts[1 - which] / counts[which], 1.0)
        if which == ONCE:
            self._target = min(float(self._capacity), self._target + step)
        else:
            self._target = max(0.0, self._target - step)
        ghosts.discard(key)
        return which

    def _evict_one(self, from_ghost: int = NONE, leaves_ghost: bool = True) -> int:
        """The next victim, for a chunk that was a ghost in `from_ghost`."""
        size = self._once.chunks + self._once.coming
        prefers_once = size > self._target or (from_ghost == AGAIN and size == int(self._target))
        block = NONE if prefers_once else self._take_again(or_any=False)
        if block == NONE:
            block = self._take_once()
        if block == NONE:
            block = self._take_again(or_any=True)
        if block == NONE:
            raise InternalError("a chunk was to be evicted, but none can go")
        if leaves_ghost:
            key = self._forest.key[block]
            if key is None:
                raise InternalError(f"block {block} holds no chunk")
            self._ghosts.add(AGAIN if self._last.ring is self._again else ONCE, key)
        return block
        return block

    def _take_once(self) -> int:
        """The next chunk that T1 can give, or NONE."""
        block = self._next_of_run(self._once)
        if block != NONE:
            return block
        self._end_run()
        forest, end = self._forest, self._once.end
        touch = linked(self._passed[ONCE].younger)
        while touch is not end:
            following = linked(touch.younger)
            if forest.children[touch.block]:
                leave(touch)
            elif forest.pins[touch.block]:
                self._passed[ONCE] = touch
            else:
                return self._begin_run(touch)
            touch = following
        return NONE

    def _take_again(self, or_any: bool) -> int:
        """The oldest end of T2, or NONE while that has children in T1; `or_any`: the oldest that has none."""
        block = self._next_of_run(self._again)
        if block != NONE:
            return block
        if self._run and (self._last.ring is self._again or self._is_again(self._forest.parent[self._run[-1]])):
            self._end_run()  # it tells whether the parent still has children
        forest, end = self._forest, self._again.end
        touch = linked(self._passed[AGAIN].younger)
        while touch is not end:
            if not forest.pins[touch.block]:
                if not forest.children[touch.block]:
                    self._end_run()
                    return self._begin_run(touch)
                if not or_any:
                    return NONE
            self._passed[AGAIN] = touch
            touch = linked(touch.younger)
        return NONE

    def _next_of_run(self, ring: Ring) -> int:
        """The parent of the last victim, where it is the next one of `ring`, or NONE."""
        run, last = self._run, self._last
        if not run or last.ring is not ring:
            return NONE
        forest = self._forest
        block = forest.parent[run[-1]]
        own = self._mark[block]
        if own is not last and (own is None or own.ring is not ring or own.stamp > last.stamp):
            return NONE  # the root, or a chunk that was used since
        if forest.children[block] != 1 or forest.pins[block]:
            return NONE
        if own is not last and own.block == block:
            leave(own)
        self._take(block, ring)
        return block

    def _begin_run(self, touch: Touch) -> int:
        self._last = touch
        self._take(touch.block, touch.ring)
        return touch.block

    def _take(self, block: int, ring: Ring) -> None:
        self._run.append(block)
        self._mark[block] = None
        ring.chunks -= 1

    def _end_run(self) -> None:
        """Let the victims leave the forest; what they hung below inherits their touch."""
        run, last = self._run, self._last
        if not run:
            return
        self._run = []
        parent = self._forest.parent[run[-1]]
        self._forest.remove_run(run)
        if last.ring is self._once and self._mark[parent] is last and not self._forest.children[parent]:
            last.block = parent
        else:
            leave(last)
            self._inherit(parent, last)

    def _inherit(self, parent: int, touch: Touch) -> None:
        if not self._is_again(parent):
            super()._inherit(parent, touch)
        elif touch.ring is self._again:
            is_end = self._forget_child(parent)
            if touch.stamp >= self._carried(parent).stamp:
                self._give(parent, touch)
            if is_end:
                own = self._carried(parent)
                own.block = parent
                self._again.enter_old(own)
        elif touch.stamp > self._carried(parent).stamp:
            was_end = self._is_end(parent)
            self._give(parent, Touch(touch.stamp, self._again))  # as young, but in its own list
            if was_end:
                self._passed[AGAIN] = self._again.end
                self._again.enter_old(self._carried(parent))

    def _use_again(self, block: int, touch: Touch) -> None:
        """Let `block` carry a touch of T2, and move it and all that is above it there."""
        mark, parents, once = self._mark, self._forest.parent, self._once
        above = block
        while above != self._forest.root and mark[above].ring is once:
            self._carry(above, touch)
            above = parents[above]
        is_end = above != block or self._is_end(block)
        if above == block:
            self._carry(block, touch)
        elif above != self._forest.root:
            self._note_child(above)
        leave(touch)
        touch.block = block
        if is_end:
            self._again.enter_young(touch)

    def _is_again(self, block: int) -> bool:
        touch = self._mark[block]
        return touch is not None and touch.ring is self._again

    def _is_end(self, block: int) -> bool:
        """Whether a chunk of T2 has no child in T2: then, and only then, its touch stands and names it."""
        touch = self._carried(block)
        return touch.block == block and touch.older is not None

    def _note_child(self, parent: int) -> None:
        """`parent`, in T2, has one more child in T2."""
        if self._is_end(parent):
            leave(self._carried(parent))
        else:
            self._forks[parent] = self._forks.get(parent, 1) + 1

    def _forget_child(self, parent: int) -> bool:
        """`parent`, in T2, has one child in T2 less. Whether that was the last."""
        left = self._forks.pop(parent, 1) - 1
        if left > 1:
            self._forks[parent] = left
        return left == 0
