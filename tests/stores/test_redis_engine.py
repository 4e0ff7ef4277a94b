"""An engine on a Redis server that takes no values: it reads what is there, and its answers are the model's own."""

import pytest

from cpu_prefix_cache import SharedTier
from cpu_prefix_cache.offload.completion import FAILURES_IN_A_ROW
from cpu_prefix_cache.tiers import tier_cache
from tests.stores.servers import RedisServer
from tests.unit.test_host_tier import engine_with, serve

pytestmark = pytest.mark.needs("redis")
WRITER = ["--user", "writer", "on", "nopass", "~*", "+@all"]
READER = ["--user", "reader", "on", ">secret", "~*", "+get", "+exists", "+del", "+ping"]


def engine_on(url):
    return engine_with(SharedTier(url, model="tiny", revision="1", ask_seconds=5.0))


@pytest.fixture
def server(start):
    """It has what an engine has put there."""
    server = start(RedisServer, "--maxmemory-policy", "noeviction", *WRITER, *READER)
    first = engine_on(server.url())
    _, seen = serve(first, number=8)
    first.host.close()
    assert seen.cache.chunks_stored > 0
    return server


@pytest.mark.parametrize("why", ["it is full", "the user may not write"])
def test_values_of_a_server_are_read_although_it_takes_none(server, why, caplog, monkeypatch):
    monkeypatch.setattr(tier_cache, "STORE_PAUSE_SECONDS", 1e6)
    if why == "it is full":
        server.ask("CONFIG", "SET", "maxmemory", "1mb")  # it uses more already
    engine = engine_on(server.url("reader:secret@" if why == "the user may not write" else ""))
    wrong, _ = serve(engine, number=20, seed=1)  # which nobody has stored
    seen = engine.host.statistics().tier
    assert wrong == [] and seen.cache.stores_failed >= FAILURES_IN_A_ROW and seen.cache.chunks_stored == 0
    assert seen.state == "read_only" and "it is only read" in caplog.text
    wrong, after = serve(engine, number=8)
    engine.host.close()
    assert wrong == [] and after.hit_tokens > seen.hit_tokens and after.cache.loads_failed == 0
