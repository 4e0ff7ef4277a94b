"""Engines that share a store, in the batching engine of the examples: answers are those of the model alone.

The host has room for a fifth of the documents. What one engine has put into the store, another one finds, and is not
fooled by whatever else lies there. Logits are compared, and a store that damages what it gives must be seen.
"""

import threading
import time

import pytest

from cpu_prefix_cache import ConfigurationError, SharedTier
from cpu_prefix_cache.offload.completion import FAILURES_IN_A_ROW
from cpu_prefix_cache.stores import frame, keyed_values
from cpu_prefix_cache.testing import MemoryStore
from cpu_prefix_cache.tiers import questions, tier_cache
from tests.unit.test_host_tier import BLOCK_TOKENS, HOST_BLOCKS, engine_with, serve

SLOT_BYTES = 4096


def shared(store, revision="1", **said):
    return SharedTier(store, model="tiny", revision=revision, **{"ask_seconds": 5.0, **said})


def engine_on(store, **said):
    return engine_with(shared(store, **said))


@pytest.fixture(scope="module")
def left():
    """Values that an engine has left in a store."""
    store = MemoryStore()
    first = engine_on(store)
    serve(first, number=24)
    first.host.close()
    assert len(store.values) > HOST_BLOCKS
    return store.values


@pytest.fixture
def filled(left):
    return with_values(MemoryStore(), left)


def with_values(store, values):
    store.values |= {name: bytearray(value) for name, value in values.items()}
    return store


def served_by_another(store):
    """Prompts of which the store has values: wrong blocks, and what the tier has counted."""
    second = engine_on(store)
    wrong, seen = serve(second, number=12)
    second.host.close()
    return wrong, seen


def test_a_second_engine_finds_what_the_first_one_has_stored(filled):
    wrong, seen = served_by_another(filled)
    assert wrong == []
    assert seen.hit_tokens > HOST_BLOCKS * BLOCK_TOKENS / 4, "nothing came from the store: this compares nothing"
    assert seen.found > HOST_BLOCKS / 2 and seen.refused == 0 and seen.unanswered == 0


def damaged(values, how):
    """Every third value is not what it was."""
    names = list(values)
    for at in range(0, len(names), 3):
        how(values, names[at], names[at - 1])


def flip(values, name, other):
    values[name][-1] ^= 0x40  # of an exponent


def flip_in_frame(values, name, other):
    values[name][20] ^= 1


def cut(values, name, other):
    values[name] = values[name][:-1]


def lengthen(values, name, other):
    values[name] += b"x"


def exchange(values, name, other):
    values[name] = bytearray(values[other])


@pytest.mark.parametrize("how", [flip, flip_in_frame, cut, lengthen, exchange])
def test_values_that_are_not_what_they_should_be_are_computed_again(filled, how):
    """tiers 1, 2, 3, 4"""
    damaged(filled.values, how)
    wrong, seen = served_by_another(filled)
    assert wrong == []
    assert seen.refused > 0 and seen.hit_tokens > 0


@pytest.mark.parametrize("how", [flip, exchange])
def test_control_without_frames_damage_is_seen(filled, how, monkeypatch):
    damaged(filled.values, how)
    for value in filled.values.values():  # of values of whatever content
        value[: frame.SIZE] = bytes(frame.SIZE)
    monkeypatch.setattr(frame, "pack", lambda *_: bytes(frame.SIZE))
    wrong, seen = served_by_another(filled)
    assert wrong != [] and seen.refused == 0


def test_refused_values_are_put_anew_although_the_store_keeps_old_values(filled):
    """tiers 25: it is deleted before"""

    class Keeps(MemoryStore):
        def _put(self, key, buffers):
            return key in self.values or super()._put(key, buffers)

    keeps = with_values(Keeps(), filled.values)
    damaged(keeps.values, flip)
    refused = []
    while not refused or refused[-1]:  # what hangs below a refused chunk is looked at by the next engine
        engine = engine_on(keeps)
        wrong, seen = serve(engine, number=12)
        engine.host.close()
        refused.append(seen.refused)
        assert wrong == [] and len(refused) < 10
    assert refused[0] > 0 and seen.hit_tokens > 0


def test_a_value_that_is_overwritten_while_it_is_got_is_refused(filled):
    """tiers 24: a store whose memory was given to others reports success"""

    class Reclaims(MemoryStore):
        def get_into(self, keys, buffers, timeout):
            found = super().get_into(keys, buffers, timeout)
            for _, body in buffers[::2]:
                body[:] = b"\x55" * body.nbytes
            return found

    engine = engine_on(with_values(Reclaims(), filled.values))
    wrong, seen = serve(engine, number=12)
    engine.host.close()
    assert wrong == [] and seen.refused > 0


