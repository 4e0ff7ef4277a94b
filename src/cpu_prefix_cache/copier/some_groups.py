"""A rank that has some of a model's groups only: a stage of a pipeline, none of whose layers are in the others."""

from collections.abc import Sequence
from dataclasses import replace

from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.queues import Mark, Passed
from cpu_prefix_cache.messages.plan import Direction, GroupCopy


class SomeGroupsCopier(Copier):
    """By way of `copier`, whose group i is number `groups[i]` of the plans. What concerns no group of it has ended at
    once."""

    def __init__(self, copier: Copier, groups: Sequence[int]) -> None:
        self._copier = copier
        self._number = {group: number for number, group in enumerate(groups)}

    def here(self) -> Mark:
        return self._copier.here()

    def hold_compute(self, mark: Mark) -> None:
        self._copier.hold_compute(mark)

    def submit(self, direction: Direction, copies: Sequence[GroupCopy], after: Mark) -> Mark:
        mine = [replace(copy, group=self._number[copy.group]) for copy in copies if copy.group in self._number]
        return self._copier.submit(direction, mine, after) if mine else Passed()
