"""A keeper over a store that others write, too: when that is queried, and what becomes of the question that waits.

The test is the engines, the store, and the clock.
"""

from itertools import count

import pytest

from cpu_prefix_cache.deciding import HybridChunkPlanner, PrefixGroup
from cpu_prefix_cache.keeper.answers import NOTHING
from cpu_prefix_cache.keeper.names import named
from cpu_prefix_cache.keeper.protocol import NAMESPACE_BYTES
from cpu_prefix_cache.keeper.records import Records, records_bytes
from cpu_prefix_cache.keeper.tiered_keeper import TieredKeeper
from cpu_prefix_cache.messages.plan import RankReport
from cpu_prefix_cache.messages.request import Pending
from cpu_prefix_cache.messages.tier import KEY_BYTES, TierOptions, TierReport, Told

SLOTS, BLOCK, ASK_SECONDS = 32, 64, 0.02
NAMESPACE, ENGINE = b"n" * NAMESPACE_BYTES, 1
A, B, C, D, Y = (letter.encode() * KEY_BYTES for letter in "abcdy")
MODEL = HybridChunkPlanner([PrefixGroup(name="0", block_tokens=4, block_bytes=BLOCK)], max_model_len=64)


class Asking(TieredKeeper):
    def __init__(self):
        records = Records(memoryview(bytearray(records_bytes(SLOTS))))
        records.begin(SLOTS, BLOCK)
        super().__init__(SLOTS, records, MODEL, TierOptions(4 * SLOTS, ask_seconds=ASK_SECONDS))
        self.join(ENGINE, NAMESPACE)
        self.hears()
        self.hears_of = 0

    def hears(self, done=(), told=(), heard=None):
        ranks = RankReport(0, frozenset(done))
        self.report_below(TierReport(ranks, 1, is_scanned=True, told=tuple(told), heard=heard))
        self.check_valid()

    def asks(self):
        """Keys that the store is queried for now, by the number of the query."""
        return {ask.id: ask.keys for ask in self.plan_below().asks}

    def answers(self):
        """By the number of the question."""
        return {id: answer for _, id, answer in self.step()}


@pytest.fixture
def keeper():
    return Asking()


def test_a_question_waits_for_the_answer_of_the_store_and_then_for_what_is_read(keeper):
    assert keeper.run(ENGINE, 1, [A, B, C]) == Pending(ASK_SECONDS)
    assert keeper.asks() == {0: tuple(named(NAMESPACE, [A, B, C]))} and not keeper.answers()
    keeper.hears(told=[Told(0, True, 2)])
    (reading,) = keeper.answers().values()
    assert isinstance(reading, Pending)
    list(keeper.step())
    (load,) = keeper.plan_below().step.transfers
    keeper.hears(done=[load.id])
    (leased,) = keeper.answers().values()
    assert (leased.present, leased.depth, len(leased.slots)) == (2, 2, 2) and not keeper.is_awaited


def test_chunks_that_the_pool_had_are_no_hits_of_the_tier(keeper):
    keeper.take(ENGINE, 1, [A, B])
    keeper.commit(ENGINE, 1, 2, False)
    for store in keeper.plan_below().step.transfers:
        keeper.hears(done=[store.id])
    keeper.run(ENGINE, 2, [A, B, C])
    keeper.asks()
    keeper.hears(told=[Told(0, True, 1)])
    assert isinstance(keeper.answers()[2], Pending)
    list(keeper.step())
    (load,) = keeper.plan_below().step.transfers
    keeper.hears(done=[load.id])
    assert keeper.answers()[2].depth == 3
    now = keeper.keeper_statistics()
    assert (now.questions, now.asked_chunks, now.hit_chunks, now.tier_hit_chunks) == (1, 3, 3, 1)
    assert keeper.tier_statistics().asked == 1 and keeper.tier_statistics().late == 0


@pytest.mark.parametrize("told", [Told(0, True, 0), Told(0, False)])
def test_a_store_without_it_and_one_that_fails_are_a_miss(keeper, told):
    keeper.run(ENGINE, 1, [A])
    keeper.asks()
    keeper.hears(told=[told])
    assert keeper.answers() == {1: NOTHING}


