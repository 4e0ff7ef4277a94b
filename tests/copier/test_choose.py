"""Which copier, and why."""

import subprocess
import sys

import pytest

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.copier.choose import choose_copier
from cpu_prefix_cache.copier.reference import ReferenceCopier
from cpu_prefix_cache.copier.staged import StagedCopier
from tests.copier.bench import poisoned, randoms, shapes_of


@pytest.fixture
def arguments():
    part = randoms(4, 64)
    return shapes_of([[part]], [1], 64), [[part]], poisoned(4, 64)


def test_tensors_in_host_memory_are_copied_by_the_reference(arguments):
    choice = choose_copier(*arguments)
    assert isinstance(choice.copier, ReferenceCopier)
    assert choice.name == "reference"
    assert "host memory" in choice.reason


def test_a_name_is_obeyed(arguments):
    choice = choose_copier(*arguments, name="staged")
    assert isinstance(choice.copier, StagedCopier)
    assert choice.name == "staged"
    assert choice.reason == "it was asked for; directly: no group; through the ring: 1 groups"
    assert isinstance(choose_copier(*arguments, name="reference").copier, ReferenceCopier)


def test_an_unknown_name_is_refused(arguments):
    with pytest.raises(ConfigurationError, match="auto, reference, staged; got 'fast'"):
        choose_copier(*arguments, name="fast")


def test_without_triton_staging_is_refused_by_that_name(arguments, monkeypatch):
    monkeypatch.setitem(sys.modules, "cpu_prefix_cache.copier.staged", None)
    with pytest.raises(ConfigurationError, match="need Triton"):
        choose_copier(*arguments, name="staged")


def test_the_reference_needs_no_triton():
    program = (
        "import sys, torch; from cpu_prefix_cache import *; from cpu_prefix_cache.copier.choose import choose_copier\n"
        "group = Group(name='a', kind=GroupKind.PREFIX, block_tokens=1, block_bytes=8)\n"
        "tensors = [[torch.zeros(4, 8, dtype=torch.uint8)]]\n"
        "choose_copier(HybridChunkPlanner([group], max_model_len=8), tensors, torch.zeros(4, 8, dtype=torch.uint8))\n"
        "print('triton.language' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