def test_values_that_were_put_and_evicted_are_misses(filled):
    """tiers 26, 27: a put that went well, and a restart, guarantee nothing about later values"""
    store = MemoryStore(20 * SLOT_BYTES)
    engine = engine_on(store)
    wrong, seen = serve(engine, number=24)
    assert wrong == [] and seen.cache.chunks_stored > 20 and seen.refused > 0
    store.values.clear()
    wrong, seen = serve(engine, number=12)
    engine.host.close()
    assert wrong == [] and seen.state == "open"


def test_values_that_the_store_did_not_take_are_not_looked_up_there():
    """tiers 5"""

    class Refuses(MemoryStore):
        def put_from(self, keys, buffers, timeout):
            return [False] * len(keys)

    engine = engine_on(Refuses())
    wrong, seen = serve(engine, number=10)
    engine.host.close()
    assert (
        wrong == [] and seen.cache.chunks_stored == 0 and seen.cache.pool.cached == 0 and seen.cache.stores_failed > 0
    )


@pytest.mark.parametrize("said", [{"revision": "2"}, {"hash": "sha256_cbor"}])
def test_other_weights_and_other_hashes_never_meet(filled, said):
    """tiers 15, 16"""
    other = engine_on(filled, **said)
    wrong, seen = serve(other, number=10)
    other.host.close()
    assert wrong == [] and seen.found == 0


def test_a_model_of_another_name_or_layout_never_meets(filled):
    """tiers 16, 21: names are fields of a digest, each after its length, and so are dtypes, strides and sizes"""
    for model in "tiny/1", "tiny-1", "tin":
        other = engine_with(SharedTier(filled, model=model, revision="1", ask_seconds=5.0))
        _, seen = serve(other, number=10)
        other.host.close()
        assert seen.found == 0
    names = {name.split(":")[1] for name in filled.values}
    assert len(names) == 4, "each has a namespace of its own"


def test_after_a_reset_a_process_shares_with_nobody(filled):
    """New weights: what was stored before is not served, and what is stored from then on is not found by others."""
    engine = engine_on(filled)
    engine.step()
    before = set(filled.values)
    engine.host.reset()
    wrong, seen = serve(engine, number=12)
    assert wrong == [] and seen.found == 0 and set(filled.values) > before
    engine.host.close()
    other = engine_on(filled)
    _, seen = serve(other, number=10)
    other.host.close()
    assert seen.found > 0, "others still have what was there"
    assert len({name.split(":")[1] for name in filled.values}) == 2


def test_after_a_reset_those_who_name_the_same_revision_share(filled):
    """A fleet that is sent new weights: each engine resets, and names their revision."""
    fleet = [engine_on(filled) for _ in range(2)]
    for engine in fleet:
        engine.step()
        engine.host.reset(revision="step 2")
    seen = []
    for engine in (*fleet, engine_on(filled, revision="step 2"), engine_on(filled, revision="step 3")):
        wrong, of_tier = serve(engine, number=12)
        engine.host.close()
        seen.append((wrong, of_tier.found > 0))
    assert seen == [([], False), ([], True), ([], True), ([], False)], "the second, and one that starts with it"


def test_old_weights_that_come_back_find_what_they_had(filled):
    engine = engine_on(filled)
    engine.step()
    engine.host.reset(revision="a test")
    assert serve(engine, number=12)[1].found == 0
    engine.host.reset(revision="1")
    wrong, seen = serve(engine, number=12)
    engine.host.close()
    assert wrong == [] and seen.found > 0


@pytest.mark.parametrize("revision", ["", 7])
def test_a_reset_to_what_is_no_revision_changes_nothing(filled, revision):
    engine = engine_on(filled)
    with pytest.raises(ConfigurationError, match="revision of a reset is a text"):
        engine.host.reset(revision)
    assert engine.host.cache.epoch == 0
    engine.host.close()


