"""A real engine with vLLM's OffloadingConnector as we derive from it, and a tier of ours below its host memory."""

import shutil
from contextlib import contextmanager

import pytest
import torch

from connector.vllm_tiers import PrefixCacheTier
from tests.vllm.cpu_worker import copies_on_the_cpu
from tests.vllm.real_cache import PROMPTS, expected_of, folder_of
from tests.vllm.real_engine import SHOWN, TOLERANCE, RealEngine, differences
from tests.vllm.secondary import MODULE, ours

CONNECTOR = "CPUPrefixCacheOffloadingConnector"
WANTED = PROMPTS[:2]


@contextmanager
def engine_on(files, model):
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 1 << 23,
        "secondary_tiers": [ours(files, revision=None, bytes=1 << 26)],
    }
    with (
        copies_on_the_cpu(),
        RealEngine(model, blocks=200, connector=CONNECTOR, module=MODULE, extra=extra) as engine,
    ):
        yield engine


def forget(engine):
    """Device and host are empty; the tier has what it has."""
    engine.forget()
    manager_of(engine).primary_tier.reset_cache()


def manager_of(engine):
    return engine.connectors.scheduler.connector_scheduler.manager


@pytest.fixture
def model(tmp_path):
    shutil.copytree(folder_of("llama"), tmp_path / "model")
    return tmp_path / "model"


@contextmanager
def damaged_rows():
    """Noise in each row of host memory, after the tier has found that its bytes are right."""
    result = PrefixCacheTier._result

    def damage(tier, ended):
        job = tier._jobs[ended.job]
        if job.is_promotion:
            rows = torch.frombuffer(tier._view, dtype=torch.float32).view(-1, tier._row_bytes // 4)
            for row in job.chunk_ids:
                rows[row].normal_()
        return result(tier, ended)

    PrefixCacheTier._result = damage
    try:
        yield
    finally:
        PrefixCacheTier._result = result


def test_an_engine_is_served_what_it_computed(tmp_path, model):
    with engine_on(tmp_path, model) as engine:
        computed = engine.answer(WANTED)
        forget(engine)
        promoted = engine.answer(WANTED)
        assert [answer.loaded_tokens for answer in computed] == [0, 0]
        assert min(answer.loaded_tokens for answer in promoted) > 0
        (blocks,) = tmp_path.rglob("blocks")
        data = bytearray(blocks.read_bytes())
        assert any(data)
        blocks.write_bytes(bytes(each ^ 1 for each in data))
        forget(engine)
        refused = engine.answer(WANTED)
        assert [answer.loaded_tokens for answer in refused] == [0, 0]
    with engine_on(tmp_path, model) as engine:
        again = engine.answer(WANTED)
        assert min(answer.loaded_tokens for answer in again) > 0
        forget(engine)
        with damaged_rows():
            damaged = engine.answer(WANTED)
    expected = expected_of("llama")[: len(WANTED)]
    for answers in (computed, promoted, refused, again):
        assert max(differences(answers, expected)) <= TOLERANCE
    assert min(differences(damaged, expected)) >= SHOWN
