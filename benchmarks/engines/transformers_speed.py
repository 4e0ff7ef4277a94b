"""`generate` with a past of a HostPrefixCache beside `generate` without one.

    past      2,048 tokens that are known, and 32 new ones, up to the first token. Plain `generate` continues a deep
              copy of a cache that holds the known ones; the HostPrefixCache finds them in its host memory
    decode    from there to the last one of `--tokens`
    miss      a prompt of 2,080 tokens that nobody knows: all of `generate`, with host memory that is full

Both run in turn, in pairs, each first in half of them. A streamer reads the clock when a token arrives: the processor
time of the thread, with torch on one thread. Printed are medians and ranges of the pairs, and of the ratio within each
pair: the time over that of plain `generate`.

The answers are compared, too. Models are small and random: what is measured is the work around the matrices.

    PYTHONPATH=examples python -m benchmarks.engines.transformers_speed \\
        [--pairs 21] [--families llama,gemma3] [--parts past,decode,miss] [--json FILE]
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from tqdm import tqdm
from transformers import DynamicCache, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from benchmarks.common import print_environment
from connector.transformers import HostPrefixCache
from random_models import build_family

FAMILIES = ("llama", "qwen3", "deepseek_v3_dense", "gemma3", "qwen3_5", "falcon_h1")
KNOWN, NEW = 2048, 32
WINDOW = 128
HIDDEN, LAYERS = 256, 4
HOST_BYTES, FILLING = 1 << 26, 10  # host memory, and the prompts that fill it
PAST, DECODE, MISS = "past", "decode", "miss"


class Clock(BaseStreamer):
    """The processor time of this thread when each token arrives."""

    def __init__(self) -> None:
        self.began = time.thread_time()
        self.tokens: list[int] = []
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        if value.dim() == 1:  # the prompt has two dimensions
            self.times.append(time.thread_time())
            self.tokens.append(int(value))

    def end(self) -> None:
        """Nothing to do."""


@dataclass(frozen=True)
class Row:
    """Milliseconds, of plain `generate` and with a past, for every pair."""

    part: str
    family: str
    generate_ms: list[float]
    ours_ms: list[float]
    same_tokens: bool

    @property
    def ratios(self) -> list[float]:
        return [ours / theirs for theirs, ours in zip(self.generate_ms, self.ours_ms, strict=True)]


Turn = Callable[[int], Clock]  # of a pair: the number of the pair
SECONDS: dict[str, Callable[[Clock], float]] = {
    PAST: lambda clock: clock.times[0] - clock.began,
    DECODE: lambda clock: clock.times[-1] - clock.times[0],
    MISS: lambda clock: clock.times[-1] - clock.began,
}


def main() -> int:
    options = parse()
    torch.set_num_threads(1)
    print_environment(["torch", "transformers"])
    print(f"thread processor time, {options.pairs} pairs, hidden size {HIDDEN}, {LAYERS} layers, window {WINDOW}\n")
    print(f"{'':8} {'family':18}  {'generate, ms':>24}  {'ours, ms':>24}  {'ratio':>18}  same tokens")
    rows = []
    for part in options.parts.split(","):
        for family in options.families.split(",") if options.families else FAMILIES:
            rows.append(measure(part, family, options))
            print(line(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) | {"ratios": row.ratios} for row in rows], indent=1))
    return 0 if all(row.same_tokens for row in rows) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--tokens", type=int, default=32, help="tokens that decode generates after the first one")
    parser.add_argument("--families", help="comma-separated; default: all")
    parser.add_argument("--parts", default="past,decode,miss")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measure(part: str, family: str, options: argparse.Namespace) -> Row:
    model = build_family(family, hidden=HIDDEN, layers=LAYERS, window=WINDOW)
    with HostPrefixCache(model, host_bytes=HOST_BYTES, offload="eager") as cache:
        turns = miss_of(model, cache) if part == MISS else hit_of(model, cache, 1 + options.tokens * (part == DECODE))
        return pairs(part, family, *turns, SECONDS[part], options.pairs)


def hit_of(model: PreTrainedModel, cache: HostPrefixCache, tokens: int) -> tuple[Turn, Turn]:
    prefix, prompts = known_prefix()
    first = torch.cat([prefix, prefix[:, :1]], dim=1)
    with cache.past(first) as past:
        model.generate(first, past_key_values=past, max_new_tokens=1, do_sample=False)

    def ours(pair: int) -> Clock:
        cache.forget_device()
        clock = Clock()
        with cache.past(prompts(pair)) as past:
            model.generate(prompts(pair), past_key_values=past, max_new_tokens=tokens, do_sample=False, streamer=clock)
        if past.hit_tokens != KNOWN or past.device_hit_tokens:
            raise SystemExit(f"the host gave {past.hit_tokens - past.device_hit_tokens} tokens, not {KNOWN}")
        return clock

    return of_a_copy(model, prefix, prompts, tokens), ours


def miss_of(model: PreTrainedModel, cache: HostPrefixCache) -> tuple[Turn, Turn]:
    random = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, 256, (1000, 1, KNOWN + NEW), generator=random)

    def theirs(pair: int) -> Clock:
        clock = Clock()
        model.generate(prompts[pair], max_new_tokens=1, do_sample=False, streamer=clock)
        clock.times.append(time.thread_time())
        return clock

    def ours(pair: int) -> Clock:
        clock = Clock()
        with cache.past(prompts[pair]) as past:
            model.generate(prompts[pair], past_key_values=past, max_new_tokens=1, do_sample=False, streamer=clock)
        clock.times.append(time.thread_time())
        if past.hit_tokens:
            raise SystemExit(f"{past.hit_tokens} tokens of a new prompt were known")
        return clock

    for number in range(1, 1 + FILLING):  # the first write of each page of host memory is not timed
        ours(-number)
    return theirs, ours


def known_prefix() -> tuple[torch.Tensor, Callable[[int], torch.Tensor]]:
    """A prefix, and the prompts that begin with it, by number."""
    random = torch.Generator().manual_seed(1)
    prefix = torch.randint(0, 256, (1, KNOWN), generator=random)
    suffixes = torch.randint(0, 256, (1000, 1, NEW), generator=random)
    return prefix, lambda pair: torch.cat([prefix, suffixes[pair]], dim=1)


def of_a_copy(
    model: PreTrainedModel, prefix: torch.Tensor, prompts: Callable[[int], torch.Tensor], tokens: int
) -> Turn:
    """`generate` behind a deep copy of a cache that holds the prefix."""
    known = prefilled(model, prefix)

    def turn(pair: int) -> Clock:
        prompt, clock = prompts(pair), Clock()
        past = copy.deepcopy(known)
        model.generate(prompt, past_key_values=past, max_new_tokens=tokens, do_sample=False, streamer=clock)
        return clock

    return turn


@torch.no_grad()
def prefilled(model: PreTrainedModel, ids: torch.Tensor) -> DynamicCache:
    """A cache that holds `ids`, computed in portions."""
    past = DynamicCache(config=model.config)
    for begin in range(0, ids.shape[1], 256):
        part = ids[:, begin : begin + 256]
        positions = torch.arange(begin, begin + part.shape[1])[None]
        model(part, position_ids=positions, past_key_values=past, use_cache=True, logits_to_keep=1)
    return past


def pairs(part: str, family: str, theirs: Turn, ours: Turn, seconds: Callable[[Clock], float], count: int) -> Row:
    """Measure pairs. One before them is not counted."""
    times: dict[Turn, list[float]] = {theirs: [], ours: []}
    same = True
    for pair in tqdm(range(count + 1), desc=f"{part}, {family}", leave=False, disable=not sys.stderr.isatty()):
        clocks = {turn: turn(pair) for turn in ((theirs, ours) if pair % 2 else (ours, theirs))}
        same = same and clocks[theirs].tokens == clocks[ours].tokens
        for turn, clock in clocks.items():
            times[turn].append(1e3 * seconds(clock))
    return Row(part, family, times[theirs][1:], times[ours][1:], same)


def line(row: Row) -> str:
    def spread(values: Sequence[float], digits: int) -> str:
        return f"{median(values):.{digits}f} [{min(values):.{digits}f} - {max(values):.{digits}f}]"

    times = f"{spread(row.generate_ms, 1):>24}  {spread(row.ours_ms, 1):>24}  {spread(row.ratios, 2):>18}"
    return f"{row.part:8} {row.family:18}  {times}  {'yes' if row.same_tokens else 'NO'}"


if __name__ == "__main__":
    sys.exit(main())
