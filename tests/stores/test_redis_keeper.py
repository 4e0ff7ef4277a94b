"""Keepers of several nodes over one Redis, as processes, with engines that compare every byte."""

import signal

import pytest

from cpu_prefix_cache.keeper import questions
from tests.stores.servers import RedisServer
from tests.support.host_engine import PATIENCE
from tests.support.threads import wait_until
from tests.unit.keeper.node_with_files import NodeWithStore
from tests.unit.keeper.pool_engine import PoolEngine
from tests.unit.keeper.test_files_below import MODELS, PROMPT

pytestmark = pytest.mark.needs("redis")


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """A keeper on a busy machine answers late, and these tests want its answers."""
    monkeypatch.setattr(questions, "ASK_SECONDS", PATIENCE / 2)


def holds(server, count):
    wait_until(lambda: int(server.ask("DBSIZE")) >= count)


@pytest.mark.parametrize("model", MODELS)
def test_an_engine_finds_what_one_of_another_node_has_computed(tmp_path, redis_server, model):
    engine_at, block_bytes, slots = MODELS[model]
    with (
        NodeWithStore(tmp_path / "one", redis_server.url(), block_bytes=block_bytes) as one,
        engine_at(one.address) as engine,
    ):
        engine.stores(PROMPT)
        holds(redis_server, slots)
        one.kill(signal.SIGTERM)
        assert one.process.returncode == 0
    with (
        NodeWithStore(tmp_path / "two", redis_server.url(), block_bytes=block_bytes) as two,
        engine_at(two.address) as engine,
    ):
        assert engine.serves(PROMPT) == len(PROMPT)


def test_requests_go_on_while_the_server_hangs_and_find_what_it_has_when_it_goes_on(tmp_path, redis_server):
    """Each prompt is served once on the second node: what it finds is from the server."""
    prompts = ["ab", "cd", "ef", "gh", "ij"]
    with NodeWithStore(tmp_path / "one", redis_server.url()) as one, PoolEngine(one.address) as engine:
        for at, prompt in enumerate(prompts):
            engine.stores(prompt)
            holds(redis_server, 2 * (at + 1))
    with (
        NodeWithStore(tmp_path / "two", redis_server.url()) as two,
        PoolEngine(two.address, device_blocks=32) as engine,
    ):
        engine.stores("x")
        holds(redis_server, 2 * len(prompts) + 1)
        redis_server.freeze()
        assert engine.serves(prompts.pop()) == 0
        redis_server.thaw()
        wait_until(lambda: engine.serves(prompts.pop()) == 2)


def test_another_password_leaves_the_pool_as_it_is_and_is_not_in_the_log(tmp_path, start):
    server = start(RedisServer, "--requirepass", "right")
    with NodeWithStore(tmp_path / "one", server.url(":wrong@")) as one, PoolEngine(one.address) as engine:
        engine.stores(PROMPT)
        assert engine.serves(PROMPT) == len(PROMPT)
        said = one.log.read_text()
    assert "nothing is below this pool" in said and "password" in said and "wrong@" not in said


def test_a_keeper_over_redis_imports_no_torch(tmp_path, redis_server):
    with NodeWithStore(tmp_path / "one", redis_server.url()) as one, PoolEngine(one.address) as engine:
        engine.stores(PROMPT)
        holds(redis_server, len(PROMPT))
        with open(f"/proc/{one.process.pid}/maps") as maps:
            found = maps.read()
    assert not [name for name in ("torch", "numpy", "triton", "cuda") if name in found]
