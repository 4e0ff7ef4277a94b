"""Queries to a store that others write: the prompts queried, the wait for an answer, and its use.

Any order: property_tests/machines/test_tier_machine.py. With bytes: tests/unit/stores/test_shared.py.
"""

from dataclasses import replace

import pytest

from cpu_prefix_cache import Hit, Miss, Pending
from cpu_prefix_cache.deciding import Request
from cpu_prefix_cache.messages.plan import CHUNK
from cpu_prefix_cache.messages.tier import Told
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.offload.completion import FAILURES_IN_A_ROW
from cpu_prefix_cache.testing import Engine
from cpu_prefix_cache.tiers import questions
from cpu_prefix_cache.tiers.questions import LATE_SECONDS, MOST_CHECKPOINTS, PROBE_SECONDS, REMEMBERED_SECONDS
from cpu_prefix_cache.tiers.tier_cache import STORE_PAUSE_SECONDS
from cpu_prefix_cache.tiers.trials import FIRST_SECONDS
from property_tests.strategies import chain
from tests.unit.tiers.small_tier import FULL, GRID, SECONDS, STATE, WINDOW, Shared, chain_names


def with_others(*prompts, groups=(), checkpoints=(), **options):
    engine = Shared(*groups, **options)
    engine.others_have(*prompts, checkpoints=checkpoints)
    return engine


# queries and waits


def test_a_request_waits_for_its_answer_and_reads_what_others_have():
    engine = with_others("abc")
    assert engine.asks_as("r", "abcd") == Pending(SECONDS)
    engine.steps_below()
    assert engine.asked == ["abcd"]
    engine.answers()
    assert engine.below == set(chain_names("abc"))
    assert engine.asks_as("r", "abcd").deadline > SECONDS, "now it waits for the promotion"
    engine.works()
    assert engine.asks_as("r", "abcd") == Hit(3 * GRID)
    engine.admits("r", "abcd")
    engine.works_off()
    assert engine.seen.hit_tokens == 3 * GRID and engine.seen.found == 3 and engine.is_at_rest()


def test_control_a_store_that_has_lost_it_since_is_found_out_by_the_read():
    engine = with_others("abc")
    engine.is_told("r", "abcd")
    engine.tiers[0].records.clear()
    engine.works()
    assert engine.asks_as("r", "abcd") == Miss()
    assert engine.seen.refused == 3 and not engine.below


def test_the_chunk_of_the_last_token_is_not_queried():
    """The last token is computed in any case, for its logits (rule 6)."""
    engine = Shared()
    engine.cache.lookup(Request("r", chain("abcd"), 4 * GRID), 0, engine.now)
    engine.steps_below()
    assert engine.asked == ["abc"]


def test_it_waits_until_its_deadline_and_no_longer():
    engine = with_others("abc")
    assert engine.asks_as("r", "abcd") == Pending(SECONDS)
    engine.now = 0.99 * SECONDS
    assert engine.asks_as("r", "abcd") == Pending(SECONDS)
    engine.now = SECONDS
    assert engine.asks_as("r", "abcd") == Miss()
    assert engine.seen.questions == engine.seen.unanswered == 1


def test_a_prompt_is_queried_once_and_anew_after_its_admission():
    engine = Shared()
    for _ in range(3):
        engine.asks_as("r", "abcd")
        engine.steps_below()
    assert engine.asked == ["abcd"]
    engine.answers()
    for _ in range(3):
        assert engine.asks_as("r", "abcd") == Miss()
    engine.admits("r", "abcd")
    engine.cache.preempted("r")
    assert engine.seen.questions == 1
    assert isinstance(engine.asks_as("r", "abcd"), Pending), "a preempted request comes back, or another by that name"
    assert engine.seen.questions == 2


def test_a_request_that_never_comes_back_is_forgotten():
    engine = Shared()
    engine.is_told("r", "abcd")
    engine.now = SECONDS + 0.99 * REMEMBERED_SECONDS
    assert engine.asks_as("r", "abcd") == Miss()
    engine.now = SECONDS + REMEMBERED_SECONDS
    engine.steps_below()
    assert isinstance(engine.asks_as("r", "abcd"), Pending)


