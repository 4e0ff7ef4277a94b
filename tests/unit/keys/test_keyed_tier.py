"""Blocks by keys with a tier of files below the host: what left the host comes back, also in a second process."""

import functools
import hashlib
import itertools
import random
import time
from threading import Semaphore

import pytest

from cpu_prefix_cache import ConfigurationError, FileTier, MisuseError, SharedTier
from cpu_prefix_cache.deciding import Direction
from cpu_prefix_cache.keyed import tiered_keyed_cache
from cpu_prefix_cache.testing import CorruptingCopier, FailingCopier, LateCopier, MemoryStore
from cpu_prefix_cache.tiers.tier_cache import TierCache
from tests.support.keyed_engine import GROUPS, KeyedEngine, keys
from tests.support.simulated_driver import SimulatedDriver, pins_host_caches
from tests.support.threads import wait_until

BLOCKS = [[0, 1, 2], [1, 2]]
ELSEWHERE = [[9, 8, 7], [6, 5]]
PROMPTS = [keys(name, 1, 2) for name in range(12)]


def engine_above(path, groups=GROUPS[:2], **options):
    """A host with room for two prompts, above files for all."""
    below = FileTier(str(path), 8 << 20, model="patterns", revision="1", offload="eager")
    engine = KeyedEngine(groups, **({"host_blocks": 12, "below": below} | options))
    while engine.host.statistics().tier.state == "opening":
        engine.host.poll()
    return engine


def put_all(engine):
    for prompt in PROMPTS:
        engine.put(prompt, BLOCKS[: len(engine.groups)])
        settle(engine)


def settle(engine):
    """Poll until the tier has written what it wants to."""
    while engine.host.cache.below.has_transfers:
        engine.host.poll()
    engine.host.cache.check_valid()


def check_that_all_come_back(engine, wanted):
    """Into these blocks, prompt by prompt."""
    for prompt in PROMPTS:
        found = engine.host.lookup(prompt)
        assert found.longest == 3 and engine.loaded(prompt, wanted)
        engine.host.release(found)
        engine.host.cache.check_valid()


def test_prompts_that_left_the_host_come_back_from_the_files(tmp_path):
    engine = engine_above(tmp_path)
    put_all(engine)
    check_that_all_come_back(engine, ELSEWHERE)
    assert engine.host.statistics().tier.cache.chunks_loaded > 20, "nothing came from the files: this compares nothing"
    engine.host.close()


def test_the_host_declines_nothing(tmp_path):
    """Chunks that it declines would never reach the tier. Without one `adaptive` declines most of these strangers."""
    engine, residents, strangers = engine_above(tmp_path, policy="adaptive"), PROMPTS[:2], keys("stranger", *range(99))
    for prompt in residents:
        engine.put(prompt, BLOCKS)
        settle(engine)
    pool, now = engine.host.cache.pool, time.monotonic()
    for at in range(40):
        for key in itertools.chain(*residents):
            pool.touch(pool.find(key), [key], now + 3.0 * at)
    pool.touch(None, strangers, now + 118.0)
    assert pool.choose(pool.root, strangers) == len(strangers)
    engine.host.close()


def test_damage_is_seen(tmp_path):
    engine = engine_above(tmp_path, wrap_copier=lambda copier, tensors: CorruptingCopier(copier, tensors))
    put_all(engine)
    assert engine.host.load(PROMPTS[0], ELSEWHERE).wait() and engine.wrong(PROMPTS[0], ELSEWHERE)
    engine.host.close()


def test_a_second_process_finds_what_the_first_one_left(tmp_path):
    first = engine_above(tmp_path)
    put_all(first)
    first.host.close()
    second = engine_above(tmp_path)
    assert [second.host.lookup(prompt).longest for prompt in PROMPTS[-3:]] == [3, 3, 3]
    assert second.loaded(PROMPTS[-1], ELSEWHERE)
    second.host.close()


def above_a_region(tmp_path, monkeypatch):
    """A second process whose region is not pinned yet, and the gate of its driver."""
    first, driver = engine_above(tmp_path), SimulatedDriver()
    put_all(first)
    first.host.close()
    driver.gate = Semaphore(0)
    pins_host_caches(monkeypatch, driver)
    second = engine_above(tmp_path)
    assert second.host.statistics().ready_bytes == 0
    return second, driver.gate


