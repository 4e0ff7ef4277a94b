"""Demotions: chunks that the host writes to the tier, when, and with which end. Any order: test_tier_machine.py.

`S8.n` numbers edge cases that broke the tiers of other caches.
"""

from string import ascii_letters

import pytest

from cpu_prefix_cache import Hit, Miss, Pending
from cpu_prefix_cache.deciding import (
    BlockPool,
    CPUPrefixCache,
    HybridChunkPlanner,
    PooledDevice,
    RankReport,
    TieredCache,
)
from cpu_prefix_cache.messages.tier import TierOptions
from cpu_prefix_cache.offload.completion import FAILURES_IN_A_ROW
from cpu_prefix_cache.tiers.tier_cache import PAUSE_SECONDS
from cpu_prefix_cache.tiers.tiered_cache import LEASE_SECONDS
from tests.unit.tiers.small_tier import FULL, GRID, STATE, WINDOW, Tiered, chain_names


def test_eager_writes_what_reaches_the_host():
    engine = Tiered(host=32)
    engine.starts("r", "abc", load=False)
    engine.computes("r")
    engine.copies()  # to the host
    engine.works_off()
    assert engine.below == set(chain_names("abc"))
    assert engine.seen.mode == "eager"


def test_an_idle_engine_steps_until_everything_is_written():
    engine = Tiered(host=32)
    engine.host_has("abc")
    assert engine.cache.has_transfers and not engine.moving, "it waits for the next step"
    engine.steps_below()
    assert engine.cache.has_transfers and engine.moving
    engine.works_off()
    assert engine.below == set(chain_names("abc")) and not engine.cache.has_transfers


def test_lazy_writes_what_the_host_evicts_next():
    engine = Tiered(host=16, below="lazy")
    engine.host_has("abcdefgh")
    engine.host_has("mnopqrst")
    engine.works_off()
    assert "abcdefgh" in engine.below and not engine.below & set(chain_names("mnopqrst"))
    engine.host_has("xy")  # of the stretch
    assert engine.cache.below.edge.statistics().lost_before_store == 0
    engine.works_off()
    assert engine.seen.unsaved == 0 and engine.seen.mode == "lazy"


@pytest.mark.parametrize(("slots", "mode"), [(32, "lazy"), (160, "eager")])
def test_a_large_tier_is_written_eagerly_by_default(slots, mode):
    assert Tiered(host=16, slots=slots, below=None).seen.mode == mode


@pytest.mark.parametrize("policy", ["arc", "adaptive"])
def test_where_nobody_knows_what_the_host_evicts_next_it_is_written_eagerly(policy):
    assert Tiered(host=16, slots=32, below=None, policy=policy).seen.mode == "eager"


def test_a_write_that_fails_leaves_nothing_to_be_found_and_is_tried_again():  # S8.5
    engine = Tiered()
    engine.host_has("a")
    engine.steps_below()
    assert engine.writes() == ["a"] and not engine.below
    engine.tier_ends(ok=False)
    assert not engine.below and engine.cache.below.edge.statistics().pool.free == 64
    engine.host_forgets()
    assert engine.asks_as("r", "a") == Miss()
    engine.host_has("a")
    engine.works_off()
    assert engine.below == {"a"}


def test_a_write_that_fails_on_one_rank_leaves_nothing_to_be_found():  # S8.5
    engine = Tiered(ranks=2)
    engine.host_has("a")
    (store,) = engine.steps_below()
    engine.tiers[0].write(store.copies[0].host_blocks[0], store.copies[0].labels[0], "")
    engine.reports_below(_report(0, done=[store.id]), ranks=[0])
    assert not engine.below
    engine.reports_below(_report(1, failed=[store.id]), ranks=[1])
    assert not engine.below and not engine.cache.below.has_transfers


def test_the_children_of_a_write_that_failed_are_not_written_below_nothing():
    engine = Tiered(host=64)
    engine.host_has("ab")
    engine.steps_below()
    engine.host_has("abcd")
    engine.steps_below()
    first, second = sorted(engine.moving)
    engine.tier_ends(second)
    assert not engine.below  # they wait for their parents
    engine.tier_ends(first, ok=False)
    assert not engine.below
    engine.cache.check_valid()


