"""The cache in trouble: interrupts, loads that fail, hardly any room, and sizes that nobody recommends.

Whatever happens, the next answer is right, nothing stays held, and every rule holds. What was damaged would show: the
controls of test_families.py are served by the same Pair.
"""

import gc

import pytest
import torch

from builtin_models import build_model
from connector.transformers import HostPrefixCache
from connector.transformers.steps import copy_all
from cpu_prefix_cache import OFFLOAD_MODES
from cpu_prefix_cache.deciding import Direction
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.slab.settings import FileTier
from cpu_prefix_cache.testing import CorruptingCopier, MeddlingCopier
from random_models import FAMILIES
from tests.connector.running import document, last_boundary
from tests.connector.serving import Pair, generated, model, on_host, planner_of
from tests.support.sizes import sizes_of_containers
from tests.support.troubled_copiers import FailingLoads

WITH_CHECKPOINTS = ("gemma3", "qwen3_5", "falcon_h1", "llama4", "jamba")

modes = pytest.mark.parametrize("mode", OFFLOAD_MODES)


class InterruptedCopier(MeddlingCopier):
    """Raises at the next copy in `direction`: before a byte has moved, or after all have."""

    def __init__(self, copier, tensors) -> None:
        super().__init__(copier)
        self.direction = None
        self.late = False
        self.interrupted = 0

    def copy(self, direction, copies):
        interrupts = direction is self.direction
        if interrupts:
            self.direction = None
            self.interrupted += 1
        if interrupts and not self.late:
            raise KeyboardInterrupt
        event = self.copier.copy(direction, copies)
        if interrupts:
            raise KeyboardInterrupt
        return event


def wrapped(family, mode, kind):
    """A pair, and the copier of this kind around its own."""
    copiers = []

    def wrap(copier, tensors):
        copiers.append(kind(copier, tensors))
        return copiers[0]

    return Pair(family, mode, wrap_copier=wrap), copiers[0]


@modes
@pytest.mark.parametrize("family", ["llama", *WITH_CHECKPOINTS])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("direction", [Direction.LOAD, Direction.STORE])
def test_after_an_interrupted_copy_the_prompt_is_answered(family, mode, late, direction):  # rule 10
    pair, copier = wrapped(family, mode, InterruptedCopier)
    copier.late = late
    opening = document(1, 90)
    if direction is Direction.LOAD or mode == "lazy":
        pair.ask_right(opening)
    if direction is Direction.LOAD:
        pair.evict_all()
    copier.direction = direction
    with pytest.raises(KeyboardInterrupt):
        pair.ask(opening) if direction is Direction.LOAD or mode == "eager" else pair.evict_all()
    assert copier.interrupted == 1
    assert pair.is_at_rest()
    for _ in range(2):
        pair.ask_right(opening)
        pair.evict_all()
    assert on_host(pair.ask_right(opening)) == 80  # it was computed, and stored, again
    assert pair.is_at_rest()


class InterruptedWaits:
    """A host cache whose copies go on behind two interrupted waits."""

    def __init__(self) -> None:
        self.is_copying, self.interrupts = False, 2

    def begin_step(self) -> None:
        assert not self.is_copying, "blocks of a copy have been given away"
        self.is_copying = True

    def drain(self) -> list[tuple[str, int]]:
        if self.is_copying and self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        self.is_copying = False
        return []


def test_nothing_is_copied_beside_what_two_interrupts_have_left_under_way():
    host = InterruptedWaits()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            copy_all(host)
    copy_all(host)
    assert not host.is_copying


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_a_failed_load_leaves_the_checkpoints_of_others_as_they_are(family):
    """The device has the checkpoint at 96 tokens, and of the one at 80 only what both share. The host has that one."""
    pair = Pair(family, "eager", wrap_copier=FailingLoads)
    whole = document(1, 100)
    pair.ask_right(whole[:81], 1)
    pair.ask_right(whole, 1)
    pool, keys = pair.cache._pool, pair.cache._hasher.keys(whole)
    pool.withdraw(pool.find(checkpoint_key(keys[4])))
    assert pair.ask_right(whole[:81], 1).hit_tokens == 0
    assert pair.ask_right(whole, 1).device_hit_tokens == 96
    assert pair.is_at_rest()


