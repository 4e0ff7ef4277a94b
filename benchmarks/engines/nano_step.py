"""Cost of the host cache for a step of nano-vllm: the engine alone, with `examples/nano_vllm`, and as it was before.

    python -m benchmarks.engines.nano_step ENGINES [--before CHECKOUT] [--block-tokens 16] [--runs 5]

ENGINES is a folder with nano-vllm, such as the one into which `make engines` fetches it. Its scheduler and block
manager are real. There is no model, and copies do nothing, so a step is what the engine and the cache decide. 64
sequences at a time go on from 200 documents, of which the device (65,536 tokens) holds a third, and the host (four
times that) all.

Times are processor time. The kinds take turns, each run in a process of its own; medians over the runs. CHECKOUT is
this project at the commit before HostCache (c216b7c), with which the same patched engine runs with the glue in
`nano_before/`.
"""

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

from benchmarks.common import percentile, print_environment

ROOT = Path(__file__).parents[2]
ALONE = "alone"
MODES = ("lazy", "eager")
CHILD = "--child"
DEVICE_TOKENS = 65_536
SEQUENCES = 64
STEP_TOKENS = 8_192
DOCUMENTS, REQUESTS = 200, 800


def prompts():
    """Each with the number of tokens of its answer."""
    draw = random.Random(7)
    documents = [[draw.randrange(50_000) for _ in range(draw.randrange(400, 1_600))] for _ in range(DOCUMENTS)]
    for _ in range(REQUESTS):
        document = draw.choice(documents)
        question = [draw.randrange(50_000) for _ in range(draw.randrange(16, 64))]
        yield document[: draw.randrange(100, len(document))] + question, draw.randrange(128, 512)


def engine(block_tokens: int):
    """nano-vllm without a model: each sequence gets tokens of its own."""
    import nano_on_cpu as nano
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.engine.scheduler import Scheduler

    config = type("Config", (), {})()
    config.max_num_seqs = SEQUENCES
    config.max_num_batched_tokens = STEP_TOKENS
    config.eos = -1
    config.kvcache_block_size, config.num_kvcache_blocks = block_tokens, DEVICE_TOKENS // block_tokens
    nano.Sequence.block_size = block_tokens
    llm = LLMEngine.__new__(LLMEngine)
    llm.scheduler = Scheduler(config)
    llm.model_runner = type("Runner", (), {"call": lambda self, name, seqs, is_prefill: [len(each) for each in seqs]})()
    for prompt, max_tokens in prompts():
        llm.scheduler.add(nano.Sequence(prompt, nano.SamplingParams(max_tokens=max_tokens, ignore_eos=True)))
    return llm


class CopiesNothing:
    """A copier whose copies, and the events that stand for their ends, have passed at once."""

    knows_pieces = False
    reads = property(lambda self: self)

    def here(self):
        return self

    def awaiting_stores(self):
        return nullcontext()

    def hold_compute(self, event):
        pass

    def submit(self, direction, copies, after):
        return self

    def passed(self):
        return True

    def until_passed(self):
        pass

    def unfit(self):
        return ()


def with_host(llm, block_tokens: int, offload: str) -> None:
    import torch
    from host import Host

    try:
        from cpu_prefix_cache import HostOptions
    except ImportError:  # the older checkout has none, and its glue reads two attributes
        from types import SimpleNamespace as HostOptions

    Host(
        llm.scheduler,
        torch.zeros(2, 1, DEVICE_TOKENS // block_tokens, block_tokens, 1, 8),
        host_bytes=4 * DEVICE_TOKENS * 2 * 8 * 4,
        max_model_len=8_192,
        max_step_tokens=STEP_TOKENS,
        options=HostOptions(offload=offload, wrap_copier=lambda copier, tensors: CopiesNothing()),
    )


def child(offload: str, block_tokens: int) -> None:
    """Serve all prompts, and print what steps took."""
    llm = engine(block_tokens)
    if offload != ALONE:
        with_host(llm, block_tokens, offload)
    seconds, clock = [], time.thread_time
    while not llm.is_finished():
        begin = clock()
        llm.step()
        seconds.append(clock() - begin)
    row = {"mean": statistics.fmean(seconds), "p50": percentile(seconds, 0.5), "p99": percentile(seconds, 0.99)}
    print(json.dumps({name: 1e6 * value for name, value in row.items()} | {"steps": len(seconds)}))


def patched(engines: Path, folder: Path, glue: Path) -> Path:
    """A copy of nano-vllm with our patch, and `glue` as its host.py."""
    tree = folder / glue.parent.name
    shutil.copytree(engines / "nano-vllm", tree)
    subprocess.run(["chmod", "-R", "u+w", str(tree)], check=True)
    patch = ROOT / "examples" / "nano_vllm" / "nano_vllm.patch"
    subprocess.run(["patch", "-s", "-p1", "-i", str(patch)], cwd=tree, check=True)
    shutil.copy(glue, tree / "host.py")
    return tree


def served(tree: Path, checkout: Path, offload: str, block_tokens: int) -> dict[str, float]:
    paths = os.pathsep.join(map(str, (checkout / "src", checkout, tree, ROOT, ROOT / "tests" / "engines")))
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, CHILD, offload, str(block_tokens)]
    result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(result.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engines", type=Path)
    parser.add_argument("--before", type=Path, help="a checkout of this project, as it was before HostCache")
    parser.add_argument("--block-tokens", type=int, default=16)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    print_environment(["torch", "xxhash"])
    engines = options.engines.resolve()
    with tempfile.TemporaryDirectory() as folder:
        kinds = {ALONE: (engines / "nano-vllm", ROOT, ALONE)}
        ours = patched(engines, Path(folder), ROOT / "examples" / "nano_vllm" / "host.py")
        kinds |= {f"ours, {mode}": (ours, ROOT, mode) for mode in MODES}
        if options.before is not None:
            before = patched(engines, Path(folder), Path(__file__).parent / "nano_before" / "host.py")
            kinds |= {f"before, {mode}": (before, options.before.resolve(), mode) for mode in MODES}
        rows = {name: [] for name in kinds}
        for _ in range(options.runs):
            for name, (tree, checkout, mode) in kinds.items():
                rows[name].append(served(tree, checkout, mode, options.block_tokens))
    medians = {name: {at: statistics.median(row[at] for row in runs) for at in runs[0]} for name, runs in rows.items()}
    print(f"blocks of {options.block_tokens}; us a step, medians of {options.runs} runs in turn")
    print(f"{'':14}{'steps':>8}{'mean':>8}{'more':>8}{'p50':>8}{'p99':>8}{'p99 / alone':>14}")
    for name, row in medians.items():
        more, tail = row["mean"] - medians[ALONE]["mean"], row["p99"] / medians[ALONE]["p99"]
        print(
            f"{name:14}{row['steps']:8.0f}{row['mean']:8.0f}{more:8.0f}{row['p50']:8.0f}{row['p99']:8.0f}{tail:14.2f}"
        )


if __name__ == "__main__":
    if sys.argv[1:2] == [CHILD]:
        child(sys.argv[2], int(sys.argv[3]))
    else:
        main()
