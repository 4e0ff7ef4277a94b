"""Generation with the cache equals generation without it, and a damaged block is seen.

Tokens alone prove little on random models, so the logits of the first generated token are compared too, with the same
engine, cache off, and the same prefill cuts. The control at the end of each comparison zeroes one loaded block: it
must show in at least 7 of 8 prompts.
"""

import gc

import pytest
import torch

from builtin_models import build_model
from connector.transformers import PrefixCachedGenerator, PromptRefused
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import Direction
from cpu_prefix_cache.testing import CorruptingCopier, MeddlingCopier
from tests.sizes import sizes_of_containers

TOLERANCE = 1e-4
BLOCK = 16
DEVICE_BLOCKS = 24  # one prompt and its answer at a time
HOST_BYTES = 1 << 24
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, "


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return build_model("full", hidden=64, layers=2)


class Pair:
    """A generator, and the same one without a cache."""

    def __init__(self, model, offload="lazy", device_blocks=DEVICE_BLOCKS, prefill_tokens=64, **options) -> None:
        self.cached = PrefixCachedGenerator(
            model,
            device_blocks=device_blocks,
            host_bytes=HOST_BYTES,
            offload=offload,
            prefill_tokens=prefill_tokens,
            **options,
        )
        self.plain = PrefixCachedGenerator(
            model, device_blocks=device_blocks, prefill_tokens=prefill_tokens, prefix_caching=False
        )

    def ask(self, prompt, new_tokens=6):
        """The answer of the cached generator and how far its logits are from the plain one's, in deviations."""
        answer = self.cached.answer(prompt, new_tokens)
        hit = answer.prompt_tokens - answer.computed_tokens
        cuts = [
            *range(self.plain.prefill_tokens, hit, self.plain.prefill_tokens),
            *([hit] if hit else []),
            *answer.cuts,
        ]
        plain = self.plain.answer(prompt, new_tokens, cuts=cuts)
        error = float((answer.first_logits - plain.first_logits).abs().max() / plain.first_logits.std())
        return answer, error, answer.tokens == plain.tokens

    def ask_right(self, prompt, new_tokens=6):
        answer, error, same = self.ask(prompt, new_tokens)
        assert error <= TOLERANCE
        assert same
        return answer

    def evict_all(self):
        """Fill the device with something else."""
        for filler in range(4):
            self.cached.answer(f"{filler} something else entirely, " * 10, 2)


def prompt_of(length, seed=0):
    """Real text of `length` bytes, different from its first one on for each seed."""
    return list((f"{seed}: " + TEXT * 4)[:length].encode())


@pytest.mark.parametrize("offload", ["lazy", "eager"])
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 100, 112, 113, 200])
def test_a_prompt_comes_back_from_the_host_up_to_its_last_boundary(model, offload, length):  # S7.27, O8.11, L5.6
    pair = Pair(model, offload)
    prompt = prompt_of(length)
    assert pair.ask_right(prompt).computed_tokens == length
    pair.evict_all()
    again = pair.ask_right(prompt)
    assert again.host_hit_tokens + again.device_hit_tokens == (length - 1) // BLOCK * BLOCK
    assert again.host_hit_tokens > 0 or length <= BLOCK


@pytest.mark.parametrize("offload", ["lazy", "eager"])
def test_a_second_turn_finds_the_first_one_and_its_answer(model, offload):
    pair = Pair(model, offload)
    first = pair.ask_right(prompt_of(150), new_tokens=20)
    pair.evict_all()
    second_prompt = [*prompt_of(150), *first.tokens, *b" and then?"]
    second = pair.ask_right(second_prompt)
    assert second.host_hit_tokens >= 160  # 150 of the prompt, 19 of the answer have KV: 10 blocks


@pytest.mark.parametrize("offload", ["lazy", "eager"])
def test_two_prompts_share_what_they_have_in_common(model, offload):
    pair = Pair(model, offload)
    common = prompt_of(130)
    pair.ask_right([*common, *b" one way to go on from here"])
    other = pair.ask_right([*common, *b", or another one, which branches off"])
    assert other.device_hit_tokens == 128
    pair.evict_all()
    assert pair.ask_right([*common, *b" one way to go on from here"]).host_hit_tokens >= 128
    pair.evict_all()
    assert pair.ask_right([*common, *b" a third"]).host_hit_tokens >= 128


def test_a_prompt_still_on_the_device_needs_no_host(model):
    pair = Pair(model)
    pair.ask_right(prompt_of(100))
    again = pair.ask_right(prompt_of(100))
    assert (again.device_hit_tokens, again.host_hit_tokens, again.computed_tokens) == (96, 0, 4)


@pytest.mark.parametrize("offload", ["lazy", "eager"])
def test_prompts_seen_once_and_short_ones_are_not_stored(model, offload):
    pair = Pair(model, offload, store_after=2, min_store_tokens=100)
    hits = []
    for length in (100, 100, 100, 99, 99, 99):
        hits.append(pair.ask_right(prompt_of(length, seed=length)).host_hit_tokens)
        pair.evict_all()
    assert hits == [0, 0, 96, 0, 0, 0]


