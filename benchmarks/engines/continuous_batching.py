"""Cost of a prompt under transformers' continuous batching: computed, from the host, and where the device has it.

    PYTHONPATH=examples python -m benchmarks.engines.continuous_batching [--rounds 5]

A small random Llama on one core; 2,048 tokens that four prompts have in turn, and 32 new ones each time, to the second
token. The engine has room for one and a half prompts on the device: alone, with host memory, and, with room for all,
alone again. Processor time of the process, medians, the engines in turn; the first round is of prompts that nobody has.
"""

import argparse
import logging
import random
import statistics
import time

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.common import print_environment
from builtin_models import build_model
from connector.transformers.continuous import ContinuousPrefixCache

PAGE, DOCUMENTS, TOKENS, NEW_TOKENS = 64, 4, 2048, 32
SOME, ALL = 54, 1000  # blocks


def tokens(seed, count):
    draw = random.Random(seed)
    return [draw.randrange(1, 256) for _ in range(count)]


def start(blocks, host_bytes=0):
    """An engine that takes requests, with host memory or without."""
    manager = build_model("full").init_continuous_batching(
        GenerationConfig(do_sample=False, max_new_tokens=2, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(page_size=PAGE, num_blocks=blocks, max_batch_tokens=512),
    )
    if host_bytes:
        ContinuousPrefixCache(manager, host_bytes=host_bytes)
    manager.start()
    return manager


def seconds(manager, prompt):
    before = time.process_time()
    manager.add_request(prompt)
    while manager.get_result(timeout=1) is None:
        pass
    return time.process_time() - before


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    print_environment(["torch", "transformers"])
    managers = {"computed": start(SOME), "from the host": start(SOME, 1 << 28), "on the device": start(ALL)}
    new, known = {name: [] for name in managers}, {name: [] for name in managers}
    for each in range(1 + rounds):
        for at in range(DOCUMENTS):
            prompt = tokens(at, TOKENS) + tokens(1000 * (1 + each) + at, NEW_TOKENS)
            for name, manager in managers.items():
                (known if each else new)[name].append(seconds(manager, prompt))
    for name, manager in managers.items():
        manager.stop()
        first, later = (statistics.median(times[name]) * 1e3 for times in (new, known))
        print(f"{name:15} {later:6.1f} ms; in the first round, when nobody has it, {first:6.1f} ms")


if __name__ == "__main__":
    main()
