"""The layers of a load by keys come one after the other, and a forward may go on with each that has come."""

import threading

import pytest

from cpu_prefix_cache import MisuseError
from cpu_prefix_cache.by_keys import CopyFailed
from cpu_prefix_cache.copier import sections
from tests.support.keyed_engine import KeyedEngine, keys
from tests.support.late_sections import LateSections
from tests.support.threads import eventually

ONE, TWO = keys(*"abc"), keys(*"xyz")
LAYERS = 3  # of attention and of the window; the state has one


@pytest.fixture
def engine(monkeypatch):
    """Sections of one part each."""
    monkeypatch.setattr(sections, "SECTION_BYTES", 1)
    copiers = []

    def late(copier, tensors):
        copiers.append(LateSections(copier, tensors))
        return copiers[0]

    engine = KeyedEngine(("attention", "window"), threads=True, wrap_copier=late)
    engine.copier = copiers[0]
    engine.put(ONE, [[0, 1, 2], [4, 5]])
    engine.put(TWO, [[3, 4, 5], [1, 2]])
    yield engine
    engine.copier.allowed.release(100)
    engine.host.close()


def right(engine, layer, keys, blocks):
    """Whether all of a layer has come, of a load of all these keys."""
    parts = [part for group in engine.groups for part in group.parts if part.layer == layer]
    contents = {
        id(part): [engine.bytes_of(key, at)[number] for key in keys[len(keys) - len(blocks[at]) :]]
        for at, group in enumerate(engine.groups)
        for number, part in enumerate(group.parts)
    }
    where = {id(part): blocks[at] for at, group in enumerate(engine.groups) for part in group.parts}
    return all(
        part.rows[block].equal(content)
        for part in parts
        for block, content in zip(where[id(part)], contents[id(part)], strict=True)
    )


def test_each_layer_has_an_event_that_is_passed_when_it_has_come(engine):
    blocks = [[9, 8, 7], [6, 3]]
    handle = engine.host.load(ONE, blocks)
    sections = [engine.copier.sections(at) for at in range(2)]
    count = 1 + max(map(max, sections))
    assert len(handle.layers) == LAYERS < count, "K and V of a layer are sections of their own here"
    for section in range(count):
        engine.copier.allowed.release()
        eventually(lambda wanted=section + 1: len(engine.copier.ended) == wanted)
        for layer, event in enumerate(handle.layers):
            needed = max(max(each[: 2 * layer + 2]) for each in sections)
            if event.passed():
                assert section >= needed and right(engine, layer, ONE, blocks)
            else:
                assert section <= needed
    assert not handle.is_done, "the last section has come, and the load has not ended"
    engine.copier.allowed.release()
    assert handle.wait() and engine.wrong(ONE, blocks) == []


def test_compute_is_held_for_a_layer_and_not_for_those_behind_it(engine):
    handle = engine.host.load(ONE, [[9, 8, 7], [6, 3]])
    needed = max(max(engine.copier.sections(at)[:2]) for at in range(2))
    held = threading.Thread(target=handle.hold_compute, args=(0,))
    held.start()
    held.join(0.02)
    assert held.is_alive()
    engine.copier.allowed.release(needed + 1)
    held.join(5)
    assert not held.is_alive() and not handle.layers[LAYERS - 1].passed()


def test_loads_of_one_forward_come_layer_by_layer(engine):
    first, second = [[9, 8, 7], [6, 3]], [[12, 11, 10], [9, 8]]
    handles = engine.host.load_together([(ONE, first), (TWO, second)])
    count = 1 + max(max(engine.copier.sections(at)) for at in range(2))
    for _ in range(count):
        assert [each.layers[0].passed() for each in handles] in ([True] * 2, [False] * 2)
        engine.copier.allowed.release()
    eventually(lambda: len(engine.copier.ended) == count)  # one load of both
    assert all(event.passed() for each in handles for event in each.layers)
    engine.copier.allowed.release()
    assert all(each.wait() for each in handles)
    assert engine.wrong(ONE, first) == [] == engine.wrong(TWO, second)


def test_loads_of_one_forward_fill_different_blocks(engine):
    with pytest.raises(MisuseError, match="given twice"):
        engine.host.load_together([(ONE, [[9, 8, 7], [6, 3]]), (TWO, [[12, 7, 10], [9, 8]])])
    engine.copier.allowed.release(100)
    assert engine.host.load(ONE, [[9, 8, 7], [6, 3]]).wait()


def test_a_load_of_what_is_gone_leaves_the_others_of_its_forward_alone(engine):
    engine.copier.allowed.release(100)
    gone, here = engine.host.load_together([(keys("gone"), [[12], []]), (ONE, [[9, 8, 7], [6, 3]])])
    assert here.wait() and not gone.wait()
    with pytest.raises(CopyFailed):
        gone.hold_compute(0)
    assert engine.wrong(ONE, [[9, 8, 7], [6, 3]]) == []


def test_a_section_that_fails_fails_the_layers_from_it_on(engine):
    """The layers before it stay right."""
    handle = engine.host.load(ONE, [[9, 8, 7], [6, 3]])
    needed = max(max(engine.copier.sections(at)[:2]) for at in range(2))
    engine.copier.allowed.release(needed + 1)
    eventually(lambda: len(engine.copier.ended) == needed + 1)
    handle.layers[0].until_passed()
    engine.copier.ended = None  # the next section raises
    engine.copier.allowed.release(100)
    with pytest.raises(CopyFailed):
        handle.layers[LAYERS - 1].until_passed()
    assert not handle.wait() and right(engine, 0, ONE, [[9, 8, 7], [6, 3]])
    assert engine.host.lookup(ONE).longest == 0


def test_loads_of_one_forward_have_keys_of_one_length(engine):
    with pytest.raises(MisuseError, match="of one length"):
        engine.host.load_together([([b"k" * 32], [[9], []]), ([b"k" * 20], [[8], []])])
    engine.copier.allowed.release(100)
    assert engine.host.load(ONE, [[9, 8, 7], [6, 3]]).wait()
