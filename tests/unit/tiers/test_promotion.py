"""Promotions: chunks that the tier brings to the host, for one request, for a time. Any order: test_tier_machine.py.

`S8.n` numbers edge cases that broke the tiers of other caches.
"""

from dataclasses import replace
from itertools import pairwise

import pytest

from cpu_prefix_cache import ConfigurationError, Hit, Miss, Pending
from cpu_prefix_cache.deciding import BoundariesRemoved, BoundariesStored, Direction, Request
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.offload.completion import FAILURES_IN_A_ROW
from cpu_prefix_cache.tiers import promotions, tier_cache
from cpu_prefix_cache.tiers.questions import REMEMBERED_SECONDS
from cpu_prefix_cache.tiers.tier_cache import PAUSE_SECONDS, STALL_SECONDS
from cpu_prefix_cache.tiers.tiered_cache import LEASE_SECONDS
from cpu_prefix_cache.tiers.trials import FIRST_SECONDS, LONGEST_SECONDS
from property_tests.strategies import chain
from tests.unit.tiers.small_tier import FULL, GRID, STATE, WINDOW, Tiered, chain_names


@pytest.fixture(autouse=True)
def slices_of_two_chunks(monkeypatch):
    monkeypatch.setattr(tier_cache, "READ_BYTES", 2 * 4096)


def with_tier(prompt="abcd", **options):
    engine = Tiered(**options)
    engine.tier_has(prompt)
    return engine


def test_a_prompt_of_the_tier_is_pending_and_then_a_hit():
    engine = with_tier("abcd")
    assert isinstance(engine.asks_as("r", "abcd"), Pending)
    engine.works()
    assert engine.asks_as("r", "abcd") == Hit(4 * GRID)
    assert engine.seen.asked == 1 and engine.seen.late == 0 and engine.seen.refused == 0
    engine.admits("r", "abcd")
    assert engine.seen.hit_tokens == 4 * GRID
    engine.works_off()
    assert engine.is_at_rest()


def test_chunks_on_the_host_are_not_read_from_the_tier():
    engine = with_tier("abcd")
    engine.host_has("ab")
    engine.asks_as("r", "abcd")
    engine.steps_below()
    assert list(engine.reads().values()) == [["abc", "abcd"]]
    engine.tier_ends()
    engine.admits("r", "abcd")
    assert engine.seen.hit_tokens == 2 * GRID


def test_the_host_gets_the_parents_too_that_only_the_device_has():
    """The request needs nothing before n0, but the forest is closed."""
    engine = with_tier("abcd")
    assert isinstance(engine.asks_as("r", "abcd", n0=2 * GRID), Pending)
    engine.steps_below()
    assert list(engine.reads().values()) == [["a", "ab"], ["abc", "abcd"]]
    engine.tier_ends()
    assert engine.asks_as("r", "abcd", n0=2 * GRID) == Hit(4 * GRID, start=2 * GRID)


def test_two_requests_for_one_prefix_read_it_once():
    engine = with_tier("abcd")
    engine.asks_as("one", "abcd")
    engine.asks_as("other", "abcd")
    engine.steps_below()
    assert len(engine.reads()) == 2  # slices
    engine.tier_ends()
    assert engine.asks_as("one", "abcd") == engine.asks_as("other", "abcd") == Hit(4 * GRID)


def test_slices_are_committed_as_they_come_whatever_their_order():
    engine = with_tier("abcd")
    engine.asks_as("r", "abcd")
    engine.steps_below()
    first, second = engine.reads()
    engine.tier_ends(second)
    assert not engine.host
    engine.tier_ends(first)
    assert engine.host == set(chain_names("abcd"))


@pytest.mark.parametrize(("bad", "good"), [("abc", {"a", "ab"}), ("abcd", {"a", "ab", "abc"})])  # it reads two at once
def test_bytes_that_are_refused_are_not_read_again(bad, good):  # S8.6
    engine = with_tier("abcd")
    engine.goes_bad(bad)
    engine.asks_as("r", "abcd")
    engine.works()
    assert engine.asks_as("r", "abcd") == Hit(len(good) * GRID)  # the good leading chunks
    assert engine.below == good and engine.seen.refused == 1
    assert engine.asks_as("later", "abcd") == Hit(len(good) * GRID)
    engine.works_off()
    assert not engine.reads()


