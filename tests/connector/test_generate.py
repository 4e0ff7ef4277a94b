"""Equality with `model.generate`: the same answer for the same settings, from a cache or not.

`generate` runs beside the generator, with the same options and the same seed. A recorder in the list of
processors keeps the logits of every step; they must be equal within 1e-4 of their deviation, and the tokens equal. Each
prompt is repeated until it comes back from host memory. The controls show that a setting that is left out, another seed
and a damaged block are seen.
"""

import weakref

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse
from transformers import BatchEncoding, GenerationConfig, LogitsProcessor, PreTrainedTokenizerFast, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from connector.transformers import PrefixCachedGenerator, PromptRefused
from connector.transformers.changes import Weights
from cpu_prefix_cache import ConfigurationError, MisuseError
from cpu_prefix_cache.testing import CorruptingCopier
from random_models import build_family
from tests.connector.serving import document

TOLERANCE = 1e-4
NEW_TOKENS = 12
FAMILIES = ("llama", "gemma3", "qwen3_5")
SETTINGS = {
    "greedy": dict(do_sample=False),
    "sampled": dict(do_sample=True),
    "temperature": dict(do_sample=True, temperature=0.6),
    "top-k": dict(do_sample=True, top_k=5),
    "top-p": dict(do_sample=True, top_p=0.7),
    "min-p": dict(do_sample=True, min_p=0.2),
    "repetition penalty": dict(do_sample=False, repetition_penalty=1.7),
    "all of them": dict(do_sample=True, temperature=1.3, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.2),
    "at least six, and nothing twice": dict(
        do_sample=False, min_new_tokens=6, eos_token_id=list(range(0, 320, 2)), no_repeat_ngram_size=1
    ),
    "suppressed": dict(do_sample=False, suppress_tokens=list(range(0, 320, 2)), bad_words_ids=[[5], [7, 9]]),
}
settings = pytest.mark.parametrize("options", SETTINGS.values(), ids=SETTINGS.keys())


