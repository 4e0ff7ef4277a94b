"""Coded blocks in a real engine: what comes back from them gives the answers that raw blocks give."""

import pytest

from cpu_prefix_cache import ConfigurationError
from tests.vllm.real_cache import BLOCKS, GROUPS, PROMPTS, CachedEngine, Copies, folder_of
from tests.vllm.real_engine import BLOCK, TOLERANCE, differences

BF16 = dict(dtype="bfloat16")


def loaded(model, **options):
    """Answers to prompts, one by one, computed and then brought back from the host; and the host's statistics."""
    with CachedEngine(folder_of(model), engine=BF16, **options) as engine:
        for prompt in PROMPTS[:4]:
            engine.answer([prompt])
        engine.flood()
        answers = [engine.answer([prompt])[0] for prompt in PROMPTS[:4]]
        engine.check_nothing_leaked()
        return answers, engine.statistics


@pytest.mark.parametrize("model", ["llama", "gemma3"])
@pytest.mark.parametrize("offload", ["lazy", "eager"])
def test_coded_blocks_come_back_as_raw_ones_do(model, offload):
    raw, before = loaded(model, offload=offload)
    coded, after = loaded(model, offload=offload, codec="exponent")
    assert max(differences(coded, raw)) <= TOLERANCE
    assert [answer.loaded_tokens for answer in coded] == [BLOCKS * BLOCK] * 4
    assert after.store_unfit == 0
    per_chunk = [each.bytes_loaded * 64 // 49 for each in (before, after)]
    assert before.bytes_loaded and per_chunk[1] == before.bytes_loaded, "49 bytes for 64"


def test_the_start_line_names_coded_groups(caplog):
    with CachedEngine(folder_of("llama"), engine=BF16, codec="exponent"):
        pass
    assert any(
        "lazy, adaptive, prefix-0 by codec exponent, no tier" in record.getMessage() for record in caplog.records
    )


@pytest.mark.parametrize("group", GROUPS["gemma3"])
def test_one_damaged_coded_block_shows(group):
    raw, _ = loaded("gemma3", offload="eager")
    damaged, _ = loaded("gemma3", offload="eager", codec="exponent", copies=Copies(damaged=group))
    assert sum(difference > TOLERANCE for difference in differences(damaged, raw)) >= 3


def test_kv_of_another_type_is_refused():
    with pytest.raises(ConfigurationError, match=r"for KV of bfloat16 .* this model has none: leave it out"):
        CachedEngine(folder_of("llama"), codec="exponent")
