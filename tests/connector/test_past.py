"""A prompt's past from host memory, continued by `model.generate` itself, beside `generate` without it.

Logits of every step are equal within 1e-4 of their deviation, tokens are equal. In the control a block is zeroed while
it is loaded, and the comparison fails; test_families.py has the controls of every group.
"""

import contextlib
import copy
import inspect
import sys
import threading
from functools import cache, partial
from math import ceil

import pytest
import torch
from transformers import DynamicCache, WatermarkingConfig
from transformers.generation.streamers import BaseStreamer

from connector.transformers import HostPrefixCache, ModelPast, Past, PromptRefused, host_prefix_cache
from cpu_prefix_cache import ConfigurationError, MisuseError
from cpu_prefix_cache.testing import CorruptingCopier
from random_models import FAMILIES, build_family
from tests.connector.running import BLOCK, DEVICE, HIDDEN, apart, document, error, last_boundary

TOLERANCE = 1e-4
LONGEST = 140
NEW_TOKENS = 4
GREEDY = dict(do_sample=False, max_new_tokens=NEW_TOKENS)

families = pytest.mark.parametrize("family", FAMILIES)


@cache
def model(family):
    torch.set_num_threads(1)
    return build_family(family, hidden=HIDDEN, layers=2, window=32).to(DEVICE)


def cache_of(family, wrap_copier=None, blocks=None):
    """A cache whose device holds two prompts and some checkpoints."""
    size = ModelPast(model(family), BLOCK).block_bytes
    made = HostPrefixCache(model(family), host_bytes=1 << 23, max_model_len=8 * LONGEST)
    checkpoint = max(made.planner.checkpoint_blocks(depth) for depth in range(1, 20))
    made.close()
    blocks = blocks or 2 * ceil(LONGEST / BLOCK) + 4 * checkpoint
    return HostPrefixCache(
        model(family),
        host_bytes=1 << 23,
        device_bytes=blocks * size,
        max_model_len=8 * LONGEST,
        wrap_copier=wrap_copier,
    )


def row(tokens):
    return torch.tensor([tokens], device=DEVICE)


def generated(family, tokens, **options):
    options = dict(return_dict_in_generate=True, output_logits=True) | GREEDY | options
    return model(family).generate(row(tokens), **options)


@cache
def plain(family, tokens):
    return generated(family, tokens)


def asked(cache, family, tokens):
    """A prompt answered with its past: that, how far the logits are off, and whether the tokens are equal."""
    with cache.past(row(tokens)) as past:
        ours = generated(family, tokens, past_key_values=past)
    return past, *apart(ours, plain(family, tuple(tokens)))


def asked_right(cache, family, tokens):
    past, off, is_same = asked(cache, family, tokens)
    assert off <= TOLERANCE and is_same
    return past


def evict_all(cache):
    """Fill the device with other prompts."""
    for seed in range(3):
        filler = document(9000 + seed, LONGEST - 13)
        with cache.past(filler) as past:
            cache.model(row(filler[past.get_seq_length() :]), past_key_values=past)


def check_at_rest(cache):
    cache._pool.check_valid()
    cache._host.cache.check_valid()
    for pool in (cache._pool, cache._host.cache.pool):
        assert (pool.statistics().pinned, pool.statistics().writing) == (0, 0)
    assert cache._host.cache.statistics().running == 0


# Other ways to generate

ATTENTION = ("llama", "deepseek_v3", "gemma3")


def hit_of(family, tokens):
    """A cache that has a prompt on its host."""
    cache = cache_of(family)
    asked_right(cache, family, tokens)
    evict_all(cache)
    return cache


def both_ways(cache, family, tokens, **options):
    """Sequences with a hit of the host and without a cache, after the same seed."""
    with cache.past(row(tokens)) as past:
        assert past.hit_tokens == last_boundary(len(tokens)) > past.device_hit_tokens
        torch.manual_seed(3)
        ours = generated(family, tokens, past_key_values=past, **options)
    torch.manual_seed(3)
    return ours, generated(family, tokens, **options)


