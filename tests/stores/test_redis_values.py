"""Commands of a rank to a real Redis server, as MONITOR shows them: a miss is one GET and harms no other rank."""

import re
import subprocess
from contextlib import contextmanager

import pytest

from cpu_prefix_cache.stores.deletions import CREDITS
from cpu_prefix_cache.stores.keyed_store import Got
from cpu_prefix_cache.stores.redis_store import RedisStore
from tests.unit.stores.test_keyed_values import Rank, labels

pytestmark = pytest.mark.needs("redis")


@contextmanager
def monitored(server):
    """Yields the server's commands meanwhile, complete when it is over: each with the first word behind it."""
    seen = []
    watch = subprocess.Popen(["redis-cli", "-p", str(server.port), "MONITOR"], stdout=subprocess.PIPE, text=True)
    try:
        assert watch.stdout.readline().strip() == "OK"
        yield seen
        server.ask("ECHO", "over")
        for line in watch.stdout:
            command, argument = re.findall(r'"([^"]*)"', line)[:2]
            if command.upper() == "ECHO":
                break
            seen.append((command, argument))
    finally:
        watch.kill()
        watch.wait()
        watch.stdout.close()


def name(rank, block):
    return rank.values.names.of_label(labels([block])[0])


def test_a_miss_is_one_get_and_deletes_nothing(redis_server):
    rank = Rank(RedisStore(redis_server.url()))
    with monitored(redis_server) as seen:
        assert rank.read(0, 1, 2) == [0, 1, 2]
    assert seen == [("GET", name(rank, block)) for block in range(3)]


def test_values_that_another_process_puts_meanwhile_stay(redis_server):
    rank, other = Rank(RedisStore(redis_server.url())), Rank(RedisStore(redis_server.url()))
    get = rank.values.store.get_into

    def get_while_another_puts(keys, buffers, timeout):
        got = get(keys, buffers, timeout)
        other.fill(1)
        other.write(1)
        return got

    rank.values.store.get_into = get_while_another_puts
    assert rank.read(1) == [1]
    assert other.read(1) == [] and other.has(1)


@pytest.mark.parametrize("damage", [("SETRANGE", "130", "!"), ("APPEND", "!")])
def test_a_value_that_is_damaged_or_longer_is_deleted(redis_server, damage):
    rank = Rank(RedisStore(redis_server.url()))
    rank.fill(1, 2)
    rank.write(1, 2)
    command, *rest = damage
    redis_server.ask(command, name(rank, 1), *rest)
    with monitored(redis_server) as seen:
        assert rank.read(1, 2) == [1] and rank.has(2)
    assert seen == [("GET", name(rank, 1)), ("GET", name(rank, 2)), ("DEL", name(rank, 1))]


def test_a_machine_with_bad_memory_leaves_nearly_all_to_the_others(redis_server, caplog):
    class BadMemory(RedisStore):
        def get_into(self, keys, buffers, timeout):
            got = super().get_into(keys, buffers, timeout)
            assert Got.OTHER_SIZE not in got
            for _, body in buffers[: len(keys)]:
                body[0] ^= 1
            return got

    good, bad = Rank(RedisStore(redis_server.url())), Rank(BadMemory(redis_server.url()))
    many = range(100)
    good.fill(*many)
    good.write(*many)
    for _ in range(3):
        assert bad.read(*many) == list(many)
    assert int(redis_server.ask("DBSIZE")) == len(many) - CREDITS
    assert bad.values.kept > 0 and "too many values" in caplog.text
    assert good.read(*many[CREDITS:]) == []
