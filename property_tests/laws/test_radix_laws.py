"""RadixDevice names pages in the order in which the engine evicts them, as a slow oracle finds it in the tree.

The tree is that of `examples/radix_engine`. It is used, locked, split and evicted between questions, of which some are
read to the end, some in part, and some not at all.
"""

from itertools import islice

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.radix_trial import RadixTrial

PAGES = 24

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=6)
places = st.integers(0, 10**6)
stories = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), prompts),
        st.tuples(st.just("use"), places),
        st.tuples(st.just("lock"), places),
        st.tuples(st.just("unlock"), places),
        st.tuples(st.just("evict"), st.integers(1, 6)),
        st.tuples(st.just("read"), st.integers(0, PAGES)),
        st.tuples(st.just("flush"), st.none()),
    ),
    min_size=10,
    max_size=60,
)


class Story:
    def __init__(self):
        trial = RadixTrial(PAGES, 1)
        self.cache, self.device = trial.cache, trial.device
        self.locked = []

    def nodes(self):
        found = [self.cache.root]
        for node in found:
            found += node.children.values()
        return found[1:]

    def insert(self, tokens):
        node, here = self.cache.match(tokens)
        self.cache.lock(node, +1)
        missing = len(tokens) - len(here)
        if missing <= self.cache.room:
            new = self.cache.allocate(missing)
            self.cache.insert(tokens, here + new)
        self.cache.lock(node, -1)

    def use(self, at):
        if nodes := self.nodes():
            node, tokens = nodes[at % len(nodes)], []
            while node is not self.cache.root:
                node, tokens = node.parent, node.tokens + tokens
            self.cache.match(tokens)

    def lock(self, at):
        if nodes := self.nodes():
            self.locked.append(nodes[at % len(nodes)])
            self.cache.lock(self.locked[-1], +1)

    def unlock(self, at):
        if self.locked:
            self.cache.lock(self.locked.pop(at % len(self.locked)), -1)

    def evict(self, number):
        self.cache.evict(min(number, self.cache.evictable))

    def read(self, number):
        assert list(islice(self.device.soonest_evicted(), number)) == self.order()[:number]

    def flush(self, _):
        """All of it at once, parents before children."""
        if self.locked:
            return
        for node in self.nodes():
            self.device.evicted(node.pages)
            self.cache.free_pages += node.pages
        self.cache.root.children.clear()
        self.cache.evictable = 0

    def order(self):
        """Free pages; then again and again the node without children that was used longest ago, from its last page."""
        order, left = (
            [(page, None) for page in self.cache.free_pages],
            [each for each in self.nodes() if not each.locks],
        )
        while left:
            leaves = [each for each in left if not any(other.parent is each for other in left)]
            first = min(leaves, key=lambda leaf: leaf.last_use)
            left.remove(first)
            order += [(page, None) for page in reversed(first.pages)]
        return order


@settings(max_examples=200)
@given(stories)
def test_the_order_is_that_of_the_engine(steps):
    story = Story()
    for name, value in steps:
        getattr(story, name)(value)
    story.read(PAGES)
    story.read(PAGES)
