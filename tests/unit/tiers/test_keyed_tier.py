"""KeyedTier in letters: jobs, and the host blocks they name. A letter is a name; capital ones are of group 1."""

import logging

import pytest

from cpu_prefix_cache.deciding import BlockName, KeyedTier
from cpu_prefix_cache.messages.plan import Label
from cpu_prefix_cache.tiers.keyed_questions import ABSENT_SECONDS
from cpu_prefix_cache.tiers.tier_cache import PAUSE_SECONDS, STALL_SECONDS, STORE_PAUSE_SECONDS
from property_tests.models.keyed_rank import PLANNER, KeyedRank
from property_tests.models.tier_model import RankStore

HOST = 16
ASK_SECONDS = 0.02


def names(letters):
    return [BlockName(letter.lower().encode() * 32, int(letter.isupper())) for letter in letters]


class Tier:
    """Both halves. Jobs are numbered; host blocks of a store hold their letters."""

    def __init__(self, slots=8, rank=None, steps=None, **options):
        self.tier = KeyedTier(slots, host_blocks=HOST, block_bytes=4096, **options)
        self.rank = KeyedRank() if rank is None else rank
        self.jobs = 0
        self.lost = {}
        while steps is None and not self.tier.is_whole:
            self.step()
        for _ in range(steps or 0):
            self.step()

    def step(self):
        self.rank.run(self.tier.plan())
        self.lost |= dict(self.tier.report(self.rank.report()))
        self.tier.check_valid()

    def begin_store(self, letters, begin=0):
        blocks = range(begin, begin + len(letters))
        self.rank.host |= dict(zip(blocks, letters, strict=True))
        return self._submit(self.tier.store, letters, blocks)

    def begin_load(self, letters, begin=0):
        blocks = range(begin, begin + len(letters))
        self.rank.host |= dict.fromkeys(blocks, "poison")
        return self._submit(self.tier.load, letters, blocks)

    def _submit(self, call, letters, blocks):
        self.jobs += 1
        call(self.jobs, names(letters), blocks)
        self.step()
        return self.jobs

    def end_all(self, well=True):
        for id in list(self.rank.waiting):
            self.rank.end(id, well)
        self.step()

    def store(self, letters, well=True):
        job = self.begin_store(letters)
        self.end_all(well)
        return self.lost_letters(job)

    def load(self, letters, well=True):
        """Contents of the host then: a letter, "." for one that is lost."""
        job = self.begin_load(letters)
        self.end_all(well)
        lost = self.lost_letters(job)
        return "".join("." if each in lost else self.rank.host[at] for at, each in enumerate(letters))

    def lost_letters(self, job):
        lost = ((chr(name.key[0]), name.number) for name in self.lost[job])
        return "".join(sorted(letter.upper() if number else letter for letter, number in lost))

    def ask(self, letters):
        """Lookup of each letter: itself, "." for one that is not there, "?" for one that is not known."""
        found = map(self.tier.has, names(letters))
        return "".join(
            "?" if has is None else letter if has else "." for letter, has in zip(letters, found, strict=True)
        )

    def has(self, letters):
        return "".join(letter for letter, name in zip(letters, names(letters), strict=True) if self.tier.has(name))

    def restarted(self, slots=8, portion=1):
        return Tier(slots, KeyedRank(self.rank.slots, portion))


def test_a_stored_name_is_loaded():
    tier = Tier()
    assert tier.load("ab") == ".."
    assert tier.store("abA") == ""
    assert tier.has("abcAB") == "abA"
    assert tier.load("Abab"[:3]) == "Aba"


def test_one_key_holds_something_else_in_each_group():
    tier = Tier()
    tier.store("aA")
    assert tier.load("Aa") == "Aa"


def test_names_that_are_stored_twice_are_written_once():
    tier = Tier()
    first, second = tier.begin_store("ab"), tier.begin_store("bc", begin=2)
    assert [len(each.copies[0].host_blocks) for each in tier.rank.waiting.values()] == [2, 1]
    tier.end_all()
    assert tier.lost_letters(first) == tier.lost_letters(second) == ""
    assert tier.store("abc") == "" and not tier.rank.waiting


def test_nothing_is_found_before_it_is_written():
    tier = Tier()
    tier.begin_store("ab")
    assert tier.has("ab") == ""
    tier.end_all()
    assert tier.has("ab") == "ab"


def test_the_least_recently_used_leaves_first_and_of_one_prompt_its_end():
    tier = Tier(slots=4)
    tier.store("ab")
    tier.store("cd")
    tier.tier.touch(names("ab"))
    tier.store("e")
    assert tier.has("abcde") == "abce"
    tier.store("fg")
    assert tier.has("abcefg") == "aefg"


