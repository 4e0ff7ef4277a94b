"""The time of one question about the order of eviction in a radix tree: its first 64 pages, with no page free.

    python -m benchmarks.deciding.radix_order [--nodes 1000 10000 200000] [--rounds 200]

A tree of nodes of one page: first nodes, each with four leaves. Between two questions the engine does what it does in
some steps: requests use 16 random nodes and lock one each, 8 pages that are next are held and released, 16 are evicted
and as many inserted. The first question after the tree was built is shown apart. Times are of the processor.
"""

import argparse
import random
import time
from itertools import count, islice
from statistics import median

from benchmarks.common import percentile, print_environment
from cpu_prefix_cache.deciding import RadixDevice

PAGES = 64
LEAVES = 4


class Node:
    __slots__ = ("last_use", "locks", "pages", "parent")

    def __init__(self, parent, page, now):
        self.parent = parent
        self.pages = [page]
        self.last_use = now
        self.locks = 0


class Tree(RadixDevice):
    """The tree and its device. All pages are in it."""

    def __init__(self, num_nodes):
        super().__init__(num_nodes, 1)
        self.clock, self.nodes = count(), [None] * num_nodes  # by page
        for page in range(num_nodes):
            beside = page % (1 + LEAVES)
            self.insert(self.nodes[page - beside] if beside else None, page)

    num_waiting = property(lambda self: len(self.nodes))

    def free_pages(self):
        return []

    def free(self, pages):
        raise NotImplementedError

    def parent(self, node):
        return node.parent

    def pages(self, node):
        return node.pages

    def last_use(self, node):
        return node.last_use

    def locks(self, node):
        return node.locks

    def lock(self, node, by):
        while node is not None:
            node.locks += by
            node = node.parent

    def insert(self, parent, page):
        self.nodes[page] = Node(parent, page, next(self.clock))
        self.placed(self.nodes[page])

    def use(self, node):
        now = next(self.clock)
        while node is not None:
            node.last_use, node = now, node.parent

    def asked(self):
        return [page for page, _ in islice(self.soonest_evicted(), PAGES)]


def seconds(call):
    start = time.process_time()
    call()
    return time.process_time() - start


def measured(num_nodes, rounds):
    draw, tree = random.Random(0), Tree(num_nodes)
    first, times = seconds(tree.asked), []
    for _ in range(rounds):
        running = draw.sample(tree.nodes, 16)
        for node in running:
            tree.use(node)
            tree.lock(node, +1)
        times.append(seconds(tree.asked))
        order = tree.asked()
        tree.release(tree.hold(order[:8]))
        for page in order[:16]:
            tree.evicted([page])
            tree.insert(None, page)
        for node in running:
            tree.lock(node, -1)
    return first, times


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1_000, 10_000, 50_000, 200_000])
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    print_environment(["cpu-prefix-cache"])
    print(f"{'nodes':>10} {'first, ms':>10} {'median, ms':>11} {'99th, ms':>9} {'longest, ms':>12}")
    for num_nodes in options.nodes:
        first, times = measured(num_nodes, options.rounds)
        told = [1e3 * each for each in (first, median(times), percentile(times, 0.99), max(times))]
        print(f"{num_nodes:>10,} {told[0]:>10.3f} {told[1]:>11.3f} {told[2]:>9.3f} {told[3]:>12.3f}")


if __name__ == "__main__":
    main()
