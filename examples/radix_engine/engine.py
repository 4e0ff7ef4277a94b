"""A small engine with a radix tree, to show the calls of a RadixHostCache in `host.py`. It runs with and without one.

    PageCache    pages: free, in the tree, or in a request. A node of the tree has whole pages.
    Engine       steps: admit requests, compute a chunk of each prompt or a token of each answer, keep it in the tree

A request is admitted when all pages it can ever need are free, can be evicted, and are promised to nobody else. Its
pages enter the tree after each step of its prompt, and at its end. What the tree has already stays, and the request's
own copy is freed.
"""

from collections import deque
from heapq import heapify, heappop, heappush
from itertools import count, takewhile

from tiny_model import TinyModel


class NoDevice:
    """Reports of the tree and the list of free pages to a host cache. Here there is none."""

    def __init__(self, cache):
        self.give_back = cache.free  # pages of a request that are not in the tree

    def placed(self, node):
        """A node has got its pages."""

    def evicted(self, pages):
        """These pages have left the tree."""


class NoHost:
    """Reports of the engine to a host cache. Here there is none."""

    is_busy = False  # copies are under way

    def may_run(self, request):
        """Whether the request, which has `length` tokens in the tree, computes now. If not, it loads or is retried."""
        return True

    def kept(self, request):
        """The first `kept` pages of the request are in the tree."""

    def ended(self, request):
        """The request has finished or is aborted, and still has its pages."""

    def begin_step(self):
        """Before compute."""

    def stepped(self, requests):
        """After compute of these requests."""


class Node:
    def __init__(self, parent):
        self.parent, self.children = parent, {}  # by the tokens of their first page
        self.tokens, self.pages = [], []
        self.locks = self.last_use = 0


class PageCache:
    """Pages of `page_tokens` tokens. A locked node, and all above it, is not evicted."""

    def __init__(self, num_pages, page_tokens):
        self.num_pages, self.page_tokens = num_pages, page_tokens
        self.root, self.clock = Node(None), count(1)
        self.free_pages = list(range(num_pages))
        self.evictable = 0  # pages in unlocked nodes
        self.promised = 0  # pages that running requests will still take
        self.device = NoDevice(self)

    @property
    def room(self):
        return len(self.free_pages) + self.evictable - self.promised

    def match(self, tokens):
        """The node at which the longest prefix that the tree has ends, and its pages."""
        node = self.root
        pages = []
        at = 0
        now = next(self.clock)
        while (child := node.children.get(self._first(tokens[at:]))) is not None:
            pairs = zip(self._by_page(child.tokens), self._by_page(tokens[at:]), strict=False)
            same = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            if same < len(child.pages):
                child = self._split(child, same)
            child.last_use = now
            node, at = child, at + len(child.tokens)
            pages += child.pages
        return node, pages

    def insert(self, tokens, pages):
        """Keep whole pages of a prefix. The node at which it ends, and the tree's pages of it.

        Where the tree has the tokens already its pages stay, and the caller has his own as before.
        """
        above, here = self.match(tokens)
        if len(here) == len(pages):
            return above, here
        node = Node(above)
        node.tokens, node.pages = tokens[len(here) * self.page_tokens :], pages[len(here) :]
        node.last_use = next(self.clock)
        above.children[self._first(node.tokens)] = node
        self.evictable += len(node.pages)
        self.device.placed(node)
        return node, here + node.pages

    def lock(self, node, by):
        """Lock the path from `node` to the root by +1, or unlock it by -1."""
        while node is not self.root:
            was = node.locks
            node.locks += by
            self.evictable += len(node.pages) * ((not node.locks) - (not was))
            node = node.parent

    def allocate(self, number):
        """So many pages. There must be room, or they are promised to the caller."""
        missing = number - len(self.free_pages)
        if missing > self.evictable:
            raise RuntimeError(f"{number} pages are wanted: {len(self.free_pages)} free, {self.evictable} evictable")
        if missing > 0:
            self.evict(missing)
        pages, self.free_pages[:number] = self.free_pages[:number], []
        return pages

    def evict(self, number):
        """Free at least so many pages: whole leaves, those used longest ago first."""
        leaves = [(leaf.last_use, id(leaf), leaf) for leaf in self._leaves(self.root)]
        heapify(leaves)
        while number > 0:
            _, _, leaf = heappop(leaves)
            number -= len(leaf.pages)
            self.evictable -= len(leaf.pages)
            self.device.evicted(leaf.pages)
            self.free_pages += leaf.pages
            above = leaf.parent
            del above.children[self._first(leaf.tokens)]
            if above is not self.root and not above.children and not above.locks:
                heappush(leaves, (above.last_use, id(above), above))

    def free(self, pages):
        self.free_pages += pages

    def _leaves(self, node):
        for child in node.children.values():
            if child.children:
                yield from self._leaves(child)
            elif not child.locks:
                yield child

    def _split(self, lower, pages):
        """Put the first pages of a node into a new one above it."""
        upper = Node(lower.parent)
        upper.locks, upper.last_use = lower.locks, lower.last_use
        at = pages * self.page_tokens
        upper.tokens, lower.tokens = lower.tokens[:at], lower.tokens[at:]
        upper.pages, lower.pages = lower.pages[:pages], lower.pages[pages:]
        upper.parent.children[self._first(upper.tokens)] = upper
        upper.children[self._first(lower.tokens)] = lower
        lower.parent = upper
        self.device.placed(upper)
        self.device.placed(lower)
        return upper

    def _first(self, tokens):
        return tuple(tokens[: self.page_tokens])

    def _by_page(self, tokens):
        whole = len(tokens) - len(tokens) % self.page_tokens
        return (tokens[at : at + self.page_tokens] for at in range(0, whole, self.page_tokens))