def test_a_store_that_does_not_answer_costs_a_question_its_deadline(keeper):
    keeper.run(ENGINE, 1, [A])
    keeper.asks()
    keeper.hears(heard=1)
    assert keeper.answers() == {}
    keeper.passed(ASK_SECONDS)
    assert keeper.answers() == {1: NOTHING}


def test_a_store_is_not_queried_for_a_prompt_of_which_the_pool_has_all(keeper):
    keeper.take(ENGINE, 1, [A, B])
    keeper.commit(ENGINE, 1, 2, False)
    assert keeper.run(ENGINE, 2, [A, B]).depth == 2 and not keeper.asks()
    assert isinstance(keeper.run(ENGINE, 3, [A, B, C]), Pending) and keeper.asks()


def test_a_store_is_not_queried_where_computing_is_sooner(keeper):
    keeper.below.edge.break_even.loads_at(0, 1.0)  # a byte a second
    assert keeper.run(ENGINE, 1, [A], chunk_nanoseconds=1_000_000) == NOTHING and not keeper.asks()
    assert isinstance(keeper.run(ENGINE, 2, [A], chunk_nanoseconds=10**12), Pending)


@pytest.mark.parametrize("ends", ["answered", "released", "gone"])
def test_a_number_that_comes_again_is_another_question(keeper, ends):
    keeper.run(ENGINE, 1, [A])
    keeper.asks()
    if ends == "answered":
        keeper.hears(told=[Told(0, True, 0)])
        assert keeper.answers() == {1: NOTHING}
    elif ends == "released":
        keeper.release(ENGINE, 1)
    else:
        keeper.leave(ENGINE)
        keeper.join(ENGINE, NAMESPACE)
    assert isinstance(keeper.run(ENGINE, 1, [D]), Pending)
    assert keeper.asks() == {1: tuple(named(NAMESPACE, [D]))}


@pytest.mark.parametrize("wrong", [[C, B], [C, C]])
def test_keys_of_several_prompts_that_a_store_has_break_nothing(keeper, wrong):
    """A key is that of all tokens up to its chunk's end, so of these one has another beginning in each prompt."""
    keeper.run(ENGINE, 1, [A, B])
    keeper.run(ENGINE, 2, wrong)
    keeper.asks()
    keeper.hears(told=[Told(0, True, 2), Told(1, True, 2)])
    answers = keeper.answers()
    assert isinstance(answers[1], Pending) and answers[2] in (None, NOTHING)


def test_keys_of_two_prompts_in_one_question_end_no_keeper(keeper):
    """Nothing but y d names d below y. Once an engine has joined them so, a b c d is read as far as it is a prompt."""
    numbers, now = count(1), [0.0]

    def asks(keys, *, gives_up=False):
        """The answer of a store that has all of them."""
        number = next(numbers)
        answer = keeper.run(ENGINE, number, keys, now[0])
        if gives_up:
            keeper.release(ENGINE, number)
        for _ in range(6):
            now[0] += 0.001
            keeper.passed(now[0])
            plan = keeper.plan_below()
            done = [transfer.id for transfer in plan.step.transfers]
            keeper.hears(done=done, told=[Told(ask.id, True, len(ask.keys)) for ask in plan.asks])
            answer = keeper.answers().get(number, answer)
        return answer

    asks([A])
    asks([Y, D], gives_up=True)
    asks([A, B], gives_up=True)
    assert asks([A, B, C, D]).depth >= 1


@pytest.mark.parametrize(("begins", "written"), [("engine", 2), ("tier", 1)])
def test_a_key_is_not_written_below_two_parents_at_once(keeper, begins, written):
    """An engine takes keys of two prompts, b and c, while the tier is read for a d y c."""

    def take():
        return keeper.take(ENGINE, 1, [B, C]).slots

    taken = take() if begins == "engine" else ()
    keeper.run(ENGINE, 2, [A, D, Y, C])
    keeper.hears(told=[Told(ask, True, len(keys)) for ask, keys in keeper.asks().items()])
    keeper.answers()
    list(keeper.step())
    loads = [transfer.id for transfer in keeper.plan_below().step.transfers]
    taken = taken or take()
    assert len(taken) == written and bool(loads) == (begins == "tier")
    keeper.commit(ENGINE, 1, written, False)
    keeper.hears(done=loads)
