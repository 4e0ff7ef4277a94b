"""A vLLM engine in one process with a tier that reads: tiers_busy.py starts this in the environment of vLLM.

    python benchmarks/tiers_busy_engine.py FOLDER WINDOWS

Prints one line of JSON: the time of each step, in windows without and with reads, in turn.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import vllm
from vllm import LLM, SamplingParams

from cpu_prefix_cache.bench.file_rates import FileUnderTest

MARK = "busy: "
MIB = 1 << 20
FILE_BYTES, SLOT_BYTES = 1024 * MIB, 2 * MIB
REQUESTS, PROMPT_TOKENS, VOCABULARY = 8, 64, 8_000
STEPS = 25  # of a window
MODEL = {
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
    """Reads all slots again and again while it is told to."""

    def __init__(self, file: FileUnderTest) -> None:
        super().__init__(daemon=True)
        self._file = file
        self._on = threading.Event()
        self._idle = threading.Event()
        self.copier = file.copier
        self.is_over = False

    def run(self) -> None:
        while not self.is_over:
            self._idle.set()
            self._on.wait()
            self._idle.clear()
            while self._on.is_set() and not self.is_over:
                self._file.read()

    def begin(self) -> tuple[int, float]:
        self._on.set()
        time.sleep(0.2)
        return self._copier.statistics().bytes_read, time.perf_counter()

    def end(self, begun: tuple[int, float]) -> float:
        """GB/s since `begin` has returned."""
        rate = (self._copier.statistics().bytes_read - begun[0]) / (time.perf_counter() - begun[1]) / 1e9
        self._on.clear()
        time.sleep(0.01)
        self._idle.wait()
        return rate


def main() -> None:
    folder, windows = Path(sys.argv[1]), int(sys.argv[2])
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    llm = LLM(
        str(folder / "model"),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=8192,
        kv_cache_memory_bytes=1 << 29,
        enable_prefix_caching=False,
    )
    (folder / "tier").mkdir()
    file = FileUnderTest(str(folder / "tier"), FILE_BYTES, SLOT_BYTES)
    file.write()
    reader = Reader(file)
    reader.start()
    print(MARK + json.dumps(measured(llm.llm_engine, reader, windows)), flush=True)
    os._exit(0)


def measured(engine: Any, reader: Reader, windows: int) -> dict[str, Any]:
    """Two windows more than are counted, which warm everything."""
    sampling = SamplingParams(temperature=0, max_tokens=8_000, ignore_eos=True, detokenize=False)
    for number in range(REQUESTS):
        prompt = [(number + at) * 31 % VOCABULARY for at in range(PROMPT_TOKENS)]
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    steps(engine, 2 * STEPS)
    found: dict[str, list[Any]] = {"without": [], "with": []}
    rates = []
    for number in range(windows):
        for which in ("without", "with") if number % 2 else ("with", "without"):
            if which == "without":
                found[which].append(steps(engine, STEPS))
                continue
            begun = reader.begin()
            found[which].append(steps(engine, STEPS))
            rates.append(reader.end(begun))
    result: dict[str, Any] = {"vllm": vllm.__version__, "requests": REQUESTS, "load": os.getloadavg()[0]}
    for which, all in found.items():
        result[f"{which}_ms"] = [wall for window in all for wall, _ in window]
        result[f"cpu_{which}_ms"] = [cpu for window in all for _, cpu in window]
        result[f"windows_{which}"] = [median(wall for wall, _ in window) for window in all]
    return {**result, "gb_per_s": median(rates), "all_gb_per_s": rates}


def steps(engine: Any, count: int) -> list[tuple[float, float]]:
    """Of each step the time, and the processor time of this thread, in ms."""
    times = []
    for _ in range(count):
        began, cpu = time.perf_counter(), time.thread_time()
        engine.step()
        times.append((1e3 * (time.perf_counter() - began), 1e3 * (time.thread_time() - cpu)))
    return times


if __name__ == "__main__":
    main()