class Request:
    def __init__(self, id, prompt, num_output):
        self.id = id
        self.tokens = list(prompt)
        self.num_output = num_output
        self.num_prompt, self.end = len(prompt), len(prompt) + num_output
        self.logits = []  # of each token of the answer
        self.node, self.pages = None, []  # its page table, and the node that it locks
        self.kept = 0  # the first pages of its table, which are the tree's
        self.length = 0  # tokens with KV
        self.promised = 0  # pages
        self.is_loaded = False  # what the host has was loaded into the tree, or could not be
        self.keys = None  # of its chunks, once the host knows the request

    def answer(self):
        return self.tokens[self.num_prompt :]


class Engine:
    """Steps `max_requests` requests at most at once, with prompts in chunks of `chunk_tokens` for each request."""

    def __init__(self, num_pages, page_tokens, *, max_requests=6, chunk_tokens=24):
        self.page_tokens = page_tokens
        self.max_requests = max_requests
        self.chunk_tokens = chunk_tokens
        self.cache, self.model = PageCache(num_pages, page_tokens), TinyModel(num_pages, page_tokens)
        self.queue = deque()
        self.running = []
        self.loading = {}  # by id
        self.host = NoHost()

    @property
    def is_idle(self):
        return not (self.queue or self.running or self.loading or self.host.is_busy)

    def step(self):
        """Compute once for each running request. Those that have finished."""
        for request in list(self.queue):
            if len(self.running) < self.max_requests:
                self._admit(request)
        for request in self.running:
            self._allocate(request)
        self.host.begin_step()
        computed = list(self.running)
        finished = [request for request in computed if self._compute(request)]
        self.host.stepped(computed)
        for request in finished:
            self.end(request)
        return finished

    def end(self, request):
        """A request has finished, or is aborted."""
        self.queue = deque(each for each in self.queue if each is not request)
        self.running = [each for each in self.running if each is not request]
        self.loading.pop(request.id, None)
        self.host.ended(request)
        self.drop(request)

    def drop(self, request):
        """Take its pages from a request. Those in the tree stay there."""
        self.cache.device.give_back(request.pages[request.kept :])
        if request.node is not None:
            self.cache.lock(request.node, -1)
        self.cache.promised -= request.promised
        request.node = None
        request.pages = []
        request.kept = 0
        request.length = 0
        request.promised = 0

    def loaded(self, request):
        """The host has ended a load for this request: match it anew."""
        request.is_loaded = True
        self.drop(request)
        self.queue.appendleft(request)

    def keep(self, request):
        """Put what the request has computed into the tree, and use the tree's pages where it has the same."""
        whole = request.length // self.page_tokens
        node, pages = self.cache.insert(request.tokens[: whole * self.page_tokens], request.pages[:whole])
        self.cache.lock(node, +1)
        if request.node is not None:
            self.cache.lock(request.node, -1)
        own = [page for page, of_tree in zip(request.pages, pages, strict=False) if page != of_tree]
        request.node = node
        request.pages[:whole] = pages
        request.kept = whole
        self.cache.device.give_back(own)
        self.host.kept(request)

    def _admit(self, request):
        """Let a request run, if there is room. If the host loads a part of its prompt, it waits in `loading`."""
        request.node, request.pages = self.cache.match(request.tokens[:-1])  # the last one is computed, for its logits
        self.cache.lock(request.node, +1)
        request.kept, request.length = len(request.pages), len(request.pages) * self.page_tokens
        wanted = -(-request.end // self.page_tokens) - request.kept
        if wanted <= self.cache.room and (request.is_loaded or self.host.may_run(request)):
            self.queue.remove(request)
            self.running.append(request)
            request.promised = wanted
            self.cache.promised += wanted
        elif len(request.pages) > request.kept:  # pages that the host loads into
            self.queue.remove(request)
            self.loading[request.id] = request
        else:
            self.drop(request)

    def _next_end(self, request):
        """How many of its tokens have KV after this step."""
        return min(len(request.tokens), request.length + self.chunk_tokens)

    def _allocate(self, request):
        """Give it the pages that this step fills."""
        missing = -(-self._next_end(request) // self.page_tokens) - len(request.pages)
        request.pages += self.cache.allocate(missing)
        request.promised -= missing
        self.cache.promised -= missing

    def _compute(self, request):
        """Whether the request has finished."""
        end = self._next_end(request)
        logits = self.model.forward(request.tokens[:end], request.length, request.pages)
        request.length = end
        is_prompt = end <= request.num_prompt
        if end == len(request.tokens):
            request.logits.append(logits)
            request.tokens.append(int(logits.argmax()))
        is_finished = len(request.logits) == request.num_output
        if is_prompt or is_finished:
            self.keep(request)
        return is_finished
