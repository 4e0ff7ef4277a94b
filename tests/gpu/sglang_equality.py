"""Equality of an SGLang engine's answers from loaded KV with its answers from KV that it kept, on one GPU.

    PYTHONPATH=src:. python -m tests.gpu.sglang_equality [--models llama,whole,mla] [--options '{"page_size": 32}']

Each model is run by engines in processes of their own:

    kept       no linker, and a device that keeps everything
    host       HostLinker, and a device of a few prompts: they have left it when they come again
    damaged    the control: one block is overwritten after each load

They get eight prompts, then others, then the eight again with 24 more tokens. The logprobs of `host` must be those of
`kept`, and those of `damaged` must differ. The status is the number of engines for which that is not so.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.gpu.vllm_equality import (
    ANSWER,
    MARK,
    MODELS,
    NUM_PROMPTS,
    ROOM,
    TAIL,
    TOLERANCE,
    answers_of,
    difference,
    save,
)
from tests.vllm.models import some_tokens

KEPT, HOST, DAMAGED = VARIANTS = ("kept", "host", "damaged")
OTHERS = 12
PAGES = {"whole": 64}  # tokens; of parts of 128 KiB, which cross directly
USUAL_PAGE = 16
DEVICE_TOKENS = {KEPT: 1 << 15, HOST: 2560, DAMAGED: 2560}
PIN_SECONDS = 3


# In the process of one engine


def answers(name: str, folder: str, variant: str, options: dict[str, Any]) -> dict[str, Any]:
    import sglang

    os.environ["DAMAGED"] = "0"  # the group, of which each model here has one
    *_, length, _ = MODELS[name]
    if variant != KEPT:
        module = "tests.gpu.sglang_damaging" if variant == DAMAGED else "connector.sglang"
        extra = dict(host_bytes="2GiB")
        linker = dict(linker="HostLinker", linker_module_path=module, linker_extra_config=extra)
        options = options | dict(
            enable_unified_cache_external_linker=True,
            unified_cache_external_linker_backend="dynamic",
            unified_cache_external_linker_config=linker,
        )
    given = dict(
        model_path=folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        context_length=length + ROOM,
        page_size=PAGES.get(name, USUAL_PAGE),
        max_total_tokens=DEVICE_TOKENS[variant],
        mem_fraction_static=0.3,
        chunked_prefill_size=1024,
        max_running_requests=8,
        disable_cuda_graph=True,
        attention_backend="triton",
        sampling_backend="pytorch",
        grammar_backend="none",
        log_level="warning",
    )
    engine = sglang.Engine(**given | options)
    prompts = [some_tokens(length, ("prompt", at)) for at in range(NUM_PROMPTS)]
    answer(engine, some_tokens(TAIL, "begin"))
    time.sleep(PIN_SECONDS)
    first = [answer(engine, prompt) for prompt in prompts]
    for at in range(OTHERS):
        answer(engine, some_tokens(length, ("other", at)))
    second = [answer(engine, prompt + some_tokens(TAIL, ("tail", at))) for at, prompt in enumerate(prompts)]
    engine.shutdown()
    return dict(first=first, second=second)


def answer(engine: Any, prompt: Sequence[int]) -> dict[str, Any]:
    """The logprobs of the likeliest tokens, token by token of the answer, and how many of the prompt were hit."""
    sampling = dict(temperature=0, max_new_tokens=ANSWER, ignore_eos=True)
    output = engine.generate(input_ids=list(prompt), sampling_params=sampling, return_logprob=True, top_logprobs_num=5)
    figures = output["meta_info"]
    logprobs = [{str(token): value for value, token, _ in at} for at in figures["output_top_logprobs"]]
    return dict(cached=figures["cached_tokens"], logprobs=logprobs)


# In the process that compares them


def run(name: str, folder: Path, variant: str, options: str) -> dict[str, Any]:
    return answers_of("tests.gpu.sglang_equality", name, folder, variant, "--options", options)


def is_as_it_must_be(name: str, variant: str, kept: dict[str, Any], told: dict[str, Any]) -> bool:
    before, after = (
        [difference(a, b) for a, b in zip(kept[which], told[which], strict=True)] for which in ("first", "second")
    )
    hits = [each["cached"] for each in told["second"]]
    right = max(before) <= TOLERANCE and hits == [each["cached"] for each in kept["second"]] and min(hits) > 0
    if variant == DAMAGED:
        right = right and sum(each > TOLERANCE for each in after) >= NUM_PROMPTS - 1
    else:
        right = right and max(after) <= TOLERANCE
    cold, hot = (", ".join(f"{each:.2g}" for each in some) for some in (before, after))
    print(f"{'ok   ' if right else 'WRONG'} {name}, {variant}: cold {cold}; hit {hits}, differences {hot}", flush=True)
    return right


def check(name: str, folder: Path, options: str) -> int:
    """How many engines of a model are not as they must be."""
    save(name, folder)
    with ThreadPoolExecutor(len(VARIANTS)) as pool:
        kept, *others = pool.map(lambda variant: run(name, folder, variant, options), VARIANTS)
    return sum(
        not is_as_it_must_be(name, variant, kept, told) for variant, told in zip(VARIANTS[1:], others, strict=True)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama,whole,mla")
    parser.add_argument("--options", default="{}", help="options of sglang.Engine, in JSON")
    parser.add_argument("--engine", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        print(MARK + json.dumps(answers(*args.engine, json.loads(args.options))), flush=True)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        return sum(check(name, Path(folder) / name, args.options) for name in args.models.split(","))


if __name__ == "__main__":
    sys.exit(main())