def test_a_load_waits_for_the_region_to_be_pinned(tmp_path, monkeypatch):
    """A lookup has promised it, and an engine may abort the request of a load that fails."""
    engine, gate = above_a_region(tmp_path, monkeypatch)
    engine.poison()
    assert engine.host.lookup(PROMPTS[-1]).longest == 3
    handle = engine.host.load(PROMPTS[-1], ELSEWHERE)
    engine.host.poll()
    assert handle.ok is None
    gate.release(100)
    assert handle.wait() and engine.wrong(PROMPTS[-1], ELSEWHERE) == []
    engine.host.close()


def test_a_load_does_not_wait_for_ever_for_the_region(tmp_path, monkeypatch):
    monkeypatch.setattr(tiered_keyed_cache, "GRACE_SECONDS", 0.05)
    engine, gate = above_a_region(tmp_path, monkeypatch)
    assert not engine.host.load(PROMPTS[-1], ELSEWHERE).wait()
    gate.release(100)
    wait_until(lambda: engine.host.statistics().ready_bytes == engine.host.statistics().host_bytes)
    assert engine.loaded(PROMPTS[-1], ELSEWHERE)
    engine.host.close()


def test_a_load_waits_for_the_files_and_its_layers_with_it(tmp_path):
    engine = engine_above(tmp_path)
    put_all(engine)
    engine.poison()
    handle = engine.host.load(PROMPTS[0], ELSEWHERE)
    assert handle.ok is None, "the host has it no more"
    handle.layers[2].until_passed()
    assert engine.wrong(PROMPTS[0], ELSEWHERE) == [] and handle.wait()
    engine.host.close()


class LateStores(LateCopier):
    """Loads are not late."""

    def submit(self, direction, copies, after):
        return (
            super().submit(direction, copies, after) if direction is Direction.STORE else self.copy(direction, copies)
        )


@pytest.mark.parametrize("queries", [1, 2, 3, 4])
def test_a_load_of_what_is_being_put_begins_when_that_is_here(tmp_path, queries):
    wrap = functools.partial(LateStores, queries=queries)
    engine = engine_above(tmp_path, ["attention"], host_blocks=40, wrap_copier=wrap)
    engine.compute(PROMPTS[0], BLOCKS[:1])
    engine.host.put(PROMPTS[0], BLOCKS[:1])
    handle = engine.host.load(PROMPTS[0], ELSEWHERE[:1])
    assert handle.ok is None
    for other in range(4):
        engine.host.put(keys("other", other), [[5]])
    assert handle.wait() and engine.wrong(PROMPTS[0], ELSEWHERE[:1]) == []
    engine.host.close()


@pytest.mark.parametrize("used_again", ["keys", "blocks"])
def test_the_engine_may_use_its_lists_again_while_a_load_waits(tmp_path, used_again):
    engine = engine_above(tmp_path, ["attention"], host_blocks=6)
    put_all(engine)
    engine.poison()
    wanted, blocks = [*PROMPTS[0]], [*ELSEWHERE[0]]
    handle = engine.host.load(wanted, [blocks])
    assert handle.ok is None
    if used_again == "keys":
        wanted[:] = PROMPTS[-1]
    else:
        blocks[:] = [1, 2, 3]
    assert handle.wait() and engine.wrong(PROMPTS[0], ELSEWHERE[:1]) == []
    engine.host.close()


def test_portions_that_came_apart_come_back_together(tmp_path):
    engine = engine_above(tmp_path)
    engine.put(PROMPTS[0][1:], [[1, 2], [1, 2]])
    engine.put(PROMPTS[0][:1], [[0], []])
    settle(engine)
    for prompt in PROMPTS[1:]:
        engine.put(prompt, BLOCKS)
        settle(engine)
    assert engine.host.cache.pool.find_all(PROMPTS[0]) == [None] * 3
    assert engine.loaded(PROMPTS[0], ELSEWHERE)
    engine.host.close()


