"""Times of a vLLM server on one GPU with the host cache, compared with vLLM's own offload connectors in one run.

    python -m benchmarks.vllm.vllm_reload [--parts ttft,rounds] [--shape llama] [--waves ...] [--json FILE]
    python -m benchmarks.vllm.vllm_reload --parts idle,stores,full --waves "none;ours-eager;none;offloading"

Engines are processes that run side by side and are measured in turn. `--waves` gives those that run together, as host
memory allows. On a GPU with the contexts of several processes, steps may take 3 % less time
(docs/design_connectors.md): to measure small differences, run each engine alone. Weights are random, and only times are
measured; tests/vllm and tests/gpu/vllm_equality.py test that bytes are right.

    none                      vLLM without a connector: what the device has evicted is computed again
    null                      the same hits as ours, without copies: a lower bound
    ours-lazy, ours-eager     CPUPrefixCacheConnector
    ours-parked, ours-short   the same: requests wait for all loads, or a step for all those of `short`
    simple-lazy, simple-eager, offloading      vLLM's SimpleCPUOffloadConnector and OffloadingConnector
    lmcache, lmcache-mp       LMCache in the engine's process, and its server

    idle       new prompts on a device that is never full: the cost of a connector without hits
    stores     the same in one engine, with and without stores: the cost of stores
    ttft       a known prompt of 8,192 or 32,768 tokens and 32 new ones, after the device has evicted it
    together   eight prompts with a common beginning of 32,768 tokens at once: how much was loaded for them, and how
               long they take when the device still has the beginning
    rounds     32 prompts of 8,192 tokens at once, with 128 tokens of output each, three times
    full       new prompts on a device that is full: stores run all the time
    short      the first token of known prompts of 512, 1,024 and 2,048 tokens and 32 new ones: alone, while 8 requests
               decode, and while a prompt of 8,192 tokens is computed; with --device-blocks 2600, --prompts 4 and
               --host-gib 22 five engines fit one GPU and find all of them
    decode     steps of 8 requests that decode, alone and until the first token of a known prompt of 32,768 tokens
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import print_environment
from benchmarks.vllm.shapes import DRAFTER, DRAFTS, OPTIONS, SHAPES
from benchmarks.vllm.vllm_engine import MARK

ROOT = Path(__file__).parents[2]
MAX_MODEL_LEN = 40_960
DEVICE_BLOCKS = {"llama": 5_000, "gemma3": 10_000, "mla": 5_000, "hybrid": 400, "small": 5_000}  # one or two of 32,768
GIB = 1 << 30
PIN_SECONDS_PER_GIB = 0.25  # when several engines pin at the same time
PAUSE_SECONDS = 0.2  # longer than any engine needs to store what one prompt has evicted
SWEEP = 32_768  # tokens of a prompt that is used to evict others
TAIL = 32
DECODING = 8  # requests, in `decode`
DECODING_TOKENS = 256
STEPS = 50
FEW = 4  # prompts at a time, in `idle` and `stores`
SHORT = (512, 1_024, 2_048)
SHORT_BYTES = 2 * GIB  # as much as any of these prompts has
COMPUTED = 8_192
LOADED = "vllm:kv_offload_load_bytes"

OURS = {"kv_connector": "CPUPrefixCacheConnector", "kv_connector_module_path": "connector.vllm"}
NULL = {"kv_connector": "NullConnector", "kv_connector_module_path": "benchmarks.vllm.vllm_null"}
SIMPLE = {"kv_connector": "SimpleCPUOffloadConnector"}
OFFLOADING = {"kv_connector": "OffloadingConnector"}
LMCACHE = {"kv_connector": "LMCacheConnectorV1"}
LMCACHE_MP = {"kv_connector": "LMCacheMPConnector"}
LRU = {"policy": "lru"}  # as in all sittings before `adaptive` was the default
DRAFTER_FOLDER = "drafter"  # in the model's
POOL = "pool"  # that a keeper has; the caller gives its address
ENGINES: dict[str, tuple[dict[str, Any], dict[str, Any]] | None] = {
    "none": None,
    "null": (NULL, LRU | {"offload": "lazy"}),
    "ours-lazy": (OURS, LRU | {"offload": "lazy"}),
    "ours-parked": (OURS, LRU | {"offload": "lazy", "sync_load_bytes": 0}),
    "ours-short": (OURS, LRU | {"offload": "lazy", "sync_load_bytes": SHORT_BYTES}),
    "ours-eager": (OURS, LRU | {"offload": "eager"}),
    "ours-adaptive": (OURS, {"offload": "lazy", "policy": "adaptive"}),
    "ours-coded": (OURS, LRU | {"offload": "lazy", "codec": "exponent"}),
    "ours-adaptive-coded": (OURS, {"offload": "lazy", "policy": "adaptive", "codec": "exponent"}),
    "ours-arc": (OURS, {"offload": "lazy", "policy": "arc"}),
    "ours-eager-adaptive": (OURS, {"offload": "eager", "policy": "adaptive"}),
    "simple-lazy": (SIMPLE, {"lazy_offload": True}),
    "simple-eager": (SIMPLE, {}),
    POOL: (OURS, {"offload": "eager"}),
    "offloading": (OFFLOADING, {}),
    "offloading-short": (OFFLOADING, {"sync_load_budget_bytes": SHORT_BYTES}),
    "offloading-arc": (OFFLOADING, {"eviction_policy": "arc"}),
    "lmcache": (LMCACHE, {}),
    "lmcache-mp": (LMCACHE_MP, {"lmcache.mp.autostart": True}),
    "offloading-adaptive": (
        OFFLOADING,
        {"eviction_policy": "AdaptivePolicy", "cache_policy_module_path": "cpu_prefix_cache_vllm"},
    ),
}


class Engine:
    """A child process, and seeds for new prompts."""

    def __init__(
        self,
        name: str,
        model: Path,
        args: argparse.Namespace,
        script: str = "vllm_engine",
        *arguments: str,
        noted: bool = False,
        **more: Any,
    ) -> None:
        """`arguments` are the script's. `more` are options of our connector, for a caller that starts one by itself.
        With `noted` its steps are (`step_trace.py`)."""
        options: dict[str, Any] = dict(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=True,
            num_gpu_blocks_override=args.device_blocks,
            gpu_memory_utilization=0.1,
            kv_cache_memory_bytes=GIB,  # so that vLLM does not profile memory, beside other engines
            max_num_batched_tokens=8192,
            disable_log_stats=not args.log_stats,
            **OPTIONS.get(args.shape, {}),
        )
        drafter = model / DRAFTER_FOLDER
        if drafter.exists():
            options["speculative_config"] = {"method": "eagle", "model": str(drafter), "num_speculative_tokens": DRAFTS}
        kind = ENGINES[name]
        if kind is not None:
            connector, extra = kind
            if noted:
                name_there = f"Noted{connector['kv_connector']}"
                connector = {"kv_connector": name_there, "kv_connector_module_path": "benchmarks.vllm.step_trace"}
            own = host_options(name, args.host_gib)
            extra = {**own, **extra, **more}
            options["kv_transfer_config"] = {**connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}
        self.name = name
        self._new = count(1_000_000)
        command = [sys.executable, "-m", f"benchmarks.vllm.{script}", json.dumps(options), *arguments]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            start_new_session=True,
            env={**os.environ, **lmcache_environment(args.host_gib), "PYTHONPATH": path},
        )

    def receive(self) -> dict[str, Any]:
        for line in self._process.stdout or ():
            if MARK in line:
                return dict(json.loads(line.partition(MARK)[2]))
            sys.stderr.write(line)  # vLLM's log, with the reason for which an engine ends
        raise SystemExit(f"engine {self.name} has ended with status {self._process.wait()}")

    def ask(
        self, prompts: Sequence[Any], max_tokens: int = 1, together: bool = False, **params: bool
    ) -> dict[str, Any]:
        return self.send({"ask": prompts, "max_tokens": max_tokens, "together": together, "params": params})

    def loaded_bytes(self) -> float:
        """Bytes that our connector has loaded so far.

        The `LLM` class of vLLM 0.26 drops reports of steps without output tokens, so some loads are not counted.
        """
        return sum(value for _, value in self.metrics(LOADED))

    def metrics(self, name: str) -> list[tuple[dict[str, str], float]]:
        """Labels and values. Needs `--log-stats`. A step reports the transfers of the one before."""
        self.ask([self.new(64) for _ in range(3)])
        return list(self.send({"metrics": name})["metrics"])

    def send(self, command: dict[str, Any]) -> dict[str, Any]:
        print(json.dumps(command), file=self._process.stdin, flush=True)
        return self.receive()

    def new(self, length: int) -> list[tuple[int, int]]:
        return [(next(self._new), length)]

    def sweep(self, tokens: int) -> None:
        """Send other prompts with as many tokens as the device holds, so that it evicts all earlier ones."""
        self.ask([self.new(SWEEP) for _ in range(tokens // SWEEP + 1)])
        time.sleep(1)

    def close(self) -> None:
        """Kill the process group, because processes that vLLM has started would run on for a while."""
        with suppress(ProcessLookupError):  # it has ended by itself
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def host_options(name: str, host_gib: int) -> dict[str, Any]:
    """Options of the connector of an engine by which it has so much host memory."""
    if name == "lmcache-mp":
        return {"lmcache.mp.autostart.server_args": f"--l1-size-gb {host_gib} --eviction-policy LRU"}
    return {} if name in (POOL, "lmcache") else {"cpu_bytes_to_use": host_gib * GIB}


def lmcache_environment(host_gib: int) -> dict[str, str]:
    """Settings of LMCache, which takes its host memory from the environment, and hashes prompts by Python's seed."""
    return {"LMCACHE_MAX_LOCAL_CPU_SIZE": str(host_gib), "LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"}


