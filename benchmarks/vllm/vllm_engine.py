"""A vLLM engine in a process of its own, which reads a command from each line. `vllm_reload.py` starts several.

    {"ask": [[[seed, length], ...], ...], "max_tokens": 1, "together": false, "params": {}}

sends prompts, each a list of random pieces of `length` tokens, one after the other or all at once, with these
kv_transfer_params. The reply is

    {"seconds": [...], "cached": [...]}

The reply to {"metrics": NAME} has the labels and the value of each metric of that name.

    {"beside": [[seed, length], ...], "decoding": [[[seed, length], ...], ...], "steps": 50}

lets the prompts of "decoding" decode, and adds the prompt of "beside" after some steps. The reply is

    {"alone": [...], "beside": [...], "seconds": 0.3, "cached": 32768}

the seconds from one token of the decoding requests to the next, before the prompt came and until its first token, and
those of the prompt.

    {"short": [[[seed, length], ...], ...], "decoding": [...], "computing": [...], "pause": 0.1}

adds the prompts of "short" one after the other: while those of "decoding" decode, if there are any, or each while one
of "computing" is computed. The reply has the seconds of each, its tokens that were found, and the longest step until
its first token:

    {"seconds": [...], "cached": [...], "longest": [...]}
"""

import json
import os
import random
import sys
import time
from functools import cache
from typing import Any

VOCABULARY = 128_000
DECODED = 64  # tokens that requests have decoded before their steps are timed
BETWEEN = 12  # steps that requests decode before each short prompt
COMPUTING_SECONDS = 0.03  # after which the step of a long prompt has begun
MARK = "ANSWER "  # begins each reply, because vLLM writes to the same pipe


@cache
def piece(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(VOCABULARY) for _ in range(length))


def tokens_of(prompt: Any) -> dict[str, list[int]]:
    return {"prompt_token_ids": [token for seed, length in prompt for token in piece(seed, length)]}


def sampled(max_tokens: int, params: Any = None) -> Any:
    from vllm import SamplingParams

    extra = {"kv_transfer_params": params} if params else None
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, extra_args=extra)


def answer(llm: Any, command: dict[str, Any]) -> dict[str, Any]:
    sampling = sampled(command["max_tokens"], command["params"])
    prompts = [tokens_of(prompt) for prompt in command["ask"]]
    seconds, outputs = [], []
    for batch in [prompts] if command["together"] else [[prompt] for prompt in prompts]:
        start = time.perf_counter()
        outputs += llm.generate(batch, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    return {"seconds": seconds, "cached": [output.num_cached_tokens for output in outputs]}


def beside(llm: Any, command: dict[str, Any]) -> dict[str, Any]:
    engine, steps = llm.llm_engine, command["steps"]
    decoding = [f"decoding {at}" for at in range(len(command["decoding"]))]
    for name, prompt in zip(decoding, command["decoding"], strict=True):
        engine.add_request(name, tokens_of(prompt), sampled(8 * DECODED))
    for _ in range(DECODED):
        step(engine)
    alone = [step(engine)[0] for _ in range(steps)]
    prompt = tokens_of(command["beside"])
    start = time.perf_counter()
    times = []
    cached = None
    engine.add_request("beside", prompt, sampled(1))
    while cached is None:
        seconds, outputs = step(engine)
        times.append(seconds)
        cached = next((each.num_cached_tokens for each in outputs if each.request_id == "beside"), None)
    seconds = time.perf_counter() - start
    engine.abort_request(decoding)
    while engine.has_unfinished_requests():
        engine.step()
    return {"alone": alone, "beside": times, "seconds": seconds, "cached": cached}


def short(llm: Any, command: dict[str, Any]) -> dict[str, Any]:
    engine = llm.llm_engine
    decoding = [f"decoding {at}" for at in range(len(command["decoding"]))]
    for name, prompt in zip(decoding, command["decoding"], strict=True):
        engine.add_request(name, tokens_of(prompt), sampled(8 * DECODED))
    reply: dict[str, list[Any]] = {"seconds": [], "cached": [], "longest": []}
    for at, prompt in enumerate(map(tokens_of, command["short"])):
        for _ in range(BETWEEN if decoding else 0):
            step(engine)
        for beside in command["computing"][at : at + 1]:
            engine.add_request(f"computing {at}", tokens_of(beside), sampled(1))
            time.sleep(COMPUTING_SECONDS)
        start, longest, cached = time.perf_counter(), 0.0, None
        engine.add_request(f"short {at}", prompt, sampled(1))
        while cached is None:
            seconds, outputs = step(engine)
            longest = max(longest, seconds)
            cached = next((each.num_cached_tokens for each in outputs if each.request_id == f"short {at}"), None)
        for name, value in zip(reply, (time.perf_counter() - start, cached, longest), strict=True):
            reply[name].append(value)
        while not decoding and engine.has_unfinished_requests():
            engine.step()
        time.sleep(0 if decoding else command["pause"])
    engine.abort_request(decoding)
    while engine.has_unfinished_requests():
        engine.step()
    return dict(reply)


def step(engine: Any) -> tuple[float, Any]:
    """The seconds until there are tokens, and the requests that have them."""
    start = time.perf_counter()
    outputs: Any = []
    while not outputs:
        outputs = engine.step()
    return time.perf_counter() - start, outputs


def metrics(llm: Any, name: str) -> list[tuple[dict[str, str], float]]:
    return [(metric.labels, metric.value) for metric in llm.get_metrics() if metric.name == name]


def reply_to(llm: Any, command: dict[str, Any]) -> dict[str, Any]:
    if "ask" in command:
        return answer(llm, command)
    if "beside" in command:
        return beside(llm, command)
    if "short" in command:
        return short(llm, command)
    return {"metrics": metrics(llm, command["metrics"])}


def main() -> None:
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM

    started = time.perf_counter()
    llm = LLM(**json.loads(sys.argv[1]))
    print(MARK + json.dumps({"start": time.perf_counter() - started}), flush=True)
    for line in sys.stdin:
        print(MARK + json.dumps(reply_to(llm, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
