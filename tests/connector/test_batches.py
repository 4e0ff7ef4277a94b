"""Requests that are decoded together answer as `model.generate` answers each of them alone.

Prompts of unequal lengths, some of which begin alike, are answered by a generator with `batch_size`; each once more
from host memory. The logits of every step must be those of `generate` within 1e-4 of their deviation, and the tokens
equal. The controls damage a loaded block, exchange two rows, and leave the padding visible: each must show.
"""

from contextlib import contextmanager

import pytest
import torch
from transformers import LogitsProcessor

from connector.transformers import PrefixCachedGenerator, PromptRefused
from connector.transformers.continuing import check_decodes_together
from connector.transformers.forward import ForwardPass
from connector.transformers.past import ModelPast
from connector.transformers.working import WorkingState
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.testing import CorruptingCopier
from random_models import FAMILIES, build_family, tiny
from tests.connector.serving import BLOCK, document, model
from tests.connector.test_generate import Listener, agree, asked

NEW_TOKENS = 24  # over the end of a block
BATCH = 4
TOGETHER = [family for family in FAMILIES if family != "llama4"]


def prompts(seed=1):
    """Two begin alike, one is shorter than a block, and one ends on a boundary beyond the windows."""
    whole = document(seed, 81)
    return [whole, document(seed + 100, 7), [*whole[:70], 5, 6], document(seed + 200, 64)]


class PerPrompt(LogitsProcessor):
    """Keeps the logits of every step, of each prompt apart."""

    def __init__(self, asked_for):
        self._prompts = asked_for
        self._seen = [[] for _ in asked_for]

    def __call__(self, input_ids, scores):
        [ids] = input_ids.tolist()
        self._seen[[each == ids[: len(each)] for each in self._prompts].index(True)].append(scores[0].clone())
        return scores

    @property
    def logits(self):
        return [torch.stack(each) for each in self._seen]


def generator_of(family, batch_size=BATCH, **options):
    usual = dict(device_blocks=96, host_bytes=1 << 23, offload="eager", prefill_tokens=64)
    return PrefixCachedGenerator(model(family), batch_size=batch_size, **{**usual, **options})


def answered(generator, batch, **options):
    """The answers, and of each its tokens and the logits of every step."""
    recorder = PerPrompt(batch)
    options = {"max_new_tokens": NEW_TOKENS, "seed": 3, **options}
    answers = list(generator.generate(batch, logits_processor=[recorder], **options))
    return answers, [(answer.tokens, logits) for answer, logits in zip(answers, recorder.logits, strict=True)]


def alone(family, ids, **options):
    return asked(model(family), ids, **{"max_new_tokens": NEW_TOKENS, **options})


def as_alone(family, batch, got, **options):
    return [agree(each, alone(family, ids, **options)) for ids, each in zip(batch, got, strict=True)]


@contextmanager
def watched(generator):
    """The sequences of every batch, when it begins to decode."""
    batches, decode = [], generator._decode

    def watching(sequences, pasts):
        batches.append(list(sequences))
        decode(sequences, pasts)

    generator._decode = watching
    yield batches


