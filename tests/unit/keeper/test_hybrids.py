"""Models with windows and states on the pool of a keeper: what engines find of each other, and all its bytes."""

import time
from functools import partial

import pytest

from cpu_prefix_cache import ChunkLocal, ConfigurationError
from cpu_prefix_cache.testing import CorruptingCopier
from tests.support.host_engine import PATIENCE
from tests.support.threads import pause
from tests.unit.keeper.hybrid_engine import BLOCK_BYTES, HybridEngine
from tests.unit.keeper.pool_engine import KeeperProcess, PoolEngine

pytestmark = pytest.mark.usefixtures("patience")

SLOTS = 96


@pytest.fixture
def keeper(tmp_path):
    with KeeperProcess(tmp_path, slots=SLOTS, block_bytes=BLOCK_BYTES) as process:
        yield process


def loaded_again(engine, prompt):
    """Serve until something was loaded: a keeper has come back."""
    until = time.monotonic() + PATIENCE
    while not (loaded := engine.stores(prompt)):
        pause(until, "nothing is found again")
    return loaded


@pytest.mark.parametrize(
    "groups",
    [{"has_state": False}, {}, {"has_state": False, "kind": ChunkLocal, "window_tokens": 32}],
    ids=["window", "window and state", "local chunks"],
)
def test_an_engine_resumes_from_what_another_one_has_stored(keeper, groups):
    engine = partial(HybridEngine, keeper.address, **groups)
    with engine() as one, engine() as other:
        one.stores("abcdef")
        assert [other.stores(prompt) for prompt in ("abcdef", "xyz", "abcdefgh")] == [6, 0, 6]
        assert one.stores("abcdefghij") == 8
        assert one.is_whole and other.is_whole


def test_chunks_without_their_checkpoint_are_no_hit_until_a_branch_has_stored_it(keeper):
    with HybridEngine(keeper.address) as one, HybridEngine(keeper.address) as other:
        one.stores("abcdef")
        assert [other.stores(prompt) for prompt in ("abcxyz", "abcuvw")] == [0, 3]


@pytest.mark.parametrize("group", range(4))
def test_a_byte_of_any_group_that_differs_shows(keeper, group):
    """The control of the tests above."""
    wrap = partial(CorruptingCopier, group=group)
    with HybridEngine(keeper.address) as one, HybridEngine(keeper.address, wrap_copier=wrap) as other:
        one.stores("abcdef")
        with pytest.raises(AssertionError, match="hold other bytes"):
            other.serves("abcdef")


def test_a_load_brings_of_a_window_what_the_device_has_not(keeper):
    with HybridEngine(keeper.address) as one, HybridEngine(keeper.address) as other:
        one.stores("abcdef")
        one.stores("abcdefgh")
        other.serves("abcdef")
        before = other.host.statistics().cache.bytes_loaded
        assert other.serves("abcdefgh") == 2
        assert other.host.statistics().cache.bytes_loaded - before == 2 * 3 * BLOCK_BYTES + 5 * BLOCK_BYTES
        one.stores("abcdefghi")
        before = other.host.statistics().cache.bytes_loaded
        assert other.serves("abcdefghi") == 1
        assert other.host.statistics().cache.bytes_loaded - before == 3 * BLOCK_BYTES + 3 * BLOCK_BYTES


def test_the_bytes_of_a_checkpoint_that_is_stored_alone_are_counted(keeper):
    with HybridEngine(keeper.address) as engine:
        engine.stores("abcdef")
        before = engine.host.statistics().cache.bytes_stored
        engine.stores("abcde")
        assert engine.host.statistics().cache.bytes_stored > before


def test_the_next_keeper_finds_checkpoints_again(keeper):
    with HybridEngine(keeper.address) as one, HybridEngine(keeper.address) as other:
        one.stores("abcdef")
        one.stores("abcxyz")
        other.rests()
        keeper.kill()
        keeper.start()
        assert loaded_again(other, "abcdef") == 6
        assert [loaded_again(one, prompt) for prompt in ("abcxyz", "abcu")] == [6, 3]


def test_a_pool_that_is_too_small_for_all_gives_right_bytes(tmp_path):
    prompts = ["abcd", "abef", "ghij", "ab", "klmno", "abcdpq", "ghrs"]
    with (
        KeeperProcess(tmp_path, slots=40, block_bytes=BLOCK_BYTES) as keeper,
        HybridEngine(keeper.address) as one,
        HybridEngine(keeper.address) as other,
    ):
        loaded = [engine.stores(prompt) for prompt in prompts * 4 for engine in (one, other)]
        assert sum(map(bool, loaded)) > len(prompts)
        assert one.is_whole and other.is_whole


def test_other_weights_meet_at_their_own_revision(keeper):
    with HybridEngine(keeper.address) as one, HybridEngine(keeper.address, revision="2", weights=1) as other:
        one.stores("abcdef")
        assert other.stores("abcdef") == 0
        assert other.stores("abcdef") == 6
        one.host.reset(revision="2")
        one.weights = 1
        assert one.stores("abcdef") == 6


def test_a_model_of_other_groups_is_refused(keeper):
    with HybridEngine(keeper.address), pytest.raises(ConfigurationError, match="models of other groups"):
        HybridEngine(keeper.address, window_tokens=20)
    with pytest.raises(ConfigurationError, match="blocks of"):
        PoolEngine(keeper.address)


def test_a_pool_that_holds_no_chunk_with_its_checkpoint_is_refused(tmp_path):
    with (
        KeeperProcess(tmp_path, slots=4, block_bytes=BLOCK_BYTES) as keeper,
        pytest.raises(ConfigurationError, match=r"a chunk and its checkpoint take 6 of them.*start a keeper with more"),
    ):
        HybridEngine(keeper.address)
