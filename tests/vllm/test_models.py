"""The tests with a real engine stand on this: equal questions get equal answers, and a wrong cache gets wrong ones.

Nothing of ours is under test. All differences that should be none were exactly 0 on the machine they were written on,
whatever the cuts of the prefill and whatever ran beside it.
"""

from itertools import combinations, product

import pytest
import torch
import transformers

from tests.gpu import vllm_equality
from tests.gpu.drafters import FOLDER
from tests.vllm.models import GATED, GATED_SHARPNESS, MODELS, SHARPNESS, WINDOW, initialise, save_gemma4, some_tokens
from tests.vllm.real_engine import BLOCK, SHOWN, TOLERANCE, Answer, RealEngine, cold_answers, differences
from tests.vllm.silent import SilentConnector

LENGTH = 20 * BLOCK + 5


@pytest.fixture(scope="module", params=list(MODELS))
def folder(request, tmp_path_factory):
    return MODELS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory):
    return MODELS["gemma3"](tmp_path_factory.mktemp("gemma3"))


PROMPTS = [some_tokens(LENGTH, seed) for seed in range(8)]


@pytest.fixture(scope="module")
def expected(folder):
    return cold_answers(folder, PROMPTS)


def error(answer: Answer, expected: Answer) -> float:
    (difference,) = differences([answer], [expected])
    return difference


# The weights

NORMS = ("q_norm", "k_norm")


def check_gains(model):
    """Factors of the norms of queries and keys, whether they keep them as they are or less 1."""
    norms = [module for name, module in model.named_modules() if name.endswith(NORMS)]
    for norm in norms:
        values = torch.randn(1, *norm.weight.shape)
        gain = float(norm(values).detach().square().mean().sqrt())
        assert gain == pytest.approx(GATED_SHARPNESS if model.config.model_type in GATED else SHARPNESS, rel=1e-3)
    assert norms


@pytest.mark.parametrize("name", ["gemma3", "qwen3next", "qwen3.5-mtp"])
def test_queries_and_keys_of_models_for_gpus_are_sharpened_alike(name):
    config, sizes, *_ = vllm_equality.MODELS[name]
    config = getattr(transformers, config)(**{**vllm_equality.SIZES, **sizes})
    model = transformers.AutoModelForCausalLM.from_config(config)
    initialise(model)
    check_gains(model)


@pytest.mark.parametrize("save", [MODELS["qwen3"], MODELS["gemma3"], save_gemma4])
def test_queries_and_keys_of_models_for_cpus_are_sharpened_alike(save, tmp_path):
    check_gains(transformers.AutoModelForCausalLM.from_pretrained(save(tmp_path)))


def test_a_drafter_for_gpus_has_the_sizes_of_its_model(tmp_path):
    vllm_equality.save("gemma3-eagle", tmp_path)
    model, drafter = (transformers.AutoConfig.from_pretrained(each) for each in (tmp_path, tmp_path / FOLDER))
    assert (drafter.hidden_size, drafter.head_dim, drafter.num_hidden_layers) == (model.hidden_size, 64, 1)
    assert drafter.dtype == model.dtype == torch.bfloat16


# Equal


def test_two_engines_agree(folder, expected):
    assert max(differences(cold_answers(folder, PROMPTS), expected)) <= TOLERANCE
    assert [answer.cached_tokens for answer in expected] == [0] * 8


def test_the_cuts_of_the_prefill_do_not_matter(folder, expected):
    assert max(differences(cold_answers(folder, PROMPTS, step_tokens=72), expected)) <= TOLERANCE
    assert max(differences(cold_answers(folder, PROMPTS, step_tokens=1024, max_requests=2), expected)) <= TOLERANCE


def test_asynchronous_scheduling_does_not_matter(folder, expected):
    assert max(differences(cold_answers(folder, PROMPTS, asynchronous=True), expected)) <= TOLERANCE


