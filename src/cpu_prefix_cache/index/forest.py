"""The index: which prefixes exist, what hangs below what, and what is pinned.

A chunk is named by the block that holds it (its first, where it takes several) and hangs below the chunk before it.
The chunks of all prompts so form a forest, drawn here with `root` above every first chunk:

        root
        |-- A --- B --- C        A B C is one prompt,
        |         `---- D        A B D another that shares A B with it
        `-- E

It is closed under prefixes at every moment (rule 3): a chunk enters only below one that is here, and leaves only when
nothing hangs below it. Two things follow, and the rest of the library is built on them:

    the chunks of a prompt are here up to some n, which bisection finds;
    a pin on one chunk holds everything above it, because what has a child does not leave.

A chunk whose key was withdrawn stays linked, found by nobody, for as long as a pin on it or below it needs its bytes.
A checkpoint stands here too, below the chunk that ends at its boundary, and never has children. Chunks and checkpoints
are the *nodes* of the forest; what takes no blocks of its own goes by a number beyond the blocks.

Everything here is indexed by node, but pins and the children of what has several, which are few. Links are arrays,
because a full garbage collection goes through lists: 6 to 20 ms for each at a million blocks. `child` is a list all
the same, which makes an insertion with its eviction 15 % faster. Links that are none by `child` and the keys are left
as they were.

The key index is several dictionaries, by the first byte of the key (shards.py). So keys must be digests, of at least 16
bytes, the first as random as the rest (rule 14).
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Any

from cpu_prefix_cache.index.pins import Pins
from cpu_prefix_cache.index.shards import distinct, new_shards
from cpu_prefix_cache.messages.errors import InternalError, MisuseError

NONE = -1  # no block
SEVERAL = -2  # in place of a block


class Forest:
    """Chunks by key, in O(1), and the links between them. `root` is the parent of every first chunk.

    `capacity`: how many nodes an eviction policy may count on, which the pool may learn later; default: one for each
    block. `numbers`: how many nodes without blocks of their own there are at first. `is_bounded`: whether no more nodes
    come than it can count on.
    """

    def __init__(
        self, num_blocks: int, capacity: int | None = None, numbers: int = 0, *, is_bounded: bool = True
    ) -> None:
        self.root = num_blocks
        self.capacity = num_blocks if capacity is None else capacity
        size = num_blocks + 1 + numbers
        self.key: list[bytes | None] = [None] * size
        self.mark: list[Any] = [None] * size  # the eviction policy's own, which alone reads and writes it
        self.parent = array("I", [0]) * size  # of what is linked, and so is depth
        self.child = [NONE] * size  # of what has one; or SEVERAL
        self.depth = array("I", [0]) * size  # chunks from the root to here
        self.pins = Pins(self.key, self.parent, self.root)
        self._withdrawn: set[int] = set()  # linked without a key
        self._several: dict[int, dict[int, None]] = {}  # the children of what has SEVERAL
        self.departed: dict[bytes, int] | None = None  # removed nodes, by key, if somebody takes them
        self._shards = new_shards(self.capacity if is_bounded else None)  # by first byte
        self._count = 0

    def __len__(self) -> int:
        """How many nodes have a key."""
        return self._count

    def add_number(self) -> int:
        """A number for a node without blocks of its own."""
        self.key.append(None)
        self.mark.append(None)
        self.child.append(NONE)
        self.parent.append(0)
        self.depth.append(0)
        return len(self.key) - 1

    def find(self, key: bytes) -> int:
        """The block of the chunk with this key, or NONE."""
        return self._shards[key[0]].get(key, NONE)

    def find_all(self, keys: Iterable[bytes]) -> list[int | None]:
        """The block of each key, or None."""
        shards = self._shards
        return [shards[key[0]].get(key) for key in keys]

    def resident_run(self, keys: Sequence[bytes], start: int, stop: int) -> int:
        """The end of the run of chunks that are here, in `keys[start:stop]`; all of `keys[:start]` is taken to be.

        Gallops and then bisects: 8,192 keys take at most 25 probes, and a miss at `start` takes one.
        """
        shards, stride = self._shards, 1
        while start < stop:
            probe = start + stride - 1 if start + stride < stop else stop - 1
            key = keys[probe]
            if key not in shards[key[0]]:
                stop = probe
                break
            start = probe + 1
            stride *= 2
        while start < stop:  # the standard library's bisection calls a function for each probe: 1 us more
            middle = (start + stop) // 2
            key = keys[middle]
            if key in shards[key[0]]:
                start = middle + 1
            else:
                stop = middle
        return start

    def path(self, block: int, length: int) -> list[int]:
        """The last `length` chunks from the root down to `block`, in that order."""
        parent, blocks = self.parent, [0] * length
        for at in range(length - 1, -1, -1):
            blocks[at] = block
            block = parent[block]
        return blocks

    def insert_run(self, run: Sequence[int], keys: Sequence[bytes], parent: int) -> None:
        """Hang the first of `run` below `parent`, which must be here (rule 3), and each further one below the last.

        None of them is here yet, so none has children.
        """
        if parent != self.root and self.key[parent] is None:
            raise MisuseError(f"block {run[0]} cannot hang below block {parent}, which holds no chunk (rule 3)")
        shards, all_keys, depths = self._shards, self.key, self.depth
        parents, child = self.parent, self.child
        depth, above, before = depths[parent], parent, child[parent]
        for block, key in zip(run, keys, strict=True):
            holder = shards[key[0]].setdefault(key, block)
            if holder != block:
                raise MisuseError(f"block {holder} already holds the chunk that block {block} was to hold")
            depth += 1
            depths[block] = depth
            all_keys[block] = key
            parents[block] = above
            child[above] = block
            above = block
        self._count += len(run)
        child[above] = NONE
        self._join(run[0], parent, before)
        self.pins.entered(run)

    def take_over(self, before: "Forest", nodes: Iterable[int]) -> list[int]:
        """Link nodes of an earlier forest without their keys, as if they had been withdrawn here, and all above them.
        They keep their pins. Parents come before their children. O(nodes taken over).
        """
        held: dict[int, None] = {}
        for node in nodes:
            for each in reversed([*takewhile(lambda above: above not in held, before.held_by(node))]):
                held[each] = None
                parent = before.parent[each] if before._is_linked(each) else self.root
                children, self.child[parent] = self.child[parent], each
                self._join(each, parent, children)
                self.parent[each], self.depth[each] = parent, self.depth[parent] + 1
                self._withdrawn.add(each)
        for node in before.pins:
            for _ in range(before.pins.count(node)):
                self.pin(node)
        return [*held]

    def remove_run(self, run: Sequence[int]) -> None:
        """`take_out`, and log them as departed."""
        gone = self.take_out(run)
        if self.departed is not None:
            self.departed.update(zip(gone, run, strict=True))

    def take_out(self, run: Sequence[int]) -> list[bytes]:
        """Take out unpinned chunks, deepest first: a childless one, then each the parent of no other but the last.
        Their keys.
        """
        keys, child, shards = self.key, self.child, self._shards
        if child[run[0]] != NONE:
            raise InternalError(f"block {run[0]} has {self.num_children(run[0])} children and cannot leave (rule 3)")
        if self.pins.linked and not self.pins.linked.isdisjoint(run):
            raise InternalError(f"one of the blocks {run} is pinned and cannot leave (rule 2)")
        self._unlink(run[-1])
        gone = [key for block in run if (key := keys[block]) is not None]
        if len(gone) < len(run):
            raise InternalError(f"one of the blocks {run} holds no chunk and cannot leave")
        for key in gone:
            del shards[key[0]][key]
        for block in run:
            keys[block] = None
            child[block] = NONE
        self._count -= len(run)
        self.pins.left(run)
        return gone

    def withdraw(self, block: int) -> None:
        """Take the key of one chunk away. It stays linked until `prune`."""
        key = self.key[block]
        if key is None:
            raise MisuseError(f"block {block} holds no chunk")
        del self._shards[key[0]][key]
        self.key[block] = None
        self._count -= 1
        self._withdrawn.add(block)
        self.pins.left((block,))

    def prune(self, block: int) -> int:
        """Unlink a chunk without a key, if it ever was linked. The chunk it hung below, or the root."""
        if block not in self._withdrawn:
            return self.root
        self._withdrawn.remove(block)
        parent = self.parent[block]
        self._unlink(block)
        return parent

    def pin(self, block: int) -> None:
        self.pins.add(block, is_linked=self._is_linked(block))

    def num_children(self, block: int) -> int:
        return len(self._several[block]) if self.child[block] == SEVERAL else self.child[block] != NONE

    def children(self, block: int) -> Iterable[int]:
        """The children of `block`."""
        if self.child[block] == SEVERAL:
            return self._several[block]
        return () if self.child[block] == NONE else (self.child[block],)

    def held_by(self, block: int) -> Iterator[int]:
        """`block` and, if it is linked, all above it: what a pin on it holds."""
        yield block
        while self._is_linked(block) and (block := self.parent[block]) != self.root:
            yield block

    def subtree(self, block: int) -> list[int]:
        """`block` and all below it, parents before children."""
        order = [block]
        for parent in order:
            order += self.children(parent)
        return order

    def nodes(self) -> dict[int, bytes]:
        """Every node with its key. For tests: O(blocks)."""
        return {block: key for block, key in enumerate(self.key) if key is not None}

    def check_valid(self) -> None:
        """Assert every rule this class keeps. For tests: O(blocks)."""
        indexed = {block: key for shard in distinct(self._shards) for key, block in shard.items()}
        assert self._count == len(indexed), "nodes are miscounted"
        assert indexed == self.nodes(), "keys differ"
        linked, closed = self.subtree(self.root), {self.root, *indexed}
        for block in linked[1:]:
            assert block not in closed or self.parent[block] in closed, f"block {block} has a key and its parent none"
            assert self.depth[block] == self.depth[self.parent[block]] + 1, f"block {block} is at the wrong depth"
        assert set(indexed) <= set(linked), "a chunk is not linked"
        below = Counter(self.parent[block] for block in linked[1:])
        for block in range(len(self.child)):
            assert below[block] == self.num_children(block), f"the children of block {block} are miscounted"
        assert self._withdrawn == set(linked) - set(indexed) - {self.root}, "what was withdrawn is miscounted"
        several = {block for block, count in below.items() if count > 1}
        assert self._several.keys() == several, "the children of a block are in the wrong place"
        self.pins.check_valid(set(linked), self.parent)

    def _is_linked(self, block: int) -> bool:
        return self.key[block] is not None or block in self._withdrawn

    def _join(self, block: int, parent: int, before: int) -> None:
        """A new child of `parent`, whose entry in `child` was this `before`."""
        if before != NONE:
            siblings = self._several[parent] if before == SEVERAL else self._several.setdefault(parent, {before: None})
            siblings[block] = None
            self.child[parent] = SEVERAL

    def _unlink(self, block: int) -> None:
        parent = self.parent[block]
        if self.child[parent] != SEVERAL:
            self.child[parent] = NONE
            return
        siblings = self._several[parent]
        del siblings[block]
        if len(siblings) == 1:
            (self.child[parent],) = self._several.pop(parent)
