"""A model whose weights change under a cache: nobody calls `reset`, and no answer comes from KV of before."""

import logging

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from builtin_models import build_model
from connector.transformers import HostPrefixCache
from connector.transformers.changes import Weights
from connector.transformers.inputs import PromptRefused
from cpu_prefix_cache import MisuseError
from tests.connector.serving import generated

PROMPT = [at * 7 % 256 for at in range(200)]


def model(seed=0, arch="full"):
    return build_model(arch, hidden=64, layers=2 if arch == "full" else 4, seed=seed)


def of_weights(name, of):
    """A projection of the first layer: K of what is cached depends on it."""
    return next(each for each_name, each in of.named_parameters() if name in each_name)


def step_of_an_optimizer(of):
    with torch.enable_grad():
        of(torch.tensor([PROMPT])).logits.square().mean().backward()
    torch.optim.SGD(of.parameters(), lr=0.5).step()
    of.zero_grad()


def write(of):
    with torch.no_grad():
        of_weights("k_proj", of).mul_(1.5)


def write_uncounted(of):
    """As adapters are merged, and weights are received: torch counts no write to `.data`."""
    weight, before = of_weights("k_proj", of), of_weights("k_proj", of)._version
    weight.data += torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    assert weight._version == before


def write_under_inference(of):
    with torch.inference_mode():
        of_weights("k_proj", of).mul_(1.5)


def load(of):
    of.load_state_dict(model(seed=1).state_dict())


def put_another_in_place(of):
    of.model.layers[0].self_attn.k_proj.weight = torch.nn.Parameter(of_weights("k_proj", of) * 1.5)


def point_to_other_data(of):
    of_weights("k_proj", of).data = of_weights("k_proj", of).data * 1.5


class LowRank(torch.nn.Module):
    """An adapter, as PEFT's are."""

    def __init__(self, base):
        super().__init__()
        self.base, self.added = base, torch.nn.Linear(base.in_features, base.out_features, bias=False)
        self._disable_adapters = False

    def forward(self, hidden):
        return self.base(hidden) if self._disable_adapters else self.base(hidden) + self.added(hidden)


def add_an_adapter(of):
    attention = of.model.layers[0].self_attn
    torch.manual_seed(2)
    attention.k_proj = LowRank(attention.k_proj)


CHANGES = [
    step_of_an_optimizer,
    write,
    write_uncounted,
    write_under_inference,
    load,
    put_another_in_place,
    point_to_other_data,
    add_an_adapter,
]


def cache_of(of, **options):
    return HostPrefixCache(of, host_bytes=1 << 22, **options)


def first_logits(cache):
    """The past that an answer began with, and the logits of its first token."""
    with cache.past(PROMPT) as past:
        return past, generated(cache.model, PROMPT, past, new_tokens=3)[0][0]


def expected(change):
    of = model()
    change(of)
    return generated(of, PROMPT, new_tokens=3)[0][0]


