"""The first token of a prompt whose KV is in files only, under vLLM on one GPU, and the steps of others meanwhile.

    python -m benchmarks.vllm.vllm_tier FOLDER [FOLDER ...] [--json FILE]

For each folder an engine with a tier there gets prompts; others follow, until device and host have evicted them; then
they come again, with 32 new tokens:

    computed     nothing was known
    tier         the KV was in files only
    host         once more: device memory no longer has it, the host does
    device       and once more, at once

and each but the last beside requests that decode: the median and the longest time between two of their tokens before
the prompt comes, and until its first token. Weights are random, and only times are measured. Files on a disk are read
past the page cache.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import print_environment
from benchmarks.vllm.vllm_reload import (
    DECODING,
    DECODING_TOKENS,
    GIB,
    PIN_SECONDS_PER_GIB,
    STEPS,
    SWEEP,
    TAIL,
    Engine,
    all_ms,
    model_folder,
    ms,
    say,
)

TOKEN_BYTES = 131_072  # of the shape of Llama 3.1 8B
BLOCK_TOKENS = 16
WRITE_SECONDS = 1.0  # after each prompt that evicts others, for what the tier writes
COUNTERS = {
    "hit_tokens": "vllm:cpu_prefix_cache_tier_hit_tokens",
    "transferred_bytes read": "vllm:kv_offload_tiering_read_bytes",
    "transferred_bytes write": "vllm:kv_offload_tiering_write_bytes",
    "requests": "vllm:cpu_prefix_cache_tier_requests",
    "refused_slots": "vllm:cpu_prefix_cache_tier_refused_slots",
    "unsaved_chunks": "vllm:cpu_prefix_cache_tier_unsaved_chunks",
}


def evict(engine: Engine, args: argparse.Namespace) -> None:
    """Send so many others that neither device nor host has the KV of an earlier prompt."""
    tokens = args.host_gib * GIB // TOKEN_BYTES + args.device_blocks * BLOCK_TOKENS
    for _ in range(math.ceil(tokens / SWEEP)):
        engine.ask([engine.new(SWEEP)])
        time.sleep(WRITE_SECONDS)


def again(prompt: list[tuple[int, int]], engine: Engine) -> list[tuple[int, int]]:
    return prompt + engine.new(TAIL)


def first_tokens(engine: Engine, prompts: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Times of prompts that are in the tier only."""
    for source, asked in (("tier", prompts), ("host", prompts[:-1]), ("device", prompts[-2:-1])):
        answer = engine.ask([again(prompt, engine) for prompt in asked])
        yield {"source": source, **times(answer["seconds"], answer["cached"])}


def times(seconds: Sequence[float], found: Sequence[int]) -> dict[str, Any]:
    return {"first_token_ms": ms(seconds), "all_ms": all_ms(seconds), "found": list(found)}


def beside(engine: Engine, source: str, prompts: Sequence[Any]) -> dict[str, Any]:
    decoding = [engine.new(DECODING_TOKENS) for _ in range(DECODING)]
    command = {"decoding": decoding, "steps": STEPS}
    answers = [engine.send({"beside": again(prompt, engine), **command}) for prompt in prompts]
    alone = [seconds for answer in answers for seconds in answer["alone"]]
    steps = [seconds for answer in answers for seconds in answer["beside"]]
    return {
        "source": f"{source}, beside {DECODING} that decode",
        **times([answer["seconds"] for answer in answers], [answer["cached"] for answer in answers]),
        "step_before_ms": [round(1e3 * each(alone), 2) for each in (median, max)],
        "step_ms": [round(1e3 * each(steps), 2) for each in (median, max)],
        "steps": len(steps),
        "all_steps_ms": [all_ms(answer["beside"]) for answer in answers],
    }


def measured(engine: Engine, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    prompts = [engine.new(args.tokens) for _ in range(args.prompts)]
    answer = engine.ask(prompts)
    yield {"source": "computed", **times(answer["seconds"], answer["cached"])}
    evict(engine, args)
    yield from first_tokens(engine, prompts)
    yield counters(engine)
    evict(engine, args)
    yield beside(engine, "tier", prompts)
    yield beside(engine, "host", prompts[:-1])
    yield beside(engine, "computed", [engine.new(args.tokens) for _ in prompts[:-1]])
    yield counters(engine)


def counters(engine: Engine) -> dict[str, Any]:
    """The tier's metrics so far, by name and label."""
    found = {}
    for name, metric in COUNTERS.items():
        for labels, value in engine.metrics(metric):
            label = labels.get("outcome")
            found[name if label is None else f"{name} {label}"] = value
    return {"source": "metrics", **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--device-blocks", type=int, default=3_000, help="blocks of 16 tokens; less than two prompts")
    parser.add_argument("--host-gib", type=int, default=17, help="more than all prompts, and than four times one")
    parser.add_argument("--tier-gib", type=int, default=40, help="more than all prompts, host and device")
    parser.add_argument("--model", type=Path, help="a folder for the model's configuration: what vLLM compiles is kept")
    parser.add_argument("--json", type=Path)
    parser.set_defaults(shape="llama")
    args = parser.parse_args()
    args.log_stats = True
    print_environment(["vllm", "torch", "triton"])
    results = []
    with model_folder(args.model, args.shape) as model:
        for folder in args.folder:
            size = args.tier_gib * GIB
            tier = {"kind": "file", "path": str(folder), "bytes": size, "offload": "eager", "revision": "random"}
            engine = Engine("ours-lazy", model, args, tier=tier)
            try:
                engine.receive()
                time.sleep(PIN_SECONDS_PER_GIB * args.host_gib)
                for result in measured(engine, args):
                    say(json.dumps(result))
                    results.append({"folder": str(folder), **result})
                    if args.json:
                        args.json.write_text(json.dumps(results, indent=1))
            finally:
                engine.close()


if __name__ == "__main__":
    main()