@modes
@pytest.mark.parametrize("family", WITH_CHECKPOINTS)
def test_a_checkpoint_that_only_the_host_has_is_loaded_beside_chunks_of_the_device(family, mode):
    pair, whole = Pair(family, mode), document(1, 90)
    pair.ask_right(whole)
    pair.evict_all()
    pair.ask_right(whole)
    pool, keys = pair.cache._pool, pair.cache._hasher.keys(whole)
    pool.withdraw(pool.find(checkpoint_key(keys[4])))
    again = pair.ask_right(whole)
    assert again.hit_tokens == 80 > again.device_hit_tokens
    assert pair.is_at_rest()


def test_loads_that_fail_are_computed_and_not_tried_again():  # S7.24
    pair, copier = wrapped("llama", "lazy", FailingLoads)
    pair.ask_right(document(1, 130))
    pair.evict_all()
    assert pair.ask_right(document(1, 130)).hit_tokens == 0
    assert copier.failed == 1
    assert pair.cache.statistics().cache.loads_failed == 1


@modes
@pytest.mark.parametrize("family", ["llama", *WITH_CHECKPOINTS])
def test_a_prompt_whose_load_fails_is_found_when_it_comes_again(family, mode):
    pair, copier = wrapped(family, mode, FailingLoads)
    pair.ask_right(document(1, 130))
    pair.evict_all()
    assert [pair.ask_right(document(1, 130)).hit_tokens for _ in range(2)] == [0, 128]
    assert copier.failed == 1 and pair.is_at_rest()


def test_a_load_that_fails_is_not_tried_again_though_a_tier_gives_its_bytes_back(tmp_path):
    """Else each try withdraws what the host has, and the tier gives it back, until the cache is off."""
    tier, prompt, of = FileTier(str(tmp_path), 32 << 20), document(1, 400), model("llama")
    options = {"host_bytes": 4 << 20, "device_bytes": "1MiB", "below": tier}
    with HostPrefixCache(of, **options) as cache, cache.past(prompt) as past:
        generated(of, prompt, past, new_tokens=4)
    with HostPrefixCache(of, **options, wrap_copier=FailingLoads) as cache:
        with cache.past(prompt) as past:
            assert past.hit_tokens == 0
        loaded = cache.statistics()
        assert loaded.cache.loads_failed == 1 and loaded.tier.hit_tokens > 0
        assert not cache._host.cache.is_off


@pytest.mark.parametrize("family", WITH_CHECKPOINTS)
def test_after_an_interrupted_checkpoint_the_prompt_is_answered(family, monkeypatch):
    pair = Pair(family, "eager")

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pair.cache._kv, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair.ask(document(1, 90))
    assert pair.is_at_rest()
    pair.ask_right(document(1, 90))


@modes
@pytest.mark.parametrize("family", FAMILIES)
def test_host_memory_for_one_chunk_and_its_checkpoint(family, mode):
    planner = planner_of(model(family))
    blocks = planner.host_blocks_per_chunk + planner.checkpoint_blocks(1)
    pair = Pair(family, mode, host_bytes=blocks * planner.host_block_bytes)
    for _ in range(2):
        for length in (17, 90, 18):
            pair.ask_right(document(length, length))
            pair.cache.forget_device()
            pair.ask_right(document(length, length))
            assert pair.is_at_rest()
        pair.evict_all()
    if mode == "eager":  # a prompt of two blocks is all it can keep
        pair.ask_right(document(17, 17))
        pair.cache.forget_device()
        assert on_host(pair.ask_right(document(17, 17))) == 16


