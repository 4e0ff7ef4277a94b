"""HostCache behind a small engine on the CPU, story by story: what an engine calls, and the bytes that come back.

A prompt is letters, one to a chunk. Every chunk has bytes of its own, made of its key, and blocks are poisoned when
they are handed out. So what is on the device after a load is right, or it shows.
"""

import time
from contextlib import nullcontext
from threading import Semaphore

import pytest
import torch

from cpu_prefix_cache import ConfigurationError, Hit, Miss, MisuseError, Pending
from cpu_prefix_cache.copier.events import Event
from cpu_prefix_cache.deciding import (
    ChunkLocalGroup,
    Direction,
    HybridChunkPlanner,
    KVCacheCoordinator,
    PooledDevice,
    PrefixGroup,
    WindowGroup,
)
from cpu_prefix_cache.host_cache import HostCache
from cpu_prefix_cache.kv_layout import ChunkLocal, KVGroup, Prefix, State, Window, keys_and_values, states
from cpu_prefix_cache.memory import arena, registration
from cpu_prefix_cache.memory.parts import Role, blocks_first
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.pool.coordinator import new_pool
from cpu_prefix_cache.testing import CorruptingCopier, MeddlingCopier
from tests.support.host_engine import CHUNK_BYTES, GRID, POISON, HostEngine, allocating, contents, keys_of
from tests.support.host_options import with_options
from tests.support.simulated_driver import CUDA, SLICE, SimulatedDriver
from tests.support.sinks import SinkGroup
from tests.support.small_engine import SmallEngine
from tests.support.troubled_copiers import FailingLoads


class Engine(HostEngine):
    def __init__(self, device_blocks=8, host_chunks=32, **options):
        host_bytes = int(host_chunks * CHUNK_BYTES)
        super().__init__(device_blocks, **{"host_bytes": host_bytes, "max_step_tokens": 4 * GRID, **options})

    def serves(self, prompt):
        """Compute all of it, and wait until that is stored."""
        assert super().serves(prompt) == 0
        self.rests()


def served(*prompts, **options):
    """An engine that has forgotten these prompts, so that the host alone has them."""
    engine = Engine(**options)
    for prompt in prompts:
        engine.serves(prompt)
    engine.forgets()
    return engine


class Late(Event):
    def __init__(self, copy):
        self.copy, self.is_over = copy, False

    def passed(self):
        return self.is_over

    def until_passed(self):
        if not self.is_over:
            self.is_over = True
            self.copy()


class LateCopier(MeddlingCopier):
    """Nothing of a load is copied before somebody waits for its event, in `loads`."""

    def __init__(self, copier, tensors):
        super().__init__(copier)
        self.loads = []

    def submit(self, direction, copies, after):
        if direction is Direction.STORE:
            return super().submit(direction, copies, after)
        self.loads.append(Late(lambda: self.copy(direction, copies)))
        return self.loads[-1]


def keeping(kind, copiers):
    """A `wrap_copier` that notes the copier it makes."""

    def wrap(copier, tensors):
        copiers.append(kind(copier, tensors))
        return copiers[0]

    return wrap


def with_late_loads(*prompts, **options):
    """An engine that served these prompts and forgot them, and its copier."""
    copiers = []
    engine = Engine(wrap_copier=keeping(LateCopier, copiers), **options)
    for prompt in prompts:
        engine.serves(prompt)
    engine.forgets()
    return engine, copiers[0]


# Run, store, evict, load, resume


@pytest.mark.parametrize("offload", ["eager", "lazy"])
@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("id", ["a string", 7, ("conversation", 3), None], ids=str)
def test_chunks_that_the_device_evicted_come_back_byte_for_byte(offload, threads, id):
    engine = Engine(device_blocks=8, offload=offload, threads=threads)
    for prompt in ("abcd", "klmn", "vwxy"):  # the last one evicts the first
        assert engine.starts(id, prompt) == Miss()
        engine.steps(id)
        engine.ends(id)
        engine.steps()
        engine.host.drain()
    assert engine.blocks.find(keys_of("abcd")[1]) is None
    assert engine.starts(id, "abcd") == Hit(16, 0)
    assert not any(engine.right(id))
    engine.host.begin_step()
    assert engine.resumes(engine.host.drain()) == [(id, 16)]
    assert all(engine.right(id))
    engine.ends(id)
    engine.rests()
    assert engine.is_at_rest()
    engine.host.close()


