"""RadixDevice: a Device for an engine with a radix tree of tokens over pages, and a list of free pages.

    free          in the engine's free list                       waits; handed out first
    private       in a request only, until the request is inserted
    in the tree   in one node, which is locked                    in use
                  or unlocked                                     waits; evicted with its node, leaves first
    held          a source: its node is locked once more, with the path to the root
                  a destination: private; if the request gives it back, it becomes free when the hold ends

A page is a device block. The tree knows tokens and the cache knows keys, so the engine reports which pages are a chunk
(`keyed`), which node has a page (`placed`), and which pages have left the tree (`evicted`). Two chunks share their
pages until their tokens part, so only the last page of a chunk is its own. It stands for the chunk in the order of
eviction.

    tokens        0  1  2  3   4  5  6  7          pages of 2 tokens, chunks of 4
    first node    page 7, 3        4               chunk A: 7, 3      chunk B: 4, 9
    its children                   9 | 5           chunk C: 4, 5, which parts from B at token 6

The engine goes on evicting whole nodes: unlocked leaves, those used longest ago first, then what becomes a leaf by
that. When it splits a node, the lower part stays the same object; the upper one is new and has as many locks. So a hold
survives a split, and a node that is unlocked again waits where it did.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, NamedTuple

from cpu_prefix_cache.messages.errors import ConfigurationError, MisuseError
from cpu_prefix_cache.messages.numbers import Numbers, is_whole, numbers
from cpu_prefix_cache.offload.device import Device
from cpu_prefix_cache.pool.notes import Notes

Node = Any  # of the engine's tree
SLACK = 2  # entries of the heap for each node: further ones count no more, and are dropped
PORTION = 512  # free pages that are read at a time: a tensor is turned into a list portion by portion


@dataclass(slots=True, eq=False)
class _Placed:
    node: Node
    pages: list[int]  # in token order, when it was placed; a split has moved some to another node since
    above: Node | None = None  # the node that it hangs below
    entry: "_Entry | None" = None  # of a leaf that waits to be read: the one that counts


_Entry = tuple[Any, int, int, _Placed]  # last use when it was made, no later than the true one; two to tell them apart


class _RadixHold(NamedTuple):
    nodes: list[Node]
    pages: list[int]  # in no node


class RadixDevice(Device):
    """A subclass has eight members of one line each, and the engine calls four.

    A question about the order of eviction costs what is read of it, and what was used or locked since the last one; not
    the size of the tree (benchmarks/deciding/radix_order.py).

    `num_pages` is how many pages the engine can hand out, whatever their numbers are; `chunk_pages` how many of them a
    chunk takes. Page numbers may be given in lists, tensors and arrays, and are returned in lists.

    `hands_out_first`: the engine allocates all pages of a step before `CPUPrefixCache.step` or `HostCache.begin_step`,
    and writes to them after it. Then device and host hold prompts together: a chunk is stored when it leaves, or
    into ample room before (rule 3).

    Raises ConfigurationError for numbers below 1.
    """

    def __init__(self, num_pages: int, chunk_pages: int, *, hands_out_first: bool = False) -> None:
        if not is_whole(num_pages, 1) or not is_whole(chunk_pages, 1):
            raise ConfigurationError(
                f"num_pages and chunk_pages must be whole numbers of at least 1, got {num_pages!r} pages and "
                f"{chunk_pages!r} to a chunk; chunk_pages is the tokens of a chunk divided by those of a page"
            )
        self._num_pages = num_pages
        self._chunk_pages = chunk_pages
        self._chunks: dict[bytes, list[int]] = {}  # key -> pages of the chunk
        self._key: dict[int, bytes] = {}  # last page of a chunk -> its key
        self._placed: dict[int, _Placed] = {}  # id of a node -> the node
        self._children = Counter[int]()  # id of a node -> how many hang below it, if any
        self._leaves: list[_Entry] = []  # a heap
        self._read: list[_Placed] = []  # leaves taken from it for the last question
        self._number = count()
        self._node: list[Node | None] = [None] * (num_pages + 1)  # of each page
        self._held = Counter[int]()  # private pages -> holds
        self._given_back: set[int] = set()  # pages that are held, and become free then
        self._hands_out_first = hands_out_first
        self._notes = Notes(num_pages)

    # Methods of a subclass

    @property
    @abstractmethod
    def num_waiting(self) -> int:
        """How many pages are free or in unlocked nodes: engines count both."""

    @abstractmethod
    def free_pages(self) -> Any:
        """The engine's free list, or tensor, that can be sliced. The first page is handed out next."""

    @abstractmethod
    def free(self, pages: list[int]) -> None:
        """Append pages to the free list."""

    @abstractmethod
    def parent(self, node: Node) -> Node | None:
        """The node above. That of a first node is the root, or None."""

    @abstractmethod
    def pages(self, node: Node) -> Numbers:
        """The page numbers of a node, in token order."""

    @abstractmethod
    def last_use(self, node: Node) -> Any:
        """The value by which the engine chooses among leaves: that with the smallest is evicted first.

        It grows when a node is used. An engine in which it can fall calls `placed` again then.
        """

    @abstractmethod
    def locks(self, node: Node) -> int:
        """How many locks a node has; with none it can be evicted."""

    @abstractmethod
    def lock(self, node: Node, by: int) -> None:
        """Lock the path from a node to the root by +1, or unlock it by -1, as the engine does for a request."""

    # Called by the engine

    def placed(self, node: Node) -> None:
        """A node has got its pages: it was inserted, or one of the two that a split has made.

        Raises MisuseError for pages that a load is still filling.
        """
        pages = numbers(self.pages(node))
        if self._held and not self._held.keys().isdisjoint(pages):
            raise MisuseError(
                "a load is filling pages of this node: insert them when end_step has named the request, and call "
                "give_back(pages) in place of freeing those of a request that ends before"
            )
        if pages and max(pages) >= len(self._node):
            self._node += [None] * (max(pages) + 1 - len(self._node))
        before = {id(each) for page in pages if (each := self._node[page]) is not None and each is not node}
        for page in pages:
            self._node[page] = node
        placed = self._placed.setdefault(id(node), _Placed(node, pages))
        placed.pages = pages
        self._hang(placed)
        for lower in before & self._placed.keys():  # a split has put this node above it
            self._hang(self._placed[lower])
        self._queue(placed)

    def keyed(self, keys: Sequence[bytes], pages: Numbers) -> None:
        """The tree has `pages`: those of a prefix, from its first token on, in token order.

        The chunks that they fill are found under `keys` from now on. Chunks that are known already cost nothing.

        Raises MisuseError for a key that is not bytes, pages that no node has, and pages other than those of the tree.
        """
        width, pages = self._chunk_pages, numbers(pages)
        stop = min(len(keys), len(pages) // width)
        start = stop
        while start and keys[start - 1] not in self._chunks:
            start -= 1
        if start:
            self._check_same(keys[start - 1], pages[(start - 1) * width : start * width])
        for at in range(start, stop):
            self._add(keys[at], pages[at * width : (at + 1) * width])

    def evicted(self, pages: Numbers) -> None:
        """These pages have left the tree. Call it before they are handed out."""
        for page in numbers(pages):
            if page < len(self._node):
                left = self._placed.pop(id(self._node[page]), None)
                self._node[page] = None
                if left is not None:
                    left.entry = None
                    self._unhang(left)
            if (key := self._key.pop(page, None)) is not None:
                self._notes.add(key, self._chunks.pop(key))

    def give_back(self, pages: Numbers) -> None:
        """Free a request's private pages. Those that a load may still write to become free when it has ended."""
        free = []
        for page in numbers(pages):
            if page in self._held:
                self._given_back.add(page)
            else:
                free.append(page)
        if free:
            self.free(free)

    # Called by the cache

    def check_path(self, pages: Sequence[int]) -> None:
        """Raise MisuseError unless the tree has these pages on one path, from its first page on, in this order."""
        path: list[int] = []
        node = self._node[pages[-1]] if pages and pages[-1] < len(self._node) else None
        while node is not None and id(node) in self._placed:
            path[:0] = numbers(self.pages(node))
            node = self.parent(node)
        if pages != path[: len(pages)]:
            raise MisuseError(
                f"a prefix is given as pages {pages}, but the tree has {path} up to the last of them: give the "
                "tree's pages of the whole prefix, in token order, after placed(node)"
            )

    @property
    def num_blocks(self) -> int:
        return self._num_pages

    @property
    def blocks_per_chunk(self) -> int:
        return self._chunk_pages

    def check_own(self, blocks: Sequence[int]) -> None:
        free = set(numbers(self.free_pages()))
        for page in blocks:
            if page in free:
                raise MisuseError(f"page {page} is free: pages that a load fills are allocated, for its request")
            if page < len(self._node) and self._node[page] is not None:
                raise MisuseError(f"page {page} is in the tree: others may read it while a load fills it")
            if page in self._held and not self.shares_unfinished:
                raise MisuseError(f"page {page} is being filled by another load: give each load pages of its own")

    def find(self, key: bytes) -> Sequence[int] | None:
        return self._chunks.get(key)

    def find_all(self, keys: Sequence[bytes]) -> list[Sequence[int] | None]:
        return list(map(self._chunks.get, keys))

    def soonest_evicted(self) -> Iterator[tuple[int, bytes | None]]:
        """As for every Device. Free pages come one by one, and behind them nodes, as far as they are read."""
        for page in self._free_pages():
            yield page, None
        node_of, key_of = self._node, self._key.get
        for placed in self._by_eviction():
            for page in reversed(placed.pages):
                if node_of[page] is placed.node:
                    yield page, key_of(page)

    def handed_out(self) -> Mapping[bytes, Sequence[int]] | None:
        return self._notes.take(self.find_all) if self._hands_out_first else None

    def is_waiting(self, block: int, key: bytes | None) -> bool:
        if self._key.get(block) != key:
            return False
        node = self._node[block] if block < len(self._node) else None
        return bool(block in self.free_pages()) if node is None else not self.locks(node)

    def hold(self, blocks: Sequence[int], parent: Sequence[int] = ()) -> _RadixHold:
        of = [self._node[block] if block < len(self._node) else None for block in blocks]
        nodes = list({id(node): node for node in of if node is not None}.values())
        pages = [block for block, node in zip(blocks, of, strict=True) if node is None]
        for node in nodes:
            self.lock(node, +1)
        self._held.update(pages)
        return _RadixHold(nodes, pages)

    def release(self, hold: _RadixHold) -> None:
        for node in hold.nodes:
            self.lock(node, -1)
        self._held.subtract(hold.pages)
        ended = [page for page in hold.pages if not self._held[page]]
        for page in ended:
            del self._held[page]
        if free := [page for page in reversed(ended) if page in self._given_back]:
            self._given_back.difference_update(free)
            self.free(free)

    # Details

    def _add(self, key: bytes, pages: list[int]) -> None:
        if not isinstance(key, bytes):
            raise MisuseError(f"keys are bytes, got {key!r}")
        for page in pages:
            if page >= len(self._node) or self._node[page] is None:
                raise MisuseError(
                    f"page {page} is in no node: insert pages into the tree, and call placed(node) for every node that "
                    f"gets pages, before its chunks are keyed"
                )
        last = pages[-1]
        if last in self._key:
            raise MisuseError(
                f"page {last} is the last of another chunk: call evicted(pages) when pages leave the tree, and give "
                f"every chunk its own key"
            )
        self._chunks[key] = pages
        self._key[last] = key

    def _check_same(self, key: bytes, pages: Sequence[int]) -> None:
        if self._chunks[key] != list(pages):
            raise MisuseError(
                f"a chunk is in pages {self._chunks[key]} of the tree, but was given as {list(pages)}: give the "
                f"tree's pages of the whole prefix, in token order, and call evicted() for those that have left it"
            )

    def _free_pages(self) -> Iterator[int]:
        free = self.free_pages()
        for at in range(0, len(free), PORTION):
            for page in numbers(free[at : at + PORTION]):
                self._check_free(page)
                yield page

    def _check_free(self, page: int) -> None:
        if page < len(self._node) and self._node[page] is not None:
            raise MisuseError(f"page {page} is free and in a node: call evicted(pages) when pages leave the tree")
        if page in self._held:
            raise MisuseError(
                f"page {page} is free, and a load is writing to it: call give_back(pages) in place of freeing them"
            )

    def _hang(self, placed: _Placed) -> None:
        """Note below which node this one hangs now."""
        above = self.parent(placed.node)
        if placed.above is not above:
            self._unhang(placed)
            placed.above = above
            self._children[id(above)] += 1

    def _unhang(self, placed: _Placed) -> None:
        above, placed.above = placed.above, None
        if above is None:
            return
        self._children[id(above)] -= 1
        if not self._children[id(above)]:
            del self._children[id(above)]
            if (parent := self._placed.get(id(above))) is not None:
                self._queue(parent)

    def _queue(self, placed: _Placed) -> None:
        """Put a leaf where it is evicted as of now. Its entry from before counts no more."""
        use = self.last_use(placed.node)
        if id(placed.node) in self._children or (placed.entry is not None and placed.entry[0] == use):
            return
        placed.entry = (use, id(placed.node), next(self._number), placed)
        heappush(self._leaves, placed.entry)
        if len(self._leaves) > SLACK * len(self._placed):
            self._leaves = [entry for entry in self._leaves if entry[-1].entry is entry]
            heapify(self._leaves)

    def _next_leaf(self) -> _Entry | None:
        """The leaf that is evicted first of those not read yet in this question. Locked ones are passed over."""
        while self._leaves:
            entry = heappop(self._leaves)
            placed = entry[-1]
            if placed.entry is not entry:
                continue  # it has left the tree, or another entry counts
            placed.entry = None
            if self.last_use(placed.node) != entry[0]:
                self._queue(placed)  # used since then
            elif id(placed.node) not in self._children:  # else it comes back when it is a leaf again
                self._read.append(placed)
                if not self.locks(placed.node):
                    return entry
        return None

    def _by_eviction(self) -> Iterator[_Placed]:
        """The unlocked nodes as the engine evicts them: leaves, and nodes that are leaves by then.

        Leaves that are read are put back when the order is read again. So this costs what is read, and what was
        used, locked or evicted meanwhile, however many nodes there are.
        """
        back, read = self._read, list[_Placed]()
        self._read = read
        for placed in back:
            if self._placed.get(id(placed.node)) is placed:
                self._queue(placed)
        left = dict[int, int]()  # of nodes above what is read: how many of their children are not
        order = [] if (leaf := self._next_leaf()) is None else [leaf]
        while order:
            placed = heappop(order)[-1]
            yield placed
            if self._read is not read:
                raise MisuseError("the order of eviction was asked for again: an earlier answer cannot be read on")
            if id(placed.node) not in self._children and (leaf := self._next_leaf()) is not None:
                heappush(order, leaf)
            above = self._placed.get(id(placed.above))
            if above is None:
                continue
            left[id(above)] = left.get(id(above), self._children[id(above.node)]) - 1
            if not left[id(above)] and not self.locks(above.node):
                heappush(order, (self.last_use(above.node), id(above.node), next(self._number), above))
