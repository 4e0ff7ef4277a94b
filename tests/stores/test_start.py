"""The start of an engine whose Redis is not there, does not answer, or has another password."""

import pytest

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.slab import opening
from tests.stores.servers import RedisServer
from tests.stores.test_redis_engine import engine_on
from tests.unit.test_host_tier import serve, until

pytestmark = pytest.mark.needs("redis")


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(opening, "PATIENCE_SECONDS", 0.2)
    monkeypatch.setattr(opening, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(opening, "LONGEST_PAUSE_SECONDS", 0.05)


@pytest.mark.parametrize(("ends", "mends"), [("kill", "restart"), ("freeze", "thaw")])
def test_it_starts_without_its_server_and_shares_once_that_is_there(redis_server, ends, mends, caplog):
    getattr(redis_server, ends)()
    engine = engine_on(redis_server.url())
    until(engine, "paused")
    wrong, seen = serve(engine, number=4)
    assert wrong == [] and seen.state == "paused"
    getattr(redis_server, mends)()
    until(engine, "open")
    wrong, seen = serve(engine, number=4, seed=1)
    engine.host.close()
    assert wrong == [] and seen.cache.chunks_stored > 0
    assert caplog.text.count("is open now") == 1


def test_another_password_is_refused(start):
    server = start(RedisServer, "--requirepass", "right")
    with pytest.raises(ConfigurationError, match="password") as refused:
        engine_on(server.url(":wrong@"))
    assert "wrong@" not in str(refused.value)
    engine = engine_on(server.url(":right@"))
    engine.host.close()