def test_with_offload_off_what_the_device_evicts_is_computed_again(model):
    pair = Pair(model, "off")
    pair.ask_right(prompt_of(100))
    pair.evict_all()
    assert pair.ask_right(prompt_of(100)).computed_tokens == 100


@pytest.mark.parametrize("offload", ["lazy", "eager"])
def test_control_a_damaged_block_shows_in_the_logits(model, offload):
    damage = []

    def damaging(copier, tensors):
        damage.append(CorruptingCopier(copier, tensors, group=0, loads=None))
        return damage[0]

    seen = 0
    pair = Pair(model, offload, wrap_copier=damaging)
    for seed in range(8):
        prompt = prompt_of(150 + seed, seed)
        pair.ask(prompt)
        pair.evict_all()
        before = damage[0].corrupted
        _, error, _ = pair.ask(prompt)
        assert damage[0].corrupted > before
        seen += error > TOLERANCE
        pair.evict_all()
    assert seen >= 7


class FailingLoads(MeddlingCopier):
    """A copier whose loads raise."""

    def __init__(self, copier) -> None:
        super().__init__(copier)
        self.failed = 0

    def copy(self, direction, copies):
        if direction is Direction.LOAD:
            self.failed += 1
            raise RuntimeError("the link is down")
        return self.copier.copy(direction, copies)


def test_loads_that_fail_are_computed_and_not_tried_again(model):  # S7.24
    failing = []

    def wrap(copier, tensors):
        failing.append(FailingLoads(copier))
        return failing[0]

    pair = Pair(model, wrap_copier=wrap)
    pair.ask_right(prompt_of(150))
    pair.evict_all()
    again = pair.ask_right(prompt_of(150))
    assert (again.host_hit_tokens, again.computed_tokens) == (0, 150)
    assert failing[0].failed == 1
    assert pair.cached.statistics().loads_failed == 1


def test_text_goes_in_and_text_comes_out(model):
    generator = PrefixCachedGenerator(model, device_blocks=DEVICE_BLOCKS, host_bytes=HOST_BYTES)
    first, second = generator.generate(["What is a prefix?", "What is a prefix cache?"], max_new_tokens=4)
    assert isinstance(first.text, str)
    assert len(first.tokens) == 4
    assert (first.prompt_tokens, second.prompt_tokens) == (17, 23)
    assert second.device_hit_tokens == 16


def test_a_prompt_that_does_not_fit_is_refused_in_a_sentence(model):
    generator = PrefixCachedGenerator(model, device_blocks=2, host_bytes=HOST_BYTES)
    with pytest.raises(PromptRefused, match="3 device blocks, but the pool has 2"):
        generator.answer([1] * 30, 4)
    with pytest.raises(PromptRefused, match="more than the model's 8192"):
        generator.answer([1] * 9000, 4)
    with pytest.raises(PromptRefused, match="at least one token"):
        generator.answer([], 4)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"device_blocks": 0}, "device pool needs at least 1 block"),
        ({"prefill_tokens": 20}, "multiple of the 16 tokens"),
        ({"offload": "sometimes"}, "lazy, eager"),
        ({"policy": "random"}, "policy must be one of"),
        ({"store_after": 0}, "store_after must be a whole number of at least 1"),
        ({"min_store_tokens": -1}, "min_store_tokens must be a whole number of at least 0"),
        ({"host_bytes": 0}, 'to use no host memory, set offload="off"'),
        ({"host_bytes": 100}, "host_bytes must hold at least one chunk"),
        ({"host_bytes": 1 << 60}, "ask for at most"),
    ],
)
def test_a_bad_configuration_is_refused_in_a_sentence(model, options, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        PrefixCachedGenerator(model, **{"device_blocks": 8, "host_bytes": HOST_BYTES, **options})


def device_bytes():
    gc.collect()
    return sum(each.untyped_storage().nbytes() for each in gc.get_objects() if issubclass(type(each), torch.Tensor))


def test_device_bytes_are_constant(model):
    generator = PrefixCachedGenerator(model, device_blocks=DEVICE_BLOCKS, host_bytes=HOST_BYTES)
    region = generator.kv.region.data_ptr()
    for seed in range(3):
        generator.answer(prompt_of(200, seed), 2)
    before = device_bytes()
    for seed in range(20):
        generator.answer(prompt_of(100 + seed, seed), 2)
    assert device_bytes() == before
    assert generator.kv.region.data_ptr() == region


@pytest.mark.parametrize("offload", ["lazy", "eager"])
def test_two_thousand_short_requests_leave_everything_at_its_steady_size(offload):
    torch.set_num_threads(1)
    generator = PrefixCachedGenerator(
        build_model("full", hidden=16, layers=1), device_blocks=8, host_bytes=1 << 16, offload=offload
    )
    sizes = []
    for half in range(2):
        for number in range(1000):
            generator.answer(prompt_of(33 + number % 40, seed=1000 * half + number), 2)
        sizes.append(sizes_of_containers(generator))
    assert sizes[0].keys() == sizes[1].keys()
    assert any(".ledger." in path for path in sizes[0]), "the walk does not reach what it is to measure"
    grown = {name: (sizes[0][name], size) for name, size in sizes[1].items() if size > 1.5 * sizes[0][name] + 16}
    assert not grown
    assert generator.statistics().pool.evictions > 1000
    generator.pool.check_valid()
