"""An engine in one process with a tier that reads: tiers_busy.py starts this.

    python -m benchmarks.tiers.tiers_busy_engine FOLDER vllm ROUNDS   the engine: prints one line of JSON
    python -m benchmarks.tiers.tiers_busy_engine FOLDER               reads only, between "on" and "off" on stdin

`vllm` is vLLM on a CPU; `torch` the same layers without an engine, where vLLM is not installed. All of it runs on two
cores, the engine in one thread.

A round is three windows of steps: without reads, with reads in this process, and with the same reads in another
process, which shares the machine with the engine but not Python's lock. On a machine that others use, too, a step also
waits for them: rounds in which they have used more than CALM of a core are not counted, and more are made instead.
"""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from cpu_prefix_cache.tools.bench.file_rates import FileUnderTest

MARK = "busy: "
MIB = 1 << 20
FILE_BYTES, SLOT_BYTES = 1024 * MIB, 2 * MIB
REQUESTS = 8
PROMPT_TOKENS = 64
VOCABULARY = 8_000
CONTEXT = 512  # tokens of a request, in `torch`
CORES = 2
STEPS = 20  # of a window
CALM = 0.2  # of a core
MOST_SECONDS = 240
WITHOUT = "without"
HERE = "with"
ELSEWHERE = "elsewhere"
MODEL: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
}