def test_chunks_in_flight_to_the_tier_can_be_hit_and_are_not_written_twice():  # S8.14
    engine = Tiered(host=64)
    engine.host_has("ab")
    engine.steps_below()
    turn = sorted(engine.moving)
    assert engine.asks_as("next turn", "abcd") == Hit(2 * GRID)
    engine.host_has("abcd")
    engine.steps_below()
    assert sorted(engine.writes()) == ["a", "ab", "abc", "abcd"]
    engine.tier_ends(*(id for id in list(engine.moving) if id not in turn))
    engine.host_forgets()
    assert engine.asks_as("again", "abcd") == Hit(2 * GRID)  # what is being written stays
    engine.tier_ends(*turn)
    assert engine.below == set(chain_names("abcd"))


def test_a_chain_that_is_being_written_cannot_be_evicted():
    engine = Tiered(host=8, below="eager")
    engine.host_has("abc")
    engine.steps_below()
    engine.host_forgets()
    assert engine.host == set(chain_names("abc"))
    engine.tier_ends()
    engine.works_off()
    engine.host_forgets()
    assert not engine.host
    assert engine.is_at_rest()


def test_a_saturated_tier_holds_up_nobody_and_recovers():  # S8.30
    engine = Tiered(host=16, slots=200, below="lazy")
    engine.tier_has("pq")
    engine.host_has("abcdefgh")
    engine.host_has("ABCDEFGH")
    engine.steps_below()
    assert engine.writes()
    for prompt in ("ijkl", "mnop", "qrst", "uvwx", "abba", "zyx"):
        engine.steps_below()  # nothing ends
        engine.host_has(prompt)
    stuck = sorted(engine.moving)
    assert len(engine.writes()) <= 9  # a chain, and what the share of the host allows
    assert isinstance(engine.asks_as("r", "pq"), Pending)
    engine.steps_below()
    assert list(engine.reads().values()) == [["p", "pq"]]
    engine.tier_ends(*engine.reads())
    assert engine.admits("r", "pq") == Hit(2 * GRID)
    assert engine.seen.unsaved > 0
    engine.tier_ends(*stuck)
    engine.works_off()
    unsaved = engine.seen.unsaved
    for prompt in ("AB", "CD", "EF", "GH", "IJ", "KL", "MN", "OP", "QR"):
        engine.host_has(prompt)
        engine.works_off()
    assert engine.seen.unsaved == unsaved and "AB" in engine.below and "AB" not in engine.host


def test_thresholds_hold_back_what_is_written_and_the_host_keeps_it():
    engine = Tiered(host=32, store_after=2)
    engine.starts("one", "ab", load=False)
    engine.computes("one")
    engine.copies()
    engine.works_off()
    assert engine.host == {"a", "ab"} and not engine.below
    for _ in range(2):
        engine.serves("cd")
    engine.works_off()
    assert engine.below == {"c", "cd"}, "what is held back holds up nothing else"
    engine.cache.check_valid()


@pytest.mark.parametrize("policy", ["arc", "adaptive"])
def test_the_host_declines_nothing(policy):
    """Chunks that it declines would never reach the tier."""
    engine = Tiered(host=8, slots=64, device=32, policy=policy)
    for prompt in ("abcdefgh", "ijklmnop", "qrstuvwx"):
        engine.now += 1.0
        engine.serves(prompt)
        engine.works_off()
    assert {"abcdefgh", "ijklmnop", "qrstuvwx"} <= engine.below
    assert engine.cache.statistics().store_declined == 0
    pool, strangers = engine.cache.pool, [b"stranger %d" % at for at in range(100)]
    assert pool.choose(pool.root, strangers) == 100
    assert engine.cache.below.pool.choose(engine.cache.below.pool.root, strangers) >= 40


def test_a_chunk_and_its_checkpoint_are_written():
    engine = Tiered(FULL, STATE, host=32)
    engine.host_has("abc", ["abc"])
    engine.works_off()
    assert engine.has_checkpoint_below("abc") and engine.below >= set(chain_names("abc"))


def test_a_chunk_without_a_checkpoint_costs_the_same_below_a_long_prompt(monkeypatch):
    """It is of no use to the tier, nor is what is above it: nobody walks up there."""
    walked = []
    parent = BlockPool.parent
    monkeypatch.setattr(BlockPool, "parent", lambda pool, node: walked.append(node) or parent(pool, node))
    engine = Tiered(FULL, WINDOW, host=128)
    for end in range(1, 41):
        engine.host_has(ascii_letters[:end])
        engine.steps_below()
    assert len(walked) <= 40 and not engine.below


