"""KV of eight bits in a real engine: what the host brings back gives the answers of an engine without it."""

import pytest

from tests.vllm.real_cache import BLOCKS, GROUPS, PROMPTS, CachedEngine, Copies, folder_of
from tests.vllm.real_engine import BLOCK, HAS_AVX512, TOLERANCE, RealEngine, differences

FP8 = dict(kv_cache_dtype="fp8", dtype="bfloat16")
MODEL = "llama"
pytestmark = pytest.mark.skipif(not HAS_AVX512, reason="vLLM has KV of eight bits on CPUs with AVX-512 only")


def answers_one_by_one(engine: RealEngine):
    return [engine.answer([prompt])[0] for prompt in PROMPTS[:4]]


def expected():
    with RealEngine(folder_of(MODEL), blocks=300, **FP8) as engine:
        return answers_one_by_one(engine)


@pytest.mark.parametrize("offload", ["lazy", "eager"])
def test_fp8_kv_comes_back_as_it_was(offload):
    right = expected()
    with CachedEngine(folder_of(MODEL), offload=offload, engine=FP8) as engine:
        computed = answers_one_by_one(engine)
        engine.flood()
        loaded = answers_one_by_one(engine)
        engine.check_nothing_leaked()
    assert max(differences(computed, right)) <= TOLERANCE
    assert max(differences(loaded, right)) <= TOLERANCE
    assert [answer.loaded_tokens for answer in loaded] == [BLOCKS * BLOCK] * 4


def test_one_damaged_block_of_fp8_kv_shows():
    right = expected()
    with CachedEngine(folder_of(MODEL), offload="eager", engine=FP8, copies=Copies(damaged=GROUPS[MODEL][0])) as engine:
        answers_one_by_one(engine)
        engine.flood()
        damaged = answers_one_by_one(engine)
    assert sum(difference > TOLERANCE for difference in differences(damaged, right)) >= 3
