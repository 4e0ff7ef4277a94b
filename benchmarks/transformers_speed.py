"""`connector.transformers` beside `model.generate`: decode, and the first token after a prefix that is known.

    decode         from the first token to the last one of `--tokens`, after a prompt of 256, 2,048 and 6,000 tokens
    batch          the same of 1, 4 and 8 prompts of 193 to 256 tokens together. `generate` gets them padded; ours are
                   timed from the last first token on
    first token    2,048 tokens that are known, and 32 new ones. `generate` continues a deep copy of a cache that holds
                   the known ones; the generator finds them in its host memory, after its device pool was reset
    past           the same by a HostPrefixCache, up to the end of the first token
    miss           a prompt of 2,080 tokens that nobody knows: all of `generate`, with and without a HostPrefixCache

Both run in turn, in pairs, each first in half of them. A streamer reads the clock when a token arrives: the processor
time of the thread, with torch on one thread. Printed are medians and ranges of the pairs, and of the ratio within each
pair: decode speed over that of `generate`, and time to the first token over that of `generate`.

The answers are compared, too. Models are small and random: what is measured is the work around the matrices.

    PYTHONPATH=examples python benchmarks/transformers_speed.py \\
        [--pairs 21] [--families llama,gemma3] [--parts decode,batch,first,past,miss] [--json FILE]
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
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from common import print_environment
from connector.transformers import HostPrefixCache, PrefixCachedGenerator
from random_models import build_family

DECODE_FAMILIES = ("llama", "gemma3", "falcon_h1")
FIRST_FAMILIES = ("llama", "qwen3", "deepseek_v3_dense", "gemma3", "qwen3_5", "falcon_h1")
PROMPTS = (256, 2048, 6000)
BATCHES = (1, 4, 8)
BATCH_PROMPT = 256
KNOWN, NEW = 2048, 32
WINDOW = 128
HIDDEN, LAYERS = 256, 4
LONGEST = 6144
FIRST, BATCH, PAST, MISS = "first token", "batch of", "past", "miss"


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


class Steps(StoppingCriteria):
    """The processor time of this thread after each step, and the tokens chosen in it. It stops nothing."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **options: object) -> torch.Tensor:
        self.times.append(time.thread_time())
        self.tokens += input_ids[:, -1].tolist()
        return torch.zeros(len(input_ids), dtype=torch.bool)


@dataclass(frozen=True)
class Row:
    """Milliseconds, of `generate` and of the generator, for every pair."""

    part: str
    family: str
    prompt_tokens: int
    generate_ms: list[float]
    ours_ms: list[float]
    same_tokens: bool

    @property
    def ratios(self) -> list[float]:
        """Ratios of speeds for decode, of times for a first token."""
        pairs = zip(self.generate_ms, self.ours_ms, strict=True)
        return [ours / theirs if self.part in (FIRST, PAST, MISS) else theirs / ours for theirs, ours in pairs]


Times = Clock | Steps
Turn = Callable[[int], Times]  # of a pair: the number of the pair


def main() -> int:
    options = parse()
    torch.set_num_threads(1)
    print_environment(["torch", "transformers"])
    print(f"thread processor time, {options.pairs} pairs, hidden size {HIDDEN}, {LAYERS} layers, window {WINDOW}\n")
    print(f"{'':12} {'family':18} {'tokens':>6}  {'generate, ms':>24}  {'ours, ms':>24}  {'ratio':>18}  same tokens")
    rows = []
    for part, family, length in plan(options):
        rows.append(measure(part, family, length, options))
        print(line(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) | {"ratios": row.ratios} for row in rows], indent=1))
    return 0 if all(row.same_tokens for row in rows) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--tokens", type=int, default=32, help="tokens that each decode generates after the first one")
    parser.add_argument("--families", help="comma-separated; default: those of the part")
    parser.add_argument("--parts", default="decode,batch,first,past,miss")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def plan(options: argparse.Namespace) -> list[tuple[str, str, int]]:
    def wanted(families: Sequence[str]) -> Sequence[str]:
        return options.families.split(",") if options.families else families

    rows: list[tuple[str, str, int]] = []
    if "decode" in options.parts.split(","):
        rows += [("decode", family, length) for family in wanted(DECODE_FAMILIES) for length in PROMPTS]
    if "batch" in options.parts.split(","):
        rows += [(f"{BATCH} {size}", family, BATCH_PROMPT) for family in wanted(DECODE_FAMILIES) for size in BATCHES]
    if "first" in options.parts.split(","):
        rows += [(FIRST, family, KNOWN + NEW) for family in wanted(FIRST_FAMILIES)]
    for part in (PAST, MISS):
        if part in options.parts.split(","):
            rows += [(part, family, KNOWN + NEW) for family in wanted(FIRST_FAMILIES)]
    return rows


