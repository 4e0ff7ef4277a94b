"""Models that are known by their names: what their published configurations say."""

import re
from pathlib import Path

import pytest

from cpu_prefix_cache.tools.replay.flops import read_flops
from cpu_prefix_cache.tools.replay.models import read_model
from cpu_prefix_cache.tools.replay.named_models import NAMED

IN_NAME = re.compile(r"-(?P<all>\d+)b(?:-a(?P<active>\d+)b)?$")
ACTIVE = {"gpt-oss-20b": 3.6e9, "gpt-oss-120b": 5.1e9, "deepseek-v3": 37e9}  # their authors' numbers


@pytest.mark.parametrize("name", NAMED)
def test_a_named_model_has_the_parameters_of_its_name(name):
    """Without embeddings, which are in no matrix product: up to a sixth of a small model."""
    found = read_flops(Path(name)).token / 2
    named = IN_NAME.search(name)
    whole = ACTIVE.get(name) or float(named["active"] or named["all"]) * 1e9
    assert 0.83 * whole < found < 1.1 * whole


def test_a_name_is_found_in_any_case_and_is_a_configuration_like_others():
    assert read_model(Path("Qwen3-8B")) == read_model(Path("qwen3-8b"))
    assert read_model(Path("qwen3-8b")) != read_model(Path("qwen3-8b"), kv_dtype="fp8")
