"""A tier of files below the generator's host memory: found again after a restart, by the same weights alone."""

import pytest
import torch

from builtin_models import build_model
from connector.transformers import PrefixCachedGenerator, identity
from connector.transformers.identity import model_name, weights_revision
from cpu_prefix_cache import ConfigurationError, SharedTier
from cpu_prefix_cache.slab.settings import FileTier
from cpu_prefix_cache.testing import MemoryStore

PROMPT = [at * 7 % 256 for at in range(400)]
HOST_BYTES, TIER_BYTES = 4 << 20, 32 << 20


def model(arch="full", seed=0):
    return build_model(arch, hidden=64, layers=2 if arch == "full" else 4, seed=seed)


def answered(of, folder, **said):
    below = FileTier(str(folder), TIER_BYTES, **said)
    generator = PrefixCachedGenerator(of, device_blocks=96, host_bytes=HOST_BYTES, offload="eager", below=below)
    try:
        return generator.answer(PROMPT, 4)
    finally:
        generator.close()


@pytest.mark.parametrize("arch", ["full", "swa", "hybrid", "mla"])
def test_a_restarted_generator_finds_the_prefix_in_the_files(tmp_path, arch):
    first, again = answered(model(arch), tmp_path), answered(model(arch), tmp_path)
    assert first.tier_hit_tokens == 0 < again.tier_hit_tokens == again.host_hit_tokens
    assert again.tokens == first.tokens
    torch.testing.assert_close(again.first_logits, first.first_logits, rtol=1e-4, atol=1e-4)


def test_other_weights_find_nothing(tmp_path):
    answered(model(seed=0), tmp_path)
    below = FileTier(str(tmp_path), TIER_BYTES, keep_others=True)
    generator = PrefixCachedGenerator(model(seed=1), device_blocks=96, host_bytes=HOST_BYTES, below=below)
    assert generator.tier_statistics().found == generator.answer(PROMPT, 2).tier_hit_tokens == 0
    generator.close()
    assert len(list(tmp_path.iterdir())) == 2


def test_model_and_revision_of_a_tier_are_options(tmp_path):
    answered(model(seed=0), tmp_path, model="mine", revision="1")
    assert answered(model(seed=0), tmp_path, model="mine", revision="1").tier_hit_tokens > 0


def test_generators_whose_weights_have_changed_alike_share_again():
    """Nobody resets them."""
    store, found = MemoryStore(), []
    for _ in range(2):
        of, below = model(), SharedTier(store, ask_seconds=10.0)
        options = dict(device_blocks=96, host_bytes=HOST_BYTES, offload="eager")
        with PrefixCachedGenerator(of, below=below, **options) as generator:
            generator.answer(PROMPT, 4)
            with torch.no_grad():
                for parameter in of.parameters():
                    parameter.mul_(1.05)
            found.append(generator.answer(PROMPT, 4).tier_hit_tokens)
    assert found[0] == 0 < found[1]


SPECIAL = [257 + at * 7 % 60 for at in range(400)]


def train_special_tokens(of):
    with torch.no_grad():
        of.get_input_embeddings().weight[257:] *= 3.0


def tier_hits_after(change, of, store):
    with shared(of, store) as generator:
        generator.answer(SPECIAL, 4)
        generator.answer(PROMPT, 4)
        change(generator)
        return generator.answer(SPECIAL, 4).tier_hit_tokens


def shared(of, store):
    below = SharedTier(store, ask_seconds=10.0)
    return PrefixCachedGenerator(of, device_blocks=96, host_bytes=HOST_BYTES, offload="eager", below=below)


def test_weights_that_have_changed_in_a_few_rows_find_nothing_of_before():
    assert tier_hits_after(lambda generator: train_special_tokens(generator.model), model(), MemoryStore()) == 0


def test_after_a_reset_nothing_of_before_is_found_though_the_weights_are_the_same():
    """Control: another generator finds it."""
    of, store = model(), MemoryStore()
    assert tier_hits_after(PrefixCachedGenerator.reset, of, store) == 0
    with shared(of, store) as generator:
        assert generator.answer(SPECIAL, 4).tier_hit_tokens > 0


def test_a_revision_changes_with_any_byte_and_with_adapters():
    same = model()
    rows = model()
    off = model()
    train_special_tokens(rows)
    off.model.layers[0].self_attn.k_proj._disable_adapters = True
    assert len({weights_revision(each) for each in (same, rows, off)}) == 3


def test_a_reset_that_fails_is_tried_again(monkeypatch):
    with shared(of := model(), MemoryStore()) as generator:
        generator.answer(PROMPT, 4)
        train_special_tokens(of)
        with monkeypatch.context() as broken:
            broken.setattr(identity, "_digest", raising)
            with pytest.raises(RuntimeError, match="out of memory"):
                generator.answer(PROMPT, 4)
        assert generator.answer(PROMPT, 4).host_hit_tokens == 0


def raising(tensor):
    raise RuntimeError("out of memory")


def test_a_name_alone_does_not_identify_the_weights(tmp_path):
    store = MemoryStore()
    first, other, again = (answered_from(store, model(seed=seed), model="mine") for seed in (0, 1, 0))
    assert first.tier_hit_tokens == other.tier_hit_tokens == 0 < again.tier_hit_tokens


def test_a_revision_changes_with_weights_and_configuration_alone():
    same = model()
    other = model(seed=1)
    changed = model()
    assert weights_revision(same) == weights_revision(model())
    assert model_name(same) == "llama"
    same.config._name_or_path = "/somewhere/else"
    assert weights_revision(same) == weights_revision(model()) and model_name(same) == "/somewhere/else"
    changed.config.rope_parameters = {**changed.config.rope_parameters, "rope_theta": 7.0}
    half = model().to(torch.bfloat16)
    assert len({weights_revision(each) for each in (same, other, changed, half)}) == 4
    with torch.no_grad():
        next(reversed(list(same.parameters()))).reshape(-1)[0] += 1
    assert weights_revision(same) != weights_revision(model())


def test_without_host_memory_a_tier_is_below_nothing(tmp_path):
    with pytest.raises(ConfigurationError, match="below host memory"):
        PrefixCachedGenerator(model(), device_blocks=8, offload="off", below=FileTier(str(tmp_path), TIER_BYTES))


def test_another_generator_finds_the_prefix_in_a_store_that_both_share():
    store = MemoryStore()
    first, again, other = (answered_from(store, model(seed=seed)) for seed in (0, 0, 1))
    assert first.tier_hit_tokens == other.tier_hit_tokens == 0 < again.tier_hit_tokens
    assert again.tokens == first.tokens
    torch.testing.assert_close(again.first_logits, first.first_logits, rtol=1e-4, atol=1e-4)


def answered_from(store, of, **said):
    below = SharedTier(store, ask_seconds=10.0, **said)
    options = dict(device_blocks=96, host_bytes=HOST_BYTES, offload="eager")
    with PrefixCachedGenerator(of, below=below, **options) as generator:
        return generator.answer(PROMPT, 4)
