"""Asynchronous vLLM engines, as servers have them, below one process, for `serve.py`. A line of input is a job:

    {"users": [[[PIECES, ANSWER], ...], ...]}         closed loop: the requests of each user
    {"requests": [[SECONDS, PIECES, ANSWER], ...]}    open loop

PIECES are seeds and lengths of random pieces, as in `vllm_engine.py`. All prompts are made before the clock starts. The
reply has `seconds` from the first request to the last token, and the `answered` requests.

Several engines are servers on the GPUs in turn. A request goes to one that is drawn by its tokens, so that it is the
same one in each run.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from itertools import count
from typing import Any

import torch

from benchmarks.vllm.serve_loop import Ask, Loop, Tokens, results
from benchmarks.vllm.vllm_engine import MARK, sampled, tokens_of

NUMBERS = count()
GPUS = torch.cuda.device_count()  # counted before one is chosen, and without a context on any


def started(options: dict[str, Any]) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    if "kv_transfer_config" in options:
        options["kv_transfer_config"] = KVTransferConfig(**options["kv_transfer_config"])
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**options))


def servers(options: dict[str, Any], count: int) -> list[Any]:
    """One after the other, because the first one's compiled kernels are cached for the others."""
    engines = []
    for at in range(count):
        if count > 1:  # one alone may have several GPUs
            os.environ["CUDA_VISIBLE_DEVICES"] = str(at % max(1, GPUS))  # for the process of this engine
        engines.append(started(dict(options)))
    return engines


def asking(engines: Sequence[Any]) -> Ask:
    from vllm.sampling_params import RequestOutputKind

    async def ask(prompt: Sequence[int], answer: int) -> AsyncIterator[Tokens]:
        sampling = sampled(answer)
        sampling.output_kind = RequestOutputKind.DELTA
        engine = random.Random(str(prompt[-8:])).choice(engines)
        async for output in engine.generate({"prompt_token_ids": prompt}, sampling, f"request {next(NUMBERS)}"):
            yield Tokens(len(output.outputs[0].token_ids), output.num_cached_tokens or 0)

    return ask


async def served(ask: Ask, job: dict[str, Any]) -> dict[str, Any]:
    def made(pieces: Any) -> list[int]:
        return tokens_of(pieces)["prompt_token_ids"]

    users = [[(made(pieces), answer) for pieces, answer in user] for user in job.get("users", [])]
    requests = [(at, made(pieces), answer) for at, pieces, answer in job.get("requests", [])]
    loop = Loop(ask, say, len(requests) + sum(map(len, users)))
    await (loop.closed(users) if users else loop.open(requests))
    return {"seconds": loop.now, "answered": results(loop)}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def reply(values: dict[str, Any]) -> None:
    print(MARK + json.dumps(values), flush=True)


async def main() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    begin = time.perf_counter()
    engines = servers(json.loads(sys.argv[1]), int(sys.argv[2]))
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    gpus = min(GPUS or 1, sum(engine.vllm_config.parallel_config.world_size for engine in engines))
    reply({"start": time.perf_counter() - begin, "device": device, "gpus": gpus})
    while line := await asyncio.to_thread(sys.stdin.readline):
        reply(await served(asking(engines), json.loads(line)))


if __name__ == "__main__":
    asyncio.run(main())
