"""KeyedRank: below a KeyedTier, with a dict for its files or its store. The test ends its transfers, well or not."""

from types import SimpleNamespace
from typing import Any

from cpu_prefix_cache.deciding import Piece, RankReport, StateGroup, TransferPlan
from cpu_prefix_cache.messages.tier import Ask, TierPlan, TierReport, Told
from property_tests.models.tier_model import RankSlots, RankStore, carry_out

GROUPS = 2
PIECES = [Piece(StateGroup(name=f"group {at}", block_tokens=1, block_bytes=4096), 1, 1, 4096) for at in range(GROUPS)]
PLANNER = SimpleNamespace(pieces=PIECES)


class KeyedRank:
    """`host` is the content of host blocks, by their numbers. `waiting` transfers move bytes at `end`."""

    def __init__(self, slots: RankSlots | RankStore | None = None, portion: int = 1) -> None:
        self.slots = RankSlots(PLANNER) if slots is None else slots
        self.slots.open(portion=portion, scans=True)
        self.host: dict[int, Any] = {}
        self.waiting: dict[int, TransferPlan] = {}
        self.asks: dict[int, Ask] = {}  # to be answered
        self._told: dict[int, Told] = {}
        self._done: set[int] = set()
        self._failed: set[int] = set()
        self._refused: dict[int, tuple[int, ...]] = {}

    def run(self, plan: TierPlan) -> None:
        self.slots.advance(plan)
        self.slots.taken = plan.taken
        self.waiting |= {transfer.id: transfer for transfer in plan.step.transfers}
        resolved = {id for id in self._done | self._failed if id < plan.step.resolved_below} | {*plan.step.resolved}
        self._done -= resolved
        self._failed -= resolved

        self.asks |= {ask.id: ask for ask in plan.asks}
        self._told = {id: told for id, told in self._told.items() if id >= plan.told_below}

    def answer(self, id: int, well: bool = True) -> None:
        """Answer a question of a store as it is now."""
        ask = self.asks.pop(id)
        self._told[id] = self.slots.answer(ask) if well else Told(id, ok=False)

    def end(self, id: int, well: bool = True) -> None:
        """A transfer that fails has moved half of its blocks."""
        transfer = self.waiting.pop(id)
        self._refused[id] = carry_out(self.slots, transfer, self.host, well)
        (self._done if well else self._failed).add(id)

    def report(self) -> TierReport:
        number, found, is_scanned = self.slots.portion()
        unfit = tuple((id, self._refused[id]) for id in sorted(self._done) if self._refused[id])
        transfers = RankReport(0, frozenset(self._done), frozenset(self._failed), unfit=unfit)
        told = tuple(self._told.values())
        return TierReport(transfers, self.slots.next_generation, number, found, is_scanned, told)
