"""A store below the pools of several nodes: a keeper each, as a process, and the store is an installed package's.

Engines compare every byte that they load (`pool_engine.py`).
"""

from contextlib import nullcontext

import pytest

from cpu_prefix_cache.slab.records import checksum
from cpu_prefix_cache.stores import frame
from tests.support.threads import wait_until
from tests.unit.keeper.node_with_files import NodeWithStore, install_store
from tests.unit.keeper.pool_engine import PoolEngine
from tests.unit.keeper.test_files_below import MODELS, PROMPT

pytestmark = pytest.mark.usefixtures("patience")

DIGEST = slice(88, 104)  # in a frame


class Store:
    """A folder that nodes mount."""

    def __init__(self, folder):
        self.folder = folder
        folder.mkdir()

    @property
    def url(self):
        return f"folder://{self.folder}"

    @property
    def values(self):
        return [file for file in self.folder.iterdir() if not file.name.startswith("new-")]

    def holds(self, count):
        wait_until(lambda: len(self.values) >= count)

    def damage(self, forged):
        """Flip a bit of each value; `forged`: and have the frames say that this is right."""
        for file in self.values:
            value = bytearray(file.read_bytes())
            value[frame.SIZE] ^= 1
            if forged:
                value[DIGEST] = checksum(memoryview(value)[frame.SIZE :])
            file.write_bytes(value)


@pytest.fixture
def store(tmp_path, monkeypatch):
    install_store(tmp_path, monkeypatch)
    return Store(tmp_path / "store")


@pytest.mark.parametrize("model", MODELS)
def test_an_engine_finds_what_one_of_another_node_has_computed(tmp_path, store, model):
    engine_at, block_bytes, slots = MODELS[model]
    with NodeWithStore(tmp_path / "one", store.url, block_bytes=block_bytes) as one, engine_at(one.address) as engine:
        engine.stores(PROMPT)
        store.holds(slots)
    with (
        NodeWithStore(tmp_path / "two", store.url, block_bytes=block_bytes) as two,
        engine_at(two.address) as engine,
        engine_at(two.address) as other,
    ):
        assert engine.serves(PROMPT + "x") == len(PROMPT)
        engine.rests()
        assert other.serves(PROMPT) == len(PROMPT), "it is in the pool now"


@pytest.mark.parametrize(("forged", "loaded"), [(False, 0), (True, len(PROMPT))])
def test_a_damaged_value_is_a_miss_and_bytes_that_differ_would_show(tmp_path, store, forged, loaded):
    with NodeWithStore(tmp_path / "one", store.url) as one, PoolEngine(one.address) as engine:
        engine.stores(PROMPT)
        store.holds(len(PROMPT))
    store.damage(forged)
    with (
        NodeWithStore(tmp_path / "two", store.url) as two,
        PoolEngine(two.address) as engine,
        pytest.raises(AssertionError, match="hold other bytes") if forged else nullcontext(),
    ):
        assert engine.serves(PROMPT) == loaded


def test_engines_of_other_weights_do_not_meet_in_the_store(tmp_path, store):
    with NodeWithStore(tmp_path / "one", store.url) as one, PoolEngine(one.address) as engine:
        engine.stores("abc")
        engine.host.reset("2")
        engine.weights = 2
        engine.stores("abcd")
        store.holds(3 + 4)
    with (
        NodeWithStore(tmp_path / "two", store.url) as two,
        PoolEngine(two.address) as first,
        PoolEngine(two.address, revision="2", weights=2) as second,
    ):
        assert (first.serves("abcd"), second.serves("abcd")) == (3, 4)
        with PoolEngine(two.address, revision="3", weights=3) as third:
            assert third.serves("abcd") == 0


def test_a_store_that_cannot_be_opened_leaves_the_pool_as_it_is(tmp_path, store):
    store.folder.rmdir()
    with NodeWithStore(tmp_path / "one", store.url) as one, PoolEngine(one.address) as engine:
        engine.stores(PROMPT)
        assert engine.serves(PROMPT) == len(PROMPT)
        assert "nothing is below this pool: a store of files is folder:///PATH" in one.log.read_text()