def test_a_read_that_fails_is_not_tried_again():  # S8.6
    engine = with_tier("abcd")
    engine.asks_as("r", "abcd")
    engine.steps_below()
    first, second = engine.reads()
    engine.tier_ends(first)
    engine.tier_ends(second, ok=False)
    assert engine.asks_as("r", "abcd") == Hit(2 * GRID) and engine.below == {"a", "ab"}
    engine.works_off()


def test_descendants_of_a_refused_chunk_are_given_up_at_once():
    """The chunks that were read below it stand in the way of nobody who stores them."""
    engine = with_tier("abcd")
    engine.goes_bad("ab")
    engine.asks_as("r", "abcd")
    engine.steps_below()
    first, second = engine.reads()
    engine.tier_ends(first)
    assert engine.host == {"a"}
    engine.starts("s", "abcd", load=False)
    engine.computes("s")
    engine.copies()
    assert engine.host == set(chain_names("abcd"))
    engine.tier_ends(second)
    engine.cache.check_valid()


def test_one_rank_that_has_lost_its_disk_makes_misses():
    engine = with_tier("abcd", ranks=2)
    engine.tiers[1].records.clear()
    engine.asks_as("r", "abcd")
    engine.works()
    assert engine.asks_as("r", "abcd") == Miss()
    assert not engine.below and not engine.host and engine.seen.refused == 4  # slots, of both slices


def test_refused_slots_never_turn_the_cache_off():  # S8.6
    engine = Tiered()
    for prompt in "abcdefgh":
        engine.tier_has(prompt)
        engine.goes_bad(prompt)
        engine.asks_as(prompt, prompt)
        engine.works()
        assert engine.asks_as(prompt, prompt) == Miss()
    assert engine.seen.refused == 8 > FAILURES_IN_A_ROW and engine.seen.state == "open" and not engine.cache.is_off


def test_waiting_requests_are_promoted_first_come_first_served_and_within_bounds():  # S8.7
    engine = Tiered(host=16)  # a quarter: 4 chunks
    prompts = ["abc", "def", "ghi"]
    for prompt in prompts:
        engine.tier_has(prompt)
    for prompt in prompts:
        assert isinstance(engine.asks_as(prompt, prompt), Pending)
    engine.steps_below()
    assert list(engine.reads().values()) == [["a", "ab"], ["abc"], ["d"]]
    engine.tier_ends()
    assert engine.steps_below() == []  # what is read and not admitted counts
    assert engine.admits("abc", "abc") == Hit(3 * GRID)
    engine.steps_below()
    assert list(engine.reads().values()) == [["de", "def"], ["g"]]
    engine.tier_ends()
    engine.admits("def", "def")
    engine.works()
    assert engine.asks_as("ghi", "ghi") == Hit(3 * GRID)


def test_a_later_request_takes_no_room_that_an_earlier_one_waits_for():  # S8.7
    """A checkpoint takes two blocks here, and one is left: not for the chunk of another."""
    engine = Tiered(FULL, replace(STATE, block_bytes=8192), host=28)  # a share of 7 blocks
    for prompt in ("x", "abc", "d"):
        engine.tier_has(prompt, [prompt])
    assert isinstance(engine.asks_as("x", "x"), Pending)
    engine.steps_below()
    for prompt in ("abc", "d"):
        assert isinstance(engine.asks_as(prompt, prompt), Pending)
    for _ in range(2):
        engine.steps_below()
        read = {name for names in engine.reads().values() for name in names}
        assert read == {"x", "a", "ab", "abc"} and len(engine.reads()) == 4
    engine.tier_ends()
    assert engine.admits("x", "x") == Hit(GRID)
    engine.works()
    assert engine.asks_as("abc", "abc") == Hit(3 * GRID)


def test_promotions_that_hang_take_no_more_than_their_share():  # S8.7, S8.30
    engine = Tiered(host=16)
    for prompt in ("abcd", "efgh", "ijkl"):
        engine.tier_has(prompt)
    for prompt in ("abcd", "efgh", "ijkl"):
        answer = engine.asks_as(prompt, prompt)
        engine.steps_below()  # nothing ever ends
        engine.now = answer.deadline + LEASE_SECONDS
        assert engine.asks_as(prompt, prompt) == Miss()
    engine.steps_below()
    assert len(engine.reads()) == 2 and engine.cache.pool.statistics().writing == 4
    engine.tier_ends()
    engine.works_off()
    assert engine.is_at_rest()