@pytest.mark.parametrize("part", [0, 3])
def test_control_a_damaged_part_of_a_loaded_block_is_seen(part):
    """The comparison of bytes, with something to find."""

    def damaging(copier, tensors):
        return CorruptingCopier(copier, [[tensors[0][part]]], group=0)

    engine = served("abcd", wrap_copier=damaging)
    assert engine.starts("r", "abcd") == Hit(16, 0)
    engine.steps()
    assert engine.right("r") == [False, True, True, True]


def test_chunks_on_the_device_are_not_loaded():
    engine = served("abcd")
    engine.starts("r", "ab")
    engine.steps()
    assert engine.starts("s", "abcd") == Hit(16, 8)
    engine.steps()
    assert all(engine.right("s"))


def test_chunks_behind_a_hole_on_the_device_are_not_stored():
    """Or the bytes of the third chunk would be stored under the key of the second."""
    engine = Engine()
    engine.starts("r", "abc")
    engine.steps("r")
    engine.blocks.forget(engine.tables["r"][1])
    engine.ends("r")
    engine.rests()
    engine.forgets()
    assert engine.starts("s", "abc") == Hit(GRID, 0)
    engine.rests()
    assert engine.right("s") == [True, False, False]


def test_n0_within_a_chunk_is_rounded_down():
    engine = served("abcd")
    assert engine.starts("r", "abcd", n0=6, table=allocating) == Hit(16, 4)
    assert engine.steps() == [("r", 16)]
    assert engine.right("r") == [False, True, True, True]


def test_chunks_computed_after_a_load_are_stored_before_the_request_ends():
    """It was not computing in the step in which its load ended, and the engine did not report it."""
    engine = served("ab")
    assert engine.starts("r", "abcd") == Hit(8, 0)
    engine.steps()
    engine.steps("r")
    engine.rests()
    engine.steps()
    assert engine.host.statistics().cache.chunks_stored == 4


# A prefix that is loading


def test_a_second_request_waits_for_a_prefix_that_is_loading():
    engine, copier = with_late_loads("abcd")
    assert engine.starts("r", "abcd") == Hit(16, 0)
    engine.host.begin_step()
    answer = engine.starts("s", "abcx")
    assert isinstance(answer, Pending) and answer.deadline > time.monotonic()
    copier.loads[0].until_passed()
    assert engine.resumes(engine.host.end_step({})) == [("r", 16)]
    assert engine.starts("s", "abcx") == Miss()  # from what the device has
    assert engine.right("s") == [True, True, True, False]
    engine.steps("s")
    for id in ("r", "s"):
        engine.ends(id)
    engine.rests()
    assert engine.is_at_rest()


def test_after_the_deadline_it_loads_its_own_copy():
    engine, copier = with_late_loads("abcd")
    engine.starts("r", "abcd")
    engine.host.begin_step()
    answer = engine.starts("s", "abcd")
    time.sleep(max(0, answer.deadline - time.monotonic()))
    assert engine.starts("s", "abcd") == Hit(16, 0)
    engine.host.begin_step()
    copier.loads[1].until_passed()
    assert not any(engine.right("r")) and all(engine.right("s"))
    assert sorted(engine.resumes(engine.host.drain())) == [("r", 16), ("s", 16)]
    assert all(engine.right("r"))
    for id in ("r", "s"):
        engine.ends(id)
    assert engine.is_at_rest()


def test_the_blocks_of_an_aborted_request_are_not_handed_out_before_its_load_has_ended():
    engine, copier = with_late_loads("abcd")
    engine.starts("r", "abcd")
    filled = engine.tables["r"]
    engine.steps()
    engine.ends("r")
    assert not set(filled) & set(engine.blocks.free_blocks)
    assert engine.steps() == []
    copier.loads[0].until_passed()
    assert engine.steps() == []  # nobody waits for it any more
    assert set(filled) < set(engine.blocks.free_blocks)
    assert engine.is_at_rest()


def test_a_request_that_is_preempted_while_it_loads_comes_back():
    engine, copier = with_late_loads("abcd")
    engine.starts("r", "abcd")
    engine.steps()
    engine.ends("r", preempted=True)
    assert isinstance(engine.starts("r", "abcd"), Pending)
    copier.loads[0].until_passed()
    assert engine.steps() == []
    assert engine.starts("r", "abcd") == Hit(16, 0)
    engine.steps()
    copier.loads[1].until_passed()
    assert engine.steps() == [("r", 16)]
    assert all(engine.right("r"))
    engine.ends("r")
    assert engine.is_at_rest()