def test_faulty_tiers_are_refused_in_a_sentence():
    with pytest.raises(ConfigurationError, match=r"revision is missing: give it model="):
        engine_with(SharedTier(MemoryStore(), model="tiny"))
    with pytest.raises(ConfigurationError, match="a KeyedStore or a URL, such as redis://host:6379; got another text"):
        SharedTier("redis", model="tiny", revision="1")
    with pytest.raises(ConfigurationError, match="a store is SCHEME://ADDRESS, and its scheme one of mooncake, redis"):
        engine_with(SharedTier("nobody://host", model="tiny", revision="1"))
    with pytest.raises(ConfigurationError, match="tell whose KV they hold; got MemoryStore"):
        engine_with(MemoryStore())
    with pytest.raises(ConfigurationError, match="must be digests by sha256"):
        SharedTier(MemoryStore(), model="tiny", revision="1", hash="xxh3")
    with pytest.raises(ConfigurationError, match="lazy or eager"):
        SharedTier(MemoryStore(), model="tiny", revision="1", offload="both")
    for seconds in (0, True, float("inf"), float("nan")):  # no lock can be waited for with the last two
        with pytest.raises(ConfigurationError, match="ask_seconds of a tier is a number of seconds above 0"):
            SharedTier(MemoryStore(), model="tiny", revision="1", ask_seconds=seconds)


class Halting(MemoryStore):
    """Answers nothing while it is `frozen`; calls end with TimeoutError by their timeouts, as those of a server do."""

    def __init__(self):
        super().__init__()
        self.runs = threading.Event()
        self.calls = []
        self.threads = set()
        self.runs.set()

    def _pass(self, verb, timeout):
        self.calls.append(verb)
        self.threads.add(threading.current_thread().name)
        if not self.runs.wait(timeout):
            raise TimeoutError("the server does not answer")

    def exists(self, keys, timeout):
        self._pass("exists", timeout)
        return super().exists(keys, timeout)

    def get_into(self, keys, buffers, timeout):
        self._pass("get", timeout)
        return super().get_into(keys, buffers, timeout)

    def put_from(self, keys, buffers, timeout):
        self._pass("put", timeout)
        return super().put_from(keys, buffers, timeout)

    def close(self):
        self.runs.set()


@pytest.fixture
def short_puts(monkeypatch):
    """An engine at rest waits for the put that is under way."""
    monkeypatch.setattr(keyed_values, "PUT_SECONDS", 0.5)


@pytest.mark.usefixtures("short_puts")
def test_a_frozen_server_costs_requests_a_deadline_and_then_nothing(filled, caplog):
    """tiers 28"""
    store = with_values(Halting(), filled.values)
    engine = engine_on(store, ask_seconds=0.01)
    engine.step()
    store.runs.clear()
    wrong, seen = serve(engine, number=12)
    assert wrong == []
    assert FAILURES_IN_A_ROW <= seen.unanswered < 12 and seen.hit_tokens == 0
    assert seen.state == "paused" and "left alone for 5 s" in caplog.text
    assert engine.host.statistics().cache.hit_tokens > 0, "hits on the host go on"
    engine.host.close()


@pytest.mark.usefixtures("short_puts")
def test_a_server_that_comes_back_is_found_by_one_question(filled, monkeypatch):
    """tiers 27, 28"""
    monkeypatch.setattr(tier_cache, "STORE_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(questions, "PROBE_SECONDS", 0.05)
    store = with_values(Halting(), filled.values)
    engine = engine_on(store, ask_seconds=0.25)
    engine.step()
    store.runs.clear()
    serve(engine, number=10)
    while_off = engine.host.statistics().tier
    assert while_off.state == "paused"
    store.runs.set()
    until(lambda: engine.host.statistics().tier.state == "open", engine.step)
    wrong, seen = serve(engine, number=12)
    engine.host.close()
    assert wrong == [] and seen.hit_tokens > 0 and seen.questions > while_off.questions


def test_the_thread_that_decides_never_calls_the_store(filled):
    """tiers 29"""
    store = with_values(Halting(), filled.values)
    engine = engine_on(store)
    serve(engine, number=12)
    engine.host.close()
    assert {"exists", "get", "put"} <= set(store.calls)
    assert threading.current_thread().name not in store.threads


def test_closing_ends_calls_that_would_never_end(filled):
    """It returns at all."""

    class Hangs(Halting):
        def _pass(self, verb, timeout):
            super()._pass(verb, None)

    store = with_values(Hangs(), filled.values)
    engine = engine_on(store, flush_seconds=0.1, ask_seconds=0.01)
    engine.step()
    store.runs.clear()
    serve(engine, number=3)
    engine.host.close()


def until(is_so, act, seconds=10.0):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, "it does not come"
        act()
        time.sleep(0.005)
