"""The tier of one rank as a decider sees it: plans in, reports out."""

import os
import threading

import pytest

from cpu_prefix_cache import MisuseError
from cpu_prefix_cache.deciding import Direction, GroupCopy, StepPlan, TransferPlan
from cpu_prefix_cache.messages.plan import CHUNK, Label
from cpu_prefix_cache.messages.tier import TierPlan
from cpu_prefix_cache.slab import scan as module
from cpu_prefix_cache.slab.rank_tier import RankTier
from cpu_prefix_cache.slab.settings import FileTier
from cpu_prefix_cache.slab.tier import RankPart
from tests.support.threads import eventually
from tests.unit.slab.host_region import region
from tests.unit.slab.small_slab import BLOCK, PIECES, POISON, SLOTS, key_of, namespace, open_slab, page

STORE, LOAD = Direction.STORE, Direction.LOAD


class Decider:
    """Sends plans to one rank and remembers what it must: which slots hold which letters."""

    def __init__(self, path, rank=0):
        self.host = region(8)
        self.slab = open_slab(path, rank=rank, ranks=rank + 1)
        self.tier = RankTier(self.slab, self.host, PIECES, rank, module.RestartScan(self.slab, PIECES))
        self.first = self.tier.report().next_generation
        self.next = 0

    def labels(self, letters):
        return tuple(Label(key_of(each), b"", 1, 0, 0, self.first + ord(each)) for each in letters)

    def transfer(self, direction, letters, slot=0, block=0, **fields):
        slots, blocks = range(slot, slot + len(letters)), range(block, block + len(letters))
        copies = (GroupCopy(1, tuple(slots), tuple(blocks), self.labels(letters)),)
        self.next += 1
        return TransferPlan(self.next - 1, direction, copies, len(letters) * BLOCK, **fields)

    def step(self, *transfers, taken=0, first_generation=0, **fields):
        self.tier.run(TierPlan(StepPlan(0, transfers, **fields), first_generation, taken))
        self.tier.drain()
        return self.tier.report()

    def put(self, letters, slot=0):
        for block, letter in enumerate(letters):
            self.host[block] = ord(letter)
        return self.step(self.transfer(STORE, letters, slot), resolved_below=self.next)

    def damage(self, slot):
        with open(os.path.join(self.slab.folder, "blocks"), "r+b") as file:
            file.seek(slot * BLOCK)
            file.write(b"\0")


@pytest.fixture
def decider(tmp_path):
    made = Decider(tmp_path)
    yield made
    made.tier.close()


def test_a_round_trip(decider):
    assert decider.put("abc").transfers.done == {0}
    decider.host.fill_(POISON)
    report = decider.step(decider.transfer(LOAD, "abc", block=4), resolved_below=1)
    assert report.transfers.done == {1} and not report.transfers.failed and report.transfers.unfit == ()
    assert [chr(row[0]) for row in decider.host[4:7].tolist()] == ["a", "b", "c"]
    assert decider.tier.statistics().bytes_read == decider.tier.statistics().bytes_written == 3 * BLOCK


def test_refusals_are_repeated_until_their_load_is_resolved(decider):  # S8.6
    decider.put("abc")
    decider.damage(1)
    report = decider.step(decider.transfer(LOAD, "abc", block=4))
    assert report.transfers.done == {0, 1}
    assert report.transfers.unfit == ((1, (1,)),)
    assert decider.step(resolved=(0,)).transfers.unfit == ((1, (1,)),)
    assert decider.step(resolved_below=2).transfers.unfit == ()


def test_two_loads_of_one_bad_slot_are_both_refused(decider):
    decider.put("ab")
    decider.damage(0)
    one, other = decider.transfer(LOAD, "ab"), decider.transfer(LOAD, "ab", block=4)
    assert decider.step(one, other).transfers.unfit == ((1, (0,)), (2, (0,)))
    assert decider.step(resolved=(1,)).transfers.unfit == ((2, (0,)),)
    assert decider.step(decider.transfer(LOAD, "ab"), resolved_below=3).transfers.unfit == ((3, (0,)),)


def test_a_slot_that_was_bad_is_good_once_written_again(decider):
    decider.put("ab")
    decider.damage(0)
    decider.step(decider.transfer(LOAD, "ab"), resolved_below=1)
    decider.first += 1
    decider.put("ab")
    report = decider.step(decider.transfer(LOAD, "ab"), resolved_below=3)
    assert report.transfers.done == {3} and report.transfers.unfit == ()


def test_a_transfer_that_may_not_be_copied_fails_alone(decider):
    decider.put("ab")
    wrong = TransferPlan(1, LOAD, (GroupCopy(7, (0,), (0,), decider.labels("a")),), BLOCK)
    decider.next = 2
    report = decider.step(wrong, decider.transfer(LOAD, "ab"))
    assert report.transfers.failed == {1} and report.transfers.done == {0, 2}


def test_a_disk_that_breaks_fails_the_transfer(decider, monkeypatch):
    decider.put("ab")

    def breaks(*_):
        raise OSError(5, "the disk is broken")

    monkeypatch.setattr(os, "preadv", breaks)
    report = decider.step(decider.transfer(LOAD, "ab"))
    assert report.transfers.failed == {1} and report.transfers.unfit == ()


def test_a_load_whose_source_was_gone_is_reported_as_failed(decider):
    report = decider.step(decider.transfer(LOAD, "a", failed=True))
    assert report.transfers.failed == {0}


def test_plans_of_another_version_are_refused(decider):
    with pytest.raises(MisuseError, match="version"):
        decider.step(version=99)