def test_chunks_on_the_host_are_not_queried():
    engine = Shared()
    engine.host_has("abcd")
    assert engine.asks_as("r", "abcd") == Hit(4 * GRID)
    assert engine.asks_as("r", "abcd", n0=4 * GRID) == Miss(), "the device has it all"
    assert engine.seen.questions == 0
    engine.asks_as("r", "abcdef")
    engine.steps_below()
    assert next(iter(engine.asks.values())).depth == 0, "the tier has nothing of it yet"


def test_chunks_on_the_host_up_to_a_drafters_reach_are_not_queried():
    """Groups that look ahead resume a chunk before what is there: the store can add nothing to that."""
    engine = Shared(replace(FULL, lookahead_tokens=1))
    engine.host_has("abcd")
    assert engine.asks_as("r", "abcd") == Hit(3 * GRID)
    assert engine.asks_as("on the device", "abcd", n0=3 * GRID) == Miss()
    assert engine.seen.questions == 0
    engine.asks_as("r", "abcdef")
    assert engine.seen.questions == 1


def test_chunks_known_to_be_in_the_store_are_not_queried_again():
    engine = with_others("abcd")
    engine.is_told("r", "abcd")
    engine.asks_as("s", "abcdef")
    engine.steps_below()
    (ask,) = engine.asks.values()
    assert ask.depth == 4 and ask.keys == (b"abcde", b"abcdef")
    engine.asks_as("t", "abcd")
    engine.steps_below()
    assert engine.seen.questions == 2, "of t's prompt everything is known"


def test_prompts_too_short_to_be_loaded_are_not_queried():
    engine = Shared(min_load_tokens=3 * GRID)
    assert engine.asks_as("r", "ab") == Miss()
    assert engine.asks_as("r", "abcd", n0=2 * GRID) == Miss()
    assert engine.seen.questions == 0
    assert isinstance(engine.asks_as("r", "abc"), Pending)


def test_where_reading_is_slower_than_computing_nobody_waits():
    slow, fast = with_others("abcd"), with_others("abcd")
    slow.measures(rate=1.0, prefill=1e6)
    fast.measures(rate=1e9, prefill=10.0)
    assert slow.asks_as("r", "abcd") == Miss() and slow.seen.questions == 0
    assert isinstance(fast.asks_as("r", "abcd"), Pending)
    slow.now += FIRST_SECONDS
    assert isinstance(slow.asks_as("later", "abcd"), Pending), "the rate is measured again"


def test_nothing_is_queried_before_all_ranks_have_reported():
    engine = Shared()
    Engine.begins(engine)  # without what the ranks report of their tiers
    assert engine.asks_as("r", "abcd") == Miss()
    assert engine.seen.questions == 0


# the use of an answer


def test_an_answer_in_any_order_and_repeated_is_taken_in_once():
    engine = with_others("ab", "xy")
    engine.asks_as("r", "ab")
    engine.asks_as("s", "xy")
    engine.steps_below()
    first, second = engine.asks
    assert engine.told_below == first
    told = engine.answers(second)
    engine.steps_below()
    assert engine.told_below == first, "it is still open"
    told += engine.answers(first)
    engine.steps_below()
    assert engine.told_below == second + 1
    found = engine.seen.found
    engine.hears(told * 2)
    assert engine.seen.found == found == 4 and engine.below == {"a", "ab", "x", "xy"}


def test_an_answer_after_the_deadline_is_taken_in_for_others():
    engine = with_others("abcd")
    engine.asks_as("r", "abcd")
    engine.steps_below()
    engine.now = SECONDS + 0.99 * LATE_SECONDS
    assert engine.asks_as("r", "abcd") == Miss()
    engine.answers()
    assert engine.below == set(chain_names("abcd")) and engine.seen.unanswered == 1
    engine.asks_as("s", "abcd")
    engine.works()
    assert engine.asks_as("s", "abcd") == Hit(4 * GRID)


def test_an_answer_that_comes_too_late_even_for_that_is_ignored():
    engine = with_others("abcd")
    engine.asks_as("r", "abcd")
    engine.steps_below()
    engine.now = SECONDS + LATE_SECONDS
    engine.steps_below()
    assert engine.told_below == 1, "the ranks need not keep it"
    engine.answers()
    assert not engine.below


