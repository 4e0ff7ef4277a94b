"""A tier below the cache's host memory: found again after a restart, by the same weights alone."""

import json
import sys

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor
from transformers import AutoModelForCausalLM

from builtin_models import build_model
from connector.transformers import HostPrefixCache, identity
from connector.transformers.identity import model_name, weights_revision, with_code
from cpu_prefix_cache import SharedTier
from cpu_prefix_cache.slab.settings import FileTier
from cpu_prefix_cache.testing import MemoryStore
from tests.connector.serving import generated

PROMPT = [at * 7 % 256 for at in range(400)]
HOST_BYTES, TIER_BYTES = 4 << 20, 32 << 20


def model(arch="full", seed=0):
    return build_model(arch, hidden=64, layers=2 if arch == "full" else 4, seed=seed)


def cache_of(of, below):
    return HostPrefixCache(of, host_bytes=HOST_BYTES, device_bytes="1MiB", below=below)


def ask(cache, ids=PROMPT):
    """Tokens that the tier had and the host had not, the logits of the first new token, and the tokens."""
    before = cache.statistics().tier.hit_tokens
    with cache.past(ids) as past:
        logits, tokens = generated(cache.model, ids, past, new_tokens=4)
    return cache.statistics().tier.hit_tokens - before, logits[0], tokens


def answered(of, folder, **options):
    with cache_of(of, FileTier(str(folder), TIER_BYTES, **options)) as cache:
        return ask(cache)


def answered_from(store, of, **options):
    with shared(of, store, **options) as cache:
        return ask(cache)


def shared(of, store, **options):
    return cache_of(of, SharedTier(store, ask_seconds=10.0, **options))


def found(answers):
    return [tokens for tokens, _, _ in answers]