class Recorder(LogitsProcessor):
    """Keeps the logits of every step."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(scores[0].clone())
        return scores


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    torch.set_num_threads(1)
    return build_family(request.param, hidden=32, layers=2, window=32)


@pytest.fixture(scope="module")
def llama():
    torch.set_num_threads(1)
    return build_family("llama", hidden=32, layers=2, window=32)


def generator_of(model, tokenizer=None, **options):
    usual = {"device_blocks": 24, "host_bytes": 1 << 22, "offload": "eager", "prefill_tokens": 64}
    return PrefixCachedGenerator(model, tokenizer, **{**usual, **options})


class Resetting(Recorder):
    """Resets the generator in the middle of its answer."""

    def __init__(self, generator, at):
        super().__init__()
        self.generator, self.at = generator, at

    def __call__(self, ids, scores):
        if len(self.seen) == self.at:
            self.generator.reset()
        return super().__call__(ids, scores)


def asked(model, ids, seed=3, **options):
    """The tokens that `generate` answers, and the logits of every step."""
    recorder = Recorder()
    torch.manual_seed(seed)
    options = {"max_new_tokens": NEW_TOKENS, **options}
    whole = model.generate(torch.tensor([ids]), logits_processor=[recorder], **options)
    return tuple(whole[0, len(ids) :].tolist()), torch.stack(recorder.seen)


def answered(generator, ids, seed=3, recorder=None, **options):
    recorder = recorder or Recorder()
    options = {"max_new_tokens": NEW_TOKENS, **options}
    answer = generator.answer(ids, seed=seed, logits_processor=[recorder], **options)
    return answer, (answer.tokens, torch.stack(recorder.seen))


def agree(one, other):
    (tokens, logits), (other_tokens, reference) = one, other
    if tokens != other_tokens or not logits.isinf().equal(reference.isinf()):  # what may not come has -inf
        return False
    possible = reference.isfinite()
    return float((logits - reference)[possible].abs().max() / reference[possible].std()) <= TOLERANCE


# --- settings ----------------------------------------------------------------------------------------------------


@settings
def test_equal_settings_mean_equal_answers(model, options):
    ids = document(1, 61)
    expected = asked(model, ids, **options)
    with generator_of(model) as generator:
        for from_host in (0, 48):
            answer, got = answered(generator, ids, **options)
            assert answer.host_hit_tokens == from_host
            assert agree(got, expected)
            generator.pool.reset()  # the device forgets, the host does not


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "greedy"])
def test_control_a_setting_that_is_left_out_shows(llama, name):
    options = SETTINGS[name]
    without = dict(do_sample=options["do_sample"] and len(options) > 1)
    with generator_of(llama) as generator:
        shown = [
            answered(generator, document(seed, 61), **options)[0].tokens
            != answered(generator, document(seed, 61), **without)[0].tokens
            for seed in range(8)
        ]
    assert sum(shown) >= 7


def test_control_another_seed_shows(llama):
    with generator_of(llama) as generator:
        one, same, other = (answered(generator, document(1, 61), seed, do_sample=True)[0].tokens for seed in (3, 3, 4))
    assert one == same != other


def test_control_a_damaged_block_shows(model):
    damage = []

    def damaging(copier, tensors):
        damage.append(CorruptingCopier(copier, tensors, group=0, loads=None))
        return damage[0]

    shown = 0
    with generator_of(model, wrap_copier=damaging) as generator:
        for seed in range(8):
            ids = document(seed, 61)
            expected = asked(model, ids, do_sample=True)
            assert agree(answered(generator, ids, do_sample=True)[1], expected)
            generator.pool.reset()
            before = damage[0].corrupted
            shown += not agree(answered(generator, ids, do_sample=True)[1], expected)
            assert damage[0].corrupted > before
    assert shown >= 7


def test_without_a_seed_samples_are_drawn_from_torchs_own(llama):
    with generator_of(llama) as generator:
        torch.manual_seed(3)
        answer = generator.answer(document(1, 61), NEW_TOKENS, do_sample=True)
    assert answer.tokens == asked(llama, document(1, 61), do_sample=True)[0]


def test_settings_come_from_the_call_then_its_configuration_then_the_models(llama, monkeypatch):
    given = GenerationConfig(do_sample=True, top_k=5, max_new_tokens=9)
    own = GenerationConfig(do_sample=True, temperature=0.6, repetition_penalty=1.5, max_length=70)
    ids = document(1, 61)
    with generator_of(llama) as generator:
        for options in ({}, {"generation_config": given}, {"generation_config": given, "top_k": 3}):
            monkeypatch.setattr(llama, "generation_config", own)
            expected = asked(llama, ids, max_new_tokens=None, **options)
            answer, got = answered(generator, ids, max_new_tokens=None, **options)
            assert agree(got, expected)
            assert len(answer.tokens) == 9
            monkeypatch.setattr(llama, "generation_config", GenerationConfig())
            assert not agree(got, asked(llama, ids, max_new_tokens=9))
        assert len(generator.answer(ids).tokens) == 20  # transformers' default


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (dict(num_beams=2), "num_beams=2"),
        (dict(num_return_sequences=2, do_sample=True), "num_return_sequences=2"),
        (dict(prompt_lookup_num_tokens=3), "prompt_lookup_num_tokens=3"),
        (dict(guidance_scale=1.5), "guidance_scale=1.5"),
        (dict(cache_implementation="static"), "cache_implementation='static'"),
        (dict(use_cache=False), "use_cache=False"),
        (dict(return_dict_in_generate=True), "return_dict_in_generate=True"),
        (dict(generation_config=GenerationConfig(num_beams=3)), "num_beams=3"),
        (dict(temprature=0.7), "temprature"),
        (dict(attention_mask=torch.ones(1, 61)), "attention_mask"),
        (dict(stop_strings="x"), "stop_strings need a tokenizer of transformers"),
        (dict(max_new_tokens=0), "max_new_tokens"),
    ],
)
def test_unsupported_options_are_refused_by_name(llama, options, name):
    with generator_of(llama) as generator:
        with pytest.raises(ConfigurationError, match=name):
            generator.generate([document(1, 61)], **options)  # at once, not with the first answer
        with pytest.raises(ConfigurationError, match=name):
            generator.answer(document(1, 61), **options)


def test_a_setting_in_the_configuration_of_the_model_is_refused(llama, monkeypatch):
    monkeypatch.setattr(llama.config, "temperature", 0.7, raising=False)
    with pytest.raises(ConfigurationError, match=r"model\.config says temperature, which"):
        generator_of(llama)


def test_a_setting_of_the_model_that_is_not_carried_out_is_refused(llama, monkeypatch):
    monkeypatch.setattr(llama, "generation_config", GenerationConfig(num_beams=2))
    with generator_of(llama) as generator, pytest.raises(ConfigurationError, match="num_beams=2"):
        generator.answer(document(1, 61))


# --- where an answer ends ------------------------------------------------------------------------------------------


def letter(token):
    return chr(token) if chr(token) in "abcdef" else chr(0x100 + token)


def letters():
    """A tokenizer whose tokens are letters. (A stop string is looked for behind "abcdef".)"""
    tokenizer = Tokenizer(models.WordLevel({letter(token): token for token in range(320)}, unk_token=letter(0)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = Fuse()
    template = "{% for each in messages %}{{ each.content }}{% endfor %}{% if add_generation_prompt %}f{% endif %}"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)


@pytest.mark.parametrize("at", [0, 3])
def test_a_processor_that_resets_the_generator_costs_the_answer_its_caching_and_no_block(model, at):
    ids = document(1, 61)
    expected = asked(model, ids)
    with generator_of(model) as generator:
        for _ in range(3):
            assert agree(answered(generator, ids, recorder=Resetting(generator, at))[1], expected)
            now = generator.pool.statistics()
            assert (now.writing, now.retired, now.pinned) == (0, 0, 0)
        assert agree(answered(generator, ids)[1], expected)


def test_an_answer_ends_with_a_stop_string(model):
    tokenizer, ids = letters(), document(1, 61)
    with generator_of(model, tokenizer) as generator:
        whole = generator.answer(ids, NEW_TOKENS, do_sample=False)
        stop = [whole.text[4:6], "nowhere"]
        generator.pool.reset()
        stopped, got = answered(generator, ids, do_sample=False, stop_strings=stop)
        assert stopped.host_hit_tokens == 48
        assert agree(got, asked(model, ids, do_sample=False, stop_strings=stop, tokenizer=tokenizer))
        assert stopped.text == whole.text[: whole.text.index(stop[0]) + 2]
    assert len(whole.tokens) == NEW_TOKENS > len(stopped.tokens)


def test_an_answer_ends_with_any_of_the_models_end_tokens(llama):
    ids = document(1, 61)
    with generator_of(llama) as generator:
        whole = generator.answer(ids, NEW_TOKENS).tokens
        ends = [whole[5], whole[8]]
        stopped, got = answered(generator, ids, eos_token_id=ends)
    assert stopped.tokens == whole[: min(map(whole.index, ends)) + 1]
    assert agree(got, asked(llama, ids, eos_token_id=ends))


def test_an_answer_ends_with_a_criterion_of_the_caller(llama):
    class After(StoppingCriteria):
        def __call__(self, input_ids, scores, **options):
            return torch.tensor([input_ids.shape[1] == 64])

    with generator_of(llama) as generator:
        assert len(generator.answer(document(1, 61), NEW_TOKENS, stopping_criteria=[After()]).tokens) == 3


def test_max_length_counts_the_prompt_too(llama):
    with generator_of(llama) as generator:
        assert len(generator.answer(document(1, 61), max_length=66).tokens) == 5
        with pytest.raises(PromptRefused, match="max_length counts the prompt's tokens too"):
            generator.answer(document(1, 61), max_length=61)


class Listener(BaseStreamer):
    def __init__(self):
        self.heard = []

    def put(self, value):
        self.heard.append(value.tolist())

    def end(self):
        self.heard.append("end")


def test_a_streamer_gets_the_same_calls_as_from_generate(llama):
    ids = document(1, 61)
    ours = Listener()
    theirs = Listener()
    llama.generate(torch.tensor([ids]), max_new_tokens=5, streamer=theirs)
    with generator_of(llama) as generator:
        list(generator.generate([ids, ids], 5, streamer=ours))
    assert ours.heard == 2 * theirs.heard
    assert len(theirs.heard) == 7  # the prompt, five tokens, the end


# --- prompts ---------------------------------------------------------------------------------------------------------

IDS = document(1, 61)
ONE = {
    "list": IDS,
    "tuple": tuple(IDS),
    "array": np.array(IDS),
    "array of 32 bits in a row": np.array([IDS], dtype=np.int32),
    "numpy integers": list(np.array(IDS)),
    "tensor": torch.tensor(IDS),
    "tensor of one row": torch.tensor([IDS]),
    "tokenizer's": BatchEncoding({"input_ids": IDS, "attention_mask": [1] * len(IDS)}),
    "tokenizer's tensors, padded": {
        "input_ids": torch.tensor([[0, 0, *IDS]]),
        "attention_mask": torch.tensor([[0, 0, *[1] * len(IDS)]]),
    },
}


@pytest.mark.parametrize("prompt", ONE.values(), ids=ONE.keys())
def test_one_prompt_in_any_form(llama, prompt):
    with generator_of(llama) as generator:
        expected = generator.answer(IDS, 4)
        [answer] = generator.generate(prompt, 4)
        for each in (answer, generator.answer(prompt, 4), *generator.generate([prompt], 4)):
            assert (each.prompt_tokens, each.tokens) == (61, expected.tokens)
        assert not expected.first_logits.equal(generator.answer(IDS[1:], 4).first_logits)


def test_a_plain_string_is_one_prompt(llama):
    with generator_of(llama) as generator:
        [answer] = generator.generate("hello", 4)
        assert answer.prompt_tokens == 5
        assert [each.prompt_tokens for each in generator.generate(["hello", "you"], 4)] == [5, 3]


def test_several_prompts_in_one_tensor_or_encoding(llama):
    rows = torch.tensor([IDS, IDS[::-1]])
    with generator_of(llama) as generator:
        expected = [each.tokens for each in generator.generate([IDS, IDS[::-1]], 4)]
        assert [each.tokens for each in generator.generate(rows, 4)] == expected
        assert [each.tokens for each in generator.generate({"input_ids": rows.tolist()}, 4)] == expected
        assert [each.tokens for each in generator.generate(iter(rows), 4)] == expected
    assert expected[0] != expected[1]


def test_a_chat_template_s_output_is_a_prompt(llama):
    tokenizer = letters()
    messages = [{"role": "user", "content": "".join(map(letter, IDS))}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    with generator_of(llama, tokenizer) as generator:
        answer, got = answered(generator, prompt)
        assert answer.prompt_tokens == 62
        assert agree(got, asked(llama, [*IDS, ord("f")]))
        with pytest.raises(PromptRefused, match=r"tokenizer.apply_chat_template\(messages"):
            generator.answer(messages[0], 4)


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        (np.array([1.5]), "integers; got 1.5"),
        (["a", 3], "a text or token ids, got int"),
        (torch.zeros(1, 1, 3, dtype=torch.long), r"got \[1, 1, 3\]"),
        (None, "got NoneType"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "attention_mask of a prompt must have the shape"),
        ([], "at least one token"),
        ([[]], "at least one token"),
        (["a", "b"], "one prompt, got 2: give them to generate"),
    ],
)
def test_malformed_prompts_are_refused_in_a_sentence(llama, prompt, sentence):
    with generator_of(llama) as generator, pytest.raises(PromptRefused, match=sentence):
        generator.answer(prompt, 4)


# --- from the beginning to the end of a generator ---------------------------------------------------------------------


def test_a_closed_generator_gives_its_memory_back_and_answers_no_more(llama):
    with generator_of(llama) as generator:
        rest = generator.generate([IDS, IDS], 4)
        next(rest)
        memories = [
            weakref.ref(each.untyped_storage()) for each in (generator.kv.region, generator._host._arena.blocks)
        ]
        assert all(each() is not None for each in memories)
    assert [each() for each in memories] == [None, None]
    assert generator.statistics().chunks_stored > 0  # what was counted is still there
    generator.close()  # closing twice is no error
    for call in (lambda: generator.answer(IDS, 4), lambda: next(rest), generator.reset):
        with pytest.raises(MisuseError, match="the generator is closed"):
            call()


@pytest.mark.parametrize("resets", [True, False])
def test_after_a_reset_nothing_from_before_is_used(resets, monkeypatch, caplog):
    """New weights and no reset is the control: what the old ones computed shows."""
    if not resets:
        monkeypatch.setattr(Weights, "follow", lambda weights: None)
    torch.set_num_threads(1)
    model, other = (build_family("llama", hidden=32, layers=2, window=32, seed=seed) for seed in (0, 1))
    with generator_of(model) as generator:
        generator.answer(IDS, 4)
        model.load_state_dict(other.state_dict())
        if resets:
            generator.reset()
        answer, got = answered(generator, IDS)
        assert answer.computed_tokens == (61 if resets else 13)
        assert agree(got, asked(model, IDS)) is resets
        assert not caplog.records, "who has reset is not told of new weights"
        generator.reset()
        assert generator.answer(IDS, 4).computed_tokens == 61
        generator.pool.reset()
        assert generator.answer(IDS, 4).host_hit_tokens == 48
