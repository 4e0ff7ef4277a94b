"""Every test here imports ATOM as `source.py` finds it, the real one or its double.

ATOM_POOL names the pool of blocks that its schedulers have, of those in `pools.py`; default: ATOM's.

Kernels run in Triton's interpreter. The variable must be set before anything imports it, as ATOM does.
"""

import logging
import os

import pytest

if os.environ.get("COPIER_DEVICE", "cpu") == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

from tests.engines.atom import source  # noqa: F401

collect_ignore = [  # they import the real one
    "engine.py",
    "mends.py",
    "pools.py",
    "simulation.py",
    "state_engine.py",
    "state_simulation.py",
    "tiered.py",
    "tiered_simulation.py",
]


@pytest.fixture(autouse=True)
def pool():
    kind = os.environ.get("ATOM_POOL")
    if kind is None:
        yield
        return
    from tests.engines.atom.pools import pools  # the real ATOM, where this is set

    with pools(kind):
        yield


@pytest.fixture
def quiet():
    """Failed copies and prefills are logged by the thousand."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def copies(monkeypatch):
    """How the copiers of ranks that are made from now on behave."""
    import connector.atom.worker
    from tests.engines.atom.simulation import troubled  # the real ATOM, where this is wanted

    def behave(wrap):
        choose = connector.atom.worker.choose_copier
        monkeypatch.setattr(connector.atom.worker, "choose_copier", troubled(choose, wrap))

    return behave