def test_a_past_of_earlier_weights_is_refused_each_time():
    of = model()
    with cache_of(of, offload="eager") as cache:
        first_logits(cache)
        with cache.past(PROMPT) as past:
            assert past.hit_tokens > 0
            CHANGES[0](of)
            for _ in range(2):
                with pytest.raises(MisuseError, match="computed by other weights"):
                    generated(of, PROMPT, past, new_tokens=1)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_an_answer_after_a_change_is_that_of_the_new_weights(change, caplog):
    of = model()
    with cache_of(of, offload="eager") as cache:
        first_logits(cache)
        change(of)
        with caplog.at_level(logging.WARNING):
            past, logits = first_logits(cache)
        assert past.hit_tokens == 0
        torch.testing.assert_close(logits, expected(change))
        assert [each.getMessage()[:32] for each in caplog.records] == ["the model has other weights than"]
        again, logits = first_logits(cache)
        assert again.hit_tokens > 0
        torch.testing.assert_close(logits, expected(change), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_cache_that_does_not_look_answers_from_the_old_weights(change, monkeypatch):
    """The control."""
    monkeypatch.setattr(Weights, "follow", lambda weights: None)
    of = model()
    with cache_of(of) as cache:
        first_logits(cache)
        change(of)
        past, logits = first_logits(cache)
    assert past.hit_tokens > 0 and not torch.allclose(logits, expected(change), rtol=1e-3, atol=1e-3)


def test_a_prompt_has_tokens_of_the_vocabulary_that_the_model_has_now():
    of = model()
    first = of.config.vocab_size
    with cache_of(of) as cache:
        of.resize_token_embeddings(first + 6)
        with cache.past([*PROMPT, first + 5]):
            pass
        of.resize_token_embeddings(first - 6)
        with pytest.raises(PromptRefused, match=f"ids from 0 to {first - 7}"), cache.past([*PROMPT, first - 6]):
            pass
        with cache.past([*PROMPT, first - 7]):
            pass


def test_an_adapter_that_is_off_for_one_answer_alone_counts():
    """Nothing that it computed is kept, though at the end everything is as at the beginning."""
    of = model()
    add_an_adapter(of)
    adapter = of.model.layers[0].self_attn.k_proj
    with cache_of(of) as cache:
        with cache.past(PROMPT) as past:
            adapter._disable_adapters = True
            generated(of, PROMPT, past, new_tokens=3)
            adapter._disable_adapters = False
        assert first_logits(cache)[0].hit_tokens == 0


def test_an_adapter_that_is_switched_off_counts():
    of = model()
    add_an_adapter(of)
    with cache_of(of) as cache:
        first_logits(cache)
        of.model.layers[0].self_attn.k_proj._disable_adapters = True
        past, logits = first_logits(cache)
    assert past.hit_tokens == 0
    torch.testing.assert_close(logits, generated(model(), PROMPT, new_tokens=3)[0][0])


@pytest.mark.parametrize("arch", ["full", "swa", "hybrid", "mla"])
def test_changes_that_a_model_makes_while_it_computes_are_none(arch):
    of = model(arch=arch)
    resets = []
    weights = Weights(of, lambda: resets.append(1))
    with cache_of(of) as cache:
        for _ in range(2):
            past, _ = first_logits(cache)
        assert past.hit_tokens > 0
    weights.follow()
    assert not resets


def test_tensors_of_any_dtype_and_stride_are_looked_at():
    of = torch.nn.Module()
    kinds = [torch.float8_e4m3fn, torch.bool, torch.bfloat16, torch.uint8, torch.complex64]
    for at, dtype in enumerate(kinds):
        of.register_buffer(f"of_kind_{at}", torch.zeros(5, 7).to(dtype).t())
    of.register_buffer("empty", torch.zeros(0))
    of.register_buffer("one", torch.zeros(()))
    of.register_buffer("repeated", torch.zeros(1, 7).expand(5, 7))
    of.register_buffer("elsewhere", torch.zeros(5, device="meta"))
    resets = []
    weights = Weights(of, lambda: resets.append(1))
    weights.follow()
    assert not resets
    for at, name in enumerate([*(f"of_kind_{at}" for at in range(len(kinds))), "one", "repeated"]):
        values = of.get_buffer(name).data
        values[(0,) * values.ndim] = 1
        weights.follow()
        assert len(resets) == at + 1, name


def test_parts_of_a_quantized_weight_are_looked_at():
    of, parts, resets = torch.nn.Module(), (torch.zeros(5), torch.zeros(5)), []
    of.weight = torch.nn.Parameter(TwoTensor(*parts), requires_grad=False)
    weights = Weights(of, lambda: resets.append(1))
    for at, part in enumerate(parts):
        weights.follow()
        assert len(resets) == at
        part.data[0] = 1
    weights.follow()
    assert len(resets) == 2
