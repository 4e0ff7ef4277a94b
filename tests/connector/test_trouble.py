"""The generator in trouble: interrupts, pools with hardly any room, and settings that nobody recommends.

Whatever happens, the next answer is right, nothing stays held, and every rule holds. What was damaged would show: the
controls of test_families.py are served by the same Pair.
"""

import pytest
import torch

from connector.transformers import PrefixCachedGenerator, PromptRefused
from cpu_prefix_cache import OFFLOAD_MODES
from cpu_prefix_cache.deciding import Direction
from cpu_prefix_cache.model.hashing import checkpoint_key
from cpu_prefix_cache.testing import CorruptingCopier, MeddlingCopier
from random_models import FAMILIES
from tests.connector.serving import BLOCK, Pair, document, hit, last_boundary, model

WITH_CHECKPOINTS = ("gemma3", "qwen3_5", "falcon_h1", "llama4", "jamba")

modes = pytest.mark.parametrize("mode", OFFLOAD_MODES)


class InterruptedCopier(MeddlingCopier):
    """Raises at the next copy in `direction`: before a byte has moved, or after all have."""

    def __init__(self, copier) -> None:
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


@modes
@pytest.mark.parametrize("family", ["llama", *WITH_CHECKPOINTS])
@pytest.mark.parametrize("late", [False, True])
def test_after_an_interrupted_load_the_prompt_is_answered(family, mode, late):
    copiers = []

    def wrap(copier, tensors):
        copiers.append(InterruptedCopier(copier))
        return copiers[0]

    pair = Pair(family, mode, wrap_copier=wrap)
    copiers[0].late = late
    opening = document(1, 90)
    pair.ask_right(opening)
    pair.evict_all()
    copiers[0].direction = Direction.LOAD
    with pytest.raises(KeyboardInterrupt):
        pair.cached.answer(opening, 2)
    assert copiers[0].interrupted == 1
    assert pair.is_at_rest()
    pair.ask_right(opening)
    pair.evict_all()
    assert pair.ask_right(opening).host_hit_tokens == 80  # it was computed, and stored, again
    assert pair.is_at_rest()


class TearingCopier(MeddlingCopier):
    """Damages the blocks that every load fills, and then reports that it has failed."""

    def __init__(self, copier, tensors) -> None:
        groups = range(len(tensors))
        super().__init__(copier)
        self.damages = [CorruptingCopier(copier, tensors, at, loads=None, blocks=slice(None)) for at in groups]

    def copy(self, direction, copies):
        if direction is Direction.STORE:
            return self.copier.copy(direction, copies)
        for damage in self.damages:
            damage.copy(direction, copies)
        raise OSError("the link is gone")


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_a_failed_load_leaves_the_checkpoints_of_others_as_they_are(family):
    """The device has the checkpoint at 96 tokens, and of the one at 80 only what both share. The host has that one."""
    pair = Pair(family, "eager", wrap_copier=TearingCopier)
    whole = document(1, 100)
    pair.ask_right(whole[:81], 1)
    pair.ask_right(whole, 1)
    pool, keys = pair.cached.pool, pair.cached._hasher.keys(whole)
    pool.withdraw(pool.find(checkpoint_key(keys[4])))
    answer = pair.ask_right(whole[:81], 1)
    assert (answer.device_hit_tokens, answer.host_hit_tokens, answer.computed_tokens) == (0, 0, 81)
    assert pair.ask_right(whole, 1).device_hit_tokens == 96
    assert pair.is_at_rest()


@modes
@pytest.mark.parametrize("family", ["llama", *WITH_CHECKPOINTS])
@pytest.mark.parametrize("late", [False, True])
def test_after_an_interrupted_store_the_prompt_is_answered(family, mode, late):
    copiers = []

    def wrap(copier, tensors):
        copiers.append(InterruptedCopier(copier))
        return copiers[0]

    pair = Pair(family, mode, wrap_copier=wrap)
    copiers[0].late = late
    opening = document(1, 90)
    copiers[0].direction = Direction.STORE
    if mode == "lazy":  # it stores when something else comes
        pair.ask_right(opening)
    with pytest.raises(KeyboardInterrupt):
        pair.cached.answer(opening, 2) if mode == "eager" else pair.evict_all()
    assert copiers[0].interrupted == 1
    assert pair.is_at_rest()
    for _ in range(2):
        pair.ask_right(opening)
        pair.evict_all()
    assert pair.ask_right(opening).host_hit_tokens == 80
    assert pair.is_at_rest()


@pytest.mark.parametrize("family", WITH_CHECKPOINTS)
def test_after_an_interrupted_checkpoint_the_prompt_is_answered(family, monkeypatch):
    pair = Pair(family, "eager")

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pair.cached.kv, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair.cached.answer(document(1, 90), 2)
    assert pair.is_at_rest()
    pair.ask_right(document(1, 90))


@modes
@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1"])
@pytest.mark.parametrize("chosen", [0, 6])
def test_after_a_token_that_was_not_chosen_the_prompt_is_answered(family, mode, chosen):
    """Its logits are computed, but not cached yet: at token 96 that includes a block."""
    pair, opening = Pair(family, mode), document(1, 90)

    def interrupted(ids, scores):
        if ids.shape[1] == len(opening) + chosen:
            raise KeyboardInterrupt
        return scores

    with pytest.raises(KeyboardInterrupt):
        pair.cached.answer(opening, 10, logits_processor=[interrupted])
    assert pair.is_at_rest()
    assert pair.cached._host.statistics().reported_not_on_device == 0
    pair.ask_right(opening)
    assert pair.is_at_rest()