def end_engines_when_terminated() -> None:
    """Have SIGTERM, which `timeout` sends, raise SystemExit: engines have sessions of their own and would run on."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


@contextmanager
def model_folder(kept: Path | None, shape: str, *, drafts: bool = False) -> Iterator[Path]:
    """Folder of the model, and of an EAGLE drafter where it drafts. vLLM keeps compiled code by folder, so one that is
    kept makes the next start faster.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = kept or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
        if drafts:
            (folder / DRAFTER_FOLDER).mkdir(exist_ok=True)
            (folder / DRAFTER_FOLDER / "config.json").write_text(json.dumps(SHAPES[shape] | DRAFTER))
        yield folder


@contextmanager
def engines(names: Sequence[str], model: Path, args: argparse.Namespace) -> Iterator[list[Engine]]:
    begin = time.perf_counter()
    with ExitStack() as stack:
        started: list[Engine] = []
        for name in names:
            started.append(Engine(name, model, args))
            stack.callback(started[-1].close)
            if len(started) == 1:
                started[0].receive()  # its compiled kernels are cached for the others
        for engine in started[1:]:
            engine.receive()
        for engine in started:
            engine.ask([engine.new(4096)])
        say(f"{', '.join(names)}: started in {time.perf_counter() - begin:.0f} s")
        time.sleep(PIN_SECONDS_PER_GIB * args.host_gib * len([name for name in names if ENGINES[name] is not None]))
        yield started


