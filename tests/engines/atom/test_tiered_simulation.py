"""Some hundred requests in ATOM's real scheduler over a tier of files, with everything that may happen: S5.23, S5.30.

ATOM_REQUESTS is how many each variant has, ATOM_SEEDS how many seeds.
"""

import os

import pytest

from tests.engines.atom.source import WHY_NOT_REAL

if WHY_NOT_REAL:
    pytest.skip(WHY_NOT_REAL, allow_module_level=True)

from tests.engines.atom.tiered_simulation import CONTROL, VARIANTS, simulate_over_files

REQUESTS, SEEDS = int(os.environ.get("ATOM_REQUESTS", "100")), int(os.environ.get("ATOM_SEEDS", "1"))

pytestmark = pytest.mark.usefixtures("quiet")


@pytest.mark.parametrize("seed", range(1, SEEDS + 1))
@pytest.mark.parametrize("name", VARIANTS)
def test_requests_read_the_bytes_of_their_own_prefixes(name, seed):
    outcome = simulate_over_files(VARIANTS[name], REQUESTS, seed)
    below = outcome.below
    assert outcome.wrong == outcome.unwritten == 0
    assert not outcome.leaks
    assert sum(outcome.finished.values()) == REQUESTS
    assert below.hit_tokens and below.cache.chunks_loaded and below.cache.chunks_stored, "nothing was tested"
    if VARIANTS[name].lies > 0.05:
        assert below.refused


def test_loaded_blocks_are_compared():
    """The control: every load damages its blocks."""
    outcome = simulate_over_files(CONTROL, REQUESTS)
    assert outcome.wrong and outcome.below.cache.chunks_loaded
