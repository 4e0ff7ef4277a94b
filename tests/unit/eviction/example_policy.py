"""A policy of another package: docs/policies.md shows it."""

from cpu_prefix_cache.eviction import Lru


class KeepsFirst(Lru):
    """Keeps what came first: declines chunks for which others would have to leave."""

    def choose(self, parent, incoming, count, margin=1.0):
        return max(0, len(incoming) - count)
