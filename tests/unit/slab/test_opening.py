"""A tier that opens itself: its owner neither waits for a disk that hangs nor fails with an attempt."""

import errno
import logging
import os
import threading
from types import SimpleNamespace

import pytest

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import RankReport, StepPlan
from cpu_prefix_cache.messages.tier import TierPlan, TierReport
from cpu_prefix_cache.slab import opening, record_file
from cpu_prefix_cache.slab.opening import NOTHING_MOVED, OpeningTier
from cpu_prefix_cache.slab.rank_tier import RankTier
from cpu_prefix_cache.tier import TierUnavailable
from tests.unit.slab.host_region import region
from tests.unit.slab.small_slab import BLOCK, PIECES, open_slab

SECONDS = 30  # more than any machine takes


class Tier:
    """An open tier that keeps the plans it gets."""

    def __init__(self):
        self.plans = []
        self.closed = threading.Event()
        self.is_busy = False

    def run(self, plan):
        self.plans.append((plan, threading.current_thread()))

    def report(self):
        return TierReport(RankReport(3), next_generation=7)

    def statistics(self):
        return "statistics"

    def drain(self):
        self.plans.append("drained")

    def close(self):
        self.closed.set()


class Attempts:
    """Result of each attempt: a tier, an error, or something to be waited for first. The last one is repeated."""

    def __init__(self, *results):
        self.results = list(results)
        self.threads = []
        self.made = 0
        self.changed = threading.Condition()

    def __call__(self):
        with self.changed:
            self.made += 1
            self.changed.notify_all()
        self.threads.append(threading.current_thread())
        result = self.results.pop(0) if len(self.results) > 1 else self.results[0]
        if isinstance(result, threading.Event):
            assert result.wait(SECONDS)
            return self()
        if isinstance(result, Exception):
            raise result
        return result

    def until(self, made):
        with self.changed:
            assert self.changed.wait_for(lambda: self.made >= made, SECONDS)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(opening, "PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(opening, "LONGEST_PAUSE_SECONDS", 0.002)


def opening_tier(*results):
    attempts = Attempts(*results)
    return OpeningTier(3, "the tier in /nvme", attempts), attempts


def is_open(tier):
    return tier.report().next_generation is not None


def until_open(tier):
    tier._attempts.join(SECONDS)
    assert is_open(tier)


def plan(epoch=0, step=0):
    return TierPlan(StepPlan(epoch, (), resolved_below=step))


def test_a_tier_that_can_be_opened_is_open_at_once():
    inner = Tier()
    tier, attempts = opening_tier(inner)
    assert tier.report() == inner.report() and tier.statistics() == "statistics"
    tier.run(plan(1))
    tier.drain()
    tier.close()
    assert inner.plans == [(plan(1), threading.current_thread()), "drained"] and inner.closed.is_set()
    assert threading.current_thread() not in attempts.threads


def test_an_error_that_only_the_operator_can_mend_is_raised():
    with pytest.raises(ConfigurationError, match="wrong password"):
        opening_tier(ConfigurationError("wrong password"))


def test_opening_is_tried_again_and_each_reason_logged_once(caplog):
    missing, full = TierUnavailable("no such disk"), OSError(28, "no room")
    inner = Tier()
    with caplog.at_level(logging.WARNING):
        tier, _ = opening_tier(*[missing] * 3, *[full] * 3, inner)
        until_open(tier)
    said = [record.getMessage() for record in caplog.records]
    assert [sum(text in line for line in said) for text in ("no such disk", "no room", "is open now")] == [1, 1, 1]
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR", "WARNING"]
    tier.close()


def test_an_unopened_tier_reports_no_generation_and_does_nothing():
    tier, _ = opening_tier(TierUnavailable("down"))
    tier.run(plan())
    tier.drain()
    assert tier.report() == TierReport(RankReport(3), next_generation=None)
    assert not tier.is_busy and tier.statistics() == NOTHING_MOVED
    tier.close()
    tier._attempts.join(SECONDS)
    assert not tier._attempts.is_alive(), "nobody tries any more"


def test_whatever_a_store_raises_is_no_reason_to_fall(caplog):
    tier, attempts = opening_tier(
        RecursionError("deep"), ConfigurationError("wrong password, now that it is up"), Tier()
    )
    until_open(tier)
    assert "deep" in caplog.text and "wrong password" in caplog.text
    assert attempts.made == 3
    tier.close()


def test_nobody_waits_for_what_hangs(monkeypatch, caplog):
    monkeypatch.setattr(opening, "PATIENCE_SECONDS", 0.001)
    monkeypatch.setattr(opening, "CLOSE_SECONDS", 0.001)
    answers, inner = threading.Event(), Tier()
    tier, attempts = opening_tier(answers, inner)
    tier.run(plan())
    assert not is_open(tier) and attempts.made == 1
    assert caplog.text.count("nothing has answered") == 1
    tier.close()
    answers.set()
    assert inner.closed.wait(SECONDS), "what opens although nobody wants it any more is closed"
    assert not is_open(tier)


def test_a_tier_that_opens_after_a_reset_gets_the_new_epoch_first():
    answers, inner = threading.Event(), Tier()
    tier, attempts = opening_tier(TierUnavailable("down"), answers, inner)
    attempts.until(2)
    for step, epoch in enumerate((0, 1, 1, 2, 2)):
        tier.run(plan(epoch, step))
    answers.set()
    until_open(tier)
    assert [each for each, _ in inner.plans] == [plan(2, 3)], (
        "it is given more than the first plan after the last reset"
    )
    assert threading.current_thread() not in [thread for _, thread in inner.plans]
    tier.close()


def test_a_tier_that_fails_at_the_new_epoch_is_closed_and_opened_again():
    class Breaks(Tier):
        def run(self, plan):
            raise OSError("read-only")

    answers = threading.Event()
    first = Breaks()
    second = Tier()
    tier, attempts = opening_tier(TierUnavailable("down"), answers, first, second)
    attempts.until(2)
    tier.run(plan(1))
    answers.set()
    until_open(tier)
    assert first.closed.is_set() and [each.step.epoch for each, _ in second.plans] == [1]
    tier.close()


def test_a_tier_that_is_dropped_is_not_opened_any_more():
    tier, attempts = opening_tier(TierUnavailable("down"))
    thread = tier._attempts
    del tier
    thread.join(SECONDS)
    assert not thread.is_alive() and attempts.made


class Once:
    """`act`, which fails at its first call as a disk may, and keeps nothing."""

    def __init__(self, act):
        self.act, self.calls = act, 0

    def __call__(self, *arguments):
        self.calls += 1
        if self.calls == 1:
            raise OSError(errno.EIO, "Input/output error")
        return self.act(*arguments)


def test_a_disk_that_fails_once_at_the_first_attempt_is_open_at_the_next(tmp_path, monkeypatch, caplog):
    """The lock of the folder is not kept by an attempt that has failed."""
    reads = Once(os.preadv)
    monkeypatch.setattr(record_file, "os", SimpleNamespace(preadv=reads, pwrite=os.pwrite))
    tier = OpeningTier(0, "the tier", lambda: RankTier(open_slab(tmp_path), region(4, BLOCK), PIECES[1:2], 0))
    until_open(tier)
    assert "Input/output error" in caplog.text and "another process" not in caplog.text
    tier.close()


def test_an_error_that_is_kept_for_others_keeps_no_lock(tmp_path, monkeypatch):
    """Nothing is left to whenever the garbage is collected."""
    monkeypatch.setattr(record_file, "os", SimpleNamespace(preadv=Once(os.preadv), pwrite=os.pwrite))
    with pytest.raises(OSError, match="Input/output error") as kept:
        open_slab(tmp_path)
    assert kept.tb is not None, "with all of its frames"
    open_slab(tmp_path).close()
