"""Behaviour of vLLM 0.32 with blocks of full attention beside a sliding window, when a connector is configured.

Nothing of ours is under test. These are the facts that the design of window groups stands on, written so that a new
release that changes one of them fails. One prompt of 30 tokens and 6 sampled ones, in blocks of 4, window 9:

    block                   0   1   2   3   4   5   6   7 | 8
    tokens                  0...                      28 30 | decode
    full attention, hashed  x   x   x   x   x   x   x   x       each as soon as it is allocated to its end
    window, hashed                              x   x           the two that a hit at 28 needs, and no others
"""

import pytest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.vllm.engine import ATTENTION, BLOCK, vllm_config

WINDOW = SlidingWindowSpec(
    block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=ATTENTION.dtype, sliding_window=2 * BLOCK + 1
)
FULL = [("full", at) for at in range(7, -1, -1)]


class Observed:
    """A hybrid model's scheduler with a silent connector. `hashed[i]` is what is hashed after i + 1 steps."""

    def __init__(self, folder, retention, step_tokens=64):
        init_none_hash(sha256)
        config = vllm_config(folder, connector="SilentConnector", module="tests.vllm.silent", step_tokens=step_tokens)
        config.cache_config.num_gpu_blocks = 80
        groups = [KVCacheGroupSpec(["full"], ATTENTION), KVCacheGroupSpec(["window"], WINDOW)]
        caches = KVCacheConfig(80, [], groups, prefix_cache_retention_interval=retention)
        manager = StructuredOutputManager(config)
        self.scheduler = Scheduler(config, caches, manager, block_size=BLOCK, hash_block_size=BLOCK)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.positions = {}

    def run(self, tokens, max_tokens=6):
        hasher = get_request_block_hasher(BLOCK, sha256)
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = Request("request", tokens, sampling, None, block_hasher=hasher)
        self.scheduler.add_request(request)
        self.hashed = []
        self.tables = []
        self.hits = []
        while not request.is_finished():
            self.hits.append(request.num_computed_tokens)
            output = self.scheduler.schedule()
            self.positions |= {key: at for at, key in enumerate(request.block_hashes)}
            self.hashed.append(sorted(self._name(block) for block in self.pool.blocks if block.block_hash))
            blocks = self.scheduler.kv_cache_manager.get_blocks("request").blocks
            self.tables.append([[not block.is_null for block in table] for table in blocks])
            sampled = [[7]] if request.num_computed_tokens >= request.num_tokens else [[]]
            self.scheduler.update_from_output(output, ModelRunnerOutput(["request"], {"request": 0}, sampled))
        return output

    def eviction_order(self):
        free = self.pool.free_block_queue.get_all_free_blocks()
        return [self._name(block) for block in free if block.block_hash]

    def _name(self, block):
        return ("full", "window")[get_group_id(block.block_hash)], self.positions[get_block_hash(block.block_hash)]


def windows(names):
    return [at for group, at in names if group == "window"]


def fulls(names):
    return [at for group, at in names if group == "full"]


@pytest.fixture
def observe(tmp_path):
    return lambda *args, **options: Observed(tmp_path, *args, **options)


def test_full_attention_is_hashed_when_allocated_and_a_window_only_before_the_last_boundary(observe):
    model = observe(retention=0)
    model.run(list(range(30)))
    assert fulls(model.hashed[0]) == [0, 1, 2, 3, 4, 5, 6]  # before the step that computes them has run: S7.9
    assert windows(model.hashed[0]) == [5, 6]  # a hit at 28 sees tokens 20 to 27
    assert fulls(model.hashed[-1]) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert windows(model.hashed[-1]) == [5, 6]  # block 7 was filled by decoding: never hashed


def test_chunked_prefill_hashes_the_window_as_its_blocks_are_filled(observe):
    model = observe(retention=0, step_tokens=8)
    model.run(list(range(30)))
    assert [windows(names) for names in model.hashed[:4]] == [[], [], [5], [5, 6]]
    assert [fulls(names)[-1] for names in model.hashed[:4]] == [1, 3, 5, 6]


def test_a_checkpoint_is_torn_apart_by_the_free_queue(observe):
    """Half of it goes when decoding moves the window on; the rest goes last, behind all of full attention."""
    model = observe(retention=0)
    model.run(list(range(30)))
    assert model.eviction_order() == [("window", 5), *FULL, ("window", 6)]


def test_a_window_block_leaves_the_table_while_its_request_runs(observe):
    model = observe(retention=0)
    model.run(list(range(30)))
    held = [[at for at, here in enumerate(window) if here] for _, window in model.tables]
    assert held == [[0, 1, 2, 3, 4, 5, 6, 7], [5, 6, 7], [5, 6, 7], [6, 7, 8], [6, 7, 8], [6, 7, 8]]
    assert all(all(full) for full, _ in model.tables)


def test_a_second_prompt_resumes_where_both_groups_can(observe):
    model = observe(retention=0)
    model.run(list(range(30)))
    model.run([*range(30), *[500] * 9], max_tokens=2)
    assert windows(model.hashed[0]) == [5, 6, 7, 8]  # its own boundary is at 36: blocks 7 and 8
    assert [at for at, here in enumerate(model.tables[0][1]) if here] == [5, 6, 7, 8, 9]  # resumed at 28


def test_dense_retention_hashes_every_window_block_of_the_prompt_and_of_decoding(observe):
    model = observe(retention=None)
    model.run(list(range(30)))
    assert windows(model.hashed[0]) == [0, 1, 2, 3, 4, 5, 6]
    assert model.eviction_order() == [
        *(("window", at) for at in (4, 3, 2, 1, 0, 5)),
        *FULL,
        ("window", 7),
        ("window", 6),
    ]
