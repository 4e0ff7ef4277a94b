"""Adaptive: evict what is least likely to be used again for the room it takes; decline to store what is worth less.

Prompts are kept as *segments*, runs of chunks that were always used together (segments.py). How a request uses a
segment gives the segment its *class* (kinds.py). How likely each class is to be used again, at each age, is learned
while serving, also from segments that were evicted (survival.py). So a *bucket*, a class at an age, has a worth.
Eviction takes

    the bucket of the least worth -> in it the segment that is there longest -> its deepest chunk

and the end of a prompt is declined if it is worth less than what would have to leave for it. Where an LRU would find
nearly all that can be found, and more than this, what was used longest ago leaves first, and nothing is declined
(recency.py).

A segment moves only here:

    admitted    to the youngest bin of the class that this use gives it; it begins to be known if it was not
    admitted    by other requests: to the next bin, when it is old enough (buckets.py)
    inserted    more of its chunks are here, from the first on
    evict       its last chunks leave; without any it is a *ghost*. So with `removed`
    anew        all of them are ghosts, those last that were used last
    forgotten   the oldest ghosts, while there are more than a third as many as blocks

It is a *leaf*, and can be evicted from, while nothing hangs below its deepest chunk. A checkpoint is a segment of its
own, with the class and age of the chunk it hangs below until a request resumes there.

Ghosts are from ARC and LHD (NSDI '18), declining is from TinyLFU (ACM ToS 2017). docs/policies.md has what was tried.
"""

import heapq
from collections.abc import Iterator, Sequence
from itertools import chain
from math import inf
from typing import Any

from cpu_prefix_cache.eviction.base import EvictionPolicy
from cpu_prefix_cache.eviction.buckets import Buckets, Rank
from cpu_prefix_cache.eviction.kinds import FEATURES, GAP_OF, HINTED, UNKNOWN, kinds_of
from cpu_prefix_cache.eviction.levels import Levels
from cpu_prefix_cache.eviction.rings import members
from cpu_prefix_cache.eviction.segments import Segment, Segments, enter, leave, segment_ring
from cpu_prefix_cache.index.departures import Departures
from cpu_prefix_cache.index.forest import NONE, SEVERAL, Forest
from cpu_prefix_cache.messages.errors import MisuseError

NOBODY: tuple[Rank, Sequence[int]] = ((inf, 0, 0), ())
# So many requests may have one time, to the last digit: 5 of a recorded trace do, by chance. More of them were rounded.
MOST_AT_ONCE = 5
LONGEST_PACE = 1.0  # second between two of those, and between all requests of a log without times