WAYS = {
    "sampled": dict(do_sample=True, temperature=1.3, top_k=40),
    "three sampled answers": dict(do_sample=True, num_return_sequences=3),
    "beams": dict(num_beams=3),
    "all beams": dict(num_beams=4, num_return_sequences=4, length_penalty=0.5),
    "penalties": dict(repetition_penalty=1.3, no_repeat_ngram_size=2),
    "a watermark": dict(do_sample=True, watermarking_config=WatermarkingConfig(bias=4.0, seeding_scheme="selfhash")),
}
REPEATED_STATES = ["qwen3_next", "falcon_h1"]  # `generate` repeats and exchanges them, too
DRAFTS = {
    "of the prompt": lambda family: dict(prompt_lookup_num_tokens=3),
    "of an assistant": lambda family: dict(
        assistant_model=build_family(family, hidden=HIDDEN, layers=2, window=32, seed=1)
    ),
    "all right": lambda family: dict(assistant_model=model(family)),
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("family", [*ATTENTION, *REPEATED_STATES])
def test_other_ways_to_generate_are_those_of_transformers(family, options):
    prompt = document(1, 100)
    with hit_of(family, prompt) as cache:
        ours, wanted = both_ways(cache, family, prompt, **{"max_new_tokens": 12} | options)
        assert torch.equal(ours.sequences, wanted.sequences)
        asked_right(cache, family, prompt)  # what several answers leave is one prompt's
        check_at_rest(cache)


@pytest.mark.parametrize("family", [*ATTENTION, *REPEATED_STATES])
def test_a_copy_of_a_past_is_as_good_and_of_its_own(family):
    """As transformers' guide reuses a prefix."""
    prompt = document(1, 100)
    with hit_of(family, prompt) as cache:
        with cache.past(row(prompt)) as past:
            copied, spare = copy.deepcopy(past), copy.deepcopy(past)
            answers = [generated(family, prompt, past_key_values=each) for each in (copied, past, spare)]
        assert past.hit_tokens == copied.hit_tokens > 0
        wanted = generated(family, prompt)
        for ours in answers:
            assert max(map(error, ours.logits, wanted.logits)) < TOLERANCE
        asked_right(cache, family, prompt)
        check_at_rest(cache)


@pytest.mark.parametrize("family", [*ATTENTION, *REPEATED_STATES])
@pytest.mark.parametrize("hits", [False, True])
def test_a_past_goes_on_after_tokens_that_were_refused(family, hits):
    prompt, others = document(1, 100), document(2, 100)
    with hit_of(family, prompt) if hits else cache_of(family) as cache, cache.past(row(prompt)) as past:
        assert bool(past.hit_tokens) is hits
        with pytest.raises(MisuseError, match="others than the past is of"):
            generated(family, others, past_key_values=past)
        assert apart(generated(family, prompt, past_key_values=past), plain(family, tuple(prompt))) == (
            pytest.approx(0, abs=TOLERANCE),
            True,
        )


@pytest.mark.parametrize("family", [*ATTENTION, *REPEATED_STATES])
@pytest.mark.parametrize("new_tokens", [1, NEW_TOKENS])
def test_a_past_that_has_an_answer_is_not_given_the_prompt_again(family, new_tokens):
    """transformers computes it behind the answer; a conversation that goes on with the answer is right."""
    prompt, more = document(1, 100), document(2, 7)
    with hit_of(family, prompt) as cache, cache.past(row(prompt)) as past:
        answer = generated(family, prompt, past_key_values=past, max_new_tokens=new_tokens)
        with pytest.raises(MisuseError, match="an answer among them, and the model is given the prompt again"):
            generated(family, prompt, past_key_values=past, max_new_tokens=new_tokens)
        longer = [*answer.sequences[0].tolist(), *more]
        ours = generated(family, longer, past_key_values=past)
        assert apart(ours, plain(family, tuple(longer)))[0] <= TOLERANCE


class Streamed(BaseStreamer):
    def __init__(self):
        self.tokens = []

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.tokens.append("end")


def test_a_streamer_is_given_the_prompt_and_the_answer():
    """As without a past: transformers passes the whole prompt on first."""
    prompt = document(1, 100)
    with hit_of("llama", prompt) as cache, cache.past(row(prompt)) as past:
        assert past.hit_tokens > 0
        streamed = Streamed()
        generated("llama", prompt, past_key_values=past, streamer=streamed)
    assert streamed.tokens == [*plain("llama", tuple(prompt)).sequences[0].tolist(), "end"]


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("family", ["llama", "falcon_h1"])
def test_a_damaged_past_shows_in_them(family, options):
    prompt = document(1, 100)
    with cache_of(family, wrap_copier=lambda *args: CorruptingCopier(*args, loads=None)) as cache:
        asked_right(cache, family, prompt)
        evict_all(cache)
        ours, wanted = both_ways(cache, family, prompt, **{"max_new_tokens": 12} | options)
        assert ours.sequences.shape != wanted.sequences.shape or not torch.equal(ours.sequences, wanted.sequences)


@pytest.fixture
def computed(monkeypatch):
    """How many tokens each layer has computed behind a past, call by call."""
    counts, update = [], Past.update

    def counting(past, keys, *args, **options):
        counts.append(keys.shape[-2])
        return update(past, keys, *args, **options)

    monkeypatch.setattr(Past, "update", counting)
    return counts


@pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS)
@pytest.mark.parametrize("family", [*ATTENTION, "lfm2"])
def test_drafts_are_checked_behind_a_past(family, drafts, computed):
    """transformers gives the model the whole prompt with the first ones."""
    prompt = document(1, 100)
    with hit_of(family, prompt) as cache:
        computed.clear()
        ours, wanted = both_ways(cache, family, prompt, max_new_tokens=12, **drafts(family))
        assert torch.equal(ours.sequences, wanted.sequences)
        assert max(map(error, ours.logits, wanted.logits)) < TOLERANCE
        assert max(computed) < len(prompt) // 2
        asked_right(cache, family, prompt)
        check_at_rest(cache)


