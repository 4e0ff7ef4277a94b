"""RedisStore with real servers: logins, refusals, eviction, and servers that are frozen, killed and started again."""

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from cpu_prefix_cache.messages.errors import ConfigurationError, TierUnavailable
from cpu_prefix_cache.stores.keyed_store import Got
from cpu_prefix_cache.stores.opening import open_store
from cpu_prefix_cache.stores.redis_store import RedisStore
from cpu_prefix_cache.testing import check_store
from tests.stores.servers import RedisServer, free_port
from tests.stores.traffic import HANG_SECONDS, Traffic, Under
from tests.support.threads import wait_until

pytestmark = pytest.mark.needs("redis")
USER = ["--user", "kv", "on", ">secret", "~*"]


# The contract


def test_tcp_keeps_the_contract(redis_server):
    check_store(lambda: open_store(redis_server.url()))


def test_a_socket_of_this_machine_keeps_the_contract(start, tmp_path):
    start(RedisServer, "--unixsocket", str(tmp_path / "redis.sock"))
    check_store(lambda: open_store(f"unix://{tmp_path}/redis.sock"))


def test_a_user_who_may_do_nothing_else_keeps_the_contract(start):
    server = start(RedisServer, *USER, "+get", "+set", "+exists", "+del", "+ping")
    check_store(lambda: open_store(server.url("kv:secret@")))


@pytest.mark.needs("tls")
def test_tls_keeps_the_contract(tls_server):
    check_store(lambda: open_store(tls_server.url(scheme="rediss", query=f"?ssl_ca_certs={tls_server.certificate}")))


def test_control_a_byte_changed_on_the_server_is_noticed(redis_server):
    traffic = Traffic(RedisStore(redis_server.url()))
    traffic.put()
    assert traffic.get_all()
    redis_server.ask("SETRANGE", traffic.keys[3], "500000", "\t\v\b!")
    with pytest.raises(AssertionError, match="wrong bytes"):
        traffic.get()


def test_databases_are_apart(redis_server):
    first, second = (Traffic(RedisStore(redis_server.url(query=f"/{number}"))) for number in range(2))
    first.put()
    assert first.get_all() and not any(second.get())


# One sentence at start