def say(text: str) -> None:
    print(text, flush=True)


def all_ms(seconds: Sequence[float]) -> list[float]:
    return [round(each * 1e3, 1) for each in seconds]


def ms(seconds: Sequence[float]) -> float:
    return round(median(seconds) * 1e3, 1)


def ttft(running: Sequence[Engine], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The engines take turns, prompt by prompt, with a pause for copies that are still in flight."""
    for length in (8_192, 32_768):
        prompts = {engine.name: [engine.new(length) for _ in range(args.prompts)] for engine in running}
        cold, on_device = {}, {}
        for engine in running:
            cold[engine.name] = engine.ask(prompts[engine.name])["seconds"]
            on_device[engine.name] = engine.ask([prompts[engine.name][-1] + engine.new(TAIL) for _ in range(3)])
            engine.sweep(args.device_blocks * 16)
        warm: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in running}
        for at in range(args.prompts):
            for engine in running:
                warm[engine.name].append(engine.ask([prompts[engine.name][at] + engine.new(TAIL)]))
                time.sleep(PAUSE_SECONDS)
        for name, answers in warm.items():
            seconds = [answer["seconds"][0] for answer in answers]
            yield dict(
                engine=name,
                tokens=length,
                computed_ms=ms(cold[name]),
                on_device_ms=ms(on_device[name]["seconds"]),
                from_host_ms=ms(seconds),
                all_ms=all_ms(seconds),
                all_on_device_ms=all_ms(on_device[name]["seconds"]),
                found=[answer["cached"][0] for answer in answers],
            )


def together(running: Sequence[Engine], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    length = 32_768
    for engine in [engine for engine in running if engine.name.startswith("ours")]:
        alone = []
        eight = []
        on_device = []
        loaded_alone = []
        loaded = []
        for _ in range(args.prompts):
            prompts = [engine.new(length) for _ in range(2)]
            engine.ask(prompts)
            engine.sweep(args.device_blocks * 16)
            before = engine.loaded_bytes()
            alone += engine.ask([prompts[0] + engine.new(TAIL)])["seconds"]
            between = engine.loaded_bytes()
            loaded_alone.append(between - before)
            eight += engine.ask([prompts[1] + engine.new(TAIL) for _ in range(8)], together=True)["seconds"]
            loaded.append(engine.loaded_bytes() - between)
            on_device += engine.ask([prompts[1] + engine.new(TAIL) for _ in range(8)], together=True)["seconds"]
        yield dict(
            engine=engine.name,
            tokens=length,
            alone_ms=ms(alone),
            slowest_of_eight_ms=ms(eight),
            slowest_on_device_ms=ms(on_device),
            copies=[round(each / max(1, *loaded_alone), 3) for each in loaded],
            all_ms=[all_ms(times) for times in (alone, eight, on_device)],
        )


def rounds(running: Sequence[Engine], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    prompts = {engine.name: [engine.new(8_192) for _ in range(32)] for engine in running}
    taken: dict[str, list[float]] = {engine.name: [] for engine in running}
    for _ in range(3):
        for engine in running:
            answer = engine.ask(prompts[engine.name], max_tokens=128, together=True)
            taken[engine.name] += [round(answer["seconds"][0], 2)]
            time.sleep(1)
    for name, seconds in taken.items():
        yield dict(engine=name, round_seconds=seconds)


def cold(engine: Engine, num_prompts: int, **params: bool) -> dict[str, list[float]]:
    """Send one new prompt, then several at once. Returns the seconds of both."""
    one = engine.ask([engine.new(4_096)], **params)
    many = engine.ask([engine.new(1_024) for _ in range(num_prompts)], max_tokens=64, together=True, **params)
    return {"ttft": one["seconds"], "run": many["seconds"]}


def medians(each: Sequence[dict[str, list[float]]]) -> dict[str, Any]:
    runs = {name: [seconds for one in each for seconds in one[name]] for name in ("ttft", "run")}
    return dict(ttft_ms=ms(runs["ttft"]), run_ms=ms(runs["run"]), runs=runs)


def alternating(running: Sequence[Engine], args: argparse.Namespace, num_prompts: int) -> Iterator[dict[str, Any]]:
    taken = [[cold(engine, num_prompts) for engine in running] for _ in range(args.repeats)]
    for engine, each in zip(running, zip(*taken, strict=True), strict=True):
        yield dict(engine=engine.name, **medians(each))


def idle(running: Sequence[Engine], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """FEW prompts of 1,024 tokens at a time. They fill the device after a while, so this part comes first."""
    yield from alternating(running, args, FEW)


def stores(running: Sequence[Engine], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """`idle` in one engine, with prompts that opt out of stores and prompts that do not. Lazy would store neither."""
    for engine in [engine for engine in running if engine.name == "ours-eager"]:
        taken: dict[bool, list[dict[str, list[float]]]] = {False: [], True: []}
        for stored in [False, True] * args.repeats:
            taken[stored].append(cold(engine, FEW, cpu_prefix_cache_store=stored))
        for stored, each in taken.items():
            yield dict(engine=engine.name, stored=stored, **medians(each))


def full(running: Sequence[Engine], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for engine in running:
        engine.sweep(args.device_blocks * 16)
    yield from alternating(running, args, 64)


def decode(running: Sequence[Engine], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    prompts = {engine.name: [engine.new(32_768) for _ in range(args.prompts)] for engine in running}
    for engine in running:
        engine.ask(prompts[engine.name])
        engine.sweep(args.device_blocks * 16)
    answers: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in running}
    for at in range(args.prompts):
        for engine in running:
            beside = prompts[engine.name][at] + engine.new(TAIL)
            decoding = [engine.new(DECODING_TOKENS) for _ in range(DECODING)]
            answers[engine.name].append(engine.send({"beside": beside, "decoding": decoding, "steps": STEPS}))
            time.sleep(PAUSE_SECONDS)
    for name, each in answers.items():
        steps = [answer["beside"][:-1] for answer in each]  # the last one computes the prompt, too
        yield dict(
            engine=name,
            first_token_ms=ms([answer["seconds"] for answer in each]),
            step_alone_ms=round(1e3 * median(seconds for answer in each for seconds in answer["alone"]), 2),
            step_beside_ms=round(1e3 * median(seconds for taken in steps for seconds in taken), 2),
            steps_beside=[len(taken) for taken in steps],
            found=[answer["cached"] for answer in each],
        )


def short(running: Sequence[Engine], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The engines take turns, round by round. The host has what was sent before each situation, and the device not."""
    for beside in ("nothing", "decoding", "computing"):
        prompts = {
            engine.name: [[engine.new(each) for each in SHORT] for _ in range(args.prompts)] for engine in running
        }
        for engine in running:
            engine.ask([prompt for each in prompts[engine.name] for prompt in each])
            engine.ask([engine.new(COMPUTED) for _ in range(args.device_blocks * 16 // COMPUTED + 1)])
        time.sleep(1)
        answers: dict[str, list[dict[str, Any]]] = {engine.name: [] for engine in running}
        for at in range(args.prompts):
            for engine in running:
                known = [prompt + engine.new(TAIL) for prompt in prompts[engine.name][at]]
                decoding = [engine.new(DECODING_TOKENS) for _ in range(DECODING if beside == "decoding" else 0)]
                computing = [engine.new(COMPUTED) for _ in SHORT if beside == "computing"]
                command = {"short": known, "decoding": decoding, "computing": computing, "pause": PAUSE_SECONDS / 2}
                answers[engine.name].append(engine.send(command))
        for name, each in answers.items():
            for at, length in enumerate(SHORT):
                seconds = [answer["seconds"][at] for answer in each]
                yield dict(
                    engine=name,
                    beside=beside,
                    tokens=length,
                    first_token_ms=ms(seconds),
                    all_ms=all_ms(seconds),
                    longest_step_ms=ms([answer["longest"][at] for answer in each]),
                    found=[answer["cached"][at] for answer in each],
                )


PARTS = {part.__name__: part for part in (idle, stores, ttft, together, rounds, full, decode, short)}  # in this order


def main() -> None:
    end_engines_when_terminated()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="ttft,rounds")
    parser.add_argument("--shape", choices=SHAPES, default="llama")
    parser.add_argument(
        "--waves", default="none,ours-lazy,offloading;none,ours-eager,simple-lazy;none,null,simple-eager"
    )
    parser.add_argument("--device-blocks", type=int, help="default: by the shape")
    parser.add_argument("--host-gib", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--log-stats", action="store_true", help="statistics of vLLM, which `together` needs")
    parser.add_argument("--model", type=Path, help="a folder for the model's configuration: what vLLM compiles is kept")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.device_blocks = args.device_blocks or DEVICE_BLOCKS[args.shape]
    print_environment(["vllm", "torch", "triton"])
    asked, results = args.parts.split(","), []
    with model_folder(args.model, args.shape) as model:
        for number, wave in enumerate(args.waves.split(";")):
            with engines(wave.split(","), model, args) as running:
                for part in [part for part in PARTS if part in asked]:
                    for result in PARTS[part](running, args):
                        say(f"{part:8} {json.dumps(result)}")
                        results.append({"part": part, "shape": args.shape, "wave": number, **result})
                        if args.json:
                            args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
