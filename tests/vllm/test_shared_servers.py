"""Two vLLM servers, processes of their own, on one Redis and on one Mooncake: the second loads chunks that
the first has computed, and gives the same answers. Skipped where the store is not installed.
"""

import pytest

from cpu_prefix_cache.stores import frame
from tests.stores.servers import MooncakeMaster, RedisServer, missing, starting
from tests.support.threads import wait_until
from tests.vllm.real_cache import BLOCKS, PROMPTS, folder_of
from tests.vllm.real_engine import BLOCK
from tests.vllm.servers import ALIKE, START_SECONDS, VllmServer, difference

MISSING = missing()
HOST = 2**25
HITS, RESIDENT = "cpu_prefix_cache_tier_hit_tokens_total", "cpu_prefix_cache_tier_resident_blocks"


@pytest.fixture
def begin(tmp_path):
    with starting(tmp_path) as begin:
        yield begin


@pytest.mark.slow
@pytest.mark.server
@pytest.mark.parametrize("store", ["redis", "mooncake"])
def test_chunks_that_one_server_has_computed_another_one_loads(begin, store):
    if store in MISSING:
        pytest.skip(MISSING[store])
    keeper = begin(RedisServer if store == "redis" else MooncakeMaster)
    url = keeper.url() if store == "redis" else keeper.url(segment="128MiB")
    tier = {"kind": store, "store": url, "revision": "1", "ask_seconds": 5}
    model, extra = folder_of("llama"), {"cpu_bytes_to_use": HOST, "offload": "eager", "tier": tier}
    first, second = [begin(VllmServer, model, extra) for _ in range(2)]
    wait_until(lambda: first.is_up() and second.is_up(), START_SECONDS)
    for server in (first, second):
        server.logprobs(range(5, 50))  # after it all ranks have reported that they have the store
    chunks, before = 2 * BLOCKS, second.metric(HITS)
    computed = [first.logprobs(prompt) for prompt in PROMPTS[:2]]
    wait_until(lambda: first.metric(RESIDENT) >= chunks, 60)
    loaded = [second.logprobs(prompt) for prompt in PROMPTS[:2]]
    assert second.metric(HITS) - before == chunks * BLOCK
    assert max(map(difference, computed, loaded)) < ALIKE
    if store == "redis":  # the control
        other = first.logprobs(PROMPTS[2])
        wait_until(lambda: first.metric(RESIDENT) >= chunks + BLOCKS, 60)
        exchange_bodies(url)
        damaged = second.logprobs(PROMPTS[2])
        assert second.metric(HITS) - before == (chunks + BLOCKS) * BLOCK
        assert difference(other, damaged) > ALIKE


def exchange_bodies(url):
    """Every value has the bytes of another one, and a checksum that fits."""
    import redis

    with redis.Redis.from_url(url) as client:
        names = client.keys()
        values = client.mget(names)
        for name, value, other in zip(names, values, values[1:] + values[:1], strict=True):
            body = other[frame.SIZE :]
            client.set(name, value[:88] + frame.checksum(memoryview(body)) + value[104 : frame.SIZE] + body)
