"""The beginning of a prompt in an engine's own pool: found, loaded into, computed, and given back."""

import pytest

from cpu_prefix_cache import ChainHasher
from cpu_prefix_cache.deciding import (
    HybridChunkPlanner,
    KVCacheCoordinator,
    Placement,
    PoolExhausted,
    PrefixGroup,
    StateGroup,
    TakenCheckpoints,
    new_pool,
)

GRID, NUM_BLOCKS = 16, 8
KEYS = ChainHasher(GRID).keys(range(96))


class Written(TakenCheckpoints):
    """Notes what would be written."""

    def __init__(self, coordinator):
        super().__init__(coordinator)
        self.written = []

    def write(self, state, depth, node):
        self.written.append((state, depth, self._pool.checkpoints.to_write(node)))
        if state == "interrupted":
            raise KeyboardInterrupt


@pytest.fixture
def engine():
    """Full attention and a state: a boundary takes a chunk and a checkpoint of one block each."""
    groups = [kind(name=kind.kind, block_tokens=GRID, block_bytes=64) for kind in (PrefixGroup, StateGroup)]
    planner = HybridChunkPlanner(groups, max_model_len=128)
    pool = new_pool(planner, NUM_BLOCKS, on_device=True)
    coordinator = KVCacheCoordinator(planner, pool, on_device=True)
    return coordinator, Written(coordinator)


def place(engine, tokens=96):
    return Placement(engine[0].pool, engine[0], KEYS[: tokens // GRID], tokens)


def computed(engine, tokens, state="of the request"):
    """A prompt is computed up to there, where its state is kept."""
    with place(engine) as prompt:
        prompt.grow(tokens)
        prompt.commit(tokens)
        prompt.take_checkpoint(engine[1], state, tokens)


def free_blocks(engine):
    """All must be free or cached: nothing pinned, nothing half written."""
    now = engine[0].pool.statistics()
    assert (now.pinned, now.writing) == (0, 0)
    engine[0].pool.check_valid()
    return now.free


def test_a_prompt_is_found_where_its_state_was_kept(engine):
    computed(engine, 48)
    assert [each[:2] for each in engine[1].written] == [("of the request", 3)]
    with place(engine) as prompt:
        assert prompt.length == 48 and len(prompt.blocks()) == 3
    assert free_blocks(engine) == NUM_BLOCKS - 4


@pytest.mark.parametrize(("tokens", "length"), [(48, 48), (49, 0)])
def test_a_prompt_resumes_behind_so_many_tokens_or_from_its_beginning(engine, tokens, length):
    computed(engine, 48)
    with place(engine) as prompt:
        prompt.begin_behind(tokens)
        assert prompt.length == length and len(prompt.blocks()) == length // GRID
    assert free_blocks(engine) == NUM_BLOCKS - 4


def test_a_state_is_kept_once(engine):
    computed(engine, 48)
    computed(engine, 48)
    assert len(engine[1].written) == 1


def test_an_interrupt_leaves_no_block_behind(engine):
    with pytest.raises(KeyboardInterrupt):
        computed(engine, 48, "interrupted")
    assert free_blocks(engine) == NUM_BLOCKS - 3
    with place(engine) as prompt:
        assert prompt.length == 0  # its chunks are there, and no state to resume from


def test_committed_chunks_stay_while_the_prompt_is_placed(engine):
    with place(engine) as prompt:
        prompt.grow(48)
        prompt.commit(48)
        with pytest.raises(PoolExhausted):
            engine[0].pool.allocate(NUM_BLOCKS - 2)
    assert free_blocks(engine) == NUM_BLOCKS - 3


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_load_fills_chunks_and_a_state_or_fails(engine, is_loaded):
    with place(engine) as prompt:
        chunks, state = prompt.room(engine[1], 0, 32)
        assert (len(chunks), len(state)) == (2, 1) and not set(chunks) & set(state)
        prompt.loaded(32 if is_loaded else 0, 32, engine[1])
        assert prompt.length == (32 if is_loaded else 0)
    with place(engine) as again:
        assert again.length == prompt.length
    assert free_blocks(engine) == NUM_BLOCKS - (3 if is_loaded else 0)


def test_a_state_is_loaded_beside_chunks_that_are_there(engine):
    """It was evicted, and they were not. The load brings all of them once more."""
    with place(engine) as prompt:
        prompt.grow(48)
        prompt.commit(48)
    with place(engine) as prompt:
        chunks, _ = prompt.room(engine[1], 0, 48)
        prompt.loaded(48, 48, engine[1])
        assert prompt.length == 48 and not set(prompt.blocks()) & set(chunks)
    assert free_blocks(engine) == NUM_BLOCKS - 4


def test_where_there_is_no_room_nothing_is_taken(engine):
    computed(engine, 64)
    with place(engine) as prompt:
        assert prompt.length == 64  # pinned: 5 blocks, and 3 are left
        assert prompt.room(engine[1], 64, 96) is not None
    with place(engine) as prompt, place(engine) as other:
        assert prompt.room(engine[1], 64, 80) is not None
        assert other.room(engine[1], 64, 96) is None
        with pytest.raises(PoolExhausted):
            other.grow(96)
    assert free_blocks(engine) == NUM_BLOCKS - 5