@pytest.mark.parametrize("family", ["gemma3", "lfm2"])
def test_drafts_are_checked_behind_what_is_computed_of_a_new_prompt(family, computed):
    prompt, drafts = document(1, 100), DRAFTS["of the prompt"](family)
    with cache_of(family) as cache:
        with cache.past(row(prompt)) as past:
            computed.clear()
            ours = generated(family, prompt, past_key_values=past, **drafts)
        assert past.hit_tokens == 0 and max(computed) < len(prompt) // 2
        assert apart(ours, plain(family, tuple(prompt))) == (pytest.approx(0, abs=TOLERANCE), True)
        evict_all(cache)
        assert asked_right(cache, family, prompt).hit_tokens > 0


@pytest.mark.parametrize("drafts", DRAFTS.values(), ids=DRAFTS)
def test_a_damaged_past_shows_behind_drafts(drafts):
    prompt = document(1, 100)
    with cache_of("llama", wrap_copier=lambda *args: CorruptingCopier(*args, loads=None)) as cache:
        asked_right(cache, "llama", prompt)
        evict_all(cache)
        ours, wanted = both_ways(cache, "llama", prompt, **drafts("llama"))
        assert error(ours.logits[0], wanted.logits[0]) > 100 * TOLERANCE


def test_hidden_states_of_all_tokens_are_computed_with_drafts(computed, caplog):
    prompt, drafts = document(1, 100), DRAFTS["of the prompt"]("llama")
    with hit_of("llama", prompt) as cache:
        ours, wanted = both_ways(cache, "llama", prompt, output_hidden_states=True, **drafts)
        assert torch.equal(ours.sequences, wanted.sequences)
        for step, of_step in zip(ours.hidden_states, wanted.hidden_states, strict=True):
            assert [layer.shape for layer in step] == [layer.shape for layer in of_step]
        assert max(computed) >= len(prompt) and "computed anew" in caplog.text
        asked_right(cache, "llama", prompt)


def test_drafts_behind_others_than_the_past_is_of_are_refused():
    prompt, drafts = document(1, 100), DRAFTS["of the prompt"]("llama")
    others = [prompt[0] + 1, *prompt[1:]]
    with hit_of("llama", prompt) as cache, cache.past(row(prompt)) as past:
        with pytest.raises(MisuseError, match="others than the past is of"):
            generated("llama", others, past_key_values=past, **drafts)
        ours = generated("llama", prompt, past_key_values=past, **drafts)
        assert apart(ours, plain("llama", tuple(prompt))) == (pytest.approx(0, abs=TOLERANCE), True)


def test_a_whole_prompt_behind_a_past_without_drafts_is_refused(monkeypatch):
    monkeypatch.setattr(Past, "activate_past_recording", DynamicCache.activate_past_recording)
    prompt, drafts = document(1, 100), DRAFTS["of the prompt"]("llama")
    with hit_of("llama", prompt) as cache, pytest.raises(MisuseError, match="behind 96 tokens of 100"):
        both_ways(cache, "llama", prompt, max_new_tokens=12, **drafts)


# What is kept


