"""The host region: the right shape, and refused in time when it is too large."""

import gc

import pytest
import torch

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.memory import arena
from cpu_prefix_cache.memory.arena import HostArena


def test_blocks_are_rows_of_bytes_one_after_another():
    blocks = HostArena(num_blocks=3, block_bytes=10).blocks
    assert blocks.dtype == torch.uint8
    assert blocks.shape == (3, 10)
    assert blocks.is_contiguous()


def test_what_is_written_to_one_block_stays_out_of_the_others():
    blocks = HostArena(num_blocks=3, block_bytes=10).blocks
    blocks.fill_(7)
    blocks[1] = 9
    assert blocks[0].tolist() == blocks[2].tolist() == [7] * 10


def test_more_than_the_machine_may_use_is_refused_with_the_number_that_fits():
    with pytest.raises(ConfigurationError, match=r"ask for at most \d+ bytes"):
        HostArena(num_blocks=1 << 30, block_bytes=1 << 20)


class CudaRuntime:
    """Says yes to everything, or `error`."""

    def __init__(self, error=0):
        self.error, self.registered = error, {}

    def cudaHostRegister(self, address, num_bytes, flags):
        self.registered[address] = num_bytes
        return self.error

    def cudaHostUnregister(self, address):
        del self.registered[address]
        return self.error


@pytest.fixture
def runtime(monkeypatch):
    runtime = CudaRuntime()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


def test_a_pinned_region_is_registered_until_it_is_closed(runtime):
    region = HostArena(num_blocks=3, block_bytes=1000, pinned=True)
    address = region.blocks.data_ptr()
    assert runtime.registered == {address: 3000}
    blocks = region.blocks
    del region  # whoever forgets the arena leaves CUDA no address without memory behind it
    gc.collect()
    blocks.fill_(1)
    assert address in arena._PINNED


def test_closing_unpins_once_and_an_ordinary_region_needs_none(runtime):
    region = HostArena(num_blocks=3, block_bytes=1000, pinned=True)
    region.close()
    assert not runtime.registered and region.blocks.data_ptr() not in arena._PINNED
    region.close()
    HostArena(num_blocks=3, block_bytes=1000).close()


def test_what_cuda_will_not_pin_is_refused_with_its_error(runtime):
    runtime.error = 2
    with pytest.raises(ConfigurationError, match=r"would not pin 0.00 GB .*error 2"):
        HostArena(num_blocks=3, block_bytes=1000, pinned=True)
    assert not arena._PINNED.keys() & runtime.registered.keys()


def test_pinned_memory_needs_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigurationError, match="pinned=False"):
        HostArena(num_blocks=3, block_bytes=1000, pinned=True)


def test_a_control_group_counts_what_is_used_already(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("1000000000\n")
    (tmp_path / "memory.current").write_text("600000000\n")
    monkeypatch.setattr(arena, "CGROUP", tmp_path)
    assert arena.usable_bytes() == 400_000_000 - arena.RESERVED_BYTES


def test_a_control_group_without_a_limit_is_none(tmp_path, monkeypatch):
    (tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr(arena, "CGROUP", tmp_path)
    unlimited = arena.usable_bytes()
    monkeypatch.setattr(arena, "CGROUP", tmp_path / "missing")
    assert abs(arena.usable_bytes() - unlimited) < 1 << 30