def test_a_promotion_evicts_nothing_that_another_has_brought():  # S8.8
    engine = Tiered(host=4)  # of which one chunk may be promoted at a time
    for prompt in "ab":
        engine.tier_has(prompt)
    engine.host_has("wxyz")
    engine.asks_as("a", "a")
    engine.works()
    assert "a" in engine.host and "wxyz" not in engine.host
    engine.asks_as("b", "b")
    engine.works()
    assert "a" in engine.host and "b" not in engine.host
    assert engine.admits("a", "a") == Hit(GRID)
    engine.works()
    assert engine.asks_as("b", "b") == Hit(GRID)


def test_a_promotion_evicts_nothing_of_its_own_request():  # S8.9
    engine = Tiered(host=16)
    engine.tier_has("abcdefg")
    engine.host_has("abcde")  # the oldest
    engine.host_has("tuvwxyz")
    engine.host_has("mnop")  # the host is full
    assert isinstance(engine.asks_as("r", "abcdefg"), Pending)
    engine.works()
    assert engine.asks_as("r", "abcdefg") == Hit(7 * GRID)


def test_promoted_chunks_stay_until_the_next_lookup_of_their_request():
    engine = with_tier("abcd")
    engine.asks_as("r", "abcd")
    engine.works()
    engine.host_forgets()
    assert engine.host == set(chain_names("abcd"))
    assert engine.asks_as("r", "abcd") == Hit(4 * GRID)


def test_the_promoted_checkpoint_stays_as_well():
    engine = Tiered(FULL, STATE, host=32)
    engine.tier_has("abcd", ["abcd"])
    engine.asks_as("r", "abcd")
    engine.works()
    assert engine.asks_as("r", "abcd") == Hit(4 * GRID)
    engine.host_forgets()
    assert engine.has_checkpoint("abcd") and engine.asks_as("r", "abcd") == Hit(4 * GRID)


def test_after_the_deadline_the_answer_is_what_the_host_has():  # S8.10
    engine = with_tier("abcd")
    answer = engine.asks_as("r", "abcd")
    engine.steps_below()
    engine.tier_ends(min(engine.reads()))  # the other slice hangs
    engine.now = 0.9 * answer.deadline
    assert engine.asks_as("r", "abcd") == answer  # the deadline stays
    engine.now = answer.deadline
    assert engine.asks_as("r", "abcd") == Hit(2 * GRID)
    assert engine.asks_as("r", "abcd") == Hit(2 * GRID) and engine.seen.late == 1


def test_the_lease_of_a_promotion_ends_some_time_after_its_deadline():
    engine = with_tier("abcd")
    answer = engine.asks_as("r", "abcd")
    engine.works()
    assert engine.cache.statistics().pool.pinned == 1
    engine.now = answer.deadline + LEASE_SECONDS
    engine.steps_below()
    assert engine.is_at_rest() and len(engine.cache._wants) == 1
    engine.now = answer.deadline + REMEMBERED_SECONDS
    engine.steps_below()
    assert not engine.cache._wants


@pytest.mark.parametrize("seconds", [0.0, LEASE_SECONDS, REMEMBERED_SECONDS, 10 * REMEMBERED_SECONDS])
def test_nothing_is_read_for_a_request_that_never_comes_back(seconds):
    engine = with_tier("abcd")
    answer = engine.asks_as("r", "abcd")
    engine.now = answer.deadline + seconds
    assert engine.steps_below() == []
    engine.steps_below()
    assert engine.is_at_rest() and engine.seen.late == 1


def test_ancestors_of_a_promotion_stay_until_it_has_landed_also_without_a_lease():
    engine = with_tier("abcd")
    engine.host_has("ab")
    answer = engine.asks_as("r", "abcd")
    engine.steps_below()
    engine.now = answer.deadline + LEASE_SECONDS
    engine.steps_below()
    engine.host_forgets()
    assert engine.host == {"a", "ab"}
    engine.tier_ends()
    assert engine.host == set(chain_names("abcd"))


