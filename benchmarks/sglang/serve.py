"""Serves a trace with SGLang engines in turn, each alone on its GPU, and prints a table of them.

    python -m benchmarks.sglang.serve TRACE --engines "none,hicache@40,ours@40" --json FILE

Load, figures and table are those of `benchmarks/vllm/serve.py`. An engine is `none`, which has the prefix cache of its
device alone, or a name and GiB of host memory:

    hicache, hicache-back    SGLang's HiCache, which writes through, or back
    ours, ours-adaptive      HostLinker, by its policy

Weights are random, and only times are measured. Attention is Triton's and sampling PyTorch's for all engines, so that
FlashInfer and flash attention need not be there; `--options` has other options of `sglang.Engine`, in JSON.
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import environment, print_environment
from benchmarks.vllm.serve import WARM_UP, brief, job, written
from benchmarks.vllm.serve_loop import Ask, Tokens
from benchmarks.vllm.serve_report import served_row, served_table
from benchmarks.vllm.shapes import SHAPES
from benchmarks.vllm.vllm_reload import GIB, MAX_MODEL_LEN, PIN_SECONDS_PER_GIB, model_folder, say

PACKAGES = ["cpu-prefix-cache", "sglang", "sglang-kernel", "torch", "triton"]
Options = dict[str, Any]


def hicache(policy: str, gib: int) -> Options:
    """HiCache counts in GB."""
    return dict(enable_hierarchical_cache=True, hicache_size=gib * GIB / 1e9, hicache_write_policy=policy)


def ours(policy: str, gib: int) -> Options:
    extra = {"host_bytes": gib * GIB, "policy": policy}
    linker = {"linker": "HostLinker", "linker_module_path": "connector.sglang", "linker_extra_config": extra}
    given = {"backend": "dynamic", "config": linker}
    options = {f"unified_cache_external_linker_{name}": value for name, value in given.items()}
    return {"enable_unified_cache_external_linker": True, **options}


HOSTS = {
    "hicache": partial(hicache, "write_through"),
    "hicache-back": partial(hicache, "write_back"),
    "ours": partial(ours, "lru"),
    "ours-adaptive": partial(ours, "adaptive"),
}


def parsed(cell: str) -> tuple[int, Options]:
    """GiB of host memory of `NAME@GIB`, and SGLang's options for it. Raises ValueError for one that cannot start."""
    name, _, gib = cell.partition("@")
    if cell == "none":
        return 0, {}
    if name not in HOSTS:
        raise ValueError(f"there is no engine {cell!r}: give none, or one of {', '.join(HOSTS)}")
    if not gib.isdecimal() or not int(gib):
        raise ValueError(f"{cell}: give GiB of host memory behind the name, such as {name}@40")
    return int(gib), HOSTS[name](int(gib))


def asking(engine: Any) -> Ask:
    async def ask(prompt: Sequence[int], answer: int) -> AsyncIterator[Tokens]:
        sampling, before = {"temperature": 0, "max_new_tokens": answer, "ignore_eos": True}, 0
        async for output in await engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True):
            figures = output["meta_info"]
            yield Tokens(figures["completion_tokens"] - before, figures["cached_tokens"])
            before = figures["completion_tokens"]

    return ask


def measured(cell: str, model: Path, send: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """Figures of an engine, in a process of its own: with that ends all that the engine has started."""
    import sglang
    import torch

    from benchmarks.vllm.serve_engine import served

    gib, own = parsed(cell)
    options: Options = dict(
        model_path=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        context_length=MAX_MODEL_LEN,
        page_size=args.page,
        max_total_tokens=args.device_tokens,
        chunked_prefill_size=8192,
        attention_backend="triton",
        sampling_backend="pytorch",
        grammar_backend="none",
        log_level="warning",
    )
    begin = time.perf_counter()
    engine = sglang.Engine(**{**options, **own, **args.options})
    start, device = time.perf_counter() - begin, torch.cuda.get_device_name()
    say(f"{cell}: started in {start:.0f} s on {device}")
    warm_up = {"users": [[([(-1 - at, size)], 8)] * 2 for at, size in enumerate(WARM_UP * 4)]}
    engine.loop.run_until_complete(served(asking(engine), warm_up))
    time.sleep(PIN_SECONDS_PER_GIB * gib)
    reply = engine.loop.run_until_complete(served(asking(engine), send))
    engine.shutdown()
    row = served_row(reply, gpus=1, price=None)
    return dict(engine=cell, device=device, start_s=round(start, 1), served=row, requests=brief(reply["answered"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--engines", default="none,hicache@40,ours@40")
    parser.add_argument("--rate", type=float, help="requests a second in an open loop, in place of users")
    for name, value in (("users", 24), ("requests", 400), ("block-tokens", 64), ("max-answer", 48), ("page", 64)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device-tokens", type=int, default=131_072)
    parser.add_argument("--shape", choices=SHAPES, default="llama")
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cells = args.engines.split(",")
    try:
        for cell in cells:
            parsed(cell)
    except ValueError as error:
        parser.error(str(error))
    print_environment(PACKAGES)
    send, load = job(args)
    command = " ".join(["benchmarks/sglang/serve.py", *sys.argv[1:]])
    kept: dict[str, Any] = {"command": command, "environment": environment(PACKAGES), "load": load, "cells": []}
    say(json.dumps(load))
    with model_folder(None, args.shape) as model:
        for cell in cells:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                kept["cells"].append(process.submit(measured, cell, model, send, args).result())
            say(f"{cell}: {json.dumps(kept['cells'][-1]['served'])}")
            if args.json:
                args.json.write_text(written(kept))
    say(served_table([(cell["engine"], cell["served"]) for cell in kept["cells"]]))


if __name__ == "__main__":
    main()