def assert_same(one, other):
    assert one[2] == other[2]
    torch.testing.assert_close(one[1], other[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arch", ["full", "swa", "hybrid", "mla"])
def test_a_restarted_cache_finds_the_prefix_in_the_files(tmp_path, arch):
    first, again = answered(model(arch), tmp_path), answered(model(arch), tmp_path)
    assert first[0] == 0 < again[0]
    assert_same(first, again)


def test_other_weights_find_nothing(tmp_path):
    answered(model(seed=0), tmp_path)
    with cache_of(model(seed=1), FileTier(str(tmp_path), TIER_BYTES, keep_others=True)) as cache:
        assert cache.statistics().tier.found == ask(cache)[0] == 0
    assert len(list(tmp_path.iterdir())) == 2


def test_model_and_revision_of_a_tier_are_options(tmp_path):
    answered(model(seed=0), tmp_path, model="mine", revision="1")
    assert answered(model(seed=0), tmp_path, model="mine", revision="1")[0] > 0


@pytest.mark.parametrize("options", [{}, {"revision": "1"}], ids=["weights", "revision"])
def test_another_release_of_transformers_finds_nothing(tmp_path, monkeypatch, options):
    """Its code may compute other KV of the same weights."""
    answered(model(), tmp_path, keep_others=True, **options)
    with monkeypatch.context() as upgraded:
        upgraded.setattr("connector.transformers.identity.transformers.__version__", "another")
        assert answered(model(), tmp_path, keep_others=True, **options)[0] == 0
    assert answered(model(), tmp_path, keep_others=True, **options)[0] > 0


CODE = """
from transformers import LlamaForCausalLM
from .parts import SCALE


class Mine(LlamaForCausalLM):
    pass
"""


def trusted(folder, parts):
    """A model whose code lies beside its weights, in two files."""
    model().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModelForCausalLM": "mine.Mine"}}))
    (folder / "mine.py").write_text(CODE)
    (folder / "parts.py").write_text(parts)
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)


def test_code_that_came_with_a_model_is_known_by_its_bytes(tmp_path, monkeypatch):
    """It may compute other KV of the same weights, and is of no release."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    first = with_code("1", trusted(tmp_path / "first", "SCALE = 1"))
    assert with_code("1", trusted(tmp_path / "moved", "SCALE = 1")) == first
    assert with_code("1", trusted(tmp_path / "first", "SCALE = 2")) != first
    assert ", code " in first and ", code " not in with_code("1", model())


def test_a_revision_that_is_given_does_not_cover_another_configuration(tmp_path):
    """A rotary scaling that `from_pretrained` was given is in no file of the weights."""
    scaled = model()
    scaled.config.rope_parameters = {**scaled.config.rope_parameters, "rope_theta": 7.0}
    answered(model(), tmp_path, keep_others=True, revision="1")
    assert answered(scaled, tmp_path, keep_others=True, revision="1")[0] == 0
    assert answered(model(), tmp_path, keep_others=True, revision="1")[0] > 0


def test_caches_whose_weights_have_changed_alike_share_again():
    """Nobody resets them."""
    store, hits = MemoryStore(), []
    for _ in range(2):
        with shared(of := model(), store) as cache:
            ask(cache)
            with torch.no_grad():
                for parameter in of.parameters():
                    parameter.mul_(1.05)
            hits.append(ask(cache)[0])
    assert hits[0] == 0 < hits[1]


SPECIAL = [257 + at * 7 % 60 for at in range(400)]


def train_special_tokens(of):
    with torch.no_grad():
        of.get_input_embeddings().weight[257:] *= 3.0


def tier_hits_after(change, of, store):
    with shared(of, store) as cache:
        ask(cache, SPECIAL)
        ask(cache)
        change(cache)
        return ask(cache, SPECIAL)[0]


def test_weights_that_have_changed_in_a_few_rows_find_nothing_of_before():
    assert tier_hits_after(lambda cache: train_special_tokens(cache.model), model(), MemoryStore()) == 0


def test_after_a_reset_nothing_of_before_is_found_though_the_weights_are_the_same():
    """Control: another cache finds it."""
    of, store = model(), MemoryStore()
    assert tier_hits_after(HostPrefixCache.reset, of, store) == 0
    with shared(of, store) as cache:
        assert ask(cache, SPECIAL)[0] > 0


def test_a_revision_changes_with_any_byte_and_with_adapters():
    same = model()
    rows = model()
    off = model()
    train_special_tokens(rows)
    off.model.layers[0].self_attn.k_proj._disable_adapters = True
    assert len({weights_revision(each) for each in (same, rows, off)}) == 3


def test_a_revision_changes_with_any_part_of_a_quantized_weight():
    """Such a tensor is made of others, such as codes and their scales."""

    def revision(codes, scale):
        of, width = model(), (64,)
        made_of = TwoTensor(torch.full(width, codes), torch.full(width, scale))
        of.model.norm.weight = torch.nn.Parameter(made_of, requires_grad=False)
        return weights_revision(of)

    assert revision(1.0, 1.0) == revision(1.0, 1.0)
    assert len({revision(1.0, 1.0), revision(1.0, 2.0), revision(2.0, 1.0)}) == 3


def test_a_reset_that_fails_is_tried_again(monkeypatch):
    with shared(of := model(), MemoryStore()) as cache:
        ask(cache)
        train_special_tokens(of)
        with monkeypatch.context() as broken:
            broken.setattr(identity, "_digest", raising)
            with pytest.raises(RuntimeError, match="out of memory"):
                ask(cache)
        with cache.past(PROMPT) as past:
            assert past.hit_tokens == 0


def raising(tensor):
    raise RuntimeError("out of memory")


def test_a_name_alone_does_not_identify_the_weights():
    store = MemoryStore()
    first, other, again = found(answered_from(store, model(seed=seed), model="mine") for seed in (0, 1, 0))
    assert first == other == 0 < again


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


def test_a_revision_is_the_same_in_whatever_order_a_configuration_has_its_fields():
    """Some models make dictionaries of a set of names, whose order is another one in each process."""
    one, other = model(), model()
    for each, names in (one, "ab"), (other, "ba"):
        each.config.rope_parameters = {name: {"rope_theta": 7.0} for name in names}
    assert with_code("1", one) == with_code("1", other) != with_code("1", model())
    assert weights_revision(one) == weights_revision(other) != weights_revision(model())


def test_another_cache_finds_the_prefix_in_a_store_that_both_share():
    store = MemoryStore()
    first, again, other = (answered_from(store, model(seed=seed)) for seed in (0, 0, 1))
    assert first[0] == other[0] == 0 < again[0]
    assert_same(first, again)