def test_a_query_that_fails_costs_no_waiting():
    engine = with_others("abcd")
    engine.asks_as("r", "abcd")
    engine.steps_below()
    engine.answers(ok=False)
    assert engine.asks_as("r", "abcd") == Miss() and engine.seen.unanswered == 1


def test_an_answer_to_a_question_from_before_a_reset_is_ignored():
    engine = with_others("abcd")
    engine.asks_as("r", "abcd")
    engine.steps_below()
    told = [engine.tiers[0].answer(ask) for ask in engine.asks.values()]
    engine.cache.reset()
    engine.hears(told)
    assert not engine.below and told[0].chunks == 4
    engine.asks_as("r", "abcd")
    engine.asks.clear()
    engine.steps_below()
    assert engine.asked == ["abcd"] and engine.told_below == told[0].id + 1
    engine.answers()
    assert engine.asks_as("r", "abcd") == Miss(), "others do not know the new names"


def test_a_question_that_had_not_gone_out_at_a_reset_never_does():
    engine = Shared()
    engine.asks_as("r", "abcd")
    engine.cache.reset()
    engine.steps_below()
    assert not engine.asked and engine.told_below == 1


def test_descendants_of_a_chunk_forgotten_meanwhile_are_not_taken_in():
    engine = with_others("abcd")
    engine.is_told("r", "ab")
    engine.asks_as("s", "abcd")
    engine.steps_below()
    pool = engine.cache.below.pool
    pool.withdraw(pool.find(b"ab"))
    engine.answers()
    assert engine.below == {"a"}
    assert isinstance(engine.asks_as("t", "abcd"), Pending)
    engine.steps_below()
    engine.answers()
    assert engine.below == set(chain_names("abcd")), "and it is asked for again"


@pytest.mark.parametrize("ok", [True, False])
def test_below_chunks_demoted_at_that_moment_nothing_is_taken_in(ok):
    engine = with_others("abcd")
    engine.asks_as("r", "abcd")
    engine.host_has("ab")
    engine.steps_below()
    assert engine.writes() == ["a", "ab"]
    engine.answers()
    assert engine.seen.found == 0 and not engine.below
    engine.tier_ends(ok=ok)
    assert engine.below == (set(chain_names("ab")) if ok else set())
    assert isinstance(engine.is_told("s", "abcd"), Pending), "the next request asks for it again, and waits for it"
    engine.works_off()
    assert engine.admits("s", "abcd") == Hit(4 * GRID) and engine.seen.questions == 2
    engine.works_off()
    assert engine.below == set(chain_names("abcd")) and engine.is_at_rest()


def test_a_full_memory_of_the_store_takes_what_fits():
    engine = with_others("abcdefgh", host=2, slots=4)
    engine.is_told("r", "abcdefgh")
    assert engine.below == set(chain_names("abcd"))


def test_chunks_taken_in_take_no_room_from_those_above():
    engine = with_others("abcdef", host=2, slots=4)
    engine.is_told("r", "abcd")
    engine.is_told("s", "abcdef")
    assert engine.below == set(chain_names("abcd"))


def test_where_everything_is_being_read_nothing_is_taken_in():
    engine = with_others("abcd", "xy", host=16, slots=32)
    engine.is_told("r", "abcd")
    pool = engine.cache.below.pool
    pin = pool.pin(pool.find(b"abcd"))
    busy = pool.take(32)
    assert engine.is_told("s", "xy") == Miss()
    assert engine.below == set(chain_names("abcd"))
    pool.unpin(pin)
    pool.abort(busy)


# checkpoints


@pytest.mark.parametrize("groups", [(FULL, STATE), (FULL, WINDOW), (FULL, WINDOW, STATE), (STATE,), (WINDOW, STATE)])
def test_checkpoints_are_taken_in_with_all_their_pieces(groups):
    engine = with_others("abcdef", groups=groups, checkpoints=["abc", "abcde"], host=64)
    engine.is_told("r", "abcdef")
    assert engine.has_checkpoint_below("abc") and engine.has_checkpoint_below("abcde")
    assert not any(engine.has_checkpoint_below(name) for name in ("a", "ab", "abcdef"))
    engine.works()
    assert engine.asks_as("r", "abcdef") == Hit(5 * GRID)