# --- the same answers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", TOGETHER)
def test_together_they_answer_as_alone(family):
    with generator_of(family) as generator:
        for hits in ([0, 0], [80, 48]):
            answers, got = answered(generator, prompts(), do_sample=False)
            assert as_alone(family, prompts(), got, do_sample=False) == [True] * 4
            assert [answer.host_hit_tokens for answer in answers[::3]] == hits
            generator.pool.reset()
        generator.pool.check_valid()


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_a_sample_of_each_is_that_of_its_seed(family):
    """Each has a random generator of its own, seeded alike."""
    options = dict(do_sample=True, temperature=1.3, top_k=40, repetition_penalty=1.2)
    with generator_of(family) as generator:
        _, got = answered(generator, prompts(), **options)
        _, other = answered(generator, prompts(), **options, seed=4)
    assert as_alone(family, prompts(), got, **options) == [True] * 4
    assert as_alone(family, prompts(), other, **options) == [False] * 4


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1"])
def test_answers_end_one_after_the_other(family):
    """The rows that are left go on, in any order of leaving."""
    places = zip(prompts(), (3, 20, 1, 17), strict=True)
    ends = [alone(family, ids, do_sample=False)[0][at] for ids, at in places]
    options = dict(do_sample=False, eos_token_id=ends, pad_token_id=319)
    with generator_of(family) as generator:
        answers, got = answered(generator, prompts(), **options)
    assert as_alone(family, prompts(), got, **options) == [True] * 4
    assert len({len(answer.tokens) for answer in answers}) > 1


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5", "falcon_h1"])
def test_a_conversation_goes_on_behind_an_answer_of_a_batch(family):
    """KV that the rows wrote to the pool, and checkpoints taken of them, are their own."""
    with generator_of(family) as generator:
        answers, _ = answered(generator, prompts(), do_sample=False)
        turns = [[*ids, *answer.tokens, 9] for ids, answer in zip(prompts(), answers, strict=True)]
        again, got = answered(generator, turns, do_sample=False)
        assert as_alone(family, turns, got, do_sample=False) == [True] * 4
        # the last two tokens were not computed: the one chosen last, and the new one
        assert [each.device_hit_tokens for each in again] == [(len(turn) - 2) // BLOCK * BLOCK for turn in turns]


def test_in_half_precision_the_logits_are_those_of_one_by_one():
    """Tokens may be as likely, so that only the first one is compared."""
    half = build_family("qwen3", hidden=32, layers=2, window=32).to(torch.bfloat16)
    one, four = (PrefixCachedGenerator(half, device_blocks=96, offload="off", batch_size=size) for size in (1, 4))
    for each, other in zip(one.generate(prompts(), 3), four.generate(prompts(), 3), strict=True):
        assert each.first_logits.equal(other.first_logits)


# --- controls ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_control_a_damaged_block_shows_in_its_row(family):
    damage, shown = [], 0

    def damaging(copier, tensors):
        damage.append(CorruptingCopier(copier, tensors, group=0, loads=None))
        return damage[0]

    with generator_of(family, wrap_copier=damaging) as generator:
        for seed in range(8):
            batch = [document(seed, 61), document(seed + 50, 9)]
            list(generator.generate(batch, 1))
            generator.pool.reset()
            _, got = answered(generator, batch, max_new_tokens=4, do_sample=False)
            damaged, whole = as_alone(family, batch, got, max_new_tokens=4, do_sample=False)
            assert whole
            shown += not damaged
        assert damage[0].corrupted == 8
    assert shown >= 7


def joined_otherwise(change):
    """`WorkingState.joined`, of other rows."""
    joined = WorkingState.joined
    return staticmethod(lambda sources: joined(change(sources)))


@pytest.mark.parametrize("family", TOGETHER)
def test_control_exchanged_rows_show(family, monkeypatch):
    """Two requests of one length, each of which goes on with the past of the other."""
    batch = [document(1, 61), document(2, 61)]
    monkeypatch.setattr(WorkingState, "joined", joined_otherwise(lambda sources: sources[::-1]))
    with generator_of(family, batch_size=1) as generator:
        generator.batch_size = 2
        _, got = answered(generator, batch, do_sample=False)
    assert as_alone(family, batch, got, do_sample=False) == [False, False]


@pytest.mark.parametrize("family", ["llama", "gemma3", "falcon_h1", "deepseek_v3"])
def test_control_padding_that_is_not_hidden_shows(family, monkeypatch):
    without = ForwardPass.__call__

    def unmasked(self, ids, lengths, past, last=0):
        inner, self._model = self._model, lambda ids, **options: inner(ids, **{**options, "attention_mask": None})
        try:
            return without(self, ids, lengths, past, last)
        finally:
            self._model = inner

    generator = generator_of(family)
    monkeypatch.setattr(ForwardPass, "__call__", unmasked)
    _, got = answered(generator, prompts(), do_sample=False)
    assert as_alone(family, prompts(), got, do_sample=False)[1] is False  # the shortest has the most of it


# --- room --------------------------------------------------------------------------------------------------------


def test_two_prompts_that_begin_alike_share_their_blocks():
    whole = document(1, 64)
    generator = generator_of("llama", batch_size=2, offload="off", host_bytes=0)
    with watched(generator) as batches:
        _, answer = generator.generate([[*whole, 1], [*whole, 2]], 20)
    [[one, other]] = batches
    assert answer.device_hit_tokens == 64
    assert one.table.blocks[:4] == other.table.blocks[:4]
    assert set(one.table.blocks[4:]).isdisjoint(other.table.blocks[4:])


@pytest.mark.parametrize(
    ("family", "mode"),
    [("llama", "lazy"), ("gemma3", "lazy"), ("gemma3", "eager"), ("falcon_h1", "eager"), ("jamba", "off")],
)
def test_as_many_run_together_as_there_is_room_for(family, mode):
    """From a pool that only just takes the longest alone, up to one that takes them all."""
    usual, together = generator_of(family), []
    longest = usual._chunks(81, NEW_TOKENS)
    least = longest * usual.planner.device_blocks_per_chunk + usual._coordinator.num_blocks(longest)
    for blocks in (least, 96):
        host = 0 if mode == "off" else 1 << 22
        with generator_of(family, device_blocks=blocks, host_bytes=host, offload=mode) as generator:
            with watched(generator) as batches:
                for _ in range(2):
                    _, got = answered(generator, prompts(), do_sample=False)
                    assert as_alone(family, prompts(), got, do_sample=False) == [True] * 4
            generator.pool.check_valid()
            assert generator.pool.statistics().pinned == 0
            together.append(max(map(len, batches)))
    assert together == sorted(together)
    assert together[0] < 4 == together[-1]


# --- a batch and its prompts -------------------------------------------------------------------------------------


def test_answers_come_in_the_order_of_the_prompts_and_are_read_a_batch_ahead():
    read = []

    def reading():
        for number in range(5):
            read.append(number)
            yield document(number, 20 + number)

    with generator_of("llama", batch_size=2) as generator:
        answers = generator.generate(reading(), 3)
        assert (next(answers).prompt_tokens, read) == (20, [0, 1])
        assert (next(answers).prompt_tokens, read) == (21, [0, 1])
        assert ([each.prompt_tokens for each in answers], read) == ([22, 23, 24], [0, 1, 2, 3, 4])


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_prompt_that_is_refused_costs_no_answer_before_it(at):
    batch = [document(1, 20), document(2, 21), document(3, 22)]
    batch[at] = [10_000]
    with generator_of("llama", batch_size=3) as generator:
        answers = generator.generate(batch, 3)
        assert [next(answers).prompt_tokens for _ in range(at)] == [20, 21][:at]
        with pytest.raises(PromptRefused, match="token ids from 0 to"):
            next(answers)
        generator.pool.check_valid()


def test_a_streamer_gets_one_answer():
    with generator_of("llama", batch_size=2) as generator:
        with pytest.raises(ConfigurationError, match="a streamer hears one answer"):
            generator.generate(prompts(), 3, streamer=Listener())
        heard = Listener()
        generator.answer(prompts()[0], 3, streamer=heard)
        assert len(heard.heard) == 5


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_has_at_least_one_request(size):
    with pytest.raises(ConfigurationError, match=f"batch_size must be at least 1, got {size}"):
        generator_of("llama", batch_size=size)


# --- which models can --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", TOGETHER)
def test_every_other_family_decodes_together(family, dtype):
    other = tiny(family).to(dtype)
    check_decodes_together(other, ModelPast(other))


def test_attention_in_chunks_is_refused():
    with pytest.raises(ConfigurationError, match="Llama4ForCausalLM attends in chunks"):
        generator_of("llama4")


def test_a_model_that_does_not_is_refused_by_its_name(monkeypatch):
    class Blind(type(model("llama"))):
        """Does not look at the mask."""

        def forward(self, input_ids, attention_mask=None, **options):
            return super().forward(input_ids, **options)

    torch.manual_seed(0)
    blind = Blind(model("llama").config).eval()
    blind.load_state_dict(model("llama").state_dict())
    with pytest.raises(ConfigurationError, match="Blind cannot decode several requests together"):
        PrefixCachedGenerator(blind, device_blocks=8, offload="off", batch_size=2)
    PrefixCachedGenerator(blind, device_blocks=8, offload="off")
