"""Real servers. Tests of one that is not installed are skipped, and the last line of the run names it."""

import pytest

from tests.stores.servers import MooncakeMaster, MooncakeNode, RedisServer, TlsRedisServer, missing, starting

MISSING = missing()


def pytest_configure(config):
    config.addinivalue_line("markers", "needs(name): skipped where this server is not installed")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("needs"):
            item.add_marker("server")


def pytest_runtest_setup(item):
    for mark in item.iter_markers("needs"):
        if mark.args[0] in MISSING:
            pytest.skip(MISSING[mark.args[0]])


def pytest_unconfigure(config):
    for why in dict.fromkeys(MISSING.values()):
        config.get_terminal_writer().line(f"not tested: {why}")


@pytest.fixture
def start(tmp_path):
    """Starts a server of this kind, which ends with the test."""
    with starting(tmp_path) as begin:
        yield begin


@pytest.fixture
def redis_server(start):
    return start(RedisServer)


@pytest.fixture
def tls_server(start):
    return start(TlsRedisServer)


@pytest.fixture
def master(start):
    return start(MooncakeMaster)


@pytest.fixture
def node(start, master):
    return start(MooncakeNode, master.url(segment="256MiB"))
