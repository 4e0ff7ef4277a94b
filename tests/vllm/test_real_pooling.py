"""Requests that have no answer, or no tokens, in a real engine.

pooling       embeddings of texts: a step ends the request whole
embeddings    prompts that are given as embeddings
"""

import pytest
import torch

from tests.vllm.models import MODELS, SIZES, save_words
from tests.vllm.real_cache import BLOCKS, GROUPS, PROMPTS, CachedEngine, Copies, folder_of
from tests.vllm.real_engine import BLOCK, TOLERANCE, RealEngine, differences

FOUND = BLOCKS * BLOCK  # tokens of each prompt
POOLING = dict(runner="pooling", convert="embed", skip_tokenizer_init=False, blocks=200)
GIVEN = dict(enable_prompt_embeds=True)
both = pytest.mark.parametrize("model", ["llama", "gemma3"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    found = {model: tmp_path_factory.mktemp(model) for model in ("llama", "gemma3")}
    for model, folder in found.items():
        MODELS[model](folder)
        save_words(folder)  # vLLM wants a tokenizer beside a pooling model
    return found


def embed(engine):
    """The embeddings of all prompts, and how many tokens of each were not computed."""
    outputs = engine.llm.embed([{"prompt_token_ids": prompt} for prompt in PROMPTS], use_tqdm=False)
    engine.rest()
    return torch.tensor([each.outputs.embedding for each in outputs]), [each.num_cached_tokens for each in outputs]


def embedded_again(folder, **options):
    with CachedEngine(folder, offload="eager", engine=POOLING, **options) as engine:
        embed(engine)
        engine.forget()
        embeddings, cached = embed(engine)
        engine.check_nothing_leaked()
    assert cached == [FOUND] * len(PROMPTS)
    return embeddings


@both
def test_embeddings_of_texts_are_the_same_from_the_host(folders, model):
    """The control damages a block of each load."""
    with RealEngine(folders[model], **POOLING) as engine:
        expected, _ = embed(engine)
    tolerance = TOLERANCE * expected.std()
    assert (embedded_again(folders[model]) - expected).abs().max() <= tolerance
    damaged = (embedded_again(folders[model], copies=Copies(damaged=GROUPS[model][-1])) - expected).abs().amax(dim=1)
    assert (damaged > tolerance).sum() >= 7


def answer_embeddings(engine, seeds):
    """Answers to prompts that are given as embeddings, each of a seed of its own."""
    names = []
    for seed in seeds:
        drawn = torch.randn(FOUND + 5, SIZES["hidden_size"], generator=torch.Generator().manual_seed(seed))
        names.append(engine.submit([0] * len(drawn), more={"prompt_embeds": drawn}))
    engine.rest()
    return [engine.finished.pop(name) for name in names]


@both
def test_a_prompt_of_embeddings_finds_its_own(model):
    """No two of them have tokens that differ."""
    with RealEngine(folder_of(model), **GIVEN) as engine:
        expected = answer_embeddings(engine, (1, 2))
    with CachedEngine(folder_of(model), offload="eager", engine=GIVEN) as engine:
        first = answer_embeddings(engine, (1,))
        engine.forget()
        answers = answer_embeddings(engine, (1, 2))
        engine.check_nothing_leaked()
    assert max(differences(first + answers[1:], expected)) <= TOLERANCE
    assert max(differences(answers, expected)) <= TOLERANCE
    assert [answer.loaded_tokens for answer in answers] == [FOUND, 0]