@modes
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "llama4", "jamba"])
@pytest.mark.parametrize("block_tokens", [8, 32])
def test_blocks_of_other_sizes(family, mode, block_tokens):
    pair = Pair(family, mode, block_tokens=block_tokens)
    for length in (33, 64, 100):
        pair.ask_right(document(length, length))
        pair.evict_all()
        assert on_host(pair.ask_right(document(length, length))) == last_boundary(length, block_tokens)
    assert pair.is_at_rest()


@modes
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "llama4"])
@pytest.mark.parametrize("window", [2, 15, 16, 17, 33, 48, 64, 100])
def test_windows_and_attention_chunks_of_other_sizes(family, mode, window):
    """Neither needs to be a multiple of a block. (Of windows of 1 token transformers keeps all tokens.)"""
    pair = Pair(family, mode, window=window)
    for length in (17, window + 1, 2 * window, 113):
        pair.ask_right(document(length, length))
        pair.evict_all()
        assert pair.ask_right(document(length, length), 18).hit_tokens == last_boundary(length)
    assert pair.is_at_rest()


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision(family):
    pair = Pair(family, dtype=torch.bfloat16)
    for length in (48, 65, 100):
        pair.ask_right(document(length, length))
        pair.evict_all()
        assert on_host(pair.ask_right(document(length, length))) == last_boundary(length)
    assert pair.is_at_rest()


@pytest.mark.parametrize("family", FAMILIES)
def test_control_half_precision_shows_a_group_that_is_wrong(family):
    """All that is loaded of it: one chunk of five may drown in the noise. For one piece there is float32.

    One token or two follow the hit: a short convolution forgets its state in three, and only attention remembers it.
    """
    for at, piece in enumerate(planner_of(model(family)).pieces):

        def damaging(copier, tensors, at=at):
            return CorruptingCopier(copier, tensors, at, loads=None, blocks=slice(None))

        pair = Pair(family, "eager", wrap_copier=damaging, dtype=torch.bfloat16)
        for seed in range(8):
            pair.ask(document(seed, 81 + seed % 2), 1)
        pair.evict_all()
        answers = [pair.ask(document(seed, 81 + seed % 2), 1) for seed in range(8)]
        assert all(on_host(past) == 80 for past, _, _ in answers)
        assert sum(off > pair.tolerance for _, off, _ in answers) >= 7, piece.group.name


# For a long time


def prompts_through(cache, prompts):
    for ids in prompts:
        with cache.past(ids) as past, torch.no_grad():
            cache.model(torch.tensor([ids[past.get_seq_length() :]]), past_key_values=past)


def device_bytes():
    gc.collect()
    return sum(each.untyped_storage().nbytes() for each in gc.get_objects() if issubclass(type(each), torch.Tensor))


def test_device_bytes_are_constant():
    with HostPrefixCache(model("gemma3"), host_bytes="16MiB", device_bytes="1MiB") as cache:
        region = cache._kv.region.data_ptr()
        prompts_through(cache, [document(seed, 200) for seed in range(3)])
        before = device_bytes()
        prompts_through(cache, [document(100 + seed, 100 + seed) for seed in range(20)])
        assert device_bytes() == before
        assert cache._kv.region.data_ptr() == region


@modes
def test_two_thousand_short_prompts_leave_everything_at_its_steady_size(mode):
    of = build_model("full", hidden=16, layers=1)
    sizes = []
    with HostPrefixCache(of, host_bytes=1 << 16, device_bytes=8 << 12, offload=mode) as cache:
        for half in range(2):
            prompts_through(cache, [document(1000 * half + number, 33 + number % 40) for number in range(1000)])
            sizes.append(sizes_of_containers(cache))
        assert cache.statistics().cache.pool.evictions > 1000
        cache._pool.check_valid()
    assert sizes[0].keys() == sizes[1].keys()
    assert any(".ledger." in path for path in sizes[0]), "the walk does not reach what it is to measure"
    grown = {name: (sizes[0][name], size) for name, size in sizes[1].items() if size > 1.5 * sizes[0][name] + 16}
    assert not grown
