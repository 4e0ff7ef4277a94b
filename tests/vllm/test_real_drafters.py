"""A real engine with an EAGLE drafter beside full attention, or beside windows: as many hits as the device has.

The drafter has a layer of its own, whose KV is stored and loaded like that of the model. vLLM drops the last block of a
hit, which the drafter computes again. Accepted drafts change no answer, only how soon it comes.
"""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.vllm.models import save_eagle, save_llama
from tests.vllm.real_cache import BLOCKS, PROMPTS, CachedEngine, Copies, expected_of, folder_of
from tests.vllm.real_engine import BLOCK, TOLERANCE, differences

FOUND = (BLOCKS - 1) * BLOCK  # tokens of each prompt
GROUPS = {"llama": ["prefix-0"], "gemma3": ["window-0", "prefix-1"]}  # the drafter's layer is in a prefix group
DEVICE = 300  # blocks: room for all prompts


@cache
def drafting() -> dict[str, object]:
    where = TemporaryDirectory()
    _folders.append(where)
    folder = save_eagle(Path(where.name))
    return dict(speculative_config=dict(method="eagle", model=str(folder), num_speculative_tokens=2), blocks=DEVICE)


_folders: list[TemporaryDirectory] = []  # to be removed at exit


@pytest.mark.parametrize("way", ["lazy", "eager"])
@pytest.mark.parametrize("model", GROUPS)
def test_the_host_brings_back_what_the_device_would_find(model, way):
    with CachedEngine(folder_of(model), offload=way, engine=drafting()) as engine:
        computed = engine.answer(PROMPTS)
        found = engine.answer(PROMPTS)
        engine.flood(30)
        loaded = engine.answer(PROMPTS)
        engine.check_nothing_leaked()
    for answers in (computed, found, loaded):
        assert max(differences(answers, expected_of(model))) <= TOLERANCE
    assert [(answer.loaded_tokens, answer.cached_tokens) for answer in found] == [(0, FOUND)] * len(PROMPTS)
    assert [answer.loaded_tokens for answer in loaded] == [FOUND] * len(PROMPTS)


@pytest.mark.parametrize(("model", "group"), [(model, group) for model in GROUPS for group in GROUPS[model]])
def test_one_damaged_block_of_a_load_shows(model, group):
    with CachedEngine(folder_of(model), offload="eager", copies=Copies(damaged=group), engine=drafting()) as engine:
        engine.answer(PROMPTS)
        engine.forget()
        damaged = engine.answer(PROMPTS)
    assert [answer.loaded_tokens for answer in damaged] == [FOUND] * len(PROMPTS)
    assert sum(difference > TOLERANCE for difference in differences(damaged, expected_of(model))) >= 7


@pytest.mark.parametrize("damaged", [None, "prefix-0"])
def test_a_whole_model_that_drafts_has_its_kv_beside_the_others(damaged, tmp_path):
    """For its drafts vLLM drops no block of a hit."""
    drafter = dict(method="draft_model", num_speculative_tokens=2, model=str(save_llama(tmp_path, seed=5)))
    engine = dict(speculative_config=drafter, blocks=DEVICE)
    with CachedEngine(folder_of("llama"), offload="eager", copies=Copies(damaged=damaged), engine=engine) as engine:
        engine.answer(PROMPTS)
        engine.forget()
        loaded = engine.answer(PROMPTS)
        engine.check_nothing_leaked()
    assert [answer.loaded_tokens for answer in loaded] == [BLOCKS * BLOCK] * len(PROMPTS)
    shown = sum(difference > TOLERANCE for difference in differences(loaded, expected_of("llama")))
    assert shown >= 7 if damaged else shown == 0
