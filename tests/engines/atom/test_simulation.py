"""Some thousand requests in ATOM's real scheduler, with everything that may happen to them: simulation.py.

ATOM_REQUESTS is how many each variant has, ATOM_SEEDS how many seeds.
"""

import os

import pytest

from tests.engines.atom.source import WHY_NOT_REAL

if WHY_NOT_REAL:
    pytest.skip(WHY_NOT_REAL, allow_module_level=True)

from connector.atom.device import AtomDevice
from tests.engines.atom.simulation import CONTROL, VARIANTS, simulate

REQUESTS, SEEDS = int(os.environ.get("ATOM_REQUESTS", "200")), int(os.environ.get("ATOM_SEEDS", "1"))

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
@pytest.mark.parametrize("name", VARIANTS)
def test_requests_read_the_bytes_of_their_own_prefixes(name, seed):
    outcome = simulate(VARIANTS[name], REQUESTS, seed)
    assert outcome.wrong == outcome.unwritten == 0
    assert not outcome.leaks
    assert outcome.cache.chunks_loaded and outcome.cache.chunks_stored, "nothing was tested"
    assert sum(outcome.finished.values()) == REQUESTS
    if VARIANTS[name].copies == "fails":
        assert outcome.cache.loads_failed and outcome.cache.stores_failed


def test_loaded_blocks_are_compared():
    """The control: every load damages its blocks."""
    assert simulate(CONTROL, REQUESTS).wrong


def test_blocks_from_before_a_reset_are_seen(monkeypatch):
    """The control: the device goes on knowing the blocks of running requests."""
    monkeypatch.setattr(AtomDevice, "forget_all", lambda self: None)
    assert simulate(VARIANTS["eager, resets"], max(REQUESTS, 200)).wrong


def test_all_phases_are_aborted():
    """S5.23."""
    phases = set()
    for name in ("eager, two ranks, late", "eager, small host, arc", "eager, preempted"):
        phases |= simulate(VARIANTS[name], max(REQUESTS, 200), seed=3).aborted.keys()
    assert phases == {"queued", "loading", "loaded", "prefill", "decode", "preempted"}