def test_an_aborted_requests_promotion_is_committed_all_the_same():
    engine = with_tier("abcd")
    answer = engine.asks_as("r", "abcd")
    engine.steps_below()
    engine.now = answer.deadline + REMEMBERED_SECONDS
    engine.steps_below()
    engine.tier_ends()
    assert engine.host == set(chain_names("abcd"))
    engine.works_off()
    assert engine.is_at_rest()


def test_for_an_aborted_request_that_the_cache_is_notified_of_nothing_more_is_read():
    engine = with_tier("abcd")
    engine.asks_as("r", "abcd")
    engine.cache.abandoned("r")
    engine.cache.abandoned("r")  # nor for one that nobody knows
    assert engine.steps_below() == [] and engine.is_at_rest()
    assert isinstance(engine.asks_as("r", "abcd"), Pending), "another one of this name is a new one"


def test_a_read_for_an_aborted_request_goes_on_without_a_lease():
    engine = with_tier("abcd")
    engine.asks_as("r", "abcd")
    engine.steps_below()
    engine.cache.abandoned("r")
    engine.tier_ends()
    assert engine.host == set(chain_names("abcd"))
    engine.works_off()
    engine.host_forgets()
    assert engine.host == set() and engine.is_at_rest()


def test_the_tier_has_a_log_of_its_own():
    engine = Tiered(log_boundaries=True)
    engine.tier_has("ab")
    assert engine.cache.below.pool.take_events() == [BoundariesStored(chain("ab"), None)]
    engine.cache.take_events()
    engine.asks_as("r", "ab")
    engine.works()
    assert engine.cache.take_events() == [BoundariesStored(chain("ab"), None)]
    assert engine.cache.below.pool.take_events() == [], "a promotion changes nothing there"
    engine.cache.abandoned("r")
    engine.host_forgets()
    engine.cache.take_events()
    engine.goes_bad("a")
    engine.asks_as("s", "ab")
    engine.works()
    assert engine.cache.take_events() == [] and engine.cache.below.pool.take_events() == [
        BoundariesRemoved([b"ab", b"a"])
    ]


def test_events_may_name_what_the_host_has_and_what_is_on_its_way():
    engine = with_tier("abcd")
    engine.host_has("x")
    engine.works_off()
    engine.asks_as("r", "ab")
    engine.steps_below()
    assert engine.cache.may_be_named([b"x", b"a", b"abc", b"y"]) == [True, True, False, False]
    engine.host_forgets()
    engine.tier_ends(ok=False)
    assert engine.cache.may_be_named([b"x", b"a", b"abc", b"y"]) == [False] * 4


def test_without_its_checkpoint_nothing_is_hit_beyond_both():  # S8.11
    engine = Tiered(FULL, STATE, host=32)
    engine.tier_has("abcd", ["ab", "abcd"])
    engine.goes_bad("abcd!")
    assert isinstance(engine.asks_as("r", "abcd"), Pending)
    engine.works()
    assert set(chain_names("abcd")) <= engine.host and not engine.has_checkpoint("abcd")
    assert engine.asks_as("r", "abcd") == Miss()
    assert isinstance(engine.asks_as("later", "abcd"), Pending)  # at the other checkpoint, to which it is no longer far
    engine.works()
    assert engine.asks_as("later", "abcd") == Hit(2 * GRID)


def test_a_request_waits_for_the_checkpoint_no_longer_than_for_the_chunks():  # S8.12
    engine = Tiered(FULL, STATE)
    engine.tier_has("ab", ["ab"])
    answer = engine.asks_as("r", "ab")
    engine.steps_below()
    chunks = [id for id, names in engine.reads().items() if "a" in names]
    engine.tier_ends(*chunks)
    assert engine.reads() and engine.asks_as("r", "ab") == answer
    engine.now = answer.deadline
    assert engine.asks_as("r", "ab") == Miss()
    engine.now += LEASE_SECONDS
    engine.works()
    assert engine.asks_as("later", "ab") == Hit(2 * GRID)