def measure(part: str, family: str, length: int, options: argparse.Namespace) -> Row:
    model = build_family(family, hidden=HIDDEN, layers=LAYERS, window=WINDOW)
    if part in (PAST, MISS):
        with HostPrefixCache(model, host_bytes=1 << 26, offload="eager", max_model_len=LONGEST) as cache:
            theirs, ours, seconds = (hit_of if part == PAST else miss_of)(model, cache)
            return pairs(part, family, length, theirs, ours, seconds, options.pairs)
    size = int(part.removeprefix(BATCH)) if part.startswith(BATCH) else 1
    with PrefixCachedGenerator(
        model, device_blocks=2 * LONGEST // 16, host_bytes=1 << 29, offload="eager", batch_size=size
    ) as generator:
        if part == "decode":
            theirs, ours, seconds = decode(model, generator, length, options.tokens)
        elif part != FIRST:
            theirs, ours, seconds = batch(model, generator, length, options.tokens)
        else:
            theirs, ours, seconds = first_token(model, generator)
        return pairs(part, family, length, theirs, ours, seconds, options.pairs)


def decode(
    model: PreTrainedModel, generator: PrefixCachedGenerator, length: int, tokens: int
) -> tuple[Turn, Turn, Callable[[Times], float]]:
    prompt = torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(1))
    known = prefilled(model, prompt[:, :-1])

    def theirs(pair: int) -> Clock:
        past, clock = copy.deepcopy(known), Clock()
        model.generate(prompt, past_key_values=past, max_new_tokens=tokens + 1, do_sample=False, streamer=clock)
        return clock

    def ours(pair: int) -> Clock:
        clock = Clock()
        generator.answer(prompt, tokens + 1, streamer=clock)
        return clock

    return theirs, ours, lambda clock: clock.times[-1] - clock.times[0]


