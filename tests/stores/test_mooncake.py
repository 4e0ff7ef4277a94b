"""MooncakeStore with a real master, and with memory of another process: frozen, killed and started again."""

import subprocess
import sys
import threading
import time

import pytest

from cpu_prefix_cache.messages.errors import ConfigurationError, TierUnavailable
from cpu_prefix_cache.stores.mooncake_store import MooncakeStore
from cpu_prefix_cache.stores.opening import open_store
from cpu_prefix_cache.testing import check_store
from tests.stores.servers import environment, free_port
from tests.stores.test_redis import serve_http
from tests.stores.traffic import Traffic, Under
from tests.support.threads import wait_until

pytestmark = pytest.mark.needs("mooncake")


def test_two_stores_that_give_memory_keep_the_contract(master):
    check_store(lambda: open_store(master.url(segment="128MiB")))


def test_two_stores_beside_a_process_that_gives_memory_keep_the_contract(master, node):
    check_store(lambda: open_store(master.url()))


def test_control_another_value_under_a_key_is_noticed(master, node):
    traffic, other = Traffic(MooncakeStore(master.url())), Traffic(MooncakeStore(master.url()), "other")
    assert all(traffic.put()) and traffic.get_all()
    traffic.store.delete(traffic.keys[:1], 5.0)
    other.keys[0] = traffic.keys[0]
    assert all(other.put())
    with pytest.raises(AssertionError, match="wrong bytes"):
        traffic.get()


def test_a_key_put_again_keeps_its_value(master, node):  # tiers 25
    store = MooncakeStore(master.url())
    old, new = Traffic(store), Traffic(store)
    new.values = new.values[::-1]
    assert all(old.put()) and all(new.put())
    assert old.get_all()
    store.delete(old.keys, 5.0)
    assert all(new.put()) and new.get_all()


def test_a_value_that_was_taken_may_be_gone(master):  # tiers 26
    store = MooncakeStore(master.url(segment="64MiB"))
    traffics = [Traffic(store, str(at)) for at in range(12)]
    for each in traffics:
        each.put()
    found = sum(sum(each.get()) for each in traffics)  # each of which is right
    assert 0 < found < sum(len(each.keys) for each in traffics)


# One sentence at start


def told(url, error=ConfigurationError):
    with pytest.raises(error) as raised:
        open_store(url)
    return str(raised.value)


@pytest.mark.parametrize(
    "rest", ["", "127.0.0.1", "127.0.0.1:1/path", "127.0.0.1:1?size=3", "127.0.0.1:1?segment=much"]
)
def test_texts_that_are_no_url_are_refused(rest):
    assert (
        "SCHEME://" in told(f"mooncake://{rest}") if not rest else "a Mooncake store is" in told(f"mooncake://{rest}")
    )


def test_nobody_there():
    assert "mooncake_master --rpc_port=" in told(f"mooncake://127.0.0.1:{free_port()}", TierUnavailable)


def test_a_server_of_another_kind():
    assert "no Mooncake master can be used" in told(f"mooncake://127.0.0.1:{serve_http()}", TierUnavailable)