def test_a_part_on_the_host_stays_while_the_rest_is_read(tmp_path):
    engine = engine_above(tmp_path, ["attention"], host_blocks=6)
    prompt, other = keys("p", 1, 2, 3), keys("q", 1, 2, 3)
    engine.put(prompt[2:], [[2, 3]])
    engine.put(prompt[:2], [[0, 1]])
    settle(engine)
    assert engine.loaded(prompt[2:], [[9, 8]])
    engine.put(other, [[0, 1, 2, 3]])
    settle(engine)
    assert [node is None for node in engine.host.cache.pool.find_all(prompt)] == [True, True, False, False]
    assert engine.loaded(prompt, [[9, 8, 7, 6]]), "the part that was there is the oldest on the host"
    engine.host.close()


def test_two_loads_of_one_prompt_read_it_once(tmp_path):
    engine = engine_above(tmp_path)
    put_all(engine)
    first, second = engine.host.load(PROMPTS[0], ELSEWHERE), engine.host.load(PROMPTS[0], [[20, 21, 22], [20, 21]])
    assert first.wait() and second.wait()
    assert engine.host.statistics().tier.cache.chunks_loaded == 3
    assert engine.wrong(PROMPTS[0], ELSEWHERE) == [] == engine.wrong(PROMPTS[0], [[20, 21, 22], [20, 21]])
    engine.host.close()


def test_a_lease_keeps_slots_too(tmp_path):
    below = FileTier(str(tmp_path), 40 << 14, model="patterns", revision="1", offload="eager")
    engine = engine_above(tmp_path, below=below)
    put_all(engine)
    here = [prompt for prompt in PROMPTS if engine.host.cache.pool.find(prompt[0]) is None]
    left = [prompt for prompt in here if engine.host.lookup(prompt).longest == 3]
    assert 0 < len(left) < len(here), "the files hold some of them"
    for number in range(100, 108):
        engine.put(keys(number, 1, 2), BLOCKS)
        settle(engine)
    assert all(engine.loaded(prompt, ELSEWHERE) for prompt in left)
    engine.host.close()


def test_files_that_were_damaged_are_a_load_that_fails(tmp_path):
    engine = engine_above(tmp_path)
    put_all(engine)
    for file in tmp_path.rglob("blocks"):
        file.write_bytes(bytes(file.stat().st_size))
    assert engine.host.load(PROMPTS[0], ELSEWHERE).wait() is False
    assert engine.host.lookup(PROMPTS[0]).longest == 0, "it is forgotten"
    engine.host.close()


def test_a_reset_ends_what_waits_for_the_files(tmp_path):
    engine = engine_above(tmp_path)
    put_all(engine)
    handle = engine.host.load(PROMPTS[0], ELSEWHERE)
    engine.host.reset("2")
    assert handle.wait() is False and engine.host.lookup(PROMPTS[0]).longest == 0
    put_all(engine)
    assert engine.loaded(PROMPTS[0], ELSEWHERE)
    engine.host.close()


def test_a_load_that_finds_no_room_fails_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(tiered_keyed_cache, "GRACE_SECONDS", 1e6)
    engine = engine_above(tmp_path)
    put_all(engine)
    leases = [engine.host.lookup(PROMPTS[-1]), engine.host.lookup(PROMPTS[-2])]
    handle = engine.host.load(PROMPTS[0], ELSEWHERE)
    assert handle.is_done and handle.ok is False
    for lease in leases:
        engine.host.release(lease)
    assert engine.loaded(PROMPTS[0], ELSEWHERE)
    engine.host.close()


