"""An asynchronous vLLM engine in a process of its own, as a server has it, for `serve.py`. A line of input is a job:

    {"users": [[[PIECES, ANSWER], ...], ...]}         closed loop: the requests of each user
    {"requests": [[SECONDS, PIECES, ANSWER], ...]}    open loop

PIECES are seeds and lengths of random pieces, as in `vllm_engine.py`. All prompts are made before the clock starts. The
reply has `seconds` from the first request to the last token, and the `answered` requests.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from itertools import count
from typing import Any

from benchmarks.vllm.serve_loop import Loop, Tokens, results
from benchmarks.vllm.vllm_engine import MARK, sampled, tokens_of

NUMBERS = count()


def started(options: dict[str, Any]) -> Any:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    if "kv_transfer_config" in options:
        options["kv_transfer_config"] = KVTransferConfig(**options["kv_transfer_config"])
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**options))


def asking(engine: Any) -> Any:
    from vllm.sampling_params import RequestOutputKind

    async def ask(prompt: Sequence[int], answer: int) -> AsyncIterator[Tokens]:
        sampling = sampled(answer)
        sampling.output_kind = RequestOutputKind.DELTA
        async for output in engine.generate({"prompt_token_ids": prompt}, sampling, f"request {next(NUMBERS)}"):
            yield Tokens(len(output.outputs[0].token_ids), output.num_cached_tokens or 0)

    return ask


async def served(engine: Any, job: dict[str, Any]) -> dict[str, Any]:
    def made(pieces: Any) -> list[int]:
        return tokens_of(pieces)["prompt_token_ids"]

    users = [[(made(pieces), answer) for pieces, answer in user] for user in job.get("users", [])]
    requests = [(at, made(pieces), answer) for at, pieces, answer in job.get("requests", [])]
    loop = Loop(asking(engine), say, len(requests) + sum(map(len, users)))
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
    engine = started(json.loads(sys.argv[1]))
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    gpus = engine.vllm_config.parallel_config.world_size
    reply({"start": time.perf_counter() - begin, "device": device, "gpus": gpus})
    while line := await asyncio.to_thread(sys.stdin.readline):
        reply(await served(engine, json.loads(line)))


if __name__ == "__main__":
    asyncio.run(main())
