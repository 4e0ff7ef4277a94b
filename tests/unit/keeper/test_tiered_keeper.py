"""A keeper over files: whole slots, whichever model comes first; when files are read, and when not.

In one process: the test is the engines, and writes to the region as they do.
"""

import mmap
import time
from contextlib import contextmanager
from unittest.mock import Mock

import pytest

from cpu_prefix_cache import ConfigurationError, MisuseError
from cpu_prefix_cache.deciding import HybridChunkPlanner, PrefixGroup, StateGroup
from cpu_prefix_cache.keeper.protocol import NAMESPACE_BYTES
from cpu_prefix_cache.keeper.shape import shared_planner
from cpu_prefix_cache.keeper.tiered_keeper import ROOM_SECONDS
from cpu_prefix_cache.messages.request import Pending
from cpu_prefix_cache.messages.tier import KEY_BYTES
from cpu_prefix_cache.node import region as regions
from cpu_prefix_cache.node.pool_tier import PoolTier
from cpu_prefix_cache.slab.settings import FileTier
from cpu_prefix_cache.tiers import promotions
from cpu_prefix_cache.tiers.trials import FIRST_SECONDS

SLOTS, BLOCK = 64, mmap.PAGESIZE
PATIENCE = 20.0
NAMESPACE, ENGINE = b"n" * NAMESPACE_BYTES, 1
KEYS = [letter.encode() * KEY_BYTES for letter in "abc"]


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """On a busy machine reading takes longer than it should, and these tests want what is read."""
    monkeypatch.setattr(promotions, "PENDING_GRACE_SECONDS", PATIENCE)


def model(*sizes, tokens=4):
    groups = [PrefixGroup(name=str(at), block_tokens=tokens, block_bytes=size) for at, size in enumerate(sizes)]
    return HybridChunkPlanner(groups, max_model_len=64)


