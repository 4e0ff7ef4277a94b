"""Two vLLM servers, processes of their own, on one Redis and on one Mooncake: the second loads chunks that
the first has computed, and gives the same answers. Skipped where the store is not installed.
"""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from cpu_prefix_cache.stores import frame
from tests.stores.servers import MooncakeMaster, RedisServer, Server, missing, starting, wait_for
from tests.vllm.real_cache import BLOCKS, PROMPTS, folder_of
from tests.vllm.real_engine import BLOCK

ROOT = Path(__file__).parents[2]
MISSING = missing()
HOST = 2**25
START_SECONDS = 300.0
PATHS = [str(ROOT / "src"), str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(PATHS), "MC_TCP_PROGRESS_TIMEOUT_SEC": "20"}
HITS, RESIDENT = "cpu_prefix_cache_tier_hit_tokens_total", "cpu_prefix_cache_tier_resident_blocks"
ALIKE = 1e-3  # in logprobs: answers of a server from another's KV, and from its own


class VllmServer(Server):
    """One with the model in `model`, and the option `tier`. It is started, and not waited for."""

    def __init__(self, folder, model, tier):
        self.model, self.tier = model, tier
        super().__init__(folder)

    def start(self):
        with (self.folder / f"log-{self.port}").open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, cwd=self.folder, env=ENVIRONMENT, start_new_session=True
            )

    def kill(self):
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def is_up(self):
        assert self.process.poll() is None, (self.folder / f"log-{self.port}").read_text()
        try:
            return self.get("/health") is not None
        except (OSError, urllib.error.URLError):
            return False

    def command(self):
        transfer = {
            "kv_connector": "CPUPrefixCacheConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": HOST, "offload": "eager", "tier": self.tier},
        }
        size = [
            "--block-size",
            str(BLOCK),
            "--max-model-len",
            "2048",
            "--num-gpu-blocks-override",
            "100",
            "--kv-cache-memory-bytes",
            str(2**30),
        ]
        model = ["--model", str(self.model), "--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager"]
        said = [*model, *size, "--port", str(self.port), "--kv-transfer-config", json.dumps(transfer)]
        return [sys.executable, "-m", "tests.vllm.patient_server", *said]

    def get(self, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", data=data, headers={"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.read().decode()

    def logprobs(self, prompt):
        body = {"model": str(self.model), "prompt": list(prompt), "max_tokens": 4, "temperature": 0, "logprobs": 5}
        answer = json.loads(self.get("/v1/completions", {**body, "return_tokens_as_token_ids": True}))
        return answer["choices"][0]["logprobs"]["top_logprobs"]

    def metric(self, name):
        lines = (line.rpartition(" ") for line in self.get("/metrics").splitlines() if line.startswith(f"vllm:{name}"))
        return sum(float(value) for _, _, value in lines)


@pytest.fixture
def begin(tmp_path):
    with starting(tmp_path) as begin:
        yield begin


@pytest.mark.server
@pytest.mark.parametrize("store", ["redis", "mooncake"])
def test_chunks_that_one_server_has_computed_another_one_loads(begin, store):
    if store in MISSING:
        pytest.skip(MISSING[store])
    keeper = begin(RedisServer if store == "redis" else MooncakeMaster)
    url = keeper.url() if store == "redis" else keeper.url(segment="128MiB")
    tier = {"kind": store, "store": url, "revision": "1", "ask_seconds": 5}
    model = folder_of("llama")
    first, second = [begin(VllmServer, model, tier) for _ in range(2)]
    wait_for(lambda: first.is_up() and second.is_up(), START_SECONDS)
    for server in (first, second):
        server.logprobs(range(5, 50))  # after it all ranks have reported that they have the store
    chunks, before = 2 * BLOCKS, second.metric(HITS)
    computed = [first.logprobs(prompt) for prompt in PROMPTS[:2]]
    wait_for(lambda: first.metric(RESIDENT) >= chunks, 60)
    loaded = [second.logprobs(prompt) for prompt in PROMPTS[:2]]
    assert second.metric(HITS) - before == chunks * BLOCK
    assert max(map(difference, computed, loaded)) < ALIKE
    if store == "redis":  # the control
        other = first.logprobs(PROMPTS[2])
        wait_for(lambda: first.metric(RESIDENT) >= chunks + BLOCKS, 60)
        exchange_bodies(url)
        damaged = second.logprobs(PROMPTS[2])
        assert second.metric(HITS) - before == (chunks + BLOCKS) * BLOCK
        assert difference(other, damaged) > ALIKE


def difference(there, here):
    """Largest difference of the logprobs of tokens that both name; a token that only one of them names is far away."""
    return max(
        abs(each.get(token, 9.0) - other.get(token, 9.0))
        for each, other in zip(there, here, strict=True)
        for token in each
    )


def exchange_bodies(url):
    """Every value has the bytes of another one, and a checksum that fits."""
    import redis

    with redis.Redis.from_url(url) as client:
        names = client.keys()
        values = client.mget(names)
        for name, value, other in zip(names, values, values[1:] + values[:1], strict=True):
            body = other[frame.SIZE :]
            client.set(name, value[:88] + frame.checksum(memoryview(body)) + value[104 : frame.SIZE] + body)