def test_after_a_reset_nothing_from_before_is_served(decider, tmp_path):
    decider.put("ab")
    report = decider.step(decider.transfer(LOAD, "ab"), first_generation=decider.first + ord("b"))
    assert report.transfers.unfit == ((1, (0,)),)
    decider.tier.close()
    again = Decider(tmp_path)
    assert again.slab.floor == again.first, "not even what was written after it"
    again.tier.close()


def test_a_reset_counts_although_the_decider_did_not_know_the_generations_of_the_files(tmp_path):  # S8.15
    """So its plan could not name a generation. All that is there is from before the reset."""
    before = Decider(tmp_path)
    before.put("ab")
    before.tier.close()
    restarted = Decider(tmp_path)
    restarted.tier.run(TierPlan(StepPlan(1, ())))
    assert restarted.slab.floor == restarted.first > before.first + ord("b")
    restarted.tier.close()


def test_a_reset_does_not_wait_for_the_disk(decider, monkeypatch):
    """Not when the disk is frozen, and not when a sync takes its time: it is a thread of the tier that waits."""
    decider.put("ab")
    thaws, syncing = threading.Event(), []
    monkeypatch.setattr(os, "fsync", lambda file: syncing.append(threading.current_thread()) or thaws.wait(30))
    later = decider.first + (1 << 32)
    decider.tier.run(TierPlan(StepPlan(0, (), resolved_below=1), later))
    assert eventually(lambda: syncing) and threading.current_thread() not in syncing
    load = decider.transfer(LOAD, "ab", block=4)
    decider.tier.run(TierPlan(StepPlan(0, (load,), resolved_below=1), later))
    assert eventually(lambda: decider.tier.report().transfers.unfit == ((1, (0, 1)),)), "loads go on"
    thaws.set()


def test_a_reset_does_not_fail_with_the_disk(decider, monkeypatch, caplog):
    def breaks(*_, **__):
        raise OSError(30, "read-only")

    decider.put("ab")
    for call in ("fsync", "unlink", "pwrite", "pwritev"):
        monkeypatch.setattr(os, call, breaks)
    decider.first += 1 << 32
    for _ in range(2):
        decider.step(first_generation=decider.first)
    assert decider.put("c").transfers.failed == {1}
    assert caplog.text.count("cannot keep a reset") == 1
    monkeypatch.undo()
    decider.step(resolved_below=2)
    assert decider.put("c").transfers.done == {2}, "it is tried again with each write"


def test_the_next_generation_stays_that_of_the_opening(decider):
    first = decider.first
    assert decider.put("a").next_generation == first
    assert decider.step(first_generation=5 << 32).next_generation == first


# Slots that a restart finds


def chunks(letters, first):
    for at, letter in enumerate(letters):
        labels = tuple(Label(key_of(letter), b"", 0, place, CHUNK, first + at) for place in range(2))
        yield GroupCopy(0, (2 * at, 2 * at + 1), (0, 1), labels)


@pytest.fixture
def restarted(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PORTION_RECORDS", 4)
    before = Decider(tmp_path)
    for id, copy in enumerate(chunks("abcdef", before.first)):
        before.step(TransferPlan(id, STORE, (copy,), 2 * BLOCK))
    before.tier.close()
    made = Decider(tmp_path)
    assert eventually(lambda: made.tier.report().portion)
    yield made
    made.tier.close()


def found(report):
    return "".join(chr(each.label.key[0]) for each in report.found)


def test_portions_come_one_after_another_and_the_last_is_marked(restarted):
    heard = []
    while True:
        report = restarted.step(taken=len(heard))
        assert report.portion == len(heard) + 1
        heard.append(found(report))
        if report.is_scanned:
            break
    assert heard == ["ab", "cd", "ef"]
    report = restarted.step(taken=3)
    assert (report.portion, report.found, report.is_scanned) == (3, (), True)


def test_a_portion_is_repeated_until_it_is_taken_in(restarted):
    for _ in range(3):
        report = restarted.step()
        assert (report.portion, found(report), report.is_scanned) == (1, "ab", False)
    assert found(restarted.step(taken=1)) == "cd"


def test_slots_found_by_a_restart_can_be_loaded(restarted):
    each = restarted.step().found[0]
    labels = tuple(each.label._replace(place=place) for place in range(2))
    load = TransferPlan(0, LOAD, (GroupCopy(0, each.slots, (4, 5), labels),), 2 * BLOCK)
    report = restarted.step(load)
    assert report.transfers.done == {0} and report.transfers.unfit == ()


def test_an_empty_slab_is_scanned_without_a_portion(decider):
    assert eventually(lambda: decider.tier.report().is_scanned)
    assert decider.tier.report().portion == 0


def test_the_first_rank_alone_reports_what_was_there(tmp_path):
    for rank in (0, 1):
        before = open_slab(tmp_path, rank=rank, ranks=2)
        before.write([3], [page(b"a")], [Label(key_of("a"), b"", 1, 0, 0, before.next_generation)])
        before.close()
        part = RankPart(SLOTS, rank, number=rank, owners=2)
        tier = FileTier(str(tmp_path), 10**6).open(namespace(), region(8), PIECES, part)
        assert eventually(lambda tier=tier: tier.report().is_scanned)
        assert tier.report().portion == 1 - rank
        tier.close()


# The end


def test_close_waits_and_unlocks(decider, tmp_path):
    decider.tier.run(TierPlan(StepPlan(0, (decider.transfer(STORE, "abcd"),))))
    decider.tier.close()
    decider.tier.close()
    again = open_slab(tmp_path)
    assert all(again.record(slot) for slot in range(4))
    again.close()


def test_a_tier_that_moves_is_busy(decider):
    assert not decider.tier.is_busy
    decider.put("a")
    assert not decider.tier.is_busy