def test_a_load_waits_as_long_as_slow_files_take(tmp_path, monkeypatch):
    monkeypatch.setattr(tiered_keyed_cache, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(TierCache, "load_rate", 1.0)  # bytes a second
    engine = engine_above(tmp_path)
    put_all(engine)
    assert engine.loaded(PROMPTS[0], ELSEWHERE)
    engine.host.close()


def test_a_cache_that_turns_off_leaves_the_files_to_the_next_process(tmp_path):
    engine = engine_above(tmp_path)
    put_all(engine)
    engine.host.close()
    engine = engine_above(tmp_path, wrap_copier=functools.partial(FailingCopier, share=1.0))
    before = sum(engine.host.lookup(prompt).longest for prompt in PROMPTS)
    for number in range(5):
        assert not engine.host.put(keys("new", number), [[0, 1], []]).wait()
    assert engine.host.cache.is_off and engine.host.lookup(PROMPTS[0]).longest == 0
    engine.host.close()
    engine = engine_above(tmp_path)
    assert sum(engine.host.lookup(prompt).longest for prompt in PROMPTS) == before == 3 * len(PROMPTS)
    assert engine.loaded(PROMPTS[0], ELSEWHERE)
    engine.host.close()


def test_a_load_that_waits_when_the_cache_turns_off_has_failed(tmp_path):
    engine = engine_above(tmp_path)
    put_all(engine)
    handle = engine.host.load(PROMPTS[0], ELSEWHERE)
    engine.host.cache.edge.is_off = True
    assert handle.wait() is False
    engine.host.close()


@pytest.mark.parametrize("seed", range(2))  # with one group, and with two
def test_any_part_of_any_prompt_comes_back_right(tmp_path, seed):
    """Puts and loads at random, leases, resets, and copies that fail, over prompts of up to five keys."""
    draw = random.Random(seed)
    wrap = functools.partial(FailingCopier, share=0.02, seed=seed)
    engine = engine_above(tmp_path, GROUPS[: 1 + seed % 2], host_blocks=7, wrap_copier=wrap)
    leases, right = [], 0
    for number in range(300):
        prompt = keys(*(draw.choice("ab") for _ in range(draw.randint(1, 5))))[draw.randint(0, 1) :]
        counts = [draw.randint(0, len(prompt)) for _ in engine.groups]
        blocks = [draw.sample(range(24), count) for count in counts]
        action = draw.choice(
            ["put", "put", "load", "load", "lookup", "release", "reset" if number % 10 == 0 else "put"]
        )
        if action == "put":
            engine.compute(prompt, blocks)
            engine.host.put(prompt, blocks).wait()
            settle(engine)
        elif action == "load":
            right += engine.loaded(prompt, blocks)
        elif action == "lookup":
            leases.append((prompt, engine.host.lookup(prompt)))
        elif action == "release" and leases:
            engine.host.release(leases.pop(draw.randrange(len(leases)))[1])
        elif action == "reset":
            engine.host.reset("1")
            leases.clear()
        engine.host.poll()
        engine.host.cache.check_valid()
    read = engine.host.statistics().tier.cache.chunks_loaded
    assert right > 20 and read > 5, f"{right} loads, {read} chunks of the files: this compares little"
    engine.host.close()


def test_another_policy_writes_below(tmp_path):
    below = FileTier(str(tmp_path), 8 << 20, model="patterns", revision="1")
    engine = engine_above(tmp_path, below=below, policy="adaptive")
    put_all(engine)
    assert engine.loaded(PROMPTS[0], ELSEWHERE)
    engine.host.close()


@pytest.mark.parametrize(
    ("groups", "host_blocks", "blocks", "wanted"),
    [
        (["attention", "window"], 12, BLOCKS, [[7], [6, 5]]),
        (["attention", "state"], 12, [[0, 1, 2], [2]], [[], [5]]),
        (["state"], 123, [[3]], [[7]]),  # of 200 bytes: six pages
    ],
    ids=["windows of more keys than attention", "a state alone", "states without attention"],
)
def test_sides_come_back_without_their_chunks(tmp_path, groups, host_blocks, blocks, wanted):
    """The chunks that they hang below are read, too."""
    engine = engine_above(tmp_path, groups, host_blocks=host_blocks)
    for prompt in PROMPTS:
        engine.put(prompt, blocks)
        settle(engine)
    check_that_all_come_back(engine, wanted)
    assert engine.host.statistics().tier.cache.bytes_loaded > 0, "nothing came from the files: this compares nothing"
    engine.host.close()


def test_one_group_beside_attention_is_kept_below(tmp_path):
    with pytest.raises(ConfigurationError, match="'window', 'state' are more"):
        engine_above(tmp_path, GROUPS)


def test_a_shared_store_is_refused():
    below = SharedTier(MemoryStore(), model="patterns", revision="1")
    with pytest.raises(ConfigurationError, match="take a FileTier"):
        KeyedEngine(["attention"], below=below)


@pytest.mark.parametrize("wrong", [hashlib.md5(b"").digest(), hashlib.sha512(b"").digest()], ids=["md5", "sha512"])
def test_keys_of_a_tier_are_sha256(tmp_path, wrong):
    engine = engine_above(tmp_path)
    with pytest.raises(MisuseError, match="sha256"):
        engine.host.lookup([wrong])
    engine.host.close()
