"""A vLLM engine in a process of its own, which reads a command from each line. `vllm_reload.py` starts several.

    {"ask": [[[seed, length], ...], ...], "max_tokens": 1, "together": false, "params": {}}

asks prompts, each a list of random pieces of `length` tokens, one after the other or all at once, with these
kv_transfer_params. The reply is

    {"seconds": [...], "cached": [...]}

The reply to {"metrics": NAME} has the labels and the value of each metric of that name.
"""

import json
import os
import random
import sys
import time
from functools import cache
from typing import Any

VOCABULARY = 128_000
MARK = "ANSWER "  # begins each reply, because vLLM writes to the same pipe


@cache
def piece(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCABULARY) for _ in range(length))


def answer(llm: Any, command: dict[str, Any]) -> dict[str, Any]:
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0,
        max_tokens=command["max_tokens"],
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": command["params"]} if command["params"] else None,
    )
    prompts = [
        {"prompt_token_ids": [token for seed, length in prompt for token in piece(seed, length)]}
        for prompt in command["ask"]
    ]
    seconds, outputs = [], []
    for batch in [prompts] if command["together"] else [[prompt] for prompt in prompts]:
        start = time.perf_counter()
        outputs += llm.generate(batch, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "cached": [output.num_cached_tokens for output in outputs]}


def metrics(llm: Any, name: str) -> list[tuple[dict[str, str], float]]:
    return [(metric.labels, metric.value) for metric in llm.get_metrics() if metric.name == name]


def main() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM

    started = time.perf_counter()
    llm = LLM(**json.loads(sys.argv[1]))
    print(MARK + json.dumps({"start": time.perf_counter() - started}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        reply = answer(llm, command) if "ask" in command else {"metrics": metrics(llm, command["metrics"])}
        print(MARK + json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
