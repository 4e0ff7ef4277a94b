"""Servers that lie: each call ends by its time-out with little memory, and later calls are not fooled.

Some lies run here; `make test-long` runs all of them (LIES=all).
"""

import os
import threading

import pytest

from cpu_prefix_cache import ConfigurationError, SharedTier
from cpu_prefix_cache.stores import redis_store
from cpu_prefix_cache.stores.keyed_store import Got
from cpu_prefix_cache.stores.redis_store import RedisStore
from cpu_prefix_cache.tier import TierUnavailable
from tests.stores.liars import FEW, LIES, LOGIN, POLITE, VALUE_BYTES, Liar
from tests.unit.test_host_tier import engine_with, serve

TOLD = list(LIES) if os.environ.get("LIES") == "all" else FEW
SECONDS = 0.4  # for a call
HANG_SECONDS = 30.0
ROUNDS = 10  # of requests, at most, until a tier is paused
MOST_MIB = 24  # that a call may take: our buffers have a tenth of it, and what is endless takes it in no time
VALUE = bytes(range(250)) * (VALUE_BYTES // 250)

pytestmark = pytest.mark.parametrize("lie", TOLD)


@pytest.fixture
def liar():
    liar = Liar()
    yield liar
    liar.close()


@pytest.fixture
def store(liar):
    """A store on a server that has been honest so far, and has "key"."""
    liar.values[b"key"] = VALUE
    store = RedisStore(liar.url())
    yield store
    store.close()


def ended(call):
    """Result or error of a call. Fails if it does not end, or takes memory without bounds."""
    result = []

    def run():
        try:
            result.append(call())
        except BaseException as error:
            result.append(error)

    before = mib_now_and_no_more_before()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG_SECONDS)
    assert not thread.is_alive(), "the call hangs"
    assert most_mib() - before < MOST_MIB
    return result[0]


def mib_now_and_no_more_before():
    """The most memory that this process has had begins anew."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return most_mib()


def most_mib():
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def get(store):
    buffers = [memoryview(bytearray(100)), memoryview(bytearray(VALUE_BYTES - 100))]
    (got,) = store.get_into(["key"], [buffers], SECONDS)
    return got, b"".join(buffers)


CALLS = {
    "exists": lambda store: store.exists(["key", "other"], SECONDS),
    "get": get,
    "put": lambda store: store.put_from(["new"], [[memoryview(VALUE)]], SECONDS),
    "delete": lambda store: store.delete(["new"], SECONDS),
}


@pytest.mark.parametrize("about", [LOGIN, None])
def test_at_the_start(liar, lie, about, monkeypatch):
    monkeypatch.setattr(redis_store, "CONNECT_SECONDS", SECONDS)
    liar.begin(lie, about)
    raised = ended(lambda: RedisStore(liar.url()))
    if about is None or lie != "OK to everything":  # which is right to a login
        assert isinstance(raised, TierUnavailable) and not isinstance(raised, ConfigurationError)
        assert "secret" not in str(raised)
    liar.stop()
    RedisStore(liar.url()).close()


def test_at_a_connection_in_service(liar, store, lie):
    liar.begin(lie, LOGIN)
    for call in CALLS.values():
        liar.drop()
        answer = ended(lambda call=call: call(store))
        assert isinstance(answer, OSError) or lie == "OK to everything"
    liar.stop()
    assert get(store) == (Got.READ, VALUE)


@pytest.mark.parametrize("name", list(CALLS))
def test_in_service(liar, store, lie, name):
    liar.begin(lie)
    answer = ended(lambda: CALLS[name](store))
    assert isinstance(answer, OSError) or lie in POLITE or "two" in lie or name != "get"
    assert isinstance(answer, OSError | list | tuple | None)
    if name == "get" and not isinstance(answer, OSError):
        assert answer[0] is not Got.READ or answer[1] == b"\x55" * VALUE_BYTES, "not all of the buffers was written"
    liar.stop()
    for _ in range(2):
        assert get(store) == (Got.READ, VALUE), "what was left of a lie was taken for an answer"
        assert store.exists(["key", "other"], HANG_SECONDS) == [True, False]


def test_an_engine_computes_what_a_liar_does_not_give(liar, lie):
    """Nothing is wrong, and no step waits for it; a tier that gives no answers is left alone for a while."""
    engine = engine_with(SharedTier(liar.url(), model="tiny", revision="1", ask_seconds=0.1, flush_seconds=0.0))
    wrong, before = serve(engine, number=10)
    liar.begin(lie)
    for seed in range(ROUNDS):
        also_wrong, after = serve(engine, number=10, seed=seed)
        wrong += also_wrong
        if after.state != "open":
            break
    engine.host.close()
    assert wrong == []
    assert before.cache.chunks_stored > 0, "the tier was not used"
    assert after.state != "open" or lie in POLITE or "two" in lie
