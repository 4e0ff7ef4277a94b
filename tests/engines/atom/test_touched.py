"""ATOM's internals that the connector uses are checked when its scheduler starts; a changed ATOM is refused."""

import ast
import logging
from pathlib import Path

import pytest

from tests.engines.atom.source import WHY_NOT_REAL

if WHY_NOT_REAL:
    pytest.skip(WHY_NOT_REAL, allow_module_level=True)

from atom.model_engine.block_pool import BlockPool
from atom.model_engine.scheduler import Scheduler
from atom.model_engine.sequence import Sequence

import connector.atom.plugin
from connector.atom import touched
from connector.atom.device import AtomDevice, UnorderedDevice
from connector.atom.plugin import register
from cpu_prefix_cache import ConfigurationError, MisuseError
from tests.engines.atom.engine import Engine, config_of, transfer_config
from tests.engines.atom.pools import POOLS, pools
from tests.engines.atom.state_engine import StateEngine, state_config

TRANSFER = transfer_config(64)
NAMES = {
    **{name: getattr(touched, name) for name in ("POOL", "BLOCK", "MANAGER", "STATES", "STORE", "SEQUENCE", "STATUS")},
    "SCHEDULER": touched.SCHEDULER,
}


@pytest.mark.parametrize("names", NAMES)
def test_a_name_that_is_gone_is_refused_by_name(monkeypatch, names):
    where = connector.atom.plugin if names == "SCHEDULER" else touched
    monkeypatch.setattr(where, names, (*NAMES[names], "gone"))
    with pytest.raises(ConfigurationError, match=r"does not fit this ATOM: \w+ has no gone; use a commit that"):
        StateEngine(state_config(kv_transfer_config=TRANSFER))


def test_another_class_of_requests_is_refused(monkeypatch):
    monkeypatch.setattr(connector.atom.plugin, "Sequence", lambda tokens: Sequence(tokens, 4))
    with pytest.raises(ConfigurationError, match="a request cannot be made of tokens, a block size and an id"):
        Engine(config_of(kv_transfer_config=TRANSFER))


def test_an_atom_with_another_connector_is_left_alone(monkeypatch):
    monkeypatch.setattr(touched, "POOL", (*touched.POOL, "gone"))
    register()
    assert Scheduler(config_of(kv_transfer_config={})).kv_connector is None


def test_all_private_names_that_are_read_are_checked():
    """Names of other objects: those behind `self.` are ours."""
    files = sorted(Path(connector.atom.__path__[0]).glob("*.py"))
    trees = [ast.parse(file.read_text()) for file in files]
    reads = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    others = {node.attr for node in reads if not (isinstance(node.value, ast.Name) and node.value.id == "self")}
    private = {name for name in others if name.startswith("_") and not name.startswith("__")}
    ours_and_torchs = {"_replace", "_C", "_construct_storage_from_data_pointer"}
    checked = {name for names in NAMES.values() for name in names}
    assert private - ours_and_torchs <= checked
    assert {"_free", "_pending_by_hash"} <= private


# The order of a pool


@pytest.mark.parametrize("kind", ["lru", "slru"])
def test_the_queues_of_a_pool_are_known(kind):
    pool = POOLS[kind](8)
    assert touched.why_not_ordered(pool) is None
    assert len(AtomDevice(pool)._pool._queues) == (2 if "_protected" in vars(pool) else 1)


class Newest(BlockPool):
    """Hands out what was freed last."""

    def _take_free(self):
        block = next(reversed(self._cached), -1) if not self._vacant else super()._take_free()
        self._take_named(block)
        return block


class Shelved(BlockPool):
    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.shelf = []
        self.counter = 0
        self.none = None


class Tiered(BlockPool):
    def __init__(self, num_blocks, tiers):
        super().__init__(num_blocks)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (POOLS["superblocks"], "also has superblocks, and it is not known what that does"),
        (Shelved, "also has shelf, and it is"),
        (Newest, "does not hand out its blocks in the order of its queues"),
    ],
)
def test_a_pool_that_chooses_otherwise_is_seen(kind, sentence):
    assert sentence in touched.why_not_ordered(kind(8))


def test_a_pool_that_takes_more_than_its_blocks_is_seen():
    why = touched.why_not_ordered(Tiered(8, tiers=2))
    assert (
        why
        == "ATOM's Tiered cannot be tried, as it is made of more than its blocks: missing a required argument: 'tiers'"
    )


def test_a_policy_that_is_not_known_is_seen():
    pool = POOLS["slru"](8)
    pool.cache_policy = "lfu"
    assert "the policy 'lfu', which is not known" in touched.why_not_ordered(pool)


@pytest.mark.parametrize(("options", "warns"), [({}, True), ({"offload": "lazy"}, True), ({"offload": "eager"}, False)])
def test_offload_is_eager_with_a_warning_where_the_order_is_not_known(caplog, options, warns):
    with pools("superblocks"), caplog.at_level(logging.WARNING, "connector.atom"):
        engine = Engine(config_of(kv_transfer_config=transfer_config(64, **options)))
    assert ("stores eagerly" in caplog.text) is warns
    engine.add(range(40))
    engine.run()
    assert engine.connector.cache.statistics().chunks_stored == 10
    device = engine.connector._requests.device
    assert isinstance(device, UnorderedDevice)
    with pytest.raises(MisuseError, match="is not known"):
        list(device.soonest_evicted())


def test_where_the_order_is_not_known_states_are_refused():
    with pools("superblocks"), pytest.raises(ConfigurationError, match="its states cannot be kept; start ATOM without"):
        StateEngine(state_config(kv_transfer_config=TRANSFER))