def test_a_checkpoint_that_shares_a_refused_piece_is_not_committed():  # S8.11
    engine = Tiered(FULL, WINDOW, host=64)
    engine.tier_has("abcd", ["abc", "abcd"])
    engine.goes_bad("abc!")
    for prompt in ("abc", "abcd"):
        assert isinstance(engine.asks_as(prompt, prompt), Pending)
    engine.steps_below()
    checkpoints = [id for id in engine.reads() if not engine.is_chunks(id)]
    assert len(checkpoints) == 2, "the checkpoints are read in two loads, of which the second follows the first"
    engine.tier_ends()
    assert set(chain_names("abcd")) <= engine.host
    assert not engine.has_checkpoint("abc") and not engine.has_checkpoint("abcd")
    engine.works()  # the other one is tried with all of its pieces
    assert engine.asks_as("abcd", "abcd") == Miss() and not engine.has_checkpoint_below("abcd")


def test_a_promotion_that_never_began_promises_nothing():  # S8.13
    engine = Tiered(host=8)
    engine.tier_has("abc")
    engine.host_has("zyxwvuts")  # the host is full
    lease = engine.reserves("zyxwvuts")
    answer = engine.asks_as("r", "ab")
    assert isinstance(answer, Pending)
    engine.works()
    engine.now = answer.deadline
    assert engine.admits("r", "ab") == Miss() and engine.seen.hit_tokens == 0
    engine.cache.release(lease)


def test_a_hit_that_needs_chunks_beyond_it_is_promoted_with_them():
    """Groups that look ahead drop the end of what is there. All of it fits into the share, or less is promoted."""
    engine = Tiered(replace(FULL, lookahead_tokens=1), host=16)
    engine.tier_has("abcdefgh")
    assert isinstance(engine.asks_as("r", "abcdefgh"), Pending)
    engine.works()
    assert engine.asks_as("r", "abcdefgh") == Hit(3 * GRID) and engine.seen.late == 0


@pytest.mark.parametrize("groups", [[FULL], [FULL, replace(FULL, name="other")]], ids=["a block to a chunk", "two"])
def test_a_prompt_larger_than_the_share_is_promoted_in_part(groups):
    engine = Tiered(*groups, host=16 * len(groups))
    engine.tier_has("abcdefgh")
    engine.host_has("ab")
    engine.asks_as("r", "abcdefgh")
    engine.works()
    assert engine.asks_as("r", "abcdefgh") == Hit(6 * GRID)


def test_reset_during_a_promotion():
    engine = with_tier("abcd")
    engine.asks_as("r", "abcd")
    engine.steps_below()
    engine.cache.reset()
    assert engine.asks_as("r", "abcd") == engine.asks_as("other", "abcd") == Miss()
    engine.tier_ends()
    assert not engine.host and not engine.below
    engine.steps_below()
    assert engine.is_at_rest()


def test_a_tier_that_fails_often_is_left_alone_for_a_pause():
    engine = Tiered(host=32)
    prompts = "abcdefg"
    for prompt in prompts:
        engine.tier_has(prompt)
    for prompt in prompts[:FAILURES_IN_A_ROW]:
        assert isinstance(engine.asks_as(prompt, prompt), Pending)
        engine.steps_below()
        engine.tier_ends(ok=False)
    assert engine.seen.state == "paused" and not engine.cache.is_off
    assert engine.asks_as("f", "f") == Miss()
    engine.host_has("uvw")
    engine.host_forgets()
    engine.host_has("xyz")
    assert engine.steps_below() == [] and engine.seen.unsaved == 3
    engine.now += PAUSE_SECONDS
    assert isinstance(engine.asks_as("f2", "f"), Pending) and engine.seen.state == "open"
    engine.works()
    assert engine.asks_as("f2", "f") == Hit(GRID)
    engine.works_off()
    assert "xyz" in engine.below


def test_a_request_that_waits_as_the_tier_pauses_gets_the_promoted_prefix():
    engine = Tiered(host=16)
    engine.tier_has("abcd")
    engine.tier_has("efgh")
    engine.asks_as("first", "abcd")
    engine.asks_as("second", "efgh")
    engine.steps_below()
    engine.cache.below._failed_often(Direction.LOAD)
    engine.tier_ends()
    assert engine.asks_as("first", "abcd") == Hit(4 * GRID)
    engine.admits("first", "abcd")
    assert engine.steps_below() == []  # there would be room
    assert engine.asks_as("second", "efgh") == Miss()


