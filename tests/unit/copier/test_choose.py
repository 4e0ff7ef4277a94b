"""The choice of copier, its reason, and its driver."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.copier import staged
from cpu_prefix_cache.copier.choose import choose_copier
from cpu_prefix_cache.copier.reference import ReferenceCopier
from cpu_prefix_cache.copier.staged import StagedCopier
from cpu_prefix_cache.deciding import Direction, GroupCopy
from cpu_prefix_cache.memory import cuda, hip
from cpu_prefix_cache.memory.arena import HostArena
from cpu_prefix_cache.memory.driver import accelerator_driver
from tests.unit.copier.bench import POISON, poisoned, randoms, shapes_of


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
        "import sys, torch; from cpu_prefix_cache.copying import *; from cpu_prefix_cache.deciding import *\n"
        "group = PrefixGroup(name='a', block_tokens=1, block_bytes=8)\n"
        "tensors = [[torch.zeros(4, 8, dtype=torch.uint8)]]\n"
        "choose_copier(HybridChunkPlanner([group], max_model_len=8), tensors, torch.zeros(4, 8, dtype=torch.uint8))\n"
        "print('triton.language' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


VENDORS = {
    "CUDA": {"cuda": "13.0", "hip": None},
    "HIP": {"cuda": None, "hip": "7.0"},
    None: {"cuda": None, "hip": None},
}


@pytest.fixture
def built_for(monkeypatch):
    """Sets the vendor that torch was built for, and gives both vendors a driver that is `found`, or none."""

    def say(vendor, found=None):
        def find():
            if found is None:
                raise AssertionError("a driver is looked for")
            return found

        for name, version in VENDORS[vendor].items():
            monkeypatch.setattr(torch.version, name, version)
        for module, name in ((cuda, "cuda_driver"), (hip, "hip_driver")):
            monkeypatch.setattr(module, name, find)
        accelerator_driver.cache_clear()

    yield say
    accelerator_driver.cache_clear()


def tensors_on(kind):
    """All attributes of tensors that are read before a copier is built."""
    return [[SimpleNamespace(device=torch.device(kind))]]


@pytest.mark.parametrize("vendor", ["CUDA", "HIP"])
def test_tensors_that_torch_calls_cuda_are_staged_and_the_log_names_their_vendor(built_for, monkeypatch, vendor):
    built_for(vendor, SimpleNamespace(name=vendor))
    monkeypatch.setattr(staged, "StagedCopier", lambda *_, **__: SimpleNamespace(paths="directly"))
    monkeypatch.setattr("cpu_prefix_cache.copier.choose.Binding", lambda *_: None)
    choice = choose_copier(None, tensors_on("cuda"), None)
    assert (choice.name, choice.reason) == ("staged", f"the device tensors are on a device of {vendor}; directly")


def test_a_torch_that_has_such_a_device_and_was_built_for_neither_vendor_is_refused_in_a_sentence(built_for):
    built_for(None)
    with pytest.raises(ConfigurationError, match=r"was built for neither; install a build for CUDA or ROCm"):
        choose_copier(None, tensors_on("cuda"), None)


@pytest.mark.parametrize("kind", ["xpu", "mps"])
def test_on_other_devices_the_reference_copies_without_a_driver(built_for, monkeypatch, kind):
    built_for("CUDA")
    monkeypatch.setattr("cpu_prefix_cache.copier.choose.ReferenceCopier", lambda *_, **__: None)
    choice = choose_copier(None, tensors_on(kind), None)
    assert choice.name == "reference"
    assert choice.reason == f"staging is for CUDA and HIP devices, and the tensors are on {kind!r}"


@pytest.mark.parametrize("vendor", VENDORS)
def test_in_host_memory_the_reference_looks_for_no_driver_whatever_torch_was_built_for(built_for, vendor):
    built_for(vendor)
    part = randoms(4, 64).cpu()
    arena, wanted = HostArena(4, 64), part.clone()
    arena.blocks.fill_(POISON)
    copier = choose_copier(shapes_of([[part]], [1], 64), [[part]], arena.blocks).copier
    copier.copy(Direction.STORE, [GroupCopy(0, (3, 1), (0, 2))])
    part.fill_(POISON)
    copier.copy(Direction.LOAD, [GroupCopy(0, (3, 1), (0, 2))])
    assert torch.equal(part[[0, 2]], wanted[[0, 2]]) and (part[[1, 3]] == POISON).all()
    arena.blocks[1, 5] ^= 1  # the controls: a wrong byte and a look for a driver would be noticed
    copier.copy(Direction.LOAD, [GroupCopy(0, (3, 1), (0, 2))])
    assert not torch.equal(part[[0, 2]], wanted[[0, 2]])
    if vendor is not None:
        with pytest.raises(AssertionError, match="a driver is looked for"):
            accelerator_driver()


@pytest.mark.parametrize(("wave_size", "warps"), [(32, 8), (64, 4)])
def test_a_program_has_as_many_threads_in_waves_of_either_size(monkeypatch, wave_size, warps):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(warp_size=wave_size))
    assert staged.tiling_on(torch.device("cuda", 0)).warps == warps