def test_a_slot_that_is_read_stays():
    tier = Tier(slots=2)
    tier.store("ab")
    job = tier.begin_load("ab")
    assert tier.store("c") == "c"  # which ends all that is under way, and the load with it
    assert tier.lost_letters(job) == ""
    assert tier.store("c") == ""


def test_a_refused_slot_is_a_miss_once_and_for_all():
    tier = Tier()
    tier.store("abc")
    slot = next(slot for slot, record in tier.rank.slots.records.items() if record.content == "b")
    tier.rank.slots.records[slot].is_intact = False
    assert tier.load("abc") == "a.c"
    assert tier.has("abc") == "ac"
    assert tier.tier.statistics() == (2, 1, 0)
    assert tier.store("b") == "" and tier.load("b") == "b"


def test_a_failed_load_loses_all_of_it():
    tier = Tier()
    tier.store("abc")
    assert tier.load("ab", well=False) == ".."
    assert tier.has("abc") == "c"


def test_a_failed_store_is_not_found():
    tier = Tier()
    assert tier.store("ab", well=False) == "ab"
    assert tier.has("ab") == ""
    assert tier.store("ab") == ""


def test_five_failed_writes_in_a_row_are_enough_for_a_while(caplog):
    tier = Tier()
    tier.store("a")
    for letter in "bcdef":
        tier.store(letter, well=False)
    assert "stores of the tier have failed 5 times in a row" in caplog.text
    assert tier.store("b") == "b" and not tier.rank.waiting
    assert tier.load("a") == "a"  # a full disk has what it had
    tier.tier.passed(PAUSE_SECONDS)
    assert tier.store("b") == ""


def test_five_failed_reads_in_a_row_are_enough_for_a_while(caplog):
    caplog.set_level(logging.CRITICAL)
    tier = Tier()
    tier.store("abcdef")
    for letter in "abcde":
        tier.load(letter, well=False)
    assert tier.has("f") == "" and tier.load("f") == "."
    tier.tier.passed(PAUSE_SECONDS)
    assert tier.load("f") == "f"


def test_while_a_read_hangs_nothing_is_found():
    tier = Tier()
    tier.store("ab")
    tier.begin_load("a")
    tier.tier.passed(STALL_SECONDS / 2)
    assert tier.has("b") == "b"
    tier.tier.passed(STALL_SECONDS)
    assert tier.has("b") == ""
    tier.end_all()
    assert tier.has("b") == "b"


def test_while_much_of_the_host_waits_to_be_written_nothing_more_does():
    tier = Tier()
    tier.begin_store("abcd")
    job = tier.begin_store("e", begin=4)
    assert tier.lost_letters(job) == "e"
    assert tier.tier.statistics().unsaved == 1
    tier.end_all()
    assert tier.store("e") == ""


def test_a_reset_forgets_and_what_is_under_way_is_lost():
    tier = Tier()
    tier.store("ab")
    load, store = tier.begin_load("a"), tier.begin_store("c", begin=4)
    tier.tier.reset()
    assert tier.has("abc") == ""
    tier.end_all()
    assert tier.lost_letters(load) == "a" and tier.lost_letters(store) == "c"
    assert tier.store("abc") == "" and tier.load("abc") == "abc"
    assert tier.restarted().load("abc") == "abc"


def test_a_restart_finds_what_was_there():
    tier = Tier()
    tier.store("abA")
    again = tier.restarted()
    assert again.has("abcA") == "abA"
    assert again.load("abA") == "abA"


def test_a_restart_finds_nothing_from_before_a_reset():
    tier = Tier()
    tier.store("ab")
    tier.tier.reset()
    tier.step()
    assert tier.restarted().has("ab") == ""


@pytest.mark.parametrize("resets", [1, 5])
def test_resets_before_it_is_open_count(resets):
    tier = Tier()
    tier.store("ab")
    early = Tier(rank=KeyedRank(tier.rank.slots), steps=0)
    for _ in range(resets):
        early.tier.reset()
    for _ in range(4):
        early.step()
    assert early.has("ab") == ""
    assert early.store("a") == "" and early.load("a") == "a"


def test_a_restart_finds_the_youngest_of_two_slots_with_one_name():
    tier = Tier()
    tier.store("a")
    (slot,) = tier.rank.slots.records
    label = tier.rank.slots.records[slot].label
    tier.rank.slots.write(slot + 1, label._replace(generation=label.generation + 1), "young")
    again = tier.restarted()
    assert again.load("a") == "young"
    assert again.tier.statistics().held == 1


def test_before_all_from_before_is_taken_in_it_is_read_and_not_written():
    tier = Tier()
    tier.store("abc")
    early = Tier(rank=KeyedRank(tier.rank.slots), steps=2)
    assert not early.tier.is_whole
    assert early.store("d") == "d"
    found = early.has("abc")
    assert found and early.load(found) == found