class Adaptive(EvictionPolicy):
    """Evicts from the bucket of the least worth, times what its blocks cost to compute again. See EvictionPolicy.

    `even_depth`: in chunks, as in levels.py; infinite, and they all cost the same.
    """

    def __init__(self, forest: Forest, even_depth: float = inf) -> None:
        self._forest = forest
        self._mark: list[Any] = forest.mark
        self._keys: list[Any] = forest.key  # bytes of what is here
        self._segments = Segments(forest)
        self._buckets = Buckets(FEATURES, HINTED, Levels(even_depth), forest.capacity)
        self._most_ghosts = max(1, forest.capacity // 3)
        self._num_ghosts = 0
        self._ghosts = segment_ring()
        self._now = self._told = 0.0  # by our clock, and by the engine's
        self._at_once = 0  # requests at this very moment
        self._pace = LONGEST_PACE  # seconds that a request took, at the moment before

    # A request

    def admitted(self, deepest: int, keys: Sequence[bytes], now: float | None, next_use: float | None = None) -> None:
        if not keys and deepest == NONE:
            return
        if not keys or now is None:
            raise MisuseError("the policy 'adaptive' needs the keys of every request and the time of its admission")
        self._tell_time(now)
        use = self._buckets.begin(self._now)
        path, matched = self._walk(keys)
        self._buckets.seek(path, is_hinted=next_use is not None)
        kinds = kinds_of(path, matched, next_use)
        while kinds:  # from the last one to the first
            segment = path[len(kinds) - 1]
            self._buckets.use(segment, kinds.pop(), use)
            if not segment.resident:
                self._become_youngest_ghost(segment)
        depth = 0 if deepest == NONE else self._forest.depth[deepest]
        if depth and self._keys[deepest] not in keys[depth - 1 : depth]:  # it is a checkpoint
            self._buckets.use(self._mark[deepest], path[-1].kind, use)
        self._forget_ghosts()
        self._buckets.a_request_came()

    def used_beside(self, nodes: Sequence[int]) -> None:
        for node in nodes:
            above = self._mark[self._forest.parent[node]]
            self._buckets.use(self._mark[node], above.kind, self._buckets.begin(self._now))

    def _tell_time(self, now: float) -> None:
        """It is `now`. While the engine's clock stands still ours goes on, at the last pace, and waits for it later."""
        if not self._told <= now < inf:
            raise MisuseError(f"a request cannot be admitted at {now} s: it is {self._told} s already")
        if now > self._told:
            self._pace = min(LONGEST_PACE, (now - self._told) / max(1, self._at_once))
            self._at_once = 0
        self._at_once += 1
        self._told = now
        if self._at_once > MOST_AT_ONCE:
            self._now += self._pace
        if self._now < now:
            self._now = now

    def _walk(self, keys: Sequence[bytes]) -> tuple[list[Segment], int]:
        """The segments of a prompt, the last of which may be new; and how many of its chunks were known."""
        path, matched, cuts = self._segments.walk(keys)
        for cut in cuts:
            self._was_cut(*cut)
        for segment in path:
            segment.gap = GAP_OF[segment.use.bin]  # it has waited so long
        if matched < len(keys):
            path.append(self._begin(keys, matched, path[-1] if path else None))
        path[-1].is_end = True
        path[-1].ended += 1
        return path, matched

    def _begin(self, keys: Sequence[bytes], start: int, above: Segment | None) -> Segment:
        """A segment that no request had before."""
        segment = Segment(keys, start, len(keys))
        self._segments.add(segment)
        if above is not None:
            above.children += 1
            segment.turn = above.turn + above.is_end
            segment.gap = above.gap if above.is_end else 0
        return segment

    def _was_cut(self, upper: Segment, lower: Segment, displaced: Segment | None) -> None:
        """A segment has become two, of one past. A ghost that was found by the same key may have been displaced."""
        self._buckets.stand_beside(upper, lower)
        self._place(lower)
        self._place(upper)
        if not lower.first:
            self._forget(lower)
        if displaced is not None:
            self._forget(displaced)

    # Cached chunks

    def inserted(self, blocks: Sequence[int], touch: None, *, ends_in_checkpoint: bool = False) -> None:
        parent = self._forest.parent[blocks[0]]
        top: Segment | None = self._mark[parent]
        above, at, stop = top, 0, len(blocks) - ends_in_checkpoint
        while at < stop:
            above = self._next_segment(blocks, at, stop, blocks[at - 1] if at else parent, above)
            at += self._arrive(above, blocks, at, stop)
        if stop < len(blocks):
            checkpoint = self._segment(blocks, stop, len(blocks), above)
            if above is not None and checkpoint.use.number < above.use.number:  # it was here before
                self._buckets.follow(checkpoint, above)
            self._arrive(checkpoint, blocks, stop, len(blocks))
        if top is not None:
            self._place(top)

    def _arrive(self, segment: Segment, blocks: Sequence[int], at: int, stop: int) -> int:
        """The next chunks of a segment are here. How many of `blocks[at:stop]` are of it."""
        mark = self._mark
        count = min(stop - at, segment.length - segment.resident)
        for block in blocks[at : at + count]:
            mark[block] = segment
        segment.resident += count
        segment.deepest = blocks[at + count - 1]
        if segment.resident == segment.length:
            segment.last = self._keys[segment.deepest]  # cached chunks outweigh keys of a forgotten request
        self._place(segment)
        return count

    def _next_segment(self, blocks: Sequence[int], at: int, stop: int, parent: int, above: Segment | None) -> Segment:
        """The segment of the first of `blocks[at:stop]`: the one above, if they go on with it, or one below that."""
        if above is not None and above.deepest == parent and self._segments.find(self._keys[blocks[at]]) is None:
            if above.resident == above.length and not above.children:
                answer = self._unknown_keys(blocks, at, stop)  # it belongs to its prompt
                above.extend(answer)
                self._buckets.lengthened(above, len(answer))
            if above.resident < above.length:
                return above
        return self._segment(blocks, at, stop, above)

    def _segment(self, blocks: Sequence[int], at: int, stop: int, above: Segment | None) -> Segment:
        """The segment that begins with the first of `blocks[at:stop]`; a new one if no request had it.

        That has the class and the age of the one above.
        """
        segment = self._segments.find(self._keys[blocks[at]])
        if segment is None:
            keys = self._unknown_keys(blocks, at, stop)
            segment = Segment(keys, 0, len(keys))
            segment.depth = self._forest.depth[blocks[at]] + len(keys) - 1
            self._segments.add(segment)
            if above is None:
                self._buckets.use(segment, UNKNOWN, self._buckets.begin(self._now))
            else:
                segment.turn, segment.gap = above.turn, above.gap
                self._buckets.stand_beside(segment, above)
                self._buckets.lengthened(segment, segment.length)
        return segment

    def _unknown_keys(self, blocks: Sequence[int], at: int, stop: int) -> list[bytes]:
        """The keys of the first of `blocks[at:stop]` and of those after it, up to where a known segment begins."""
        known = (each for each in range(at + 1, stop) if self._segments.find(self._keys[blocks[each]]) is not None)
        return [self._keys[block] for block in blocks[at : next(known, stop)]]

    def removed(self, block: int) -> None:
        segment = self._mark[block]
        self._mark[block] = None
        self._shrink(segment, 1, self._forest.parent[block])
        self._forget_ghosts()

    def anew(self, forest: Forest) -> "Adaptive":
        self._forest, self._mark, self._keys = forest, forest.mark, forest.key
        self._segments.anew(forest)
        self._buckets.clear()
        here = [segment for segment in self._segments.known() if segment.resident]
        for segment in sorted(here, key=lambda segment: segment.use.at):
            segment.resident, segment.deepest = 0, NONE
            self._place(segment)
        self._forget_ghosts()
        return self

    def bared(self, block: int) -> None:
        self._place(self._mark[block])

    # Eviction

    def choose(self, parent: int, incoming: Sequence[bytes], count: int, margin: float = 1.0) -> int:
        if self._buckets.is_by_age:
            return len(incoming)
        coming = self._coming(parent, incoming)
        accepted = len(incoming)
        order = self._order(count, held=parent)
        rank, run = next(order, NOBODY)
        while count > 0 and coming and run:
            own, chunks = coming[-1]
            if (rank[0] * margin, *rank[1:]) <= own:
                count -= len(run)
                if count > 0:
                    rank, run = next(order, NOBODY)
                continue
            declined = min(count, chunks)
            accepted -= declined
            count -= declined
            coming[-1] = own, chunks - declined
            if declined == chunks:
                coming.pop()
        return accepted

    def _coming(self, parent: int, incoming: Sequence[bytes]) -> list[tuple[Rank, int]]:
        """Segments of the chunks with these keys, from the first on: the rank of each, and the number of its chunks."""
        coming: list[tuple[Rank, int]] = []
        above: Segment | None = None if parent == NONE else self._mark[parent]
        at = 0
        if above is not None and above.resident < above.length and above.deepest == parent:
            at = min(len(incoming), above.length - above.resident)
            coming.append((self._buckets.rank(above), at))
        while at < len(incoming):
            segment, left = self._segments.find(incoming[at]), len(incoming) - at
            if segment is not None:
                coming.append((self._buckets.rank(segment), min(left, segment.length)))
            elif coming:
                coming.append((coming[-1][0], left))  # an answer, or a checkpoint: worth what is above it
            else:
                return []
            at += coming[-1][1]
        return coming

    def evict(self, count: int, incoming: Sequence[bytes] = ()) -> list[int]:
        if count:
            self._buckets.resize(self._forest.capacity)
        runs = self._next_runs(count)
        for run in runs:
            self._evict_run(run)
        self._forget_ghosts()
        return [block for run in runs for block in run]

    def _next_runs(self, count: int) -> list[Sequence[int]]:
        """The runs of the next `count` chunks to leave."""
        order, runs = self._order(count), list[Sequence[int]]()
        while count and (run := next(order, NOBODY)[1]):
            runs.append(run[:count])
            count -= len(runs[-1])
        return runs

    def _evict_run(self, run: Sequence[int]) -> None:
        """The last chunks of a segment leave, the deepest first."""
        mark, parent = self._mark, self._forest.parent[run[-1]]
        segment = mark[run[0]]
        for block in run:
            mark[block] = None
        self._forest.remove_run(run)
        self._shrink(segment, len(run), parent)
        if not segment.resident and mark[parent] is not None:
            self._place(mark[parent])

    def soonest_evicted(self) -> Iterator[int]:
        return chain.from_iterable(run for _, run in self._order(longest=16))

    def _order(self, longest: int, held: int = NONE) -> Iterator[tuple[Rank, Sequence[int]]]:
        """Runs of chunks in the order in which they would leave, if nothing came meanwhile. Changes nothing.

        The chunks of a run are of one segment, `longest` at most. What stands at or above node `held` stays.
        """
        forest, mark = self._forest, self._mark
        parents, child, pinned = forest.parent, forest.child, forest.pins.linked
        departures = Departures(forest)
        bared: list[tuple[Rank, int, int]] = []  # (rank, which one, block) of what this walk made childless; a heap
        ends = self._buckets.ends()
        turn = 0  # segments that become childless, in that order
        ahead = next(ends, None)
        while bared or ahead is not None:
            if ahead is None or (bared and bared[0][0] < ahead[0]):
                rank, number, block = heapq.heappop(bared)
            else:
                (rank, block), number = ahead, NONE
                ahead = next(ends, None)
            if block == held or not departures.may_leave(block):
                continue
            segment, run = mark[block], [block]
            block = parents[block]
            while len(run) < longest and mark[block] is segment and child[block] != SEVERAL:
                if block in pinned or block == held:
                    break
                run.append(block)
                block = parents[block]
            yield rank, run
            block = departures.leave(run[-1])
            if block != NONE:
                above = mark[block]
                following = number if above is segment else turn  # the same one goes on in its place
                turn += 1
                heapq.heappush(bared, (self._buckets.rank(above), following, block))

    # Small things

    def _shrink(self, segment: Segment, count: int, parent: int) -> None:
        """The last chunks of a segment are gone, and `parent` is what they hung below."""
        segment.resident -= count
        segment.deepest = parent if segment.resident else NONE
        self._place(segment)

    def _place(self, segment: Segment) -> None:
        """Let a segment stand where it belongs: with the ghosts, with the leaves of its bucket, or nowhere."""
        ring, ghosts, is_here = segment.ring, self._ghosts, segment.resident > 0
        is_leaf = is_here and self._forest.child[segment.deepest] == NONE
        if ring is ghosts and is_here:
            leave(segment)
            self._num_ghosts -= 1
        elif ring is not ghosts and ring is not None and not is_leaf:
            self._buckets.leave(segment)
        if is_leaf and segment.ring is None:
            self._buckets.enter(segment)
        elif ring is not ghosts and not is_here:
            self._become_youngest_ghost(segment)

    def _become_youngest_ghost(self, segment: Segment) -> None:
        self._num_ghosts += segment.ring is None
        enter(self._ghosts, segment)

    def _forget_ghosts(self) -> None:
        while self._num_ghosts > self._most_ghosts:
            self._forget(self._ghosts.younger)

    def _forget(self, ghost: Segment) -> None:
        self._num_ghosts -= ghost.ring is not None
        leave(ghost)
        self._buckets.forget(ghost, self._now)
        self._segments.forget(ghost)

    def check_valid(self) -> None:
        mark, child = self._mark, self._forest.child
        ghosts = list(members(self._ghosts))
        nodes = self._forest.nodes()
        here: set[Segment] = {mark[block] for block in nodes}
        assert len(ghosts) == self._num_ghosts, "ghosts are miscounted"
        assert self._num_ghosts <= self._most_ghosts, "there are too many ghosts"
        assert here.isdisjoint(ghosts), "a segment that is here is a ghost"
        known = self._segments.known()
        assert here.union(ghosts) <= set(known), "a segment cannot be found"
        self._buckets.check_valid(known)
        for segment in known:
            resident = sum(mark[block] is segment for block in nodes)
            assert segment in here or segment in ghosts, "a segment stands nowhere"
            is_leaf = bool(resident and child[segment.deepest] == NONE)
            assert (segment in segment.use.leaves) == is_leaf, "a segment is a leaf, or is none"
            if segment in here or segment in ghosts:
                assert resident == segment.resident <= segment.length, "the chunks of a segment are miscounted"
                assert (segment.ring is None) == (not is_leaf and bool(resident)), "a segment stands nowhere"
        for block in nodes:
            segment = mark[block]
            assert segment is not None, f"block {block}: a key without a segment"
            if block != segment.deepest:
                below = [each for each, above in enumerate(self._forest.parent) if above == block]
                assert segment in [mark[each] for each in below], f"block {block} is cut off from its segment"
