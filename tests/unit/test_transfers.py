"""The ledger: every transfer resolves exactly once, whatever the ranks report and in whatever order (rule 10)."""

import itertools

import pytest

from cpu_prefix_cache.deciding import Direction
from cpu_prefix_cache.offload.chain import Chain
from cpu_prefix_cache.offload.transfers import LoadTransfer, StoreTransfer, TransferLedger


class Ledger(TransferLedger):
    def store(self, *keys, follows=()):
        return self._new(Direction.STORE, keys, follows)

    def load(self, *keys):
        return self._new(Direction.LOAD, keys, ())

    def hears(self, rank, *transfers, done=True):
        return [each.id for each in self.report(rank, [transfer.id for transfer in transfers], done)]

    def _new(self, direction, keys, follows):
        plan = self.new_plan(direction, (), 0)
        if direction is Direction.LOAD:
            transfer = LoadTransfer(plan, Chain(None, keys), hold=None)
        else:
            transfer = StoreTransfer(plan, Chain(None, keys), nodes=range(len(keys)), hold=None, follows=list(follows))
        self.add(transfer)
        return transfer


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_last_rank_resolves_it_in_whatever_order(order):
    """S7.7, S7.21, O8.25"""
    ledger = Ledger(3)
    store = ledger.store(b"a")
    ledger.step(0)
    assert [ledger.hears(rank, store) for rank in order] == [[], [], [store.id]]
    assert store.succeeded


def test_repeated_reports_do_no_harm():
    """O8.8: ranks are a set, not a count."""
    ledger = Ledger(2)
    store = ledger.store(b"a")
    ledger.step(0)
    assert ledger.hears(0, store) == ledger.hears(0, store) == ledger.hears(0, store) == []
    assert ledger.hears(1, store) == [store.id]
    assert ledger.hears(1, store) == []
    ledger.remove(store)
    assert ledger.hears(0, store) == [] and len(ledger) == 0


def test_reports_of_strangers_and_of_what_was_not_sent_are_ignored():
    ledger = Ledger(1)
    store = ledger.store(b"a")
    assert ledger.hears(0, store) == []
    assert list(ledger.report(0, [77], True)) == []
    ledger.step(0)
    assert ledger.hears(0, store) == [store.id]


@pytest.mark.parametrize("bad", [0, 1])
def test_one_failure_fails_it(bad):
    ledger = Ledger(2)
    store = ledger.store(b"a")
    ledger.step(0)
    for rank in (0, 1):
        ledger.hears(rank, store, done=rank != bad)
    assert ledger.has_landed(store) and not store.succeeded


@pytest.mark.parametrize("first", [True, False])
def test_a_failure_outweighs_a_contradictory_report(first):
    """L5.27"""
    ledger = Ledger(2)
    store = ledger.store(b"a")
    ledger.step(0)
    ledger.hears(0, store, done=first)
    ledger.hears(0, store, done=not first)
    ledger.hears(1, store)
    assert not store.succeeded


def test_keys_are_known_while_they_move():
    ledger = Ledger(1)
    store, load = ledger.store(b"a", b"ab"), ledger.load(b"x")
    assert ledger.writing == {b"a": store, b"ab": store} and ledger.loading == {b"x": load}
    ledger.remove(store)
    ledger.remove(load)
    assert not ledger.writing and not ledger.loading


def test_a_cancelled_store_takes_its_followers_along():
    ledger = Ledger(1)
    first = ledger.store(b"a")
    second = ledger.store(b"ab", follows=[first])
    third, other = ledger.store(b"abc", follows=[second]), ledger.store(b"x")
    assert ledger.cancel(first) == [first, second, third]
    assert ledger.cancel(first) == []
    assert not (first.succeeded or third.succeeded) and other.succeeded
    assert list(ledger.writing) == [b"x"]  # nobody waits for what will not come


def test_a_cancelled_store_forgets_only_its_own_keys():
    ledger = Ledger(1)
    old = ledger.store(b"a")
    ledger.cancel(old)
    new = ledger.store(b"a")
    ledger.remove(old)
    assert ledger.writing == {b"a": new}


def test_a_cancelled_load_is_sent_once_and_still_resolves():
    """S7.41"""
    ledger = Ledger(1)
    load = ledger.load(b"a")
    ledger.cancel(load)
    ledger.cancel(load)
    plan = ledger.step(0)
    assert plan.transfers == (load.plan,) and plan.cancelled == (load.id,)
    assert ledger.step(0) == plan._replace(transfers=(), cancelled=())
    assert ledger.hears(0, load, done=False) == [load.id]


def test_ids_ascend_and_what_is_settled_is_below():
    ledger = Ledger(1)
    first, second = ledger.store(b"a"), ledger.store(b"x")
    assert (first.id, second.id, ledger.resolved_below) == (0, 1, 0)
    ledger.remove(second)
    assert ledger.resolved_below == 0
    ledger.remove(first)
    assert ledger.resolved_below == 2
    assert ledger.store(b"y").id == 2