def serve_http():
    class Answers(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.server_port


def told(url, error=ConfigurationError):
    """ConfigurationError is final; TierUnavailable is tried again."""
    with pytest.raises(error) as raised:
        open_store(url)
    return str(raised.value)


def test_nobody_there():
    assert "no Redis server can be used at 127.0.0.1:" in told(f"redis://127.0.0.1:{free_port()}", TierUnavailable)
    assert "/nowhere/redis.sock" in told("unix:///nowhere/redis.sock", TierUnavailable)


def test_no_password_a_wrong_one_and_a_user_who_may_not(start):
    server = start(RedisServer, "--requirepass", "secret")
    assert "NOAUTH" in told(server.url())
    wrong = told(server.url(":another-secret@"))
    assert "WRONGPASS" in wrong and "another-secret" not in wrong
    limited = start(RedisServer, *USER, "+get")
    assert "NOPERM" in told(limited.url("kv:secret@"))


def test_a_password_that_is_not_in_the_url(start, tmp_path, monkeypatch):
    server, file = start(RedisServer, "--requirepass", "hun/ter#2"), tmp_path / "password"
    file.write_text("hun/ter#2\n")
    monkeypatch.setenv("CACHE_PASSWORD", "hun/ter#2")
    for option in f"password_file={file}", "password_env=CACHE_PASSWORD", "password=hun%2Fter%232":
        assert RedisStore(server.url(query=f"?{option}")).exists(["key"], 5.0) == [False]
    file.write_text("another-secret")
    said = told(server.url(query=f"?password_file={file}"))
    assert "WRONGPASS" in said and "another-secret" not in said


def test_a_new_password_is_taken_for_the_next_connection(start, tmp_path):
    server, file = start(RedisServer, "--requirepass", "first"), tmp_path / "password"
    file.write_text("first")
    store = RedisStore(server.url(query=f"?password_file={file}"))
    server.options = ["--requirepass", "second"]
    server.restart()
    with pytest.raises(ConnectionError, match="WRONGPASS"):
        store.exists(["key"], 5.0)
    file.write_text("second")
    assert store.exists(["key"], 5.0) == [False]


def test_a_password_where_none_is_known_and_a_database_that_is_not_there(redis_server):
    said = told(redis_server.url(":hunter2@"))
    assert "-ERR" in said and "hunter2" not in said
    assert "DB index is out of range" in told(redis_server.url(query="/99"))


def test_a_server_that_has_too_many_clients_may_have_fewer_later(start):
    server, held = start(RedisServer, "--maxclients", "1"), []

    def is_the_client():
        held.append(socket.create_connection(("127.0.0.1", server.port)))
        held[-1].sendall(b"PING\r\n")
        with suppress(ConnectionError):
            return held[-1].recv(5) == b"+PONG"

    wait_until(is_the_client)
    told(server.url(), TierUnavailable)  # the server's sentence, or its end
    for each in held:
        each.close()
    wait_until(lambda: is_open(server.url()))


def is_open(url):
    try:
        RedisStore(url).close()
    except TierUnavailable:
        return False
    return True


def test_a_server_of_another_kind():
    port = serve_http()
    assert f"127.0.0.1:{port}" in told(f"redis://127.0.0.1:{port}", TierUnavailable)
    said = told(f"redis://:secret@127.0.0.1:{port}", TierUnavailable)
    assert f"127.0.0.1:{port}" in said and "secret" not in said


@pytest.mark.parametrize("slots", [None, (0, 8191), (8192, 16383), (0, 16383)])
@pytest.mark.parametrize("login", ["", "kv:secret@"])
def test_a_server_of_a_cluster(start, slots, login):
    """Whichever slots are its own."""
    user = *USER, "+get", "+set", "+exists", "+del", "+ping"
    server = start(RedisServer, "--cluster-enabled", "yes", "--cluster-port", str(free_port()), *user)
    if slots is not None:
        server.ask("CLUSTER", "ADDSLOTSRANGE", *map(str, slots))
    assert "one of a Redis Cluster (" in (said := told(server.url(login))) and "cluster-enabled no" in said


def test_a_server_that_is_frozen(redis_server):
    redis_server.freeze()
    assert "no Redis server can be used" in told(redis_server.url(), TierUnavailable)


@pytest.mark.needs("tls")
def test_tls_where_there_is_none_none_where_there_is_and_an_unknown_authority(redis_server, tls_server):
    assert "it speaks without TLS" in told(redis_server.url(scheme="rediss"), TierUnavailable)
    assert "rediss:// where it speaks TLS" in told(tls_server.url(), TierUnavailable)
    assert "certificate" in told(tls_server.url(scheme="rediss"))


@pytest.mark.parametrize("rest", ["127.0.0.1:port", "127.0.0.1?db=first"])
def test_texts_that_are_no_url_are_refused(rest):
    assert "a store is redis://" in told(f"redis://{rest}")


# Liberties of a server


def test_a_value_that_was_taken_may_be_gone(start):  # tiers 26
    server = start(RedisServer, "--maxmemory", "8mb", "--maxmemory-policy", "allkeys-lru")
    traffic = Traffic(RedisStore(server.url()))
    assert all(traffic.put())
    assert 0 < sum(traffic.get()) < len(traffic.keys)


def test_a_full_server_that_does_not_evict_takes_what_it_has_room_for(start):
    server = start(RedisServer, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    traffic = Traffic(RedisStore(server.url()))
    taken = traffic.put()
    assert 0 < sum(taken) < len(taken)
    assert traffic.get() == taken


def test_a_replica_refuses_the_call(start):
    server = start(RedisServer, "--replicaof", "127.0.0.1", str(free_port()))
    traffic = Traffic(RedisStore(server.url()))
    with pytest.raises(OSError, match="READONLY"):
        traffic.put()
    assert not any(traffic.get())


def test_a_user_who_may_only_read_gets_an_error_on_writes(start):
    server = start(RedisServer, *USER, "+get", "+exists", "+ping")
    traffic = Traffic(RedisStore(server.url("kv:secret@")))
    with pytest.raises(OSError, match="NOPERM"):
        traffic.put()
    assert not any(traffic.get())


def test_a_key_of_another_type_is_no_value(redis_server):
    store = RedisStore(redis_server.url())
    redis_server.ask("LPUSH", "list", "x")
    into = memoryview(bytearray(1))
    assert store.get_into(["list"], [[into]], 5.0) == [Got.OTHER_SIZE]
    assert store.put_from(["list"], [[into]], 5.0) == [True]
    assert store.get_into(["list"], [[into]], 5.0) == [Got.READ]


# Frozen, killed, started again


@pytest.mark.parametrize("call", ["get", "put"])
def test_frozen_in_the_middle(redis_server, call):  # tiers 28, 24
    store = RedisStore(redis_server.url())
    traffic, other = Traffic(store), Traffic(store, "other")
    traffic.put(), other.put()
    running = Under(lambda: getattr(traffic, call)(timeout=1.0))
    redis_server.freeze()
    assert isinstance(running.end(), TimeoutError)
    traffic.poison()
    redis_server.thaw()
    assert other.get_all(), "the rest of an old answer was taken for a new one"
    assert traffic.is_poisoned(), "buffers were written when the call was over"
    assert traffic.get_all()


@pytest.mark.parametrize("call", ["get", "put"])
def test_killed_in_the_middle_and_started_again(redis_server, call):  # tiers 28
    traffic = Traffic(RedisStore(redis_server.url()))
    traffic.put()
    running = Under(getattr(traffic, call))
    redis_server.kill()
    assert isinstance(running.end(), ConnectionError)
    with pytest.raises(ConnectionError):
        traffic.get()
    redis_server.start()
    assert not any(traffic.get()), "a server that was started again has what it had"
    assert all(traffic.put()) and traffic.get_all()


def test_idle_connections_to_a_server_started_again_are_not_used(redis_server):
    store = RedisStore(redis_server.url())
    traffics = [Traffic(store, str(at)) for at in range(4)]
    threads = [threading.Thread(target=each.put) for each in traffics]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    redis_server.restart()
    for each in traffics:
        assert all(each.put()) and each.get_all()


def test_frozen_again_and_again_no_call_gets_an_answer_of_another(redis_server):  # tiers 28
    store = RedisStore(redis_server.url())
    traffics = [Traffic(store, str(at)) for at in range(3)]
    for each in traffics:
        each.put()
    for at in range(6):
        running = [Under(lambda each=each: each.get(timeout=0.2)) for each in traffics[:2]]
        time.sleep(0.01 * at)
        redis_server.freeze()
        assert all(isinstance(each.end(), TimeoutError) for each in running)
        redis_server.thaw()
        assert all(each.get_all() for each in traffics)
        there = store.exists([*traffics[0].keys, "nothing"], 5.0)
        assert there == [True] * len(traffics[0].keys) + [False]


def test_close_ends_calls_under_way(redis_server):
    traffic = Traffic(RedisStore(redis_server.url()))
    traffic.put()
    running = Under(lambda: traffic.get(timeout=1_000.0))
    redis_server.freeze()
    time.sleep(0.1)
    traffic.store.close()
    assert isinstance(running.end(), ConnectionError)
    with pytest.raises(ConnectionError, match="closed"):
        traffic.get()


def test_close_ends_a_call_that_is_connecting(redis_server):
    store = RedisStore(redis_server.url())
    redis_server.freeze()
    with ThreadPoolExecutor(2) as pool:  # of which one has to connect
        calls = [pool.submit(store.exists, ["key"], HANG_SECONDS) for _ in range(2)]
        time.sleep(0.1)
        store.close()
        assert all(isinstance(each.exception(), ConnectionError) for each in calls)


@pytest.mark.parametrize("timeout", [0.0, -1.0])
def test_a_call_that_has_no_time_raises(redis_server, timeout):
    store = RedisStore(redis_server.url())
    for _ in range(2):  # with a connection, and without
        with pytest.raises(TimeoutError):
            store.exists(["key"], timeout)
    assert store.exists(["key"], 5.0) == [False]


@pytest.mark.needs("tls")
def test_tls_frozen_in_the_middle_and_closed(tls_server):
    store = RedisStore(tls_server.url(scheme="rediss", query=f"?ssl_ca_certs={tls_server.certificate}"))
    traffic, other = Traffic(store), Traffic(store, "other")
    traffic.put(), other.put()
    running = Under(lambda: traffic.get(timeout=1.0))
    tls_server.freeze()
    assert isinstance(running.end(), TimeoutError)
    tls_server.thaw()
    assert other.get_all() and traffic.get_all()
    running = Under(lambda: traffic.get(timeout=1_000.0))
    tls_server.freeze()
    time.sleep(0.1)
    store.close()
    assert isinstance(running.end(), OSError)