def batch(
    model: PreTrainedModel, generator: PrefixCachedGenerator, length: int, tokens: int
) -> tuple[Turn, Turn, Callable[[Times], float]]:
    random, size = torch.Generator().manual_seed(1), generator.batch_size
    prompts = [torch.randint(0, 256, (length - 64 * row // size,), generator=random) for row in range(size)]
    mask = torch.tensor([[0] * (length - len(each)) + [1] * len(each) for each in prompts])
    padded = torch.stack([torch.nn.functional.pad(each, (length - len(each), 0)) for each in prompts])

    def theirs(pair: int) -> Steps:
        steps = Steps()
        options = dict(max_new_tokens=tokens + 1, do_sample=False, stopping_criteria=[steps])
        model.generate(padded, attention_mask=mask, **options)
        steps.times = steps.times[-1 - tokens :]
        return steps

    def ours(pair: int) -> Steps:
        steps = Steps()
        answers = list(generator.generate(prompts, tokens + 1, do_sample=False, stopping_criteria=[steps]))
        steps.times = steps.times[size - 1 :]
        steps.tokens = [token for step in zip(*(answer.tokens for answer in answers), strict=True) for token in step]
        return steps

    return theirs, ours, lambda steps: steps.times[-1] - steps.times[0]


def first_token(
    model: PreTrainedModel, generator: PrefixCachedGenerator
) -> tuple[Turn, Turn, Callable[[Times], float]]:
    prefix, prompts = known_prefix()
    theirs = of_a_copy(model, prefix, prompts)
    generator.answer(torch.cat([prefix, prefix[:, :1]], dim=1), 1)

    def ours(pair: int) -> Clock:
        prompt = prompts(pair)
        generator.pool.reset()  # what the device has is gone, and the host has it
        clock = Clock()
        answer = generator.answer(prompt, 1, streamer=clock)
        if answer.host_hit_tokens != KNOWN:
            raise SystemExit(f"the host gave {answer.host_hit_tokens} tokens, not {KNOWN}")
        return clock

    return theirs, ours, lambda clock: clock.times[0] - clock.began


def hit_of(model: PreTrainedModel, cache: HostPrefixCache) -> tuple[Turn, Turn, Callable[[Times], float]]:
    prefix, prompts = known_prefix()
    theirs = of_a_copy(model, prefix, prompts)
    first = torch.cat([prefix, prefix[:, :1]], dim=1)
    with cache.past(first) as past:
        model.generate(first, past_key_values=past, max_new_tokens=1, do_sample=False)

    def ours(pair: int) -> Clock:
        cache.forget_device()
        clock = Clock()
        with cache.past(prompts(pair)) as past:
            model.generate(prompts(pair), past_key_values=past, max_new_tokens=1, do_sample=False, streamer=clock)
        if past.hit_tokens != KNOWN or past.device_hit_tokens:
            raise SystemExit(f"the host gave {past.hit_tokens - past.device_hit_tokens} tokens, not {KNOWN}")
        return clock

    return theirs, ours, lambda clock: clock.times[0] - clock.began


def miss_of(model: PreTrainedModel, cache: HostPrefixCache) -> tuple[Turn, Turn, Callable[[Times], float]]:
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

    return theirs, ours, lambda clock: clock.times[-1] - clock.began


def known_prefix() -> tuple[torch.Tensor, Callable[[int], torch.Tensor]]:
    """A prefix, and the prompts that begin with it, by number."""
    random = torch.Generator().manual_seed(1)
    prefix = torch.randint(0, 256, (1, KNOWN), generator=random)
    suffixes = torch.randint(0, 256, (1000, 1, NEW), generator=random)
    return prefix, lambda pair: torch.cat([prefix, suffixes[pair]], dim=1)


def of_a_copy(model: PreTrainedModel, prefix: torch.Tensor, prompts: Callable[[int], torch.Tensor]) -> Turn:
    """`generate` behind a deep copy of a cache that holds the prefix."""
    known = prefilled(model, prefix)

    def turn(pair: int) -> Clock:
        prompt, clock = prompts(pair), Clock()
        past = copy.deepcopy(known)
        model.generate(prompt, past_key_values=past, max_new_tokens=1, do_sample=False, streamer=clock)
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


def pairs(
    part: str, family: str, length: int, theirs: Turn, ours: Turn, seconds: Callable[[Times], float], count: int
) -> Row:
    """Measure pairs. One before them is not counted."""
    times: dict[Turn, list[float]] = {theirs: [], ours: []}
    same = True
    for pair in tqdm(
        range(count + 1), desc=f"{part}, {family}, {length}", leave=False, disable=not sys.stderr.isatty()
    ):
        clocks = {turn: turn(pair) for turn in ((theirs, ours) if pair % 2 else (ours, theirs))}
        same = same and clocks[theirs].tokens == clocks[ours].tokens
        for turn, clock in clocks.items():
            times[turn].append(1e3 * seconds(clock))
    return Row(part, family, length, times[theirs][1:], times[ours][1:], same)


def line(row: Row) -> str:
    def spread(values: Sequence[float], digits: int) -> str:
        return f"{median(values):.{digits}f} [{min(values):.{digits}f} - {max(values):.{digits}f}]"

    times = f"{spread(row.generate_ms, 1):>24}  {spread(row.ours_ms, 1):>24}  {spread(row.ratios, 2):>18}"
    return f"{row.part:12} {row.family:18} {row.prompt_tokens:6,}  {times}  {'yes' if row.same_tokens else 'NO'}"


if __name__ == "__main__":
    sys.exit(main())