def test_control_a_checkpoint_without_one_of_its_pieces_is_none():
    engine = with_others("abcdef", groups=(FULL, WINDOW), checkpoints=["abc", "abcde"])
    engine.tiers[0].records.pop((b"abcd", 1, 0, 0))
    engine.is_told("r", "abcdef")
    assert engine.has_checkpoint_below("abc") and not engine.has_checkpoint_below("abcde")


def test_pieces_that_two_checkpoints_share_are_taken_in_once():
    engine = with_others("abcd", groups=(FULL, WINDOW), checkpoints=["abc", "abcd"])
    engine.is_told("r", "abcd")
    assert engine.has_checkpoint_below("abc") and engine.has_checkpoint_below("abcd")
    assert engine.cache.below.edge.statistics().pool.cached == 4 + 3, "pieces of b, c and d"


def test_pieces_of_chunks_that_are_known_already_are_queried():
    """A checkpoint reaches back over two chunks."""
    engine = with_others("abcd", groups=(FULL, WINDOW))
    engine.is_told("r", "abcd")
    engine.host_has("abcd", ["abcd"])
    engine.others_have("abcde", checkpoints=["abcde"])
    assert isinstance(engine.asks_as("s", "abcde"), Pending)
    engine.steps_below()
    (ask,) = engine.asks.values()
    assert ask.depth == 2 and ask.keys == (b"abc", b"abcd", b"abcde")
    engine.works_off()
    engine.answers()
    assert engine.has_checkpoint_below("abcde")


def test_a_checkpoint_that_shares_a_piece_being_written_is_not_taken_in():
    engine = with_others("abcd", groups=(FULL, WINDOW))
    engine.is_told("r", "abcd")
    engine.host_has("abcd", ["abcd"])
    engine.others_have("abcde", checkpoints=["abcde"])
    engine.is_told("s", "abcde")
    assert checkpoint_key(b"abcd") in engine.cache.below.edge.ledger.writing
    assert not engine.has_checkpoint_below("abcde")
    engine.works_off()
    engine.is_told("t", "abcde")
    assert engine.has_checkpoint_below("abcde")


def test_the_deepest_checkpoints_are_taken_in_and_not_more_than_that_many():
    prompt = "abcdefghijkl"
    engine = with_others(prompt, groups=(FULL, STATE), checkpoints=chain_names(prompt), host=32, slots=64)
    engine.is_told("r", prompt)
    there = [name for name in chain_names(prompt) if engine.has_checkpoint_below(name)]
    assert there == chain_names(prompt)[-MOST_CHECKPOINTS:]


def test_checkpoints_far_above_the_end_are_not_looked_for(monkeypatch):
    monkeypatch.setattr(questions, "LOOKED_AT", 3)
    engine = with_others("abcdef", groups=(FULL, STATE), checkpoints=["abc", "abcd"])
    engine.is_told("r", "abcdef")
    assert engine.has_checkpoint_below("abcd") and not engine.has_checkpoint_below("abc")


def test_a_checkpoint_that_is_being_written_is_not_taken_in_again():
    engine = with_others("ab", groups=(FULL, STATE), checkpoints=["ab"])
    engine.host_has("ab", ["ab"])
    engine.asks_as("r", "abcd")
    while checkpoint_key(b"ab") not in engine.cache.below.edge.ledger.writing:
        engine.tier_ends()
        engine.steps_below()
    engine.answers()
    engine.works_off()
    assert engine.has_checkpoint_below("ab") and engine.is_at_rest()


def test_a_prompt_larger_than_the_memory_of_the_store_has_its_checkpoints_refused():
    """The chunks do not fit, so neither does what hangs below them."""
    engine = with_others("abcdefghij", groups=(FULL, STATE), checkpoints=["ab", "abcdefghij"], host=2, slots=4)
    engine.is_told("r", "abcdefghij")
    assert engine.has_checkpoint_below("ab") and not engine.has_checkpoint_below("abcdefghij")


def test_in_a_model_of_states_alone_chunks_without_a_checkpoint_are_not_remembered():
    """They take no blocks, so nothing would ever evict them."""
    engine = Shared(STATE)
    for prompt in ("abcd", "efgh", "ijkl"):
        assert engine.is_told(prompt, prompt) == Miss()
    assert not any(engine.cache.below.pool.find(name.encode()) for name in ("a", "e", "i"))
    engine.others_have(checkpoints=["mno"])
    engine.is_told("r", "mnop")
    assert engine.has_checkpoint_below("mno") and engine.cache.below.pool.find(b"mnop") is None


