"""Copiers with faults in the host cache of a linker, and indices that come late from the device."""

from dataclasses import replace

import torch

from connector.sglang.linker import Offer
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


class LateOffer(Offer):
    """Has its indices after some turns; what is read before that is the index of no page."""

    def __init__(self, transfers):
        super().__init__(transfers)
        self._arriving, self._turns = self.transfers, 3
        self.transfers = [replace(each, device_indices=torch.full_like(each.device_indices, -7)) for each in transfers]

    @property
    def has_arrived(self):
        self._turns -= 1
        if self._turns == 0:
            self.transfers = self._arriving
        return self._turns <= 0


def offers_are_late(monkeypatch):
    monkeypatch.setattr("connector.sglang.linker.Offer", LateOffer)