def test_a_tier_that_hangs_is_left_alone_until_its_read_ends():  # S8.30
    engine = Tiered(host=32)
    for prompt in ("abcd", "efgh", "ijkl"):
        engine.tier_has(prompt)
    deadline = engine.asks_as("first", "abcd").deadline
    engine.steps_below()  # nothing ends
    engine.now = deadline + STALL_SECONDS - 0.1
    assert isinstance(engine.asks_as("second", "efgh"), Pending) and engine.seen.state == "open"
    engine.now += 0.2
    assert engine.asks_as("third", "ijkl") == Miss() and engine.seen.state == "paused"
    engine.tier_ends()
    assert isinstance(engine.asks_as("third", "ijkl"), Pending) and engine.seen.state == "open"
    engine.works_off()


def test_one_failure_after_a_pause_is_enough_for_another():
    engine = Tiered(host=64)
    prompts = "abcdefgh"
    for prompt in prompts:
        engine.tier_has(prompt)
    for prompt in prompts:
        is_read = isinstance(engine.asks_as(prompt, prompt), Pending)
        engine.steps_below()
        engine.tier_ends(ok=False)
        assert is_read and (engine.seen.state == "paused") == (prompt in "efgh")
        if prompt in "efgh":
            engine.now += PAUSE_SECONDS
    engine.tier_has("xyz")
    assert isinstance(engine.asks_as("xyz", "xyz"), Pending)
    engine.works()
    assert engine.admits("xyz", "xyz") == Hit(3 * GRID) and engine.seen.state == "open"


# Time saved


def test_a_tier_that_is_slower_than_computing_is_not_read():
    engine = with_tier("abcd")
    engine.measures(rate=4096.0, prefill=100.0)  # 1 s for a chunk; 0.04 s to compute it
    assert engine.asks_as("r", "abcd") == engine.asks_as("r", "abcd") == Miss()
    assert engine.seen.declined == 1 and engine.seen.asked == 0


def test_a_rate_that_was_low_is_measured_again_by_a_little_soon_and_then_once_in_a_minute():
    engine = with_tier("abcd")
    engine.measures(rate=4096.0, prefill=100.0)
    assert engine.asks_as("r", "abcd") == Miss()
    trials = []
    for second in range(200):
        engine.now += 1
        if isinstance(engine.asks_as(f"at {second}", "abcd"), Pending):
            trials.append(engine.now)
            assert engine.asks_as(f"also at {second}", "abcd") == Miss(), "one is enough"
    gaps = [after - before for before, after in pairwise(trials)]
    assert gaps == [FIRST_SECONDS, 4, 8, 16, 32, LONGEST_SECONDS, LONGEST_SECONDS]


def test_reads_are_short_before_the_rate_is_known(monkeypatch):
    monkeypatch.setattr(promotions, "TRIAL_BYTES", 2 * 4096)
    engine = Tiered(host=64)
    engine.tier_has("abcdefgh")
    assert isinstance(engine.asks_as("r", "abcdefgh"), Pending)
    engine.works_off()
    assert engine.asks_as("r", "abcdefgh") == Hit(2 * GRID)
    engine.measures(rate=1e9, prefill=100.0)
    engine.now += LONGEST_SECONDS  # what is worth reading is read whole, also when nothing was read for long
    assert isinstance(engine.asks_as("known", "abcdefgh"), Pending)
    engine.works_off()
    assert engine.asks_as("known", "abcdefgh") == Hit(8 * GRID)


def test_reads_for_other_requests_count_against_a_promotion():
    engine = Tiered(host=64, slots=200)
    for prompt in ("abcd", "efgh", "ijkl"):
        engine.tier_has(prompt)
    engine.measures(rate=1e6, prefill=250.0)  # a prompt takes 0.016 s to read, and 0.064 s to compute
    assert isinstance(engine.asks_as("one", "abcd"), Pending)
    assert isinstance(engine.asks_as("two", "efgh"), Pending)  # also before anything is planned
    assert engine.asks_as("three", "ijkl") == Miss()
    engine.steps_below()  # now both are read
    assert engine.asks_as("four", "ijkl") == Miss()
    engine.works()
    assert isinstance(engine.asks_as("five", "ijkl"), Pending)


def test_prefixes_too_short_to_be_loaded_from_the_host_are_not_read():
    engine = Tiered(min_load_tokens=3 * GRID)
    engine.tier_has("abc")
    assert engine.asks_as("short", "ab") == engine.asks_as("other", "abc", n0=GRID) == Miss()
    assert engine.seen.asked == 0
    assert isinstance(engine.asks_as("long", "abc"), Pending)
    engine.works()
    assert engine.asks_as("long", "abc") == Hit(3 * GRID)