def test_without_its_package_or_the_libraries_of_the_system(master, monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    assert "pip install mooncake-transfer-engine-non-cuda" in told(master.url())

    class Unloadable:
        def find_spec(self, name, *_):
            if name == "mooncake.store":
                raise ImportError("libibverbs.so.1: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "mooncake.store")
    monkeypatch.setattr(sys, "meta_path", [Unloadable(), *sys.meta_path])
    assert "apt install libibverbs1 librdmacm1 libnl-3-200 libnl-route-3-200" in told(master.url())


# Frozen, killed, started again


@pytest.mark.parametrize("call", ["get", "put"])
def test_the_master_is_frozen_in_the_middle(master, node, call):  # tiers 28, 27
    store = MooncakeStore(master.url())
    traffic, other = Traffic(store), Traffic(store, "other")
    traffic.put()
    running = Under(traffic.get if call == "get" else lambda: put_anew(traffic))
    master.freeze()
    assert isinstance(running.end(), TimeoutError)
    traffic.poison()
    with pytest.raises(TimeoutError):
        store.exists(traffic.keys, 0.05)
    master.thaw()
    wait_until(lambda: put_and_got(other))
    assert traffic.is_poisoned(), "buffers were written when the call was over"
    there = traffic.get()  # which are right; a put that was cut off blocks its key for 30 s
    assert call == "put" or all(there)


def test_one_question_at_most_is_left_behind(master):
    store = MooncakeStore(master.url())
    master.freeze()
    before = threading.active_count()
    for _ in range(5):
        with pytest.raises(TimeoutError):
            store.exists(["key"], 0.01)
    assert threading.active_count() <= before + 1
    master.thaw()
    wait_until(lambda: threading.active_count() == before)
    assert store.exists(["key"], 5.0) == [False]


@pytest.mark.parametrize("call", ["get", "put"])
def test_no_master_is_no_answer(master, node, call):
    """It is not the answer that the store has none of the keys, or that the values do not fit."""
    store = MooncakeStore(master.url())
    traffic, other = Traffic(store), Traffic(store, "other")
    traffic.put()
    master.kill()
    with pytest.raises(TimeoutError, match="does not answer"):
        traffic.get() if call == "get" else other.put()


@pytest.mark.parametrize("call", ["get", "put"])
def test_the_master_is_killed_in_the_middle_and_started_again(master, node, call):  # tiers 27, 28
    traffic = Traffic(MooncakeStore(master.url()))
    traffic.put()
    running = Under(traffic.get if call == "get" else lambda: put_anew(traffic))
    master.kill()
    assert isinstance(running.end(), OSError)
    for _ in range(3):
        with pytest.raises(ConnectionError):
            traffic.get()
    master.start()
    assert not any(traffic.get()), "a master that was started again knows keys"
    wait_until(lambda: all(traffic.put()))  # when the node has come back to it
    assert traffic.get_all()


@pytest.mark.parametrize("call", ["get", "put"])
def test_a_node_is_frozen_in_the_middle(master, node, call):  # tiers 24, 28
    store = MooncakeStore(master.url())
    traffic, other = Traffic(store), Traffic(store, "other")
    traffic.put(), other.put()
    running = Under(traffic.get if call == "get" else lambda: put_anew(traffic))
    node.freeze()
    assert isinstance(running.end(), OSError)
    traffic.poison()
    node.thaw()
    wait_until(lambda: put_and_got(other))
    assert traffic.is_poisoned(), "buffers were written when the call was over"
    wait_until(lambda: put_and_got(traffic))


@pytest.mark.parametrize("call", ["get", "put"])
def test_a_node_is_killed_in_the_middle(master, node, call):  # tiers 28
    traffic = Traffic(MooncakeStore(master.url()))
    traffic.put()
    running = Under(traffic.get if call == "get" else lambda: put_anew(traffic))
    node.kill()
    assert isinstance(running.end(), OSError)
    node.start()
    wait_until(lambda: put_and_got(traffic))  # when the master has given up the old one, after some 10 s


def put_anew(traffic):
    """Values that are there already would not be moved."""
    traffic.store.delete(traffic.keys, 5.0)
    traffic.put()


def put_and_got(traffic):
    try:
        return all(traffic.put()) and traffic.get_all()
    except OSError:
        return False


# Ends


def test_close_waits_for_calls_under_way(master, node):
    traffic = Traffic(MooncakeStore(master.url()))
    traffic.put()
    running = Under(traffic.get)
    traffic.store.close()
    assert isinstance(running.end(), ConnectionError)


LEFT_OPEN = """
import sys
from cpu_prefix_cache.stores.mooncake_store import MooncakeStore
store = MooncakeStore(sys.argv[1])
print("open", flush=True)
sys.stdin.readline()
try:
    store.exists(["key"], 0.1)
except OSError:
    print("no answer", flush=True)
"""


@pytest.mark.parametrize("event", ["freeze", "kill"])
def test_a_program_ends_without_its_master(master, event):
    program = subprocess.Popen(
        [sys.executable, "-c", LEFT_OPEN, master.url(segment="16MiB")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment(),
    )
    try:
        assert program.stdout.readline() == b"open\n"
        getattr(master, event)()
        time.sleep(0.1)
        rest, _ = program.communicate(b"\n", timeout=60.0)
        assert (rest, program.returncode) == (b"no answer\n", 0)
    finally:
        program.kill()
