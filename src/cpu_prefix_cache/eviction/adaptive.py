"""Adaptive: evict what is least likely to be used again for the room it takes, as far as uses so far can tell.

Prompts are kept as segments (segments.py), and each use of one says what kind of use it was:

    turn    how many prompts had ended above the last segment: the first, second, 3rd to 4th, 5th to 10th ... of a
            conversation
    role    of the segment in this prompt: shared by several continuations, or one that was passed, or the last
    gap     how long the segment, or the last of the prompt where it is not shared, had waited when it was used before

The three are its *class*. How likely a class is to be used again, at what age, is learned from all segments, those that
are not here included (survival.py). So each *bucket*, a class at an age, has a worth, and evicts in this order:

    the bucket of the least worth -> in it the segment that is there longest -> its deepest chunk

and the same order says whether what comes is worth more than what would have to leave for it. If not, it is declined.

A segment moves only here:

    admitted    known now if it was not, used now, in the youngest bin of the class that this use gives it
    admitted    into the next bin, when it is old enough
    inserted    more of its chunks are here, from the first on: it is no ghost
    evict       its last chunks leave, or all: it is a ghost. So with `removed`
    forgotten   ghosts beyond a third of the blocks, oldest first

Only a segment of which the deepest chunk is childless can be evicted from. It stands in the ring of its bucket.

A checkpoint is a segment of its own, of the class and age of the chunk it hangs below, until a request resumes there.

From the study in docs/policies.md; the features of conversations are those of "KVCache in the wild" (USENIX ATC '25),
learning from those who left is LHD's (NSDI '18) and ARC's idea, to decline TinyLFU's.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from math import inf

from sortedcontainers import SortedList

from cpu_prefix_cache.errors import InternalError, MisuseError
from cpu_prefix_cache.eviction.ages import Ages, Use
from cpu_prefix_cache.eviction.segments import Segment, Segments, enter, leave, members, new_ring, used
from cpu_prefix_cache.eviction.survival import BINS, Survival
from cpu_prefix_cache.forest import NONE, Forest
from cpu_prefix_cache.hashing import checkpoint_key

TURNS, ROLES, GAPS = 6, 10, 6
TURN_OF = (0, 0, 1, 2, 2, 3, 3, 3, 3, 3, 3)  # turn 1 | 2 | 3-4 | 5-10 | 11-30 | 31 and more
REPEAT_OF = (0, 0, 6, 7, 7, 8, 8, 8, 8, 8, 8, 9)  # a prompt that comes for the 2nd | 3rd-4th | 5th-10th | further time
GAP_OF = (1, 2, 3, *[4] * 1, *[5] * (BINS - 4))
INTERIOR, FRESH, DOCUMENT = 1, 0, 3
LEARN_EVERY = 3  # requests. To learn a class anew takes 20 us
LEARN_EARLY = 256  # requests, in each of which two classes are learned anew

Rank = tuple[float, int, int]  # worth, bin from the last to the first, bucket: who has the least goes first

NOBODY: tuple[Rank, Sequence[int]] = ((inf, 0, 0), ())


class Adaptive:
    """Evicts from the bucket of the least worth. See EvictionPolicy."""

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self._mark = forest.mark
        self._keys = forest.key
        self._segments = Segments(forest)
        self._survival = Survival(
            [(turn, role, gap) for turn in range(TURNS) for role in range(ROLES) for gap in range(GAPS)]
        )
        self._ages = Ages(self._survival)
        self._most_ghosts = max(1, forest.root // 3)
        self._num_ghosts = 0
        self._ghosts = new_ring()
        self._rings: dict[int, Segment] = {}  # by bucket
        self._ranks: SortedList[Rank] = SortedList()  # of the rings that may have members
        self._is_ranked = bytearray(TURNS * ROLES * GAPS * BINS)
        self._now = 0.0
        self._requests = 0
        self._foreseen: tuple[int, list[Sequence[int]]] = (NONE, [])  # by `accepts`, and how old the forest was then

    # A request

    def admitted(self, deepest: int, keys: Sequence[bytes], now: float | None) -> None:
        if not keys and deepest == NONE:
            return
        if not keys or now is None:
            raise MisuseError("the policy 'adaptive' needs the keys of every request and the time of its admission")
        if now < self._now:
            raise MisuseError(f"a request was admitted at {now} s, after one at {self._now} s")
        self._now = now
        self._foreseen = (NONE, [])
        for grown in self._ages.grow_old(now):
            for segment in grown.leaves:
                self._enter_bucket(segment, grown)
        path, matched, cuts = self._segments.walk(keys)
        for upper, lower in cuts:
            self._was_cut(upper, lower)
        reused = len(path)
        for segment in path:
            segment.gap = GAP_OF[used(segment).bin]
        if matched < len(keys):
            path.append(self._begin(keys, matched, path[-1] if path else None))
        checkpoint = self._mark[deepest] if deepest != NONE and self._is_checkpoint(deepest) else None
        self._use(path, reused, matched, checkpoint)
        self._forget_ghosts()
        self._learn(now)

    def _begin(self, keys: Sequence[bytes], start: int, above: Segment | None) -> Segment:
        """A segment that no request had before."""
        segment = Segment(keys, start, len(keys))
        self._segments.add(segment)
        if above is not None:
            above.children += 1
            segment.turn = above.turn + above.is_end
            segment.gap = above.gap if above.is_end else 0
        self._place(segment)
        return segment

    def _was_cut(self, upper: Segment, lower: Segment) -> None:
        """A segment has become two: the upper part shares its past."""
        self._stand_beside(upper, lower)
        if lower.first:
            self._place(lower)
        else:
            self._forget(lower)
        self._place(upper)

    def _use(self, path: Sequence[Segment], reused: int, matched: int, checkpoint: Segment | None) -> None:
        """Segments are used now, the first `reused` of them again, which are `matched` chunks long."""
        use = Use(self._now)
        self._ages.begin(use)
        last = path[-1]
        last.is_end = True
        last.ended += 1
        turn = 4 if 11 <= last.turn <= 30 else 5 if last.turn > 30 else TURN_OF[last.turn]
        alone = DOCUMENT if last.turn == 1 and matched >= 2 else FRESH
        repeats = REPEAT_OF[min(last.ended, 11)] or alone
        for segment in reversed(path):  # so that of ghosts the parents are younger, and forgotten last
            children = segment.children
            if children >= 2:
                role, gap = 5 if children >= 6 else 4 if children >= 3 else 2, segment.gap
            else:
                role, gap = repeats if segment is last else INTERIOR, last.gap
            self._enter_class(segment, (turn * ROLES + role) * GAPS + gap, use)
        if checkpoint is not None:
            self._enter_class(checkpoint, last.kind, use)

    def _enter_class(self, segment: Segment, kind: int, use: Use) -> None:
        """A segment is used, and of this class from now on."""
        ages, survival, before = self._ages, self._survival, segment.use
        if before is not None:
            survival.reuses[segment.kind * BINS + before.bin] += 1
            ages.part(before, segment.kind, use.at)
        ages.join(use, kind)
        if survival.begin(kind):
            self._rank_class(kind, use.at)
        ring = segment.ring
        segment.use, segment.kind = use, kind
        if ring is self._ghosts:
            enter(ring, segment)
        elif ring is not None and before is not None:
            del before.leaves[segment]
            use.leaves[segment] = None
            self._enter_bucket(segment, use)

    def _learn(self, now: float) -> None:
        self._requests += 1
        early = self._requests <= LEARN_EARLY
        for _ in range(2 if early else self._requests % LEARN_EVERY == 0):
            self._rank_class(self._survival.next_class(), now)

    def _rank_class(self, each: int, now: float) -> None:
        """Learn what the buckets of a class are worth now, and put them in their places."""
        worth = self._survival.worth
        first = each * BINS
        ranked = [bucket for bucket in range(first, first + BINS) if self._is_ranked[bucket]]
        for bucket in ranked:
            self._ranks.remove(self._bucket_rank(bucket))
            self._is_ranked[bucket] = False
        worth[first : first + BINS] = self._survival.learn(each, now)
        for bucket in ranked:
            ring = self._rings[bucket]
            if ring.younger is not ring:
                self._ranks.add(self._bucket_rank(bucket))
                self._is_ranked[bucket] = True

    def _bucket_rank(self, bucket: int) -> Rank:
        return self._survival.worth[bucket], -(bucket % BINS), bucket

    def _rank(self, segment: Segment) -> Rank:
        return self._bucket_rank(segment.kind * BINS + used(segment).bin)

    # What is here

    def announced(self, blocks: Sequence[int]) -> None:
        """Nothing: what is being written is not here yet."""

    def abandoned(self, blocks: Sequence[int]) -> None:
        """Nothing: what was being written was not here."""

    def inserted(self, blocks: Sequence[int], touch: None) -> None:
        keys = [self._keys[block] or b"" for block in blocks]
        parent = self._forest.parent[blocks[0]]
        top: Segment | None = self._mark[parent]
        above, at, stop = top, 0, len(blocks) - self._is_checkpoint(blocks[-1])
        while at < stop:
            segment = self._next_segment(keys[at:stop], blocks[at - 1] if at else parent, above)
            at += self._arrive(segment, blocks[at:stop])
            above = segment
        if stop < len(blocks):
            checkpoint = self._segments.find(keys[-1]) or self._begin_unknown(Segment(keys, stop, len(keys)), above)
            self._arrive(checkpoint, blocks[-1:])
        if top is not None:
            self._place(top)

    def _arrive(self, segment: Segment, blocks: Sequence[int]) -> int:
        """The next chunks of a segment are here. How many of these are of it."""
        mark = self._mark
        count = min(len(blocks), segment.length - segment.resident)
        for block in blocks[:count]:
            mark[block] = segment
        segment.resident += count
        segment.deepest = blocks[count - 1]
        self._place(segment)
        return count

    def _next_segment(self, keys: Sequence[bytes], parent: int, above: Segment | None) -> Segment:
        """The segment of the chunks with these keys, or of the first of them: below or within the one above."""
        segment = self._segments.find(keys[0])
        if segment is not None:
            return segment
        if above is not None and above.deepest == parent:
            if above.resident == above.length and not above.children:
                above.extend(keys)  # the answer of a request belongs to its prompt
            if above.resident < above.length:
                return above
        return self._begin_unknown(Segment(keys, 0, len(keys)), above)

    def _begin_unknown(self, segment: Segment, above: Segment | None) -> Segment:
        """A segment of which no request told: it has the class and the age of the one above."""
        self._segments.add(segment)
        if above is None:
            use = Use(self._now)
            self._ages.begin(use)
            self._enter_class(segment, FRESH * GAPS, use)
        else:
            segment.turn, segment.gap = above.turn, above.gap
            self._stand_beside(segment, above)
        return segment

    def _stand_beside(self, segment: Segment, other: Segment) -> None:
        """Begin with the use and the class of another segment."""
        segment.use, segment.kind = used(other), other.kind
        self._ages.join(segment.use, segment.kind)

    def removed(self, block: int) -> None:
        segment = self._mark[block]
        self._mark[block] = None
        segment.resident -= 1
        segment.deepest = self._forest.parent[block] if segment.resident else NONE
        self._place(segment)
        self._forget_ghosts()

    def bared(self, block: int) -> None:
        self._place(self._mark[block])

    # What is to go

    def accepts(self, parent: int, incoming: Sequence[bytes], count: int) -> int:
        coming = self._coming(parent, incoming)
        accepted = len(incoming)
        order = self._order(count, held=parent)
        runs: list[Sequence[int]] = []
        rank, run = next(order, NOBODY)
        while count > 0 and coming:
            own, chunks = coming[-1]
            if rank <= own:
                runs.append(run)
                count -= len(run)
                rank, run = next(order, NOBODY)
                continue
            declined = min(count, chunks)
            accepted -= declined
            count -= declined
            coming[-1] = own, chunks - declined
            if declined == chunks:
                coming.pop()
        self._foreseen = self._forest.changes, runs
        return accepted

    def _coming(self, parent: int, incoming: Sequence[bytes]) -> list[tuple[Rank, int]]:
        """Of each segment that chunks with these keys are of, from the first on: its rank, and how many they are."""
        coming: list[tuple[Rank, int]] = []
        above: Segment | None = None if parent == NONE else self._mark[parent]
        at = 0
        if above is not None and above.resident < above.length and above.deepest == parent:
            at = min(len(incoming), above.length - above.resident)
            coming.append((self._rank(above), at))
        while at < len(incoming):
            segment = self._segments.find(incoming[at])
            if segment is None and not coming:
                return []
            count = len(incoming) - at if segment is None else min(len(incoming) - at, segment.length)
            coming.append((coming[-1][0] if segment is None else self._rank(segment), count))
            at += count
        return coming

    def evict(self, count: int, incoming: Sequence[bytes] = ()) -> list[int]:
        runs = self._next_runs(count)
        for run in runs:
            self._evict_run(self._mark[run[0]], run)
        self._forget_ghosts()
        return [block for run in runs for block in run]

    def _next_runs(self, count: int) -> list[Sequence[int]]:
        """The runs of the next `count` chunks to leave: those foreseen, if nothing has changed since, or new ones."""
        changes, foreseen = self._foreseen
        known = iter(foreseen)
        if changes != self._forest.changes or sum(map(len, foreseen)) < count:
            known = (run for _, run in self._order(count))
        runs: list[Sequence[int]] = []
        left = count
        while left:
            run = next(known, ())
            if not run:
                raise InternalError(f"{count} chunks were to be evicted, but only {count - left} can go")
            runs.append(run[:left])
            left -= len(runs[-1])
        return runs

    def _evict_run(self, segment: Segment, run: Sequence[int]) -> None:
        """The last chunks of a segment leave, the deepest first."""
        mark = self._mark
        parent = self._forest.parent[run[-1]]
        for block in run:
            mark[block] = None
        self._forest.remove_run(run)
        segment.resident -= len(run)
        segment.deepest = parent if segment.resident else NONE
        self._place(segment)
        if not segment.resident and mark[parent] is not None:
            self._place(mark[parent])

    def soonest_evicted(self) -> Iterator[int]:
        return chain.from_iterable(run for _, run in self._order(longest=16))

    def _order(self, longest: int, held: int = NONE) -> Iterator[tuple[Rank, Sequence[int]]]:
        """Who would leave, one run of chunks after the other, if nothing came meanwhile. Changes nothing.

        The chunks of a run are of one segment, `longest` at most. What stands at or above node `held` stays.
        """
        forest, mark = self._forest, self._mark
        parents, children, pins = forest.parent, forest.children, forest.pins
        gone: dict[int, int] = {}  # how many children of a chunk come before it in this order, if any stay longer
        bared: list[tuple[Rank, int, int]] = []  # (rank, which one, block) of what this walk made childless; a heap
        ends = self._ends()
        ahead = next(ends, None)
        while bared or ahead is not None:
            if ahead is None or (bared and bared[0][0] < ahead[0]):
                rank, number, block = heapq.heappop(bared)
            else:
                (rank, block), number = ahead, -1
                ahead = next(ends, None)
            if pins[block] or block == held or children[block] != gone.get(block, 0):
                continue
            segment = mark[block]
            run = [block]
            block = parents[block]
            while (
                len(run) < longest
                and children[block] == 1
                and mark[block] is segment
                and not pins[block]
                and block != held
            ):
                run.append(block)
                block = parents[block]
            yield rank, run
            above = mark[block]
            if above is None:
                continue
            gone[block] = gone.get(block, 0) + 1
            if children[block] == gone[block]:
                heapq.heappush(bared, (self._rank(above), number if above is segment else len(gone), block))

    def _ends(self) -> Iterator[tuple[Rank, int]]:
        """The deepest chunks of segments that nothing hangs below, by rank, and within a bucket by time."""
        for rank in self._ranks:
            for segment in members(self._rings[rank[2]]):
                yield rank, segment.deepest

    # Small things

    def _is_checkpoint(self, node: int) -> bool:
        above = self._keys[self._forest.parent[node]]
        return above is not None and self._keys[node] == checkpoint_key(above)

    def _place(self, segment: Segment) -> None:
        """Let a segment stand where it belongs: with the ghosts, in its bucket, or nowhere."""
        ring = segment.ring
        if not segment.resident:
            if ring is not self._ghosts:
                self._leave_bucket(segment)
                enter(self._ghosts, segment)
                self._num_ghosts += 1
            return
        if ring is self._ghosts:
            leave(segment)
            self._num_ghosts -= 1
        if self._forest.children[segment.deepest]:
            self._leave_bucket(segment)
        elif segment.ring is None:
            use = used(segment)
            use.leaves[segment] = None
            self._enter_bucket(segment, use)

    def _leave_bucket(self, segment: Segment) -> None:
        if segment.ring is not None:
            leave(segment)
            del used(segment).leaves[segment]

    def _enter_bucket(self, segment: Segment, use: Use) -> None:
        """Stand in the ring of its class and age; as the youngest, as it is the last to come there."""
        bucket = segment.kind * BINS + use.bin
        ring = self._rings.get(bucket)
        if ring is None:
            ring = self._rings[bucket] = new_ring()
        enter(ring, segment)
        if not self._is_ranked[bucket]:
            self._is_ranked[bucket] = True
            self._ranks.add(self._bucket_rank(bucket))

    def _forget_ghosts(self) -> None:
        while self._num_ghosts > self._most_ghosts:
            self._forget(self._ghosts.younger)

    def _forget(self, segment: Segment) -> None:
        if segment.ring is self._ghosts:
            self._num_ghosts -= 1
            leave(segment)
        else:
            self._leave_bucket(segment)
        self._ages.part(used(segment), segment.kind, self._now)
        self._segments.forget(segment)

    def check_valid(self) -> None:
        self._ages.check_valid()
        mark, children = self._mark, self._forest.children
        ghosts = list(members(self._ghosts))
        here: set[Segment] = {segment for segment in mark if segment is not None}
        assert len(ghosts) == self._num_ghosts <= self._most_ghosts, "ghosts are miscounted, or too many"
        assert here.isdisjoint(ghosts), "a segment that is here is a ghost"
        for segment in (*here, *ghosts):
            assert self._segments.find(segment.first) is segment, "a segment cannot be found"
            assert mark.count(segment) == segment.resident <= segment.length, "the chunks of a segment are miscounted"
        for block, segment in enumerate(mark):
            assert (segment is None) == (self._keys[block] is None), f"block {block}: a key without a segment"
            if segment is not None and block != segment.deepest:
                below = [each for each, above in enumerate(self._forest.parent) if above == block]
                assert segment in [mark[each] for each in below], f"block {block} is cut off from its segment"
        uses = {use: use for use in self._ages}
        known: list[Segment] = [*here, *ghosts]
        for segment in known:
            use = used(segment)
            assert use in uses, "a segment has a use that has ended"
            is_leaf = bool(segment.resident and not children[segment.deepest])
            ring = self._rings.get(segment.kind * BINS + use.bin) if is_leaf else None
            assert segment.ring is (ring if segment.resident else self._ghosts), "a segment stands in the wrong ring"
            assert (segment in use.leaves) == is_leaf, "the leaves of a use are wrong"
        kinds = Counter((used(segment), segment.kind) for segment in known)
        assert kinds == {(use, each): n for use in uses for each, n in use.members.items()}, "members are miscounted"
        ranked = {bucket for bucket, ranked in enumerate(self._is_ranked) if ranked}
        assert list(self._ranks) == sorted(map(self._bucket_rank, ranked)), "buckets are out of order"
        assert ranked >= {bucket for bucket, ring in self._rings.items() if ring.younger is not ring}, (
            "one is forgotten"
        )
