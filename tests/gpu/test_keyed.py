"""Blocks by keys on a device, whose host region is pinned while the engine works."""

from cpu_prefix_cache.testing import CorruptingCopier
from tests.support.keyed_engine import KeyedEngine, keys
from tests.support.threads import wait_until

PROMPT = keys(*range(6))
ALL = [[0, 1, 2, 3, 4, 5], [4, 5], [1]]
ELSEWHERE = [[16, 15, 14, 13, 12, 11], [8, 7], [9]]


def stored(**options):
    """An engine with its prompt on the host. Its first call begins to pin, so that there is room for the second."""
    engine = KeyedEngine(device="cuda", **options)
    engine.put(PROMPT, ALL)
    wait_until(lambda: engine.host.statistics().ready_bytes == engine.host.statistics().host_bytes)
    engine.put(PROMPT, ALL)
    assert engine.host.lookup(PROMPT).longest == 6
    return engine


def test_blocks_come_back_by_their_keys():
    assert stored().loaded(PROMPT, ELSEWHERE)


def test_a_layer_is_there_behind_its_event():
    engine = stored()
    engine.poison()
    load = engine.host.load(PROMPT, ELSEWHERE)
    for layer in range(3):
        load.hold_compute(layer)
    assert engine.wrong(PROMPT, ELSEWHERE) == [] and load.wait()


def test_a_damaged_block_is_seen():
    """The control."""
    engine = stored(wrap_copier=CorruptingCopier)
    engine.poison()
    assert engine.host.load(PROMPT, ELSEWHERE).wait()
    assert engine.wrong(PROMPT, ELSEWHERE)