LARGE, SMALL = model(BLOCK, BLOCK), model(BLOCK, BLOCK * 2 // 3, tokens=8)
STATE = StateGroup(name="state", block_tokens=4, block_bytes=BLOCK // 4)  # half a lane of a rank
RANKS = HybridChunkPlanner([*model(BLOCK // 2).groups, STATE], max_model_len=64, ranks=2)


@contextmanager
def pool(folder, planner):
    """A new pool over the files in a folder, all of which are taken in."""
    region = regions.make(SLOTS * BLOCK, BLOCK)
    below = PoolTier(FileTier(str(folder), 4 * SLOTS * 2 * BLOCK), region, planner)
    below.keeper.join(ENGINE, NAMESPACE)
    until_so(below, lambda: not below.keeper.below.is_opening)
    try:
        yield below, region.memory().cast("B")
        below.keeper.check_valid()
    finally:
        below.close()


def until_so(below, is_so):
    """Steps until then. The answers that came."""
    answers, until = [], time.monotonic() + PATIENCE
    while not is_so():
        answers += below.step()
        assert time.monotonic() < until
        time.sleep(0.001)
    return answers


def content(slot):
    return bytes([1 + slot]) * BLOCK


def stores(below, memory, keys=KEYS, id=1):
    """Contents of all slots that these take, as they are when the files have them."""
    slots = below.keeper.take(ENGINE, id, keys, has_checkpoint=True).all_slots
    for at, slot in enumerate(slots):
        memory[slot * BLOCK : (slot + 1) * BLOCK] = content(at)
    below.keeper.commit(ENGINE, id, len(keys), below.keeper.planner.has_checkpoints)
    until_so(below, lambda: not below.keeper.below.has_transfers)
    return [bytes(memory[slot * BLOCK : (slot + 1) * BLOCK]) for slot in slots]


@contextmanager
def restarted(folder, *prompts, planner=LARGE):
    """A pool over files that another one has filled."""
    with pool(folder, planner) as (below, memory):
        for id, keys in enumerate(prompts or [KEYS]):
            stores(below, memory, keys, id)
    with pool(folder, planner) as again:
        yield again


def loads(below, memory):
    """Contents of the slots that are found, read from files."""
    assert waits(below)
    ((_, _, leased),) = until_so(below, lambda: not below.keeper.is_awaited)
    found = [bytes(memory[slot * BLOCK : (slot + 1) * BLOCK]) for slot in leased.slots]
    below.keeper.release(ENGINE, 2)
    return found


@pytest.mark.parametrize(("first", "slots"), [(LARGE, 6), (SMALL, 6), (RANKS, 4)])
def test_a_slot_is_written_whole_whatever_the_model_has_in_it_that_came_first(tmp_path, first, slots):
    with pool(tmp_path, first) as (below, memory):
        assert stores(below, memory) == [content(at) for at in range(slots)]
    with pool(tmp_path, first) as (below, memory):
        assert loads(below, memory) == [content(at) for at in range(slots)]


def test_files_of_a_pool_are_the_same_whichever_of_its_models_comes_first(tmp_path):
    """Chunks of three slots: of two groups, or of three."""
    with pool(tmp_path, model(BLOCK, 2 * BLOCK)) as (below, memory):
        stored = stores(below, memory)
    with pool(tmp_path, model(BLOCK, BLOCK, BLOCK)) as (below, memory):
        assert loads(below, memory) == stored and len(stored) == 9
    with pool(tmp_path, model(BLOCK)) as (below, memory):
        assert not waits(below), "a chunk of one slot has another folder"


def test_a_chunk_of_more_slots_than_a_record_numbers_has_no_files():
    assert shared_planner(model(*[BLOCK] * 255), BLOCK).host_blocks_per_chunk == 255
    with pytest.raises(ConfigurationError, match="256 slots"):
        shared_planner(model(*[BLOCK] * 256), BLOCK)


def test_nothing_is_read_while_an_engine_of_an_earlier_keeper_may_write_to_any_slot(tmp_path):
    with restarted(tmp_path) as (below, memory):
        below.keeper.absent.add(7)
        assert reads(below).slots == ()
        below.keeper.release(ENGINE, 2)
        below.keeper.absent.discard(7)
        assert len(loads(below, memory)) == 6


def test_files_are_read_where_that_is_sooner_than_computing_and_now_and_then_to_measure_it(tmp_path):
    with restarted(tmp_path) as (below, _):
        below.keeper.below.edge.break_even.loads_at(0, 1e6)  # three chunks take 25 ms, beside what a promotion takes
        began = time.monotonic()
        for nanoseconds, is_read in ((10_000_000, False), (20_000_000, True)):
            below.keeper._promotions._trials.saves(began)
            assert waits(below, nanoseconds, now=began) is is_read
            below.keeper.release(ENGINE, 2)
        assert waits(below, 10_000_000, now=began + FIRST_SECONDS)
        below.keeper.release(ENGINE, 2)
        until_so(below, lambda: not below.keeper.below.has_transfers)


def test_chunks_that_are_read_count_for_the_engine_of_the_question(tmp_path):
    other = 2
    with restarted(tmp_path) as (below, _):
        below.keeper.join(other, bytes(NAMESPACE_BYTES))
        assert waits(below)
        until_so(below, lambda: below.keeper._promotions.slices)
        below.keeper.take(other, 9, KEYS)
        below.keeper.commit(other, 9, 1, False)
        until_so(below, lambda: not below.keeper._promotions.slices)
        assert [below.keeper._policy._rings[engine].size for engine in (ENGINE, other)] == [3, 1]


def test_questions_that_wait_cost_nothing_while_nothing_is_read(tmp_path, monkeypatch):
    """The keeper answers others meanwhile, and looks at each of these when something may have changed."""
    with restarted(tmp_path) as (below, _):
        keeper, now = below.keeper, time.monotonic()
        seen = Mock(wraps=keeper._promotions.advance)
        monkeypatch.setattr(keeper._promotions, "advance", seen)
        assert waits(below, now=now)
        for _ in range(100):
            assert not list(keeper.step())
        assert seen.call_count == 1
        keeper.passed(now + ROOM_SECONDS)
        assert not list(keeper.step()) and seen.call_count == 2
        keeper.release(ENGINE, 2)
        until_so(below, lambda: not below.keeper.below.has_transfers)


def test_questions_behind_one_that_finds_no_room_cost_nothing(tmp_path, monkeypatch):
    """A quarter of the pool is read into at once: the first prompt takes it, and the second finds none."""
    prompts = [[f"{name}{at}".encode().ljust(KEY_BYTES) for at in range(SLOTS // 8)] for name in "abc"]
    with restarted(tmp_path, *prompts) as (below, _):
        keeper, now = below.keeper, time.monotonic()
        seen = Mock(wraps=keeper._promotions.advance)
        monkeypatch.setattr(keeper._promotions, "advance", seen)
        for id, keys in enumerate(prompts):
            assert isinstance(keeper.run(ENGINE, id, keys, now), Pending)
        assert not list(keeper.step()) and seen.call_count == 2
        answered = until_so(below, lambda: not keeper.is_awaited)
        assert [leased.depth for _, _, leased in answered] == [SLOTS // 8] * len(prompts)


def test_names_of_several_prompts_are_no_question(tmp_path):
    """Two prompts are in the files; a question with a chunk of each is refused, and promotes nothing."""
    with restarted(tmp_path, KEYS, [b"x" * KEY_BYTES, b"y" * KEY_BYTES]) as (below, memory):
        with pytest.raises(MisuseError, match="several prompts"):
            reads(below, keys=[KEYS[0], b"y" * KEY_BYTES])
        assert len(loads(below, memory)) == 6


def test_a_chunk_that_files_have_of_another_prompt_is_no_question(tmp_path):
    with restarted(tmp_path, KEYS[:2], planner=RANKS) as (below, _):
        below.keeper.take(ENGINE, 3, KEYS[1:2])
        below.keeper.commit(ENGINE, 3, 1, False)
        with pytest.raises(MisuseError, match="several prompts"):
            reads(below, keys=KEYS[1:2])


def reads(below, nanoseconds=0, now=None, keys=KEYS):
    return below.keeper.run(ENGINE, 2, keys, time.monotonic() if now is None else now, nanoseconds)


def waits(below, nanoseconds=0, now=None):
    return isinstance(reads(below, nanoseconds, now), Pending)