# a store that does not answer


def is_silent(engine, times=FAILURES_IN_A_ROW):
    """So many requests come, one after another, and nobody answers."""
    for at in range(times):
        engine.asks_as(f"silent {engine.now} {at}", "stuv")
        engine.steps_below()
        engine.now += SECONDS
        engine.steps_below()
    engine.asks.clear()


def test_after_so_many_questions_without_an_answer_nobody_waits():
    engine = with_others("abcd")
    is_silent(engine, FAILURES_IN_A_ROW - 1)
    assert engine.seen.state == "open"
    is_silent(engine, 1)
    assert engine.seen.state == "paused"
    assert engine.asks_as("r", "abcd") == Miss()
    assert engine.seen.questions == FAILURES_IN_A_ROW
    engine.steps_below()
    assert not engine.asked


def test_one_answer_in_between_begins_the_count_anew():
    engine = with_others("abcd")
    is_silent(engine, FAILURES_IN_A_ROW - 1)
    engine.is_told("r", "abcd")
    is_silent(engine, FAILURES_IN_A_ROW - 1)
    assert engine.seen.state == "open"


def test_questions_that_are_late_because_others_are_answered_first_are_no_reason_to_pause():
    engine = with_others("abcd")
    for at in range(2 * FAILURES_IN_A_ROW):
        engine.asks_as(f"r{at}", "abcd")
    engine.steps_below()
    engine.now += SECONDS / 2
    engine.steps_below()
    engine.answers(min(engine.asks))  # the others wait behind it
    engine.now += SECONDS
    engine.steps_below()
    assert engine.seen.unanswered > FAILURES_IN_A_ROW and engine.seen.state == "open"


def test_steps_longer_than_the_deadline_are_no_reason_to_pause_nor_to_miss():
    """With asynchronous scheduling the next step is planned before a query has reached the ranks."""
    engine = with_others("abcd")
    for at in range(2 * FAILURES_IN_A_ROW):
        engine.asks_as(f"r{at}", "abcd")
    engine.steps_below()
    engine.hears([], heard=0)  # of the step before
    engine.now += 2 * SECONDS
    assert isinstance(engine.asks_as("r0", "abcd"), Pending) and engine.seen.unanswered == 0
    engine.steps_below()
    engine.answers(min(engine.asks), heard=2 * FAILURES_IN_A_ROW)
    assert isinstance(engine.asks_as("r0", "abcd"), Pending), "it is read"
    engine.works()
    assert engine.asks_as("r0", "abcd") == Hit(4 * GRID) and engine.seen.state == "open"


def test_a_query_that_never_reaches_the_ranks_is_not_waited_for_for_ever():
    engine = with_others("abcd")
    engine.hears([], heard=0)
    engine.asks_as("r", "abcd")
    engine.steps_below()
    engine.now += SECONDS + LATE_SECONDS
    assert engine.asks_as("r", "abcd") == Miss() and engine.seen.unanswered == 1


def test_failed_queries_count_as_unanswered():
    engine = Shared()
    for at in range(FAILURES_IN_A_ROW):
        engine.asks_as(f"r{at}", "abcd")
        engine.steps_below()
        engine.answers(ok=False)
    assert engine.seen.state == "paused"


def test_a_question_that_is_late_before_it_fails_counts_once():
    engine = Shared()
    for at in range(FAILURES_IN_A_ROW - 1):
        engine.asks_as(f"r{at}", "abcd")
        engine.steps_below()
        engine.now += SECONDS
        engine.steps_below()
        engine.answers(ok=False)
    assert engine.seen.unanswered == FAILURES_IN_A_ROW - 1 and engine.seen.state == "open"


def pauses(**options):
    engine = with_others("abcd", **options)
    is_silent(engine)
    engine.now += STORE_PAUSE_SECONDS
    return engine


