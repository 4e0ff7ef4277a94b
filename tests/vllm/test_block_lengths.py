"""Models whose groups have blocks of different lengths: which of them vLLM makes, which it can keep, and chunks
of several blocks on the device. That they come back right is shown in test_groups.py.

vLLM makes pages of all groups equal in bytes: layers with less KV for a token get longer blocks. Hits end where blocks
of all groups do, and hashes are of the length that divides all of them.

    full attention, 2 heads of 512      blocks of 32        hits every 32 tokens, hashes of 16
    windows, 8 heads of 256                       16          (Gemma 4)
"""

import math

import pytest
import torch
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    SlidingWindowSpec,
)

from connector.vllm import groups as groups_module
from connector.vllm.groups import device_blocks_per_chunk, planned_group_ids, planner_for
from connector.vllm.keys import ChunkKeys
from cpu_prefix_cache import ConfigurationError, Miss
from tests.vllm.deepseek import v4_flash
from tests.vllm.engine import Engine, full, local, state, vllm_config, window
from tests.vllm.planning import get_kv_cache_groups
from tests.vllm.test_groups import forget, start  # noqa: F401 a fixture
from tests.vllm.test_stress import Users

# Which mixes there are


def of(head_size: int, heads: int = 2, block: int = 16) -> dict[str, object]:
    return dict(block_size=block, num_kv_heads=heads, head_size=head_size, dtype=torch.bfloat16)


def sees(tokens: int, head_size: int, heads: int = 2) -> SlidingWindowSpec:
    return SlidingWindowSpec(**of(head_size, heads), sliding_window=tokens)


def mamba(block: int = 16) -> MambaSpec:
    shapes, dtypes = ((3, 64), (16, 120)), (torch.float32, torch.float32)
    return MambaSpec(
        block_size=block, shapes=shapes, dtypes=dtypes, page_size_padded=1024 * block, mamba_cache_mode="align"
    )


def dense(head_size: int, heads: int = 2, block: int = 16) -> FullAttentionSpec:
    return FullAttentionSpec(**of(head_size, heads, block))


def layers(**specs: list[object]) -> dict[str, object]:
    return {f"{name}.{at}": spec for name, each in specs.items() for at, spec in enumerate(each)}


MADE = {  # by vLLM 0.32: the blocks of the groups, the tokens between hits, and those of a hash
    "Gemma 4": (layers(full=[dense(512)] * 2, window=[sees(1024, 256, heads=8)] * 10), [32, 16], 32, 16),
    "windows with less KV": (layers(full=[dense(256)] * 2, window=[sees(1024, 128)] * 4), [16, 32], 32, 16),
    "a drafter with less KV": (layers(full=[dense(128)] * 2, drafter=[dense(64)]), [16], 16, 16),
    "that beside windows": (
        layers(full=[dense(128)] * 2, drafter=[dense(64)], window=[sees(1024, 128)] * 4),
        [16, 32, 16],
        32,
        16,
    ),
    "states and a drafter": (layers(state=[mamba()] * 3, full=[dense(128)] * 2, drafter=[dense(64)]), [16, 32], 32, 16),
}


def made_by_vllm(tmp_path, specs, block_outermost=False):
    """The cache's groups, in a configuration for them."""
    config = vllm_config(tmp_path, cpu_bytes_to_use=1)
    config.cache_config.kv_cache_layout = "BLNHC" if block_outermost else "LBNHC"
    groups = get_kv_cache_groups(config, specs)
    caches = KVCacheConfig(100, [], groups)
    config.cache_config.block_size = min(group.kv_cache_spec.block_size for group in groups)
    config.model_config.max_model_len = 4096
    return config, caches