def test_the_beginning_that_two_prompts_share_is_found_by_a_third():
    with cache_of("gemma3") as cache:
        for seed in (1, 2, 3):
            past = asked_right(cache, "gemma3", [*document(7, 70), *document(seed, 20)])
        assert past.hit_tokens == 64


def test_several_pasts_are_open_at_once():
    one, other = document(1, 90), document(2, 90)
    with cache_of("qwen3_next") as cache:
        with cache.past(row(one)) as first, cache.past(row(other)) as second:
            answers = [
                generated("qwen3_next", tokens, past_key_values=past)
                for tokens, past in ((one, first), (other, second))
            ]
        for tokens, answer in zip((one, other), answers, strict=True):
            assert error(answer.logits[-1], plain("qwen3_next", tuple(tokens)).logits[-1]) <= TOLERANCE
            assert asked_right(cache, "qwen3_next", tokens).hit_tokens == 80
        check_at_rest(cache)


def test_threads_share_a_cache():
    with cache_of("llama") as cache:
        wrong, hits = [], []

        def serve(seed):
            for length in (40, 90, 120):
                prompt = document(seed % 3, length)
                try:
                    hits.append(asked_right(cache, "llama", prompt).hit_tokens)
                except BaseException as error:
                    wrong.append(error)

        for seed in range(6):
            plain("llama", tuple(document(seed % 3, 40)))
        threads = [threading.Thread(target=serve, args=(seed,)) for seed in range(6)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert not wrong and any(hits)
        check_at_rest(cache)


def interrupted(cache, prompt):
    with cache.past(row(prompt)) as past:
        generated("llama", prompt, past_key_values=past)
        raise KeyboardInterrupt


def test_a_block_that_ends_by_an_exception_keeps_nothing():
    prompt = document(1, 90)
    with cache_of("llama") as cache:
        with pytest.raises(KeyboardInterrupt):
            interrupted(cache, prompt)
        assert asked_right(cache, "llama", prompt).hit_tokens == 0
        check_at_rest(cache)


def test_a_past_that_nobody_used_keeps_nothing():
    with cache_of("llama") as cache:
        with cache.past(document(1, 90)) as past:
            assert past.get_seq_length() == 0
        assert asked_right(cache, "llama", document(1, 90)).hit_tokens == 0


def test_other_weights_find_nothing(caplog):
    prompt = document(1, 90)
    changed = build_family("llama", hidden=HIDDEN, layers=2, window=32).to(DEVICE)
    with HostPrefixCache(changed, host_bytes="8MiB", max_model_len=512) as cache:
        for hit in (0, 80):
            with cache.past(prompt) as past:
                changed.generate(row(prompt), past_key_values=past, **GREEDY)
            assert past.hit_tokens == hit
        with torch.no_grad():
            next(changed.parameters()).mul_(1.01)
        with cache.past(prompt) as past:
            assert past.hit_tokens == 0
        assert "other weights" in caplog.text


def test_tokens_computed_across_a_reset_are_not_kept():
    prompt = document(1, 90)
    with cache_of("llama") as cache:
        with cache.past(row(prompt)) as past:
            generated("llama", prompt, past_key_values=past)
            cache.reset()
        assert asked_right(cache, "llama", prompt).hit_tokens == 0
        check_at_rest(cache)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_prompt_longer_than_the_device_is_computed(family):
    with cache_of(family, blocks=20) as cache:
        for _ in range(2):
            assert asked_right(cache, family, document(1, 600)).hit_tokens == 0
        check_at_rest(cache)


# Refused


@pytest.mark.parametrize(
    "prompt", [5, [], [[1, 2], [3]], [[[1]]], [0.5, 1.0], [-1, 3], [10**6], [True, False], list(range(9)) * 200]
)
def test_other_than_prompts_of_the_model_is_refused(prompt):
    with cache_of("llama") as cache, pytest.raises(PromptRefused), cache.past(prompt):
        pass


def test_a_closed_cache_has_no_past():
    cache = cache_of("llama")
    cache.close()
    cache.close()
    with pytest.raises(MisuseError, match="closed"), cache.past([1, 2, 3]):
        pass


def test_no_host_memory_is_refused():
    with pytest.raises(ConfigurationError):
        HostPrefixCache(model("llama"), host_bytes=0)


def test_padding_is_refused(monkeypatch):
    monkeypatch.setattr(model("llama").generation_config, "pad_token_id", 7)
    with cache_of("llama") as cache, pytest.raises(PromptRefused, match="padding"), cache.past([7, 7, 1, 2]):
        pass


def test_a_past_that_cannot_be_made_leaves_nothing_behind(monkeypatch):
    prompt = document(1, 90)
    with hit_of("gemma3", prompt) as cache:
        with monkeypatch.context() as patch:
            patch.setattr(Past, "fill", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError), cache.past(prompt):
                pass
        check_at_rest(cache)
        assert asked_right(cache, "gemma3", prompt).hit_tokens == 80


class Interrupt:
    """KeyboardInterrupt, once, where a function that a method of HostPrefixCache calls begins or ends: at one such
    place, by `number`. Python lets none come between a `with` and what enters or leaves it, nor at a `yield`.
    """

    def __init__(self, number):
        self.left, self.is_over = number, False

    def __enter__(self):
        sys.settrace(self._begins)

    def __exit__(self, *error):
        sys.settrace(None)

    def _begins(self, frame, event, value):
        is_yielding = frame.f_code.co_flags & inspect.CO_GENERATOR
        if is_yielding or frame.f_code.co_name in ("__enter__", "__exit__"):
            return None
        if not self._is_ours(frame.f_back):
            return None
        self._come()
        return self._ends

    def _ends(self, frame, event, value):
        if event == "return":
            self._come()
        return self._ends

    def _is_ours(self, frame):
        return frame is not None and frame.f_code.co_filename == host_prefix_cache.__file__

    def _come(self):
        self.left -= 1
        if self.left < 0 and not self.is_over:
            self.is_over = True
            raise KeyboardInterrupt


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_interrupt_before_a_past_is_handed_out_leaves_nothing_behind(family):
    prompt, interrupts = document(1, 90), 0
    with hit_of(family, prompt) as cache:
        is_over = True
        while is_over:
            interrupt, manager = Interrupt(interrupts), cache.past(prompt)
            with contextlib.suppress(KeyboardInterrupt):
                with interrupt:
                    manager.__enter__()
                manager.__exit__(None, None, None)
            is_over = interrupt.is_over
            interrupts += is_over
            check_at_rest(cache)
        assert interrupts > 50
        assert asked_right(cache, family, prompt).hit_tokens == 80


# Other than the key says


def test_weights_that_change_inside_are_not_kept():
    prompt, other = document(1, 90), build_family("llama", hidden=HIDDEN, layers=2, window=32).to(DEVICE)
    with HostPrefixCache(other, host_bytes="8MiB", max_model_len=512) as cache:
        with cache.past(prompt) as past:
            with torch.no_grad():
                next(other.parameters()).mul_(1.01)
            other.generate(row(prompt), past_key_values=past, **GREEDY)
        with cache.past(prompt) as past:
            assert past.hit_tokens == 0


@pytest.mark.parametrize("mode", ["weights", "training"])
def test_a_past_of_other_weights_is_not_continued(mode):
    prompt, other = document(1, 90), build_family("llama", hidden=HIDDEN, layers=2, window=32).to(DEVICE)
    with HostPrefixCache(other, host_bytes="8MiB", max_model_len=512) as cache:
        with cache.past(prompt) as past:
            other.generate(row(prompt), past_key_values=past, **GREEDY)
        with cache.past(prompt) as past:
            assert past.hit_tokens == 80
            with torch.no_grad():
                other.train() if mode == "training" else next(other.parameters()).mul_(1.01)
            with pytest.raises(MisuseError, match="other weights or adapters or in another mode"):
                other.generate(row(prompt), past_key_values=past, **GREEDY)


class Wrapped(torch.nn.Module):
    """A model in another one, as in PEFT's."""

    def __init__(self, base_model):
        super().__init__()
        self.base_model, self.generate = base_model, base_model.generate
        self.config, self.device = base_model.config, base_model.device


@pytest.mark.parametrize("wrap", [Wrapped, partial(torch.compile, backend="eager")], ids=["wrapped", "compiled"])
def test_a_model_within_another_is_given_no_other_tokens(wrap):
    """Its hooks are those that are called."""
    outer, prompt = wrap(model("llama")), document(1, 90)
    with HostPrefixCache(outer, host_bytes="8MiB", max_model_len=512) as cache:
        with pytest.raises(MisuseError, match="is given others"), cache.past(prompt) as past:
            outer.generate(row(document(2, 90)), past_key_values=past, **GREEDY)
        for hit in (0, 80):
            with cache.past(prompt) as past:
                answer = outer.generate(row(prompt), past_key_values=past, **GREEDY)
            assert past.hit_tokens == hit
    assert answer.equal(plain("llama", tuple(prompt)).sequences)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_model_that_keeps_no_past_is_refused_in_its_first_answer(family, monkeypatch):
    """As with gradient checkpointing in training mode, in some releases. A window is computed before the answer."""
    prompt = document(1, 90)
    with cache_of(family) as cache:
        monkeypatch.setattr(Past, "update", lambda past, keys, values, *_, **__: (keys, values))
        with pytest.raises(MisuseError, match=r"call its `eval\(\)`"), cache.past(prompt) as past:
            generated(family, prompt, past_key_values=past)
        monkeypatch.undo()
        assert asked_right(cache, family, prompt).hit_tokens == 0
        check_at_rest(cache)


def test_all_tokens_behind_a_past_that_has_some_are_refused():
    prompt = document(1, 90)
    refused = pytest.raises(MisuseError, match="behind 80 tokens of 90 the model is given others")
    with hit_of("llama", prompt) as cache, torch.no_grad(), cache.past(prompt) as past, refused:
        cache.model(row(prompt), past_key_values=past)


def embeddings(prompt):
    return model("llama"), dict(inputs_embeds=model("llama").get_input_embeddings()(row(prompt)))


def another_model(prompt):
    return build_family("llama", hidden=HIDDEN, layers=2, window=32, seed=1).to(DEVICE), dict(input_ids=row(prompt))


@pytest.mark.parametrize("given", [embeddings, another_model])
@pytest.mark.parametrize("hits", [False, True])
def test_tokens_that_nobody_compares_are_refused(given, hits):
    """They would be kept under the key of those that the past was made for."""
    prompt = document(1, 90)
    of, inputs = given(prompt)
    with hit_of("llama", prompt) if hits else cache_of("llama") as cache:
        with pytest.raises(MisuseError, match="`input_ids` of its prompt"), cache.past(row(prompt)) as past:
            of.generate(**inputs, past_key_values=past, **GREEDY)
        assert bool(asked_right(cache, "llama", prompt).hit_tokens) is hits
        check_at_rest(cache)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_past_that_was_refused_is_not_used_again(family):
    """Layers of states before the first of attention have gone on by then."""
    prompt = document(1, 90)
    with hit_of(family, prompt) as cache, cache.past(row(prompt)) as past:
        embedded = model(family).get_input_embeddings()(past.inputs["input_ids"][:, past.get_seq_length() :])
        with pytest.raises(MisuseError, match="`input_ids` of its prompt"):
            model(family)(inputs_embeds=embedded, past_key_values=past)
        with pytest.raises(MisuseError, match="`input_ids` of its prompt"):
            generated(family, prompt, past_key_values=past)


def test_a_past_that_is_given_by_position_is_seen():
    prompt = document(1, 90)
    with hit_of("llama", prompt) as cache:
        wanted = model("llama")(row(prompt)).logits[0, -1]
        with cache.past(row(prompt)) as past:
            given = model("llama")(row(prompt[past.get_seq_length() :]), None, None, past).logits[0, -1]
        assert past.hit_tokens and (given - wanted).abs().max() <= TOLERANCE


def test_a_model_on_several_devices_is_refused():
    split = build_family("llama", hidden=HIDDEN, layers=2, window=32).to(DEVICE)
    split.lm_head.to("meta")
    with pytest.raises(ConfigurationError, match="several devices"):
        HostPrefixCache(split, host_bytes="8MiB")


@families
def test_other_tokens_of_the_same_number_are_refused(family):
    """They would be kept under the key of those that the past was made for."""
    prompt, other = document(1, 90), document(2, 90)
    with cache_of(family) as cache:
        for answers in (1, 2):
            refused = pytest.raises(MisuseError, match=r"behind \d+ tokens of 90 the model is given others")
            with refused, cache.past(row(prompt)) as past:
                generated(family, other, past_key_values=past, num_return_sequences=answers, num_beams=answers)
        asked_right(cache, family, prompt)
        check_at_rest(cache)
    with hit_of(family, prompt) as cache:
        refused = pytest.raises(MisuseError, match=r"behind 8[09] tokens of 90 the model is given others")
        with refused, cache.past(row(prompt)) as past:
            generated(family, [*prompt[:85], *other[85:]], past_key_values=past)
        check_at_rest(cache)
