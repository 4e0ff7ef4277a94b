"""Stores in the memory of this process by URL, "memory://name": what two engines of one test share."""

from cpu_prefix_cache.testing import MemoryStore

STORES = {}


class MemoryByUrl(MemoryStore):
    """All that are opened by one URL have the same values."""

    def __init__(self, url):
        super().__init__()
        self.values = STORES.setdefault(url, self.values)