@pytest.mark.parametrize("slots", [1, 3])
def test_more_than_there_are_slots_is_left_out(slots):
    tier = Tier(slots)
    assert tier.store("abcd") == "abcd"[slots:]
    assert tier.load("abcd") == "abcd"[:slots] + "." * (4 - slots)


# A store that others write


def shared(slots=8, **options):
    return Tier(slots, KeyedRank(RankStore(PLANNER)), ask_seconds=ASK_SECONDS, **options)


def answer_all(tier, well=True):
    for id in list(tier.rank.asks):
        tier.rank.answer(id, well)
    tier.step()


def others_put(tier, letters):
    """Engines with the same revision."""
    for letter, name in zip(letters, names(letters), strict=True):
        tier.rank.slots.write(0, Label(name.key, b"", name.number, 0, 0, 1 << 60), letter)


def test_unknown_names_are_one_question():
    tier = shared()
    others_put(tier, "aA")
    assert tier.ask("abA") == "???"
    tier.step()
    assert tier.ask("abA") == "???" and len(tier.rank.asks) == 1
    answer_all(tier)
    assert tier.ask("abA") == "a.A"
    assert tier.load("abA") == "a.A"
    assert not tier.rank.asks


def test_two_questions_about_one_key_may_name_both_its_groups():
    tier = shared()
    others_put(tier, "aA")
    for letter in "aA":
        assert tier.ask(letter) == "?"
        tier.step()
    assert len(tier.rank.asks) == 2
    answer_all(tier)
    assert tier.ask("aA") == "aA"


def test_a_name_that_is_absent_is_unknown_again_later():
    tier = shared()
    assert tier.ask("a") == "?"
    tier.step()
    answer_all(tier)
    others_put(tier, "a")
    assert tier.ask("a") == "."
    tier.tier.passed(ABSENT_SECONDS)
    assert tier.ask("a") == "?"
    tier.step()
    answer_all(tier)
    assert tier.ask("a") == "a"


def test_an_answer_that_is_late_is_not_awaited():
    tier = shared()
    others_put(tier, "a")
    tier.ask("a")
    tier.step()
    tier.tier.passed(ASK_SECONDS)
    assert tier.ask("a") == "."
    answer_all(tier)
    assert tier.ask("a") == "."


def test_own_names_are_no_question():
    tier = shared()
    tier.begin_store("a")
    assert tier.ask("a") == "."
    tier.end_all()
    assert tier.ask("a") == "a" and not tier.rank.asks


def test_a_value_that_the_store_has_evicted_is_refused_and_unknown():
    tier = shared()
    tier.store("ab")
    tier.rank.slots.records.clear()
    assert tier.load("ab") == ".."
    assert tier.ask("ab") == "??"


def test_more_than_is_remembered_is_unknown_again():
    tier = shared(slots=2)
    tier.store("ab")
    tier.store("c")
    assert tier.ask("abc") == "a?c"
    tier.step()
    answer_all(tier)
    assert tier.load("b") == "b" and tier.tier.statistics().held == 2


@pytest.mark.parametrize("well", [False, None], ids=["failed", "unanswered"])
def test_a_store_that_does_not_answer_is_left_alone_for_a_while(well, caplog):
    tier = shared()
    for at, letter in enumerate("abcde"):
        assert tier.ask(letter) == "?"
        tier.step()
        if well is not None:
            answer_all(tier, well)
        tier.tier.passed((at + 1) * ASK_SECONDS)
    assert tier.ask("f") == "." and "5 times in a row" in caplog.text
    tier.tier.passed(STORE_PAUSE_SECONDS + 5 * ASK_SECONDS)
    assert tier.ask("f") == "?"


def test_an_answer_about_a_name_that_was_stored_meanwhile_changes_nothing():
    tier = shared()
    tier.ask("a")
    tier.step()
    tier.store("a")
    answer_all(tier)
    assert tier.load("a") == "a"


def test_after_a_reset_nothing_counts_that_was_answered_before():
    tier = shared(slots=2)
    others_put(tier, "a")
    tier.ask("ab")
    tier.step()
    answer_all(tier)
    assert tier.ask("abc") == "a.?"
    tier.step()
    tier.tier.reset("next")
    assert tier.tier.plan().revision == "next"
    for id in list(tier.rank.asks):
        tier.rank.answer(id)
    tier.lost |= dict(tier.tier.report(tier.rank.report()))
    assert tier.ask("abc") == "???"
    tier.step()
    answer_all(tier)
    assert tier.ask("abc") == "..."
    others_put(tier, "b")
    tier.tier.passed(ABSENT_SECONDS)
    assert tier.ask("b") == "?"
    tier.step()
    answer_all(tier)
    assert tier.load("b") == "b"
