"""A real engine with models whose layers do not have one KV each for all tokens.

sharing    layers that share another one's KV, as in Gemma 4 E2B, beside windows
local      chunked-local attention, as in Llama 4
"""

import pytest

from tests.vllm.models import LOCAL_CHUNK, save_gemma4, save_llama4, some_tokens
from tests.vllm.real_cache import CachedEngine, Copies
from tests.vllm.real_engine import BLOCK, TOLERANCE, cold_answers, differences

TOKENS = 3 * LOCAL_CHUNK + 2 * BLOCK  # of these prompts are found: the last local chunk is there in part
PROMPTS = [some_tokens(TOKENS + 5, ("shape", seed)) for seed in range(4)]
GROUPS = {
    "sharing": ["window-0", "window-1", "prefix-2"],
    "local": ["chunk-local-0", "chunk-local-1", "chunk-local-2", "prefix-3"],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        "sharing": save_gemma4(tmp_path_factory.mktemp("gemma4"), sharing=3),
        "local": save_llama4(tmp_path_factory.mktemp("llama4")),
    }


@pytest.fixture(scope="module")
def expected(folders):
    return {shape: cold_answers(folder, PROMPTS) for shape, folder in folders.items()}


def loaded(folder, **options):
    """Answers to prompts that the device has lost."""
    with CachedEngine(folder, engine=dict(blocks=300), **options) as engine:
        engine.answer(PROMPTS)
        engine.flood(45)
        answers = engine.answer(PROMPTS)
        engine.check_nothing_leaked()
    assert [answer.loaded_tokens for answer in answers] == [TOKENS] * len(PROMPTS)
    return answers


@pytest.mark.parametrize("offload", ["lazy", "eager"])
@pytest.mark.parametrize("shape", GROUPS)
def test_prompts_come_back(folders, expected, shape, offload):
    assert max(differences(loaded(folders[shape], offload=offload), expected[shape])) <= TOLERANCE


@pytest.mark.parametrize(("shape", "group"), [(shape, group) for shape in GROUPS for group in GROUPS[shape]])
def test_one_damaged_block_of_a_load_shows(folders, expected, shape, group):
    answers = loaded(folders[shape], offload="eager", copies=Copies(damaged=group))
    assert sum(difference > TOLERANCE for difference in differences(answers, expected[shape])) >= 3
