"""The host region: the right shape, and refused in time when it is too large."""

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
