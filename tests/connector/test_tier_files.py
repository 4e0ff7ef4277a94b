"""The files of a rank whose opening fails once its slab is open."""

import errno

import pytest
import torch

from connector.tier.files import FileTierSettings
from connector.tier.settings import RankPart
from cpu_prefix_cache import FileTier
from cpu_prefix_cache.slab.namespace import Namespace
from cpu_prefix_cache.slab.rank_tier import RankTier

RANGE = 1 << 32


@pytest.fixture
def opened(tmp_path):
    """Opens them."""
    said = FileTier(str(tmp_path), 1 << 20, model="m", revision="r")
    settings = FileTierSettings(Namespace((("model", "m"), ("revision", "r"))), 1, said)
    part = RankPart(torch.zeros(4, 4096, dtype=torch.uint8), (), 0, 0, 16)
    return lambda: settings.open({}, part)


def reset(owner):
    slab = owner._tier._slots
    slab.advance(slab.next_generation + RANGE)
    slab.keep()
    owner.close()


@pytest.mark.parametrize("failing", [(RankTier, "__init__")])
def test_what_fails_keeps_no_lock_from_the_next_attempt(opened, failing, monkeypatch):
    reset(opened())

    def fails(*arguments, **more):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(*failing, fails)
        with pytest.raises(OSError, match="Input/output error") as kept:
            opened()
    assert kept.tb is not None, "with all of its frames"
    opened().close()