def test_without_room_beside_its_checkpoint_a_prompt_is_computed_from_there():
    """Chunks of 64 need no checkpoint at 64, but three blocks at 48: those are held while the rest is looked for."""
    pair = Pair("llama4", "eager", device_blocks=6, window=64)
    whole = document(1, 65)
    pair.ask_right(whole, 1)
    pair.cached.pool.reset()
    pair.ask_right(whole[:48], 1)
    again = pair.ask_right(whole, 1)
    assert (again.device_hit_tokens, again.host_hit_tokens, again.computed_tokens) == (48, 0, 17)
    assert pair.is_at_rest()


@modes
@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_that_fills_the_device_pool(family, mode):
    """With the fewest blocks that take it: its own and one checkpoint's."""
    pair = Pair(family, mode)
    for length in (79, 80, 96):
        blocks = -(-length // BLOCK) + pair.plain._coordinator.num_blocks(-(-length // BLOCK))
        tight = Pair(family, mode, device_blocks=blocks)
        for seed in (1, 2, 1, 2, 2):
            tight.ask_right(document(seed, length), 1)
            assert tight.is_at_rest()
        with pytest.raises(PromptRefused, match="device blocks, but the pool has"):
            tight.cached.answer(document(1, length + 2 * BLOCK), 2)


@modes
@pytest.mark.parametrize("family", FAMILIES)
def test_host_memory_for_one_chunk_and_its_checkpoint(family, mode):
    planner = Pair(family, "off").cached.planner
    blocks = planner.host_blocks_per_chunk + planner.checkpoint_blocks(1)
    pair = Pair(family, mode, host_bytes=blocks * planner.host_block_bytes)
    for _ in range(2):
        for length in (17, 90, 18):
            pair.ask_right(document(length, length), 20)
            pair.cached.pool.reset()
            pair.ask_right(document(length, length), 1)
            assert pair.is_at_rest()
        pair.evict_all()
    if mode == "eager":  # a prompt of two blocks is all it can keep
        pair.cached.answer(document(17, 17), 1)
        pair.cached.pool.reset()
        assert pair.ask_right(document(17, 17), 1).host_hit_tokens == 16


@modes
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "llama4", "jamba"])
@pytest.mark.parametrize(("block_tokens", "prefill_tokens"), [(8, 8), (8, 64), (16, 16), (32, 32), (32, 64)])
def test_blocks_and_prefill_chunks_of_other_sizes(family, mode, block_tokens, prefill_tokens):
    pair = Pair(family, mode, block_tokens=block_tokens, prefill_tokens=prefill_tokens)
    for length in (33, 64, 100):
        opening = document(length, length)
        first = pair.ask_right(opening, 11)
        pair.evict_all()
        assert pair.ask_right(opening).host_hit_tokens == last_boundary(length, block_tokens)
        turn = pair.ask_right([*opening, *first.tokens, *document(7, 9)])
        assert hit(turn) == (length + 10) // block_tokens * block_tokens
    assert pair.is_at_rest()


@modes
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "llama4"])
@pytest.mark.parametrize("window", [1, 15, 16, 17, 33, 48, 64, 100])
def test_windows_and_attention_chunks_of_other_sizes(family, mode, window):
    """Neither needs to be a multiple of a block."""
    pair = Pair(family, mode, window=window)
    for length in (17, window + 1, 2 * window, 113):
        opening = document(length, length)
        pair.ask_right(opening, 3)
        pair.evict_all()
        again = pair.ask_right(opening, 18)
        assert hit(again) == last_boundary(length)
        assert hit(pair.ask_right([*opening, *again.tokens, 5])) == (length + 17) // BLOCK * BLOCK
    assert pair.is_at_rest()


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision(family):
    pair = Pair(family, "lazy", dtype=torch.bfloat16)
    for length in (48, 65, 100):
        opening = document(length, length)
        first = pair.ask_right(opening, 17)
        pair.evict_all()
        assert pair.ask_right(opening).host_hit_tokens == last_boundary(length)
        pair.evict_all()
        turn = pair.ask_right([*opening, *first.tokens, *document(7, 9)])
        assert turn.host_hit_tokens == (length + 16) // BLOCK * BLOCK
    assert pair.is_at_rest()


@pytest.mark.parametrize("family", FAMILIES)
def test_control_half_precision_shows_a_group_that_is_wrong(family):
    """All that is loaded of it: one chunk of five may drown in the noise. For one piece there is float32.

    One token or two follow the hit: a short convolution forgets its state in three, and only attention remembers it.
    """
    for at, piece in enumerate(Pair(family, "off").cached.planner.pieces):

        def damaging(copier, tensors, at=at):
            return CorruptingCopier(copier, tensors, at, loads=None, blocks=slice(None))

        pair = Pair(family, "eager", wrap_copier=damaging, dtype=torch.bfloat16)
        for seed in range(8):
            pair.ask(document(seed, 81 + seed % 2), 1)
        pair.evict_all()
        answers = [pair.ask(document(seed, 81 + seed % 2), 1) for seed in range(8)]
        assert all(answer.host_hit_tokens == 80 for answer, _, _ in answers)
        assert sum(off > pair.tolerance for _, off, _ in answers) >= 7, piece.group.name


def test_cuts_may_come_as_they_are_given():
    """An answer's cuts are a tuple."""
    generator = PrefixCachedGenerator(model("llama"), device_blocks=8, offload="off")
    assert generator.answer([1] * 20, 1, cuts=generator.answer([1] * 20, 1).cuts).cuts == (20,)
    with pytest.raises(PromptRefused, match="cuts must ascend and end at the prompt's 20 tokens"):
        generator.answer([1] * 20, 1, cuts=(16,))