def test_several_blocks_to_a_chunk():
    other = FULL.__class__(name="other", block_tokens=GRID, block_bytes=4096)
    engine = Tiered(FULL, other, host=32)
    assert engine.planner.host_blocks_per_chunk == 2
    engine.tier_has("abc")
    assert engine.cache.below.edge.statistics().pool.cached == 6
    engine.asks_as("r", "abc")
    engine.works()
    assert engine.admits("r", "abc") == Hit(3 * GRID)
    engine.works_off()
    assert engine.is_at_rest()


def test_a_flush_writes_what_only_the_host_has():
    engine = Tiered(host=64, slots=128, below="lazy")
    engine.host_has("abcd")
    engine.works_off()
    assert not engine.below and not engine.moving  # nothing is about to be evicted
    engine.cache.below.flush()
    assert not engine.cache.below.is_flushed
    assert len(engine.steps_below()) == 1  # a chain is one transfer
    engine.tier_ends()
    engine.works_off()
    assert engine.cache.below.is_flushed and engine.below == set(chain_names("abcd"))


def test_chunks_that_left_the_host_before_a_reset_are_no_loss_after_it():
    engine = Tiered(host=8)
    engine.tier_has("abc")
    engine.cache.reset()
    engine.steps_below()
    assert engine.seen.unsaved == 0


def _fails_to_write(engine, prompts):
    for prompt in prompts:
        engine.host_has(prompt)
        engine.steps_below()
        engine.tier_ends(ok=False)


def test_a_tier_that_cannot_be_written_is_read_on(caplog):
    """A full disk, a server without room: what it has it still has."""
    engine = Tiered(host=32)
    engine.tier_has("abc")
    _fails_to_write(engine, "uvwxy")
    assert engine.seen.state == "read_only" and caplog.text.count("it is only read") == 1
    assert isinstance(engine.asks_as("r", "abc"), Pending)
    engine.works()
    assert engine.admits("r", "abc") == Hit(3 * GRID)
    engine.host_has("z")
    assert engine.steps_below() == [] and engine.cache.below.is_flushed and "u" not in engine.below


def test_a_tier_that_could_not_be_written_is_tried_again_after_a_pause():
    engine = Tiered(host=32)
    _fails_to_write(engine, "uvwxy")
    engine.now += PAUSE_SECONDS
    engine.steps_below()
    assert engine.seen.state == "open"
    _fails_to_write(engine, "z")  # one more is enough
    assert engine.seen.state == "read_only"
    engine.now += PAUSE_SECONDS
    engine.host_has("a")
    engine.works_off()
    assert "a" in engine.below and engine.seen.state == "open"


def test_reads_and_writes_that_fail_in_turn_do_not_add_up():
    engine = Tiered(host=32)
    for prompt in "abc":
        engine.tier_has(prompt)
    for read, written in zip("abc", "xyz", strict=True):
        engine.asks_as(read, read)
        _fails_to_write(engine, written)
    failed = engine.seen.cache.loads_failed + engine.seen.cache.stores_failed
    assert failed >= FAILURES_IN_A_ROW and engine.seen.state == "open"


def _report(rank, done=(), failed=()):
    return RankReport(rank, frozenset(done), frozenset(failed))


def test_a_lease_of_a_promotion_does_not_keep_the_tier_from_writing():
    engine = Tiered(host=16)
    engine.tier_has("ab")
    answer = engine.asks_as("r", "ab")
    engine.works()
    engine.host_has("abcd")
    engine.works_off()
    assert "abcd" in engine.below
    engine.now = answer.deadline + LEASE_SECONDS
    engine.steps_below()
    assert engine.is_at_rest()


def test_a_chunk_that_came_with_what_was_promoted_above_it_is_written():
    """The store from the device lands first, and is committed when the tier has read what it hangs below."""
    engine = Tiered()
    engine.tier_has("ab")
    assert isinstance(engine.asks_as("r", "ab"), Pending)
    engine.steps_below()
    assert list(engine.reads().values()) == [["a", "ab"]]
    engine.starts("one", "abc")
    engine.computes("one")
    engine.copies()
    assert not engine.host
    engine.tier_ends()
    assert engine.host == {"a", "ab", "abc"}
    engine.works_off()
    assert "abc" in engine.below


def test_above_a_tier_the_host_holds_whole_prompts():
    """A chunk is written below with all that it hangs below, so nothing of that is left to the device alone."""
    device = PooledDevice(BlockPool(16), hands_out_first=True)
    planner = HybridChunkPlanner([FULL], max_model_len=1_000, in_pages=True)
    assert CPUPrefixCache(planner, device, host_blocks=16).pool.shape.is_shared
    assert not TieredCache(planner, device, host_blocks=16, below=TierOptions(64)).pool.shape.is_shared
