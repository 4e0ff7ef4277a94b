"""Metrics of a keeper that is a process, as a reader of Prometheus's text gets them over HTTP."""

import re
import socket
import subprocess
import sys
from urllib.request import urlopen

import pytest

from tests.support.host_engine import PATIENCE
from tests.support.threads import wait_until
from tests.unit.keeper.node_with_files import Node
from tests.unit.keeper.pool_engine import KeeperProcess, PoolEngine

pytestmark = pytest.mark.usefixtures("patience")

METRICS = {"metrics": "127.0.0.1:0"}
SAMPLE = re.compile(r'cpu_prefix_cache_(\w+(?:\{\w+="\w+"\})?) (\S+)')


def address_of(keeper):
    return "127.0.0.1", int(keeper.first_line.rpartition(" ")[2])


def shown(keeper):
    """The samples, by name and label."""
    with urlopen("http://{}:{}/metrics".format(*address_of(keeper)), timeout=PATIENCE) as page:
        assert page.headers.get_content_type() == "text/plain"
        lines = page.read().decode().splitlines()
    return {name: float(value) for line in lines if line[0] != "#" for name, value in [SAMPLE.fullmatch(line).groups()]}


def is_shown(keeper, **samples):
    now = shown(keeper)
    return all(now[name] == value for name, value in samples.items())


def test_engines_their_questions_and_what_they_store_are_counted(tmp_path):
    with KeeperProcess(tmp_path, slots=4, **METRICS) as keeper:
        assert shown(keeper) == {}, "before an engine has come there is no pool"
        with PoolEngine(keeper.address) as engine, PoolEngine(keeper.address) as other:
            engine.stores("abc")
            assert other.serves("abx") == 2
            other.rests()
            other.settles()
            now = shown(keeper)
            assert (now["engines"], now["capacity_blocks"], now["resident_blocks"]) == (2, 4, 4)
            assert (now["questions_total"], now["stored_chunks_total"]) == (2, 4)
            assert (now["asked_chunks_total"], now["hit_chunks_total"]) == (6, 2)
            assert now["leases"] == now["writes"] == now["pinned_blocks"] == now["evicted_chunks_total"] == 0
            assert not any(name.startswith("tier") for name in now)
            other.stores("uvw")
            now = shown(keeper)
            assert now["evicted_chunks_total"] == 3 and now['evicted_unused_chunks_total{kind="chunk"}'] > 0
        wait_until(lambda: is_shown(keeper, engines=0))


def test_a_lease_is_shown_until_its_request_has_ended(tmp_path):
    with KeeperProcess(tmp_path, **METRICS) as keeper, PoolEngine(keeper.address) as engine:
        engine.stores("abc")
        engine.starts("one", "abc")
        wait_until(lambda: is_shown(keeper, leases=1, pinned_blocks=3))
        engine.host.cache._questions.reset()
        wait_until(lambda: is_shown(keeper, leases=0, pinned_blocks=0))


def test_a_tier_below_the_pool_is_shown(tmp_path):
    with Node(tmp_path, **METRICS) as node:
        with PoolEngine(node.address) as engine:
            engine.stores("abc")
            node.holds(3)
            wait_until(lambda: shown(node)["tiering_write_bytes_total"] > 0)
        node.begins_again()
        with PoolEngine(node.address) as engine:
            node.has_opened()
            assert engine.serves("abc") == 3
            now = shown(node)
    assert now["tier_hit_chunks_total"] == now["hit_chunks_total"] == 3 and now["tier_found_chunks_total"] == 3
    assert now['tier_requests_total{outcome="asked"}'] == 1 and now['tier_requests_total{outcome="late"}'] == 0
    assert now['tier_state{state="open"}'] == 1 and now['tier_state{state="paused"}'] == 0
    assert now["tiering_read_bytes_total"] > 0 and now["tiering_read_time_total"] > 0
    assert now["tier_capacity_blocks"] >= now["tier_resident_blocks"] == 3


def test_readers_that_say_nothing_or_are_gone_hold_up_nobody(tmp_path):
    with KeeperProcess(tmp_path, **METRICS) as keeper, PoolEngine(keeper.address) as engine:
        engine.stores("abc")
        silent = [socket.create_connection(address_of(keeper)) for _ in range(8)]
        for _ in range(8):
            with socket.create_connection(address_of(keeper)) as gone:
                gone.sendall(b"GET")
        assert shown(keeper)["engines"] == 1
        assert engine.serves("abc") == 3
        for each in silent:
            with each:
                each.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert each.recv(1000).startswith(b"HTTP/1.0 200 OK"), "it said nothing for a while"


@pytest.mark.parametrize(
    ("address", "sentence"), [("9400", "HOST:PORT"), ("192.0.2.1:1", "no metrics"), ("{}:{}", "in use")]
)
def test_a_keeper_refuses_an_address_that_it_cannot_have(tmp_path, address, sentence):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        command = [sys.executable, "-m", "cpu_prefix_cache.tools.cli", "keep", "--host-bytes=1MiB"]
        options = [f"--socket={tmp_path}/kv", f"--metrics={address.format(*taken.getsockname())}"]
        ended = subprocess.run([*command, *options], capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode and sentence in ended.stderr and "Traceback" not in ended.stderr
