"""RadixHostCache: pages in the tree are reported once, and stored, found and loaded by that alone."""

import pytest

from cpu_prefix_cache import ChainHasher, Hit, HostOptions, Miss, MisuseError
from cpu_prefix_cache.host_cache.halves import Halves
from cpu_prefix_cache.offload.radix_device import RadixDevice
from radix_engine.engine import Engine, Request
from radix_engine.host import Host
from tests.unit import test_host_cache

PROMPT = list(range(40))


@pytest.fixture
def engine():
    """Pages of 4 tokens, chunks of 16."""
    made = Engine(24, 4)
    Host(made, host_bytes=1 << 20, max_model_len=256, options=HostOptions(offload="eager", strict=True))
    return made


def serve(engine, id, prompt=PROMPT):
    engine.queue.append(Request(id, prompt, 1))
    while not engine.is_idle:
        engine.step()


def start(engine, id, on_device):
    keys = ChainHasher(16).keys(PROMPT)
    pages = [] if on_device else engine.cache.allocate(8)
    return engine.host.start(id, keys, num_tokens=40, on_device=on_device, allocate=lambda start, boundary: pages)


def test_pages_of_the_tree_are_stored_and_loaded(engine):
    serve(engine, "r")
    assert engine.host.statistics().cache.pool.cached == 2
    engine.cache.evict(engine.cache.evictable)
    assert start(engine, "s", 0) == Hit(32, 0)
    engine.host.begin_step()
    assert engine.host.drain() == [("s", 32)]


def test_pages_that_a_request_has_not_inserted_are_not_stored(engine):
    """Nothing is stored by its end alone."""
    assert start(engine, "r", 0) == Miss()
    engine.host.begin_step()
    assert engine.host.end_step() == []
    engine.host.end("r")
    assert not engine.host.is_busy and engine.host.statistics().reported_not_on_device == 0


def test_pages_of_a_request_that_does_not_run(engine):
    with pytest.raises(MisuseError, match="request 'r' does not run"):
        engine.host.inserted("r", [])
    with pytest.raises(MisuseError, match="request 'r' does not run"):
        engine.host.end("r")
    assert engine.host.statistics().unknown_request == 2


@pytest.mark.parametrize("wrong", [lambda pages: pages[::-1], lambda pages: pages[1:], lambda pages: [*pages, 23]])
def test_pages_that_are_not_those_of_the_tree(engine, wrong):
    """They would be stored under the keys of other tokens."""
    assert start(engine, "r", 0) == Miss()
    pages = engine.cache.allocate(8)
    engine.cache.insert(PROMPT[:16], pages[:4])
    engine.cache.insert(PROMPT[:32], pages)
    with pytest.raises(MisuseError, match="give the tree's pages of the whole prefix, in token order"):
        engine.host.inserted("r", wrong(pages))
    engine.host.inserted("r", pages)
    engine.host.begin_step()
    engine.host.end_step()


def test_pages_that_are_inserted_after_a_reset_are_not_stored(engine):
    assert start(engine, "r", 0) == Miss()
    engine.host.reset()
    tokens, pages = PROMPT[:32], engine.cache.allocate(8)
    engine.cache.insert(tokens, pages)
    engine.host.inserted("r", pages)
    engine.host.begin_step()
    engine.host.end_step()
    engine.host.end("r")
    assert not engine.host.is_busy and engine.host.find(ChainHasher(16).keys(tokens)[0]) is None


def test_a_tree_and_a_host_cache_do_not_share_a_name(engine):
    """They are one object: an attribute of the one must not be that of the other."""
    tree = type("Tree", (Host,), {"__init__": lambda self: RadixDevice.__init__(self, 8, 1)})()
    of_tree, of_host = {*dir(RadixDevice), *vars(tree)}, {*vars(Halves), *vars(test_host_cache.Engine().host)}
    assert not [name for name in of_tree & of_host if not name.startswith("__")]
