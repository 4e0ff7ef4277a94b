"""Copiers with faults in the host cache of a linker."""

from dataclasses import replace

from cpu_prefix_cache.by_keys import KeyedHostCache
from cpu_prefix_cache.deciding import Direction
from cpu_prefix_cache.testing import MeddlingCopier


class Failing(MeddlingCopier):
    """Raises in the next store, or in all loads while `fails` has that direction, when its bytes have moved: one load
    that fails beside others is tried once more by itself.
    """

    fails: Direction | None = None

    def copy(self, direction, copies):
        event = super().copy(direction, copies)
        if direction is self.fails:
            if direction is Direction.STORE:
                self.fails = None
            raise RuntimeError("this copy fails")
        return event


def with_copier(monkeypatch, make):
    """From now on a linker's host cache has the copier that `make` puts around its own. Those made, in a list."""
    made = []

    def wrap(copier, tensors):
        made.append(make(copier, tensors))
        return made[-1]

    def host(groups, *, options, **others):
        return KeyedHostCache(groups, options=replace(options, wrap_copier=wrap), **others)

    monkeypatch.setattr("connector.sglang.linker.KeyedHostCache", host)
    return made