class Reader(threading.Thread):
    """Reads all slots of a file again and again while it is on."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        folder.mkdir()
        self._file = FileUnderTest(str(folder), FILE_BYTES, SLOT_BYTES)
        self._file.write()
        self._is_on, self._is_idle = threading.Event(), threading.Event()
        self._begun = 0, 0.0
        self.start()

    def run(self) -> None:
        while True:
            self._is_idle.set()
            self._is_on.wait()
            self._is_idle.clear()
            while self._is_on.is_set():
                self._file.read()

    def on(self) -> None:
        self._is_on.set()
        time.sleep(0.2)
        self._begun = self._read_so_far, time.perf_counter()

    def off(self) -> float:
        """GB/s since `on`."""
        rate = (self._read_so_far - self._begun[0]) / (time.perf_counter() - self._begun[1]) / 1e9
        self._is_on.clear()
        time.sleep(0.01)
        self._is_idle.wait()
        return rate

    @property
    def _read_so_far(self) -> int:
        return self._file.copier.statistics().bytes_read


class OtherProcess:
    """A Reader in a process of its own."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, __file__, str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def on(self) -> None:
        print("on", file=self.process.stdin, flush=True)
        self._answer()

    def off(self) -> float:
        print("off", file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> float:
        assert self.process.stdout is not None
        return float(self.process.stdout.readline())


class Nobody:
    def on(self) -> None:
        pass

    def off(self) -> float:
        return 0.0


def main() -> None:
    folder = Path(sys.argv[1])
    if len(sys.argv) == 2:
        serve(Reader(folder))
    else:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
        run(folder, sys.argv[2], int(sys.argv[3]))


def serve(reader: Reader) -> None:
    print(0.0, flush=True)
    for line in sys.stdin:
        print(reader.off() if line.strip() == "off" else reader.on() or 0.0, flush=True)
    os._exit(0)


def run(folder: Path, engine: str, rounds: int) -> None:
    version, step = ENGINES[engine](folder)
    other = OtherProcess(folder / "elsewhere")
    readers = {WITHOUT: Nobody(), HERE: Reader(folder / "here"), ELSEWHERE: other}
    for _ in range(2 * STEPS):
        step()
    result = {"engine": version, "requests": REQUESTS, **measured(step, readers, rounds)}
    print(MARK + json.dumps(result), flush=True)
    other.process.kill()
    os._exit(0)


def vllm_engine(folder: Path) -> tuple[str, Callable[[], Any]]:
    import vllm

    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    llm = vllm.LLM(
        str(folder / "model"),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=8192,
        kv_cache_memory_bytes=1 << 29,
        enable_prefix_caching=False,
    )
    return f"vLLM {vllm.__version__}", busy_step(llm.llm_engine)


def torch_layers(folder: Path) -> tuple[str, Callable[[], Any]]:
    """The matrices of the model by which a decode step multiplies, and attention over CONTEXT tokens."""
    import torch
    from torch.nn.functional import linear, scaled_dot_product_attention, silu

    torch.set_num_threads(1)
    hidden = MODEL["hidden_size"]
    inner = MODEL["intermediate_size"]
    heads = MODEL["num_attention_heads"]
    width = hidden // heads
    layers = [
        [torch.randn(*shape) / 50 for shape in ((3 * hidden, hidden), (hidden, hidden), (2 * inner, hidden))]
        + [torch.randn(hidden, inner) / 50, torch.randn(2, REQUESTS, heads, CONTEXT, width)]
        for _ in range(MODEL["num_hidden_layers"])
    ]
    head = torch.randn(VOCABULARY, hidden)

    @torch.inference_mode()
    def step() -> Any:
        state = torch.randn(REQUESTS, hidden)
        for qkv, out, gate_up, down, (keys, values) in layers:
            query, key, value = linear(state, qkv).view(REQUESTS, 3, heads, 1, width).unbind(1)
            keys[:, :, -1:], values[:, :, -1:] = key, value
            state = state + linear(scaled_dot_product_attention(query, keys, values).reshape(REQUESTS, hidden), out)
            gate, up = linear(state, gate_up).chunk(2, dim=-1)
            state = state + linear(silu(gate) * up, down)
        return linear(state, head).argmax(dim=-1).tolist()

    return f"torch {torch.__version__}", step


def busy_step(engine: Any) -> Callable[[], Any]:
    """Steps that decode, of requests which do not end meanwhile: each begins again when it has."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=512, ignore_eos=True, detokenize=False)
    added = 0

    def step() -> None:
        nonlocal added
        while engine.get_num_unfinished_requests() < REQUESTS:
            prompt = [(added + at) * 31 % VOCABULARY for at in range(PROMPT_TOKENS)]
            engine.add_request(str(added), {"prompt_token_ids": prompt}, sampling)
            added += 1
        engine.step()

    return step


def measured(step: Callable[[], Any], readers: dict[str, Any], rounds: int) -> dict[str, Any]:
    all_rounds: list[dict[str, dict[str, float]]] = []
    began = time.monotonic()
    while time.monotonic() < began + MOST_SECONDS and len(calm(all_rounds)) < rounds:
        at = len(all_rounds) % len(readers)
        names = [*list(readers)[at:], *list(readers)[:at]]
        all_rounds.append({name: window(step, readers[name]) for name in names})
    return {"load": os.getloadavg()[0], "all": all_rounds, "calm": calm(all_rounds)}


def calm(all_rounds: list[dict[str, dict[str, float]]]) -> list[dict[str, dict[str, float]]]:
    return [each for each in all_rounds if max(each[name]["others"] for name in (WITHOUT, HERE)) <= CALM]


def window(step: Callable[[], Any], reader: Any) -> dict[str, float]:
    """The medians of some steps, in ms, and how many cores others have used meanwhile."""
    reader.on()
    began = time.perf_counter()
    used = used_by_processes()
    own = own_seconds()
    times = [timed(step) for _ in range(STEPS)]
    others = (used_by_processes() - used - (own_seconds() - own)) / (time.perf_counter() - began)
    return {
        "step_ms": median(wall for wall, _ in times),
        "cpu_ms": median(cpu for _, cpu in times),
        "others": others,
        "gb_per_s": reader.off(),
    }


def timed(step: Callable[[], Any]) -> tuple[float, float]:
    began, cpu = time.perf_counter(), time.thread_time()
    step()
    return 1e3 * (time.perf_counter() - began), 1e3 * (time.thread_time() - cpu)


def used_by_processes() -> float:
    """Processor seconds of all processes since the start of the machine, without interrupts."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split(maxsplit=4)[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    return time.process_time()


ENGINES = {"vllm": vllm_engine, "torch": torch_layers}


if __name__ == "__main__":
    main()