def test_after_a_pause_one_question_finds_out_whether_it_is_back():
    engine = with_others("abcd")
    engine.is_told("before", "wxyz")
    is_silent(engine)
    engine.now += 0.99 * STORE_PAUSE_SECONDS
    engine.steps_below()
    assert not engine.asked
    engine.now += 0.01 * STORE_PAUSE_SECONDS
    for _ in range(3):
        engine.steps_below()
    assert engine.asked == [""], "one, that concerns no request"
    assert engine.asks_as("r", "abcd") == Miss(), "and nobody waits for it"
    engine.answers()
    engine.steps_below()
    assert engine.seen.state == "open" and engine.seen.unanswered == FAILURES_IN_A_ROW
    engine.is_told("s", "abcd")
    engine.works()
    assert engine.asks_as("s", "abcd") == Hit(4 * GRID)


def test_the_count_begins_anew_after_a_pause():
    engine = pauses()
    engine.steps_below()
    engine.answers()
    is_silent(engine, FAILURES_IN_A_ROW - 1)
    assert engine.seen.state == "open"
    is_silent(engine, 1)
    assert engine.seen.state == "paused"


@pytest.mark.parametrize("says", ["nothing", "no"])
def test_a_store_that_is_not_back_is_probed_again_after_a_while(says):
    engine = pauses()
    engine.steps_below()
    if says == "no":
        engine.answers(ok=False)
    engine.now += 0.99 * PROBE_SECONDS
    engine.steps_below()
    assert len(engine.asked) == (says == "nothing"), "not before that"
    engine.now += 0.01 * PROBE_SECONDS
    engine.steps_below()
    engine.steps_below()
    assert engine.asked == [""] * (1 + (says == "nothing")) and engine.seen.state == "paused"
    engine.answers(max(engine.asks))
    engine.steps_below()
    assert engine.seen.state == "open" and engine.seen.unanswered == FAILURES_IN_A_ROW, "no request has waited for it"


def test_an_engine_whose_steps_are_long_gets_the_answer_all_the_same():
    """It came within the step, and the next one begins after the probe's time."""
    engine = pauses()
    engine.steps_below()
    engine.answers()
    engine.now += 2 * PROBE_SECONDS
    engine.steps_below()
    assert engine.seen.state == "open"


def test_a_reset_during_a_pause_probes_anew():
    engine = pauses()
    engine.steps_below()
    engine.cache.reset()
    engine.answers()
    engine.steps_below()
    assert engine.seen.state == "paused" and engine.asked == [""]
    engine.answers()
    engine.steps_below()
    assert engine.seen.state == "open"


def test_a_request_that_waits_when_the_pause_begins_waits_no_longer():
    engine = with_others("abcd")
    is_silent(engine, FAILURES_IN_A_ROW - 1)
    engine.asks_as("last", "wxyz")
    engine.steps_below()
    engine.now += SECONDS / 2
    assert isinstance(engine.asks_as("r", "abcd"), Pending)
    engine.now += SECONDS / 2
    assert engine.asks_as("r", "abcd") == Miss() and engine.seen.state == "paused"


# ranks


def test_the_answer_of_the_first_rank_alone_counts():
    engine = with_others("abcd", ranks=2)
    engine.asks_as("r", "abcd")
    engine.steps_below()
    engine.hears([Told(id, True, 4) for id in engine.asks], rank=1)
    assert not engine.below and isinstance(engine.asks_as("r", "abcd"), Pending)
    engine.answers()
    assert engine.below == set(chain_names("abcd"))


def test_a_chunk_that_another_rank_lacks_is_a_miss():
    engine = Shared(ranks=2)
    engine.others_have("ab")
    engine.others_have_only("abc", ranks=[0])
    engine.is_told("r", "abcd")
    assert engine.below == set(chain_names("abc"))
    engine.works()
    assert engine.asks_as("r", "abcd") == Hit(2 * GRID)
    assert engine.below == {"a", "ab"} and engine.seen.refused == 1


def test_chunks_of_others_without_their_ancestors_are_not_found():
    engine = with_others("ab")
    engine.others_have_only("abcd")
    engine.is_told("r", "abcd")
    assert engine.below == {"a", "ab"}


def test_a_chunk_without_one_of_its_groups_is_not_there():
    other = FULL.__class__(name="other", block_tokens=GRID, block_bytes=4096)
    engine = Shared(FULL, other)
    engine.others_have("ab")
    engine.others_have_piece("abc", 0, CHUNK)
    engine.is_told("r", "abc")
    assert engine.below == {"a", "ab"}
