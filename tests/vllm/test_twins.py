"""Two requests with the same tokens and other KV, under vLLM's scheduler: whatever else their KV depends on is in the
hashes of blocks, so in our keys. The control is the same request once more.
"""

import pytest
import torch
from vllm.lora.request import LoRARequest

from tests.vllm.engine import BLOCK, Engine

PROMPT = 64
TOKENS = list(range(100, 100 + PROMPT))


def embeddings(seed):
    return torch.randn(PROMPT, 8, generator=torch.Generator().manual_seed(seed))


TWINS = {
    "salt": [{"cache_salt": "one"}, {"cache_salt": "other"}, {}],
    "embeddings": [{"prompt_embeds": embeddings(1)}, {"prompt_embeds": embeddings(2)}, {}],
    "adapter": [{"lora_request": LoRARequest(name, at, f"/{name}")} for at, name in enumerate(("one", "other"), 1)],
}


def found(engine: Engine, more: dict) -> int:
    """Tokens of the prompt that a request with `more` finds on the device or on the host."""
    engine.submit(TOKENS, max_tokens=2, **more)
    engine.admitted.clear()
    engine.drain()
    return max(engine.admitted[0])


@pytest.mark.parametrize("offload", ["eager", "lazy"])
@pytest.mark.parametrize("twins", TWINS.values(), ids=TWINS)
def test_a_request_finds_its_own_kv_and_not_that_of_its_twins(tmp_path, twins, offload):
    engine = Engine(tmp_path, offload=offload, device_blocks=60, host_blocks=1000, slowest=1)
    for round in range(2):
        for more in twins:
            assert found(engine, more) == (PROMPT - BLOCK if round else 0)
        for seed in range(12):  # the device forgets
            engine.run([400 + seed * 3] * 60, max_tokens=1)
