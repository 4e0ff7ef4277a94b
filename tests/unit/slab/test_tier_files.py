"""The files of a rank whose opening fails once its slab is open."""

import errno

import pytest
import torch

from cpu_prefix_cache import FileTier
from cpu_prefix_cache.messages.generations import RANGE
from cpu_prefix_cache.slab.namespace import Namespace
from cpu_prefix_cache.slab.rank_tier import RankTier
from cpu_prefix_cache.slab.tier import RankPart


@pytest.fixture
def opened(tmp_path):
    """Opens them."""
    tier = FileTier(str(tmp_path), 1 << 20, model="m", revision="r")
    namespace = Namespace((("model", "m"), ("revision", "r")))
    region = torch.zeros(4, 4096, dtype=torch.uint8)
    return lambda: tier.open(namespace, region, (), RankPart(16))


def reset(tier):
    slab = tier._below
    slab.advance(slab.next_generation + RANGE)
    slab.keep()
    tier.close()


@pytest.mark.parametrize("failing", [(RankTier, "__init__")])
def test_an_attempt_that_fails_keeps_no_lock_from_the_next_one(opened, failing, monkeypatch):
    reset(opened())

    def fails(*arguments, **more):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(*failing, fails)
        with pytest.raises(OSError, match="Input/output error") as kept:
            opened()
    assert kept.tb is not None, "with all of its frames"
    opened().close()
