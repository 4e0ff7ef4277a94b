"""Pages that SGLang's tree has given up come back from the host, with the bytes of its own tokens in every layer."""

import pytest

from connector.sglang.layers import LayerWaits
from cpu_prefix_cache.by_keys import KeyedHostCache
from cpu_prefix_cache.testing import CorruptingCopier, LateCopier
from tests.sglang.copiers import with_copier
from tests.sglang.engine import LONGER, PROMPT, Engine, evicted, server_args
from tests.sglang.models import KINDS, WINDOW_TOKENS

every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def left(kind):
    """The tokens of LONGER that are computed where all of PROMPT is known, which is kept in whole pages."""
    return len(LONGER) - len(PROMPT) // kind.page_tokens * kind.page_tokens


@every_kind
def test_a_prompt_comes_back_from_the_host(kind):
    with evicted(kind) as engine:
        engine.computed = 0
        engine.run(LONGER)
        assert engine.computed == left(kind)
        assert engine.wrong == [] and len(engine.answered) == 2 and engine.held_tokens == 0


@every_kind
def test_nothing_is_loaded_that_the_device_has(kind):
    """The tree has the prompt, and the host alone has how it went on."""
    with evicted(kind) as engine:
        engine.run(PROMPT[:20])
        engine.computed = 0
        engine.run(LONGER)
        assert engine.computed == left(kind)
        assert engine.wrong == [] and engine.held_tokens == 0


@pytest.mark.parametrize("name", ["full", "mla", "window"])
def test_nothing_is_stored_again_that_came_from_the_host(name):
    with server_args(host_bytes="1MiB") as args:
        engine = Engine(args, KINDS[name])
        engine.run(PROMPT)
        before = engine.linker.host.statistics().cache
        engine.evict()
        engine.run(LONGER)  # it has no whole page more
        after = engine.linker.host.statistics().cache
        assert after.bytes_loaded
        assert after.bytes_stored == before.bytes_stored


@pytest.mark.parametrize(
    ("name", "group"), [("full", 0), ("mla", 0), ("window", 0), ("window", 1), ("state", 0), ("state", 1), ("all", 2)]
)
def test_a_damaged_piece_of_any_kind_is_seen(monkeypatch, name, group):
    """The control of all stories here. Of a group the last piece is damaged: also of a window all of it is read."""
    last = slice(-1, None)
    with_copier(monkeypatch, lambda copier, tensors: CorruptingCopier(copier, tensors, group, blocks=last))
    with evicted(KINDS[name]) as engine:
        engine.run(LONGER)
        damaged = ("full", "window", "state")[group] if name != "state" else ("full", "state")[group]
        assert engine.wrong
        assert {KINDS[name].layers[wrong.layer] for wrong in engine.wrong} == {damaged}


@every_kind
def test_a_layer_waits_until_it_has_come(monkeypatch, kind):
    with_copier(monkeypatch, LateCopier)
    with evicted(kind) as engine:
        engine.run(LONGER)
        assert engine.wrong == [] and engine.linker.host.statistics().cache.bytes_loaded


@every_kind
def test_a_layer_that_does_not_wait_is_seen(monkeypatch, kind):
    """The control of the one before."""
    with_copier(monkeypatch, LateCopier)
    monkeypatch.setattr(LayerWaits, "wait_until", lambda self, layer: None)
    with evicted(kind) as engine:
        for part in (part for group in engine.linker.pools.values() for part in group.parts):
            part.rows.fill_(0xDD)
        engine.run(LONGER)
        assert {wrong.layer for wrong in engine.wrong} == set(range(len(kind.layers)))


@pytest.mark.parametrize("name", ["window", "all"])
def test_a_window_is_restored_whole_or_not_at_all(monkeypatch, name):
    """The host lacks the first page of each window that SGLang would restore."""
    kind = KINDS[name]
    kept = WINDOW_TOKENS // kind.page_tokens - 1
    put = KeyedHostCache.put
    monkeypatch.setattr(
        KeyedHostCache, "put", lambda host, keys, blocks: put(host, keys, [blocks[0], blocks[1][-kept:], *blocks[2:]])
    )
    with evicted(kind) as engine:
        engine.computed = 0
        engine.run(LONGER)
        assert engine.computed == len(LONGER)
        assert engine.aborted == [] and engine.wrong == []


def test_prompts_of_different_names_do_not_meet():
    """SGLang's `extra_key` (of an adapter, or given by a client) is part of its hashes."""
    with evicted(KINDS["full"]) as engine:
        engine.computed = 0
        engine.submit(PROMPT, extra_key="another")
        engine.drain()
        assert engine.computed == len(PROMPT)