@pytest.mark.parametrize(("rate", "chunks"), [(80_000.0, 4), (1e6, 8), (10_000.0, 0)])
def test_checkpoints_bound_the_promotion(rate, chunks):
    """The host has the first four chunks: their checkpoint is a block, the other boundary takes four chunks more."""
    engine = Tiered(FULL, STATE, host=64, slots=200)
    engine.tier_has("abcdefgh", ["abcd", "abcdefgh"])
    engine.host_has("abcd")
    engine.measures(rate, prefill=100.0)  # 0.16 s to compute four chunks; 0.2 s to read them, 0.016 s, or 1.6 s
    if not chunks:
        assert engine.asks_as("r", "abcdefgh") == Miss() and engine.seen.declined == 1
        return
    assert isinstance(engine.asks_as("r", "abcdefgh"), Pending)
    engine.works()
    assert engine.asks_as("r", "abcdefgh") == Hit(chunks * GRID)
    assert ("abcde" in engine.host) == (chunks == 8)


def test_a_tier_smaller_than_twice_the_host_is_refused():
    with pytest.raises(ConfigurationError, match="at least 32 slots"):
        Tiered(host=16, slots=31)


# Bounded work


class Counted(list):
    """Keys that count how often they are looked at."""

    looks = 0

    def __getitem__(self, at):
        Counted.looks += 1 if isinstance(at, int) else len(range(*at.indices(len(self))))
        return super().__getitem__(at)


def test_a_lookup_never_waits_and_looks_at_few_keys():  # S8.29
    letters = 4_000
    engine = Tiered(host=2 * letters, slots=6 * letters)
    keys = [b"k%07d" % at for at in range(letters)]
    pool = engine.cache.below.pool
    pool.commit(pool.allocate(letters, keys), keys, pool.root, pool.touch(None))
    request = Request("r", Counted(keys), letters * GRID + 1)
    Counted.looks = 0
    assert isinstance(engine.cache.lookup(request, 0, 0.0), Pending)
    assert Counted.looks < 150 and not engine.moving and not engine.cache.has_transfers
    Counted.looks = 0
    for _ in range(10):
        engine.cache.lookup(request, 0, 0.0)
    assert Counted.looks < 100


def test_many_checkpoints_beyond_the_share_cost_a_lookup_little():  # S8.29
    letters = 500
    engine = Tiered(FULL, STATE, host=20, slots=3_000)
    keys = [b"k%07d" % at for at in range(letters)]
    lower = engine.cache.below
    pool = lower.pool
    pool.commit(pool.allocate(letters, keys), keys, pool.root, pool.touch(None))
    for depth in range(1, letters + 1):
        key = checkpoint_key(keys[depth - 1])
        nodes = pool.allocate(0, [key], lower.coordinator.needs(lower.coordinator.checkpoint_at(keys, depth)))
        pool.commit(nodes, [key], pool.find(keys[depth - 1]), pool.touch(None))
    request = Request("r", Counted(keys), letters * GRID + 1)
    Counted.looks = 0
    answer = engine.cache.lookup(request, 0, 0.0)
    assert isinstance(answer, Pending) and Counted.looks < 400


# Where prompts depart


def test_a_prompt_departs_from_one_that_only_the_tier_has():
    """There it needs a checkpoint: the third prompt with that beginning then resumes there."""
    engine = Tiered(FULL, STATE)
    engine.tier_has("abcd", ["abcd"])
    second = Request("second", chain("abxy"), 4 * GRID + 1)
    assert engine.cache.branch(second, 0) == 2 * GRID
    assert engine.cache.boundaries_of(second, 0) == [2 * GRID, 4 * GRID]
    engine.cache.admit(second, 0)
    assert engine.cache.boundaries("second") == [2 * GRID, 4 * GRID]


def test_control_a_prompt_departs_from_nothing_that_nobody_has():
    engine = Tiered(FULL, STATE)
    engine.tier_has("abcd", ["abcd"])
    assert engine.cache.branch(Request("second", chain("vwxy"), 4 * GRID + 1), 0) is None
