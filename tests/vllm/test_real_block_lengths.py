"""A real engine with a tiny Gemma 4, whose windows have blocks twice as long as full attention has, or half as long."""

import pytest

from tests.vllm.models import WINDOW, save_gemma4, some_tokens
from tests.vllm.real_cache import CachedEngine, Copies
from tests.vllm.real_engine import BLOCK, TOLERANCE, cold_answers, differences
from tests.vllm.test_real_hits import answer_in_pairs

GRID = 2 * BLOCK
LENGTHS = [GRID - 1, GRID, GRID + 1, 2 * GRID + BLOCK, 4 * GRID, 5 * GRID + 7, 6 * GRID - 1, 6 * GRID + 1]
PROMPTS = [some_tokens(length, ("of length", length)) for length in LENGTHS]
HEADS = {"longer windows": (32, 64), "shorter windows": (64, 32)}
BLOCKS = {"longer windows": [GRID, GRID, BLOCK], "shorter windows": [BLOCK, BLOCK, GRID]}


@pytest.fixture(scope="module", params=HEADS)
def which(request):
    return request.param


@pytest.fixture(scope="module")
def folder(which, tmp_path_factory):
    return save_gemma4(tmp_path_factory.mktemp("gemma4"), *HEADS[which])


@pytest.fixture(scope="module")
def expected(folder):
    return cold_answers(folder, PROMPTS)


@pytest.mark.parametrize("offload", ["lazy", "eager"])
def test_prompts_come_back_at_their_last_boundary(which, folder, expected, offload):
    with CachedEngine(folder, offload=offload) as engine:
        groups = engine.scheduler.kv_cache_config.kv_cache_groups
        assert [group.kv_cache_spec.block_size for group in groups] == BLOCKS[which]
        computed = answer_in_pairs(engine, PROMPTS)
        engine.flood()
        loaded = answer_in_pairs(engine, PROMPTS)
        engine.check_nothing_leaked()
    assert max(differences(computed, expected)) <= TOLERANCE
    assert max(differences(loaded, expected)) <= TOLERANCE
    assert [answer.loaded_tokens for answer in loaded] == [(length - 1) // GRID * GRID for length in LENGTHS]


@pytest.mark.parametrize("group", ["window-0", "window-1", "prefix-2"])
def test_one_damaged_block_of_a_load_shows(folder, expected, group):
    """The control: one wrong block, of any group, would fail the comparison."""
    with CachedEngine(folder, offload="eager", copies=Copies(damaged=group)) as engine:
        answer_in_pairs(engine, PROMPTS)
        engine.flood()
        damaged = answer_in_pairs(engine, PROMPTS)
    long = [length > GRID + WINDOW for length in LENGTHS]
    shown = [difference > TOLERANCE for difference in differences(damaged, expected)]
    assert sum(one and other for one, other in zip(long, shown, strict=True)) >= sum(long) - 1
