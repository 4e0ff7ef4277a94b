"""Admission to the host: chunks that enough prompts had, and prompts that are long enough."""

from string import ascii_letters

import pytest

from cpu_prefix_cache import ConfigurationError, MisuseError
from cpu_prefix_cache.deciding import BlockPool, CacheOptions
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.pool.admission import Admission
from cpu_prefix_cache.pool.checkpoints import PieceNeed
from cpu_prefix_cache.testing.engine import GRID, Engine, chain

both_modes = pytest.mark.parametrize("mode", ["eager", "lazy"])


@both_modes
def test_by_default_everything_is_stored_at_once(mode):
    engine = Engine(mode, device=4)
    engine.serves("abc")
    engine.serves("wxyz")
    assert {"a", "ab", "abc"} <= engine.host


@both_modes
def test_chunks_are_stored_when_a_second_prompt_has_them(mode):
    engine = Engine(mode, device=4, store_after=2)
    engine.serves("abc")
    engine.serves("wxyz")
    assert engine.host == set() and engine.cache.statistics().store_declined
    engine.serves("abd")
    engine.serves("stuv")
    engine.serves("stuv")
    assert engine.host & {"a", "ab", "abc", "abd"} == {"a", "ab"}
    assert engine.is_at_rest()


def test_declined_chunks_do_not_count_as_lost():
    engine = Engine("lazy", device=4, store_after=2)
    for letter in ascii_letters:
        engine.serves(f"{letter}-")
    statistics = engine.cache.statistics()
    assert statistics.store_declined > 0 and engine.host == set()
    assert statistics.lost_before_store == 0


@both_modes
def test_a_hit_on_the_device_counts_as_a_second_use(mode):
    engine = Engine(mode, device=4, store_after=2)
    engine.serves("ab")
    engine.serves("abc")
    engine.serves("wxyz")
    assert engine.host == {"a", "ab"}


@both_modes
def test_short_prompts_are_not_stored_and_long_ones_are(mode):
    engine = Engine(mode, device=4, min_store_tokens=3 * GRID)
    engine.serves("ab")
    engine.serves("wxyz")
    assert engine.host & {"a", "ab"} == set()
    engine.serves("abc")
    engine.serves("stuv")
    assert {"a", "ab", "abc"} <= engine.host


@pytest.mark.parametrize("options", [{"store_after": 0}, {"min_store_tokens": -1}])
def test_nonsense_is_refused(options):
    with pytest.raises(ConfigurationError, match=f"{next(iter(options))} must be a whole number of at least"):
        Engine(**options)


def test_a_pool_with_a_least_length_needs_the_number_of_tokens():
    pool = BlockPool(4, thresholds=CacheOptions(min_store_tokens=3))
    with pytest.raises(MisuseError, match="number of tokens"):
        pool.touch(None, chain("ab"))
    pool.touch(None)  # nobody's request


def test_the_oldest_keys_are_looked_for_once_a_prompt():
    """A dictionary is searched past all that was deleted at its front: begun anew for each key, 8,192 took seconds."""

    class Counted(dict):
        begun = 0

        def __iter__(self):
            Counted.begun += 1
            return super().__iter__()

    admission = Admission(CacheOptions(store_after=2), remembered=100)
    admission._seen = Counted()
    for prompt in range(3):
        admission.told([b"%d/%d" % (prompt, at) for at in range(90)], 90)
    assert len(admission) == 100 and Counted.begun <= 3


def test_a_checkpoint_is_held_back_with_its_chunks():
    pool = BlockPool(8, needs_checkpoint=lambda depth: True, thresholds=CacheOptions(store_after=2))
    keys, needs = [*chain("ab"), checkpoint_key(b"ab")], [PieceNeed("state", 1)]
    pool.touch(None, chain("ab"))
    assert pool.choose(pool.root, keys, needs) == 0
    pool.touch(None, chain("ax"))
    assert pool.choose(pool.root, keys, needs) == 1
    pool.touch(None, chain("ab"))
    assert pool.choose(pool.root, keys, needs) == 3