@pytest.mark.parametrize("name", MADE)
def test_models_whose_layers_keep_different_amounts_for_a_token(tmp_path, name):
    specs, blocks, grid, hashed = MADE[name]
    config, caches = made_by_vllm(tmp_path, specs)
    made = [group.kv_cache_spec.block_size for group in caches.kv_cache_groups]
    assert [block for at, block in enumerate(made) if not at or block != made[at - 1]] == blocks
    assert resolve_kv_cache_block_sizes(caches, config) == (grid, hashed)
    planner = planner_for(config, caches)
    assert planner.grid_tokens == grid
    assert [group.block_tokens for group in planner.groups] == made
    assert device_blocks_per_chunk(planner, caches) == sum(grid // block for block in made)


def test_deepseek_v4_has_blocks_of_4_to_256_tokens(tmp_path):
    """Compressed latents, windows of raw ones, and what its compressors still need, in one memory, block by block."""
    config, caches = made_by_vllm(tmp_path, v4_flash(), block_outermost=True)
    planner = planner_for(config, caches)
    assert (planner.grid_tokens, resolve_kv_cache_block_sizes(caches, config)[1]) == (256, 4)
    assert {group.block_tokens for group in planner.groups} == {4, 8, 64, 256}
    assert all(group.lanes == 1 for group in planner.groups)
    kept = [planner.groups[at.group].block_tokens for at in planner.checkpoint(9)]
    assert {
        block: kept.count(block) // sum(g.block_tokens == block for g in planner.groups) for block in set(kept)
    } == {
        64: 2,
        8: 16,
        4: 2,
    }


# Which it cannot keep


def refused(tmp_path, groups) -> str:
    with pytest.raises(ConfigurationError) as caught:
        Engine(tmp_path, groups=groups)
    return str(caught.value)


def test_chunked_local_attention_of_shorter_blocks_is_refused(tmp_path):
    said = refused(tmp_path, [full(block=8), local(16)])
    assert "'chunk-local-1' has blocks of 4 tokens where prefix hits come every 8" in said
    assert said.endswith("start it with --disable-hybrid-kv-cache-manager")


def test_vllm_does_not_look_for_chunked_local_attention_of_shorter_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(groups_module, "_check_lengths", lambda groups, grid: None)
    engine = Engine(tmp_path, groups=[full(block=8), local(16)])
    with pytest.raises(AssertionError, match="not compatible with chunked local attention"):
        engine.run(list(range(30)))


@pytest.mark.parametrize("groups", [[full(), state(block=8)], [full(block=8), full(), state(block=8)]])
def test_states_further_apart_than_the_shortest_blocks_are_refused(tmp_path, groups):
    said = refused(tmp_path, groups)
    assert "has a state every 8 tokens, and group 'prefix-" in said
    assert said.endswith("blocks of at least 8 tokens")


def test_vllm_resumes_from_wrong_states_that_are_further_apart_than_the_shortest_blocks(tmp_path, monkeypatch):
    """With nothing from the host. A step ends at token 44, and the block of tokens 40 to 47 is hashed as if at 48."""
    monkeypatch.setattr(groups_module, "_check_lengths", lambda groups, grid: None)
    engine = Engine(tmp_path, groups=[full(), state(block=8)], retention=None, device_blocks=400, step_tokens=44)
    engine.cache.lookup = lambda request, n0, now: Miss()
    engine.cache.turn_off()
    engine.run(list(range(101)))
    with pytest.raises(AssertionError, match="reads wrong KV before token 48"):
        engine.run(list(range(60)))


def test_a_group_that_vllm_rebuilds_is_left_out(tmp_path):
    """It has no say in the grid, and a block of its own in each request."""
    specs = layers(full=[dense(256)] * 2, ring=[CircularBufferSpec(**of(256, block=8))] * 2)
    config, caches = made_by_vllm(tmp_path, specs)
    kinds = [type(group.kv_cache_spec) for group in caches.kv_cache_groups]
    planner = planner_for(config, caches)
    assert [kinds[at] for at in planned_group_ids(caches)] == [FullAttentionSpec]
    assert [group.kind for group in planner.groups] == ["prefix"] and planner.grid_tokens == 16
    assert device_blocks_per_chunk(planner, caches) == 2


def test_chunked_local_attention_of_the_longest_blocks_is_kept(tmp_path):
    specs = layers(full=[dense(256)] * 2)
    specs |= layers(local=[ChunkedLocalAttentionSpec(**of(128), attention_chunk_size=8192)] * 2)
    config, caches = made_by_vllm(tmp_path, specs)
    assert [group.block_tokens for group in planner_for(config, caches).groups] == [16, 32]


# Chunks of several blocks on the device


def blocks_of(engine: Engine, tokens: list[int], group: int) -> list[object]:
    """Blocks of a prompt, of which there are no copies."""
    each = engine.model.groups[group].block // engine.hash_tokens
    return [engine.pool.get_cached_block(hash, [group])[0] for hash in engine.hashes(tokens)[each - 1 :: each]]


def test_the_blocks_of_a_chunk_are_found_group_by_group_in_token_order(start):  # noqa: F811
    engine = start([full(block=8), window(9), full()])
    prompt = list(range(32))
    engine.run(prompt)
    keys = engine.keys(prompt)
    long = blocks_of(engine, prompt, 0)
    short = blocks_of(engine, prompt, 2)
    assert [engine.device.find(key) for key in keys] == [
        [long[at].block_id, short[2 * at].block_id, short[2 * at + 1].block_id] for at in range(4)
    ]


@pytest.mark.parametrize(("group", "block", "chunk"), [(0, 1, 1), (1, 2, 1), (1, 3, 1), (1, 4, 2)])
def test_a_chunk_is_gone_with_any_of_its_blocks(start, group, block, chunk):  # noqa: F811
    engine = start([full(block=8), full()])
    prompt = list(range(32))
    engine.run(prompt)
    engine.pool.evict_blocks({blocks_of(engine, prompt, group)[block].block_id})
    assert [engine.device.find(key) is not None for key in engine.keys(prompt)] == [at != chunk for at in range(4)]


def test_a_checkpoint_has_the_shorter_blocks_that_its_window_sees(start):  # noqa: F811
    engine = start([full(block=8), window(11)])
    prompt = list(range(30))
    engine.run(prompt, max_tokens=1)
    checkpoint = engine.cache.coordinator.checkpoint_at(engine.keys(prompt), depth=3)
    hashes = engine.hashes(prompt)
    pieces = [engine.pool.get_cached_block(hashes[at], [1])[0].block_id for at in (3, 4, 5)]  # tokens 12 to 23
    assert engine.device.find_checkpoint(checkpoint) == [(block,) for block in pieces]
    engine.pool.evict_blocks({pieces[0]})
    assert engine.device.find_checkpoint(checkpoint) is None


def test_a_block_within_a_chunk_is_not_taken_for_one(start):  # noqa: F811
    engine = start([full(), window(9, block=8)])
    prompt = list(range(32))
    engine.run(prompt)
    within = {block.block_id for block in blocks_of(engine, prompt, 0)[::2]}
    walked = list(engine.device.soonest_evicted())
    assert {key for block, key in walked if block in within} == {None}
    assert set(engine.keys(prompt)) <= {key for _, key in walked}


def test_a_block_that_is_still_computed_hides_its_chunk(start, monkeypatch):  # noqa: F811
    """Two prompts part within a chunk, and share the name of its first block."""
    engine = start([full(block=8), full()])
    engine.submit(list(range(33)), max_tokens=9)
    engine.step()
    engine.step()
    hashes, (key, *_) = engine.hashes(list(range(32))), engine.keys(list(range(32)))
    assert engine.device.find(key) is not None
    monkeypatch.setattr(engine.device, "_unwritten", lambda: [hashes[0]])
    assert engine.device.find(key) is None


def test_the_names_of_blocks_are_forgotten_with_the_blocks(start):  # noqa: F811
    engine = start([full(), window(9, block=8)], offload="eager")
    for at in range(100):
        engine.run([50 * at + token for token in range(30)])
    assert 3 <= len(engine.device._hashes.by_key) <= 2 * engine.pool.num_gpu_blocks


def test_a_prompt_whose_names_were_lost_with_a_reset_is_known_again_by_its_next_hit(start):  # noqa: F811
    """A request that ran when the host was emptied stores nothing; who comes after it does."""
    engine = start([full(), window(9, block=8)], offload="eager")
    prompt = list(range(30))
    engine.submit(prompt)
    engine.step()
    engine.cache.reset()
    engine.drain()
    said = engine.run(prompt)
    forget(engine, said)
    engine.run(prompt)
    assert engine.admitted[-1] == (0, 24)


def test_a_chunk_of_several_hashes_has_the_last_of_them_as_its_key_once_it_is_full():
    hashes = [b"0", b"1", b"2"]
    keys = ChunkKeys.of(hashes, 2)
    assert (len(keys), list(keys), keys[-1], keys[:7]) == (1, [b"1"], b"1", [b"1"])
    hashes += [b"3", b"4"]  # the request goes on
    assert (len(keys), list(keys), keys[-1], keys[1:]) == (2, [b"1", b"3"], b"3", [b"3"])


def test_a_step_allocates_as_many_blocks_as_its_tokens_take_in_all_groups(start):  # noqa: F811
    engine = start([full(block=8), full()], step_tokens=48)
    assert engine.cache.edge.offload._step_blocks() == 6 + 12
    engine.submit(list(range(30)))
    engine.step()
    assert engine.cache.edge.offload._step_blocks() == 6 + 12 + 2  # and each request may begin one in each


# The order in which blocks leave


def whole_chunks(engine: Engine, order: dict[int, int]) -> list[tuple[bytes, float]]:
    """Chunks that the host lacks, and where in the order the last copy of a block waits that leaves first of theirs."""
    last: dict[bytes, float] = {}  # of a name: where the last block waits that has it
    for block in engine.pool.blocks:
        if block.block_hash:
            last[block.block_hash] = max(order.get(block.block_id, math.inf), last.get(block.block_hash, 0))
    chunks = []
    for key, hashes in engine.device._hashes.by_key.items():
        groups = engine.device._chunk_groups
        leaves = min(last.get(hashes[at] + suffix, -1) for suffix, ends in groups for at in ends)
        if 0 <= leaves < math.inf and engine.cache.pool.find(key) is None:
            chunks.append((key, leaves))
    return chunks


@pytest.mark.parametrize("asynchronous", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize(
    "groups",
    [
        [full(), window(9, block=8)],
        [full(block=8), full()],
        [full(), full(block=8)],
        [full(block=12), full(block=8), window(5)],
    ],
)
def test_a_chunk_is_seen_before_any_part_of_it_leaves(tmp_path, groups, asynchronous):
    """With steps that overlap vLLM frees the groups of a request the other way around.

    All but a few: chunks that part within share a block's name, and when stored at once its only copy, which then waits
    where the first of them does.
    """
    seen, late = chunks_before_their_parts(tmp_path, groups, asynchronous=asynchronous, seed=7)
    assert seen > 300
    assert late <= seen // 100


@pytest.mark.parametrize("asynchronous", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("seed", [6, 8, 10, 28])
@pytest.mark.parametrize("groups", [[full(), full(block=8)], [full(block=8), full()]])
def test_parts_of_a_held_chunk_come_back_where_they_waited(tmp_path, groups, seed, asynchronous):
    """At each release the engine compares the order with that before the hold.

    Seeds 6, 8 and 10 have runs of which a request uses the last block, and others are held behind it; in 28 a request
    uses, and frees to the end, what waited before several held runs.
    """
    chunks_before_their_parts(tmp_path, groups, asynchronous=asynchronous, seed=seed)


def chunks_before_their_parts(tmp_path, groups, *, asynchronous, seed):
    """How many chunks were looked at in the order of eviction, and how many of them came behind one of their parts."""
    size = {"device_blocks": 60 + 120 * len(groups), "host_blocks": 3000}
    engine = Engine(tmp_path, groups=groups, asynchronous=asynchronous, seed=seed, **size)
    users = Users(engine)
    seen = late = 0
    while engine.counts["submitted"] < 300:
        while len(engine.requests) < 6:
            users.speak()
        order = {place.block: at for at, place in enumerate(engine._waiting())}
        first: dict[bytes | None, int] = {}
        for block, key in engine.device.soonest_evicted():
            first.setdefault(key, order[block])
        for key, leaves in whole_chunks(engine, order):
            seen += 1
            late += first[key] > leaves
        engine.step()
    engine.drain()
    return seen, late


def test_hashes_within_chunks_are_forgotten_though_others_begin_alike(tmp_path):
    """A beginning that all prompts share ends within a chunk: its block there stays, the chunks behind it do not."""
    engine = Engine(tmp_path, groups=[full(block=16), full(block=4)], device_blocks=200, host_blocks=400, slowest=1)
    shared = [engine.random.randrange(900) for _ in range(3 * 16 + 4)]
    for _ in range(400):
        engine.run([*shared, *(engine.random.randrange(900) for _ in range(24))], max_tokens=1)
    assert len(engine.device._hashes.by_key) < 200