def test_the_end_of_an_abandoned_load_is_not_taken_for_that_of_the_next():
    engine, copier = with_late_loads("abcd", "wxyz")
    engine.starts("r", "abcd")
    engine.steps()
    engine.ends("r", preempted=True)
    assert engine.starts("r", "wxyz") == Hit(16, 0)
    engine.steps()
    copier.loads[0].until_passed()
    assert engine.steps() == []
    copier.loads[1].until_passed()
    assert engine.steps() == [("r", 16)]
    assert all(engine.right("r"))


def test_after_a_load_that_failed_a_request_computes_from_n0():
    engine = served("abcd", wrap_copier=FailingLoads)
    assert engine.starts("r", "abcd", n0=6, table=allocating) == Hit(16, 4)
    assert engine.steps() == [("r", 6)]
    assert engine.host.statistics().cache.loads_failed == 1
    engine.steps("r")
    engine.ends("r")
    engine.rests()
    assert engine.is_at_rest()


# Destinations


def test_a_table_may_allocate_when_it_is_known_what_is_loaded():
    engine = Engine()
    asked = []

    def table(blocks):
        def allocate(start, boundary):
            asked.append((start, boundary))
            return blocks[start // GRID : boundary // GRID]

        return allocate

    assert engine.starts("r", "abcd", table=table) == Miss() and not asked
    engine.steps("r")
    engine.ends("r")
    engine.rests()
    engine.forgets()
    assert engine.starts("r", "abcd", n0=4, table=table) == Hit(16, 4)
    assert asked == [(4, 16)]
    engine.steps()
    assert engine.right("r") == [False, True, True, True]


def test_without_room_a_request_is_computed():
    engine = served("abcd")
    assert engine.starts("r", "abcd", table=lambda blocks: lambda start, boundary: None) == Miss()
    engine.steps("r")
    engine.ends("r")
    assert engine.host.statistics().cache.hit_tokens == 0
    assert engine.is_at_rest()


@pytest.mark.parametrize("table", [[0, 1], [0, 1, 2, 2], [[0, 1, 2, 3], [0, 1, 2, 3]], [[0], 1, 2, 3]], ids=str)
def test_a_table_that_does_not_fit_is_refused(table):
    engine = served("abcd")
    with pytest.raises(MisuseError, match=r"destination|one list for each of 1 groups"):
        engine.starts("r", "abcd", table=lambda blocks: table)
    assert engine.host.statistics().cache.running == 0
    assert engine.starts("r", "ab") == Hit(8, 0)  # in the blocks that are left


def test_a_table_that_raises_leaves_nothing_behind():
    engine = served("abcd")

    def full(start, boundary):
        raise MemoryError

    with pytest.raises(MemoryError):
        engine.starts("r", "abcd", table=lambda blocks: full)
    assert engine.host.statistics().cache.running == 0
    assert engine.starts("r", "ab") == Hit(8, 0)


# Misuse


@pytest.mark.parametrize("key", [b"eight by", 12345678901234567890, "a text of 16 chr"])
def test_a_key_is_16_bytes_at_least(key):
    engine = Engine()
    with pytest.raises(MisuseError, match="keys are at least 16 bytes"):
        engine.host.start("r", [key], num_tokens=GRID + 1, on_device=0, allocate=allocating([0]))


def test_a_request_is_not_started_twice():
    engine = Engine()
    engine.starts("r", "ab")
    with pytest.raises(MisuseError, match="'r' runs already"):
        engine.starts("r", "ab")


def test_the_end_of_an_unknown_request_is_counted():
    engine = Engine(strict=False)
    engine.host.end("r", 8)
    assert engine.host.statistics().unknown_request == 1
    with pytest.raises(MisuseError, match="'r' does not run"):
        Engine().host.end("r", 8)


@pytest.mark.parametrize("strict", [True, False])
def test_a_request_that_ends_before_its_blocks_can_be_found_is_counted(strict):
    """The likeliest first mistake: nothing would be stored, without a message."""
    engine = Engine(strict=strict)
    blocks = engine.blocks.take(keys_of("a"), 0, ()).blocks
    engine.host.start("r", keys_of("a"), num_tokens=GRID + 1, on_device=0, allocate=allocating(blocks))
    engine.host.begin_step()
    with pytest.raises(MisuseError, match="does not find its last chunk") if strict else nullcontext():
        engine.host.end("r", GRID)
    assert engine.host.statistics().reported_not_on_device == 1


def test_a_request_that_ran_at_a_reset_may_end_without_its_blocks():
    engine = Engine()
    engine.starts("r", "abcd")
    engine.steps("r")
    engine.host.reset()
    for block in range(engine.blocks.num_blocks):
        engine.blocks.forget(block)
    engine.ends("r")
    engine.rests()
    assert engine.host.statistics().reported_not_on_device == 0
    assert engine.is_at_rest()


def test_an_index_may_forget_a_request_whose_blocks_another_had_too():
    """It knows the latest block of a key, and forgets the key when that one is evicted."""
    engine = Engine()
    engine.starts("r", "ab")
    engine.starts("s", "ab")
    engine.steps("r", "s")
    engine.ends("s")
    engine.rests()
    engine.forgets()
    assert engine.blocks.find(keys_of("ab")[1]) is None
    engine.ends("r")
    assert engine.host.statistics().reported_not_on_device == 0


def sinks_of(window):
    """The same group, of which the first tokens are needed, too."""
    return SinkGroup(
        name="sinks",
        block_tokens=window.block_tokens,
        block_bytes=window.block_bytes,
        window_tokens=window.window_tokens,
        sink_tokens=1,
    )


class HybridEngine:
    """Attention, a window of 6 tokens and a state in blocks of one device pool, with lists for each group."""

    NAMES = ("attention", "window", "state")

    def __init__(self, blocks=16, sinks=False, **options):
        shape = (2, 1, blocks, GRID, 3)
        self.tensors = [torch.full(shape, POISON, dtype=torch.int16) for _ in range(2)]
        self.tensors.append(torch.full((blocks, 12), POISON, dtype=torch.int16))
        attention, window, state = self.tensors
        layout = [
            Prefix(keys_and_values(attention, block_dim=2), block_tokens=GRID),
            Window(keys_and_values(window, block_dim=2), block_tokens=GRID, window_tokens=6),
            State(states(state), block_tokens=GRID),
        ]
        if sinks:
            layout[1] = KVGroup(sinks_of(layout[1].group), layout[1].parts)
        planner = HybridChunkPlanner([each.group for each in layout], max_model_len=1_000)
        self.pool = new_pool(planner, blocks, on_device=True)
        self.coordinator = KVCacheCoordinator(planner, self.pool, on_device=True)
        device = PooledDevice(self.pool)
        given = with_options(host_bytes=1 << 14, max_model_len=1_000, offload="eager", **options)
        self.host = HostCache(device, layout, **given)

    def takes(self, keys, n0=0):
        """Chunks, the checkpoint after them, and the table of each group. What is not needed of one is -1."""
        chunks, depth = self.pool.allocate(len(keys)), len(keys)
        needs = self.coordinator.needs(self.coordinator.checkpoint_at(keys, depth))
        [node] = self.pool.allocate(0, needs=needs)
        tables = [list(self.pool.blocks_of(chunks)), [-1] * depth, [-1] * depth]
        pieces = zip(self.coordinator.planner.checkpoint(depth), self.pool.checkpoints.pieces(node), strict=True)
        for at, [block] in pieces:
            tables[at.group][at.chunk] = block
        return chunks, node, tables

    def starts(self, id, keys, n0, tables):
        """Loads fill those blocks of the tables that are needed."""
        planner = self.host.cache.planner

        def allocate(start, boundary):
            places = planner.positions(start // GRID, boundary // GRID)
            return [[table[at] for at in each] for table, each in zip(tables, places, strict=True)]

        return self.host.start(id, keys, num_tokens=17, on_device=n0, allocate=allocate)

    def commits(self, keys, chunks, node):
        touch = self.pool.touch(None)
        self.pool.commit(chunks, keys, self.pool.root, touch)
        self.pool.commit([node], [checkpoint_key(keys[-1])], chunks[-1], touch)

    def places(self, keys, tables):
        """Blocks of every group for each token in which it is needed: a view of its bytes, and what they should be"""
        for name, tensor, table in zip(self.NAMES, self.tensors, tables, strict=True):
            for at, block in enumerate(table):
                if block >= 0:
                    view = tensor[block] if name == "state" else tensor[:, :, block]
                    yield name, at, view, contents(name.encode() + keys[at], view.shape)

    def right(self, keys, tables):
        """The places that hold what they should."""
        return [(name, at) for name, at, found, wanted in self.places(keys, tables) if torch.equal(found, wanted)]


def loaded_by_hybrid(n0, **options):
    """Places that are right on the device after [n0, 16) was loaded into a table for each group."""
    engine, keys = HybridEngine(**options), keys_of("abcd")
    chunks, node, tables = engine.takes(keys)
    assert engine.starts("r", keys, 0, tables) == Miss()
    assert engine.host.boundaries("r") == [16]
    engine.host.begin_step()
    for _, _, block, wanted in engine.places(keys, tables):
        block.copy_(wanted)
    engine.commits(keys, chunks, node)
    engine.host.end_step({"r": 16})
    engine.host.end("r", 16)
    while engine.host.is_busy:
        engine.host.begin_step()
        engine.host.drain()
    engine.pool.reset()
    for tensor in engine.tensors:
        tensor.fill_(POISON)
    chunks, node, tables = engine.takes(keys)
    assert engine.starts("s", keys, n0, tables) == Hit(16, n0)
    engine.host.begin_step()
    assert engine.host.end_step({}) == [("s", 16)]
    return engine.right(keys, tables)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("n0", [0, 8])
def test_each_group_has_a_table(n0, strict):
    attention = [("attention", at) for at in range(n0 // GRID, 4)]
    assert loaded_by_hybrid(n0, strict=strict) == [*attention, ("window", 2), ("window", 3), ("state", 3)]


@pytest.mark.parametrize("n0", [0, 8])
def test_a_kind_of_an_engines_own_has_a_hole_in_its_table(n0):
    """The first block of the window is loaded too, unless the device has it."""
    attention = [("attention", at) for at in range(n0 // GRID, 4)]
    first = [("window", 0)] if n0 == 0 else []
    assert loaded_by_hybrid(n0, sinks=True) == [*attention, *first, ("window", 2), ("window", 3), ("state", 3)]


@pytest.mark.parametrize("group", [0, 1, 2])
def test_control_damage_in_one_group_is_seen(group):
    right = loaded_by_hybrid(0, wrap_copier=lambda copier, tensors: CorruptingCopier(copier, tensors, group))
    first = [("attention", 0), ("window", 2), ("state", 3)][group]
    assert first not in right and len(right) == 6


# Layouts


def test_a_group_may_be_given_as_it_is():
    rows = torch.zeros(4, 96, dtype=torch.uint8)
    group = WindowGroup(name="rows", block_tokens=4, window_tokens=9, block_bytes=96, device_blocks=2)
    given = KVGroup(group, [blocks_first(0, Role.STATE, rows)])
    assert given.group is group and given.tensors[0].data_ptr() == rows.data_ptr()


def test_the_words_for_kinds_make_their_groups():
    kv = torch.zeros(2, 3, 5, 4, 6, dtype=torch.int16)  # K and V, layers, blocks, tokens, width
    local = ChunkLocal(keys_and_values(kv, block_dim=2), block_tokens=4, window_tokens=16, name="local")
    assert (type(local.group), local.group.window_tokens, local.group.name) == (ChunkLocalGroup, 16, "local")
    assert local.group.block_bytes == 2 * 3 * 4 * 6 * 2 and len(local.tensors) == 6
    assert Window(keys_and_values(kv, block_dim=2), block_tokens=4, window_tokens=9).group.window_tokens == 9
    for kind in (Prefix, State):
        with pytest.raises(ConfigurationError, match="has no parts"):
            kind([], block_tokens=4)


@pytest.mark.parametrize("block_dim", [-3, 6])
def test_dimensions_are_counted_from_0(block_dim):
    with pytest.raises(ConfigurationError, match="has no dimension block_dim"):
        keys_and_values(torch.zeros(2, 3, 5, 4, 6), block_dim=block_dim)


def test_the_dimension_of_blocks_is_not_that_of_k_and_v_though_there_are_two_blocks():
    with pytest.raises(ConfigurationError, match=r"kv_dim=0 of .* is not that of K and V"):
        keys_and_values(torch.zeros(2, 3, 4, 6), block_dim=0)


def test_bytes_of_a_group_that_its_parts_do_not_have_are_refused():
    group = PrefixGroup(name="rows", block_tokens=4, block_bytes=100)
    layout = KVGroup(group, [blocks_first(0, Role.KEY, torch.zeros(4, 96, dtype=torch.uint8))])
    with pytest.raises(ConfigurationError, match="96 bytes in the tensors given, but the planner was told 100"):
        HostCache(SmallEngine(4), [layout], host_bytes=1 << 12, max_model_len=100)


# The host region


@pytest.mark.parametrize("host_chunks", [0, 0.99])
def test_a_host_of_less_than_a_chunk_is_refused(host_chunks):
    with pytest.raises(ConfigurationError, match=f"at least one chunk and its checkpoint, {CHUNK_BYTES} bytes, got"):
        Engine(host_chunks=int(host_chunks * CHUNK_BYTES) / CHUNK_BYTES)


@pytest.fixture
def driver(monkeypatch):
    """HostCaches have regions that are pinned slice by slice, as its gate opens."""
    driver, whole = SimulatedDriver(), arena.HostArena

    def pinned(num_blocks, block_bytes, pinned_for, region=None):
        return whole(num_blocks, block_bytes, pinned_for=CUDA, driver=driver, slice_bytes=SLICE)

    monkeypatch.setattr(arena, "HostArena", pinned)
    monkeypatch.setattr(registration, "PAUSE_SECONDS", 0)
    monkeypatch.setattr("cpu_prefix_cache.host_cache.copying_half.PROGRESS_SECONDS", 0.001)
    return driver


SLICES = 3
CHUNKS = SLICES * SLICE // CHUNK_BYTES


def test_preparing_waits_for_the_region_and_reports_its_progress(driver):
    driver.gate = Semaphore(0)
    engine, seen = Engine(host_chunks=CHUNKS), []
    assert engine.host.statistics().ready_bytes == 0

    def progress(ready_bytes, host_bytes):
        if (ready_bytes, host_bytes) not in seen:
            seen.append((ready_bytes, host_bytes))
            driver.gate.release()

    engine.host.prepare(progress)
    host_bytes = CHUNKS * CHUNK_BYTES
    whole = [at * SLICE // CHUNK_BYTES * CHUNK_BYTES for at in range(SLICES + 1)]
    assert seen == [(ready, host_bytes) for ready in whole]
    assert engine.host.statistics().ready_bytes == engine.host.statistics().host_bytes == host_bytes
    assert engine.host.statistics().cache.pool.ready == CHUNKS  # before any step
    engine.host.close()
    assert not driver.registered


def test_a_region_is_pinned_while_the_engine_works_if_nobody_prepares(driver):
    engine = Engine(host_chunks=CHUNKS)
    assert engine.host.statistics().cache.pool.ready == 0
    for prompt in ("abcd", "efgh", "ijkl"):
        engine.serves(prompt)
    engine.host._arena.wait_until_ready()
    engine.steps()
    assert engine.host.statistics().cache.pool.ready == CHUNKS
    engine.host.close()


def test_a_region_in_host_memory_is_ready_at_once():
    engine, seen = Engine(), []
    engine.host.prepare()
    engine.host.prepare(lambda *progress: seen.append(progress))
    assert seen == [(32 * CHUNK_BYTES, 32 * CHUNK_BYTES)]


# Counts and ends


def test_statistics_count_stored_and_loaded_chunks_and_bytes():
    engine = served("abcd")
    engine.starts("r", "abxy")
    engine.steps()
    now = engine.host.statistics()
    assert (now.cache.chunks_stored, now.cache.chunks_loaded, now.cache.hit_tokens) == (4, 2, 8)
    assert (now.cache.bytes_stored, now.cache.bytes_loaded) == (4 * CHUNK_BYTES, 2 * CHUNK_BYTES)
    assert now.ready_bytes == now.host_bytes == 32 * CHUNK_BYTES
    assert (now.reported_not_on_device, now.unknown_request) == (0, 0)


def test_after_a_reset_nothing_is_found_and_running_loads_fail():
    engine, _ = with_late_loads("abcd")
    engine.starts("r", "abcd")
    engine.steps()
    engine.host.reset()
    assert engine.resumes(engine.host.drain()) == [("r", 0)]
    engine.ends("r")
    assert engine.starts("s", "abcd") == Miss()
    engine.steps("s")
    engine.ends("s")
    engine.rests()
    engine.forgets()
    assert engine.starts("t", "abcd") == Hit(16, 0)


def test_closing_waits_for_loads():
    engine, copier = with_late_loads("abcd")
    engine.starts("r", "abcd")
    engine.host.begin_step()
    engine.host.close()
    assert copier.loads[0].passed() and all(engine.right("r"))