def test_blocks_kept_on_the_device_are_as_good_as_computed_ones(folder, expected):
    with RealEngine(folder, blocks=300) as engine:
        engine.answer(PROMPTS)
        remembered = engine.answer(PROMPTS)
        engine.forget()
        computed = engine.answer(PROMPTS)
    assert max(differences(remembered, expected)) <= TOLERANCE
    assert max(differences(computed, expected)) <= TOLERANCE
    assert [answer.cached_tokens for answer in remembered] == [20 * BLOCK] * 8
    assert [answer.cached_tokens for answer in computed] == [0] * 8


# Different


def test_eight_pasts_of_the_same_words_have_eight_futures(folder):
    words = some_tokens(16, "words")
    with RealEngine(folder) as engine:
        answers = engine.answer([prompt[:200] + words for prompt in PROMPTS])
    assert len({tuple(answer.tokens) for answer in answers}) == 8
    assert min(error(*pair) for pair in combinations(answers, 2)) > 1


def test_damage_to_one_layer_of_one_block_shows(folder):
    with RealEngine(folder) as engine:
        for prompt in PROMPTS:
            engine.forget()
            (expected,) = engine.answer([prompt], max_tokens=1)
            for group in range(len(engine.groups())):
                blocks = list(engine.cached(prompt, group).values())
                for block, layer in product({blocks[0], blocks[len(blocks) // 2], blocks[-1]}, engine.layers(group)):
                    with engine.damaged(block, [layer]):
                        (answer,) = engine.answer([prompt], max_tokens=1)
                    assert error(answer, expected) > SHOWN
                    assert answer.cached_tokens == 20 * BLOCK
            assert error(*engine.answer([prompt], max_tokens=1), expected) <= TOLERANCE  # it has been repaired


def test_gemma3_keeps_all_of_full_attention_and_two_blocks_of_each_window(gemma3):
    with RealEngine(gemma3) as engine:
        engine.answer(PROMPTS[:1])
        kinds = [type(group.kv_cache_spec).__name__ for group in engine.groups()]
        kept = [list(engine.cached(PROMPTS[0], group)) for group in range(3)]
    assert kinds == ["SlidingWindowSpec", "SlidingWindowSpec", "FullAttentionSpec"]
    assert kept == [[18, 19], [18, 19], list(range(20))]


def test_tokens_that_no_window_of_gemma3_reaches_still_matter(gemma3):
    """Its four window layers, one behind the other, see 252 tokens back: what is before comes by full attention."""
    behind = some_tokens(6 * WINDOW, "behind")
    with RealEngine(gemma3) as engine:
        answers = engine.answer([prompt[:BLOCK] + behind for prompt in PROMPTS], max_tokens=1)
    assert min(error(*pair) for pair in combinations(answers, 2)) > SHOWN


# The harness


def test_a_connector_and_its_halves_can_be_reached(folder):
    with RealEngine(folder, connector="SilentConnector", module="tests.vllm.silent") as engine:
        halves = engine.connectors.scheduler, engine.connectors.worker
        (answer,) = engine.answer(PROMPTS[:1])
    assert [type(half) for half in halves] == [SilentConnector, SilentConnector] and halves[0] is not halves[1]
    assert answer.loaded_tokens == 0


def test_an_aborted_request_leaves_nothing_behind(gemma3):
    with RealEngine(gemma3) as engine:
        for steps in range(5):
            name = engine.submit(PROMPTS[0], max_tokens=50)
            for _ in range(steps):
                engine.step()
            engine.abort(name)
        engine.rest()
        assert not engine.finished
        assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1


def test_an_engine_that_does_not_start_is_not_in_the_way_of_the_next(gemma3):
    with pytest.raises(AttributeError, match="Missing"):
        RealEngine(gemma3, connector="Missing", module="tests.vllm.silent")
    with RealEngine(gemma3) as engine:
        assert engine.answer(PROMPTS[:1])


def test_answers_are_compared_until_their_tokens_differ():
    reference = torch.randn(3, 50)
    changed = reference.clone()
    changed[2] += 1
    expected = Answer([1, 2, 3], reference, 0, 0)
    assert error(Answer([1, 2, 3], changed, 0, 0), expected) > 0.5
    assert error(Answer([1, 7, 3], changed, 0, 0), expected) == 0
    with pytest.raises(AssertionError, match="lengths"):
        error(Answer([1, 2], reference[:2], 0, 0), expected)
