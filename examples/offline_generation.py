"""Offline generation that loads shared prefixes from host memory.

Asks questions about documents in several rounds, with a device pool too small for all documents: what the device
evicted in one round is loaded from the host in the next. Every answer is compared with that of the same engine without
a cache. Run it without options, or see --help.

With --tier file:PATH:SIZE, what host memory cannot hold is kept in files in the folder PATH, and a second run finds the
prefixes of the first.

Exit status: 0 all answers agree (in half precision differences are allowed, and printed); 1 they do not; 2 invalid
options; 3 with --corrupt, if there was nothing to corrupt or the damage was not detected.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from connector.transformers import (
    ARCHITECTURES,
    ByteTokenizer,
    Generation,
    ModelPast,
    PrefixCachedGenerator,
    PromptRefused,
    build_model,
    groups_of,
)
from cpu_prefix_cache import OFFLOAD_MODES, POLICIES, CacheStatistics, ConfigurationError, GroupKind
from cpu_prefix_cache.copier.base import Copier
from cpu_prefix_cache.copier.streams import Event
from cpu_prefix_cache.memory.parts import block_bytes
from cpu_prefix_cache.messages.plan import Direction, GroupCopy
from cpu_prefix_cache.messages.sizes import parse_bytes
from cpu_prefix_cache.slab.settings import parse_tier

# In standard deviations of the logits. Two correct float32 runs with the same prefill cuts differ by 1e-6; with one
# zeroed block of 16 tokens among 3,500 they differ by 1e-2 and more.
TOLERANCE = 1e-4
DOCUMENT_TOKENS = (1_500, 3_600)
QUESTIONS = [
    "\n\nQuestion: what is this about? Answer:",
    "\n\nQuestion: which exceptions are raised? Answer:",
    "\n\nQuestion: name one example. Answer:",
    "\n\nQuestion: what changed lately? Answer:",
    "\n\nQuestion: who should read this? Answer:",
    "\n\nQuestion: what comes first? Answer:",
]
QUESTIONS_PER_ROUND = 2
PIECES = {  # --corrupt -> the kinds of group that have such a piece
    "chunk": (GroupKind.PREFIX,),
    "window": (GroupKind.WINDOW, GroupKind.CHUNK_LOCAL),
    "state": (GroupKind.STATE,),
}


class CorruptingCopier(Copier):
    """Copies like `copier`, then zeroes one device block of a group: the first one that a load fills."""

    def __init__(self, copier: Copier, tensors: Sequence[Sequence[torch.Tensor]], group: int) -> None:
        self._copier, self._group = copier, group
        self._parts = [block_bytes(tensor) for tensor in tensors[group]]
        self.corrupted = False

    def here(self) -> Event:
        return self._copier.here()

    def submit(self, direction: Direction, copies: Sequence[GroupCopy], after: Event) -> Event:
        event = self._copier.submit(direction, copies, after)
        filled = [block for copy in copies if copy.group == self._group for block in copy.device_blocks]
        if direction is Direction.LOAD and filled and not self.corrupted:
            event.until_passed()
            for part in self._parts:
                part[filled[0]] = 0
            self.corrupted = True
            return self.here()
        return event


class UserError(Exception):
    """The options cannot be carried out. The message is one sentence for the user."""


@dataclass
class Check:
    """One answer, compared with the same engine without a cache."""

    answer: Generation
    chunked_ttft: float
    one_shot_ttft: float
    logit_error: float  # in standard deviations of the reference logits
    tokens_match: bool
    near_tie: bool  # the two best reference logits are closer than four times the error
    damaged: bool  # a block was corrupted before this answer

    @property
    def agrees(self) -> bool:
        return self.tokens_match and self.logit_error <= TOLERANCE


@dataclass
class Round:
    """One line of the table. Field names are those of --json."""

    round: int
    requests: int
    prompt_tokens: int
    computed_tokens: int
    device_hit_tokens: int
    host_hit_tokens: int
    ttft_ms_median: float
    ttft_ms_median_host_hit: float | None
    ttft_ms_median_no_cache: float
    max_logit_error: float
    tokens_match: bool
    bytes_stored: int
    bytes_loaded: int
    differences: int
    near_ties: int
    tier_hit_tokens: int | None  # of those on the host; None without a tier


def main(argv: Sequence[str] | None = None) -> int:
    torch.set_num_threads(1)  # with two OpenMP threads, another busy process makes a small model 50 times slower
    options = parse(argv)
    try:
        return run(options)
    except (UserError, ConfigurationError, PromptRefused) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    check_options(options)
    options.tier = None if options.tier is None else parse_tier(options.tier)
    model, tokenizer, arch = load_model(options)
    model.to(options.device)
    prompts, source = load_prompts(options, tokenizer, model.config.get_text_config().max_position_embeddings)
    generator, reference, damage = build_generators(options, model, tokenizer)
    print(f"model: {arch}, {model.dtype} on {model.device}; input: {source}")
    try:
        rounds, checks = ask(prompts, generator, reference, options.max_new_tokens, damage)
        print_table(rounds)
        control = judge_control(checks) if options.corrupt else None
        if options.json:
            write_json(options, arch, generator, rounds, control)
    finally:
        generator.close()
    return verdict(checks, control, exact=next(model.parameters()).dtype == torch.float32)


def ask(
    prompts: Sequence[Sequence[Sequence[int]]],
    generator: PrefixCachedGenerator,
    reference: PrefixCachedGenerator,
    max_new_tokens: int,
    damage: Sequence[CorruptingCopier],
) -> tuple[list[Round], list[Check]]:
    """Answer all prompts, round by round."""
    rounds: list[Round] = []
    checks: list[Check] = []
    total = sum(map(len, prompts))
    with tqdm(total=total, unit="request", disable=None if sys.stderr.isatty() else False, mininterval=1.0) as bar:
        for number, requests in enumerate(prompts, start=1):
            before = generator.statistics()
            answered = []
            for prompt in requests:
                answered.append(check(prompt, generator, reference, max_new_tokens, damage))
                bar.update()
            checks += answered
            tier_hits = sum(each.answer.tier_hit_tokens for each in answered) if generator.tier_statistics() else None
            rounds.append(summary(number, answered, before, generator.statistics(), tier_hits))
    return rounds, checks


def summary(
    number: int,
    checks: Sequence[Check],
    before: CacheStatistics | None,
    after: CacheStatistics | None,
    tier_hits: int | None,
) -> Round:
    answers = [each.answer for each in checks]
    host_hits = [answer.ttft_seconds for answer in answers if answer.host_hit_tokens]
    no_cache = min(median(each.chunked_ttft for each in checks), median(each.one_shot_ttft for each in checks))
    return Round(
        round=number,
        requests=len(checks),
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        computed_tokens=sum(answer.computed_tokens for answer in answers),
        device_hit_tokens=sum(answer.device_hit_tokens for answer in answers),
        host_hit_tokens=sum(answer.host_hit_tokens for answer in answers),
        ttft_ms_median=1e3 * median(answer.ttft_seconds for answer in answers),
        ttft_ms_median_host_hit=1e3 * median(host_hits) if host_hits else None,
        ttft_ms_median_no_cache=1e3 * no_cache,
        max_logit_error=max(each.logit_error for each in checks),
        tokens_match=all(each.tokens_match for each in checks),
        bytes_stored=after.bytes_stored - before.bytes_stored if after and before else 0,
        bytes_loaded=after.bytes_loaded - before.bytes_loaded if after and before else 0,
        differences=sum(not each.agrees for each in checks),
        near_ties=sum(not each.agrees and each.near_tie for each in checks),
        tier_hit_tokens=tier_hits,
    )


def check(
    prompt: Sequence[int],
    generator: PrefixCachedGenerator,
    reference: PrefixCachedGenerator,
    max_new_tokens: int,
    damage: Sequence[CorruptingCopier],
) -> Check:
    """Answer a prompt with the cache, then without: with the same prefill cuts, and in one shot for its time."""
    answer = generator.answer(prompt, max_new_tokens)
    chunked = reference.answer(prompt, max_new_tokens, cuts=generator.cuts_without_cache(answer))
    one_shot = reference.answer(prompt, 1, cuts=[len(prompt)])
    difference = float((answer.first_logits - chunked.first_logits).abs().max())
    best, second = chunked.first_logits.topk(2).values.tolist()
    return Check(
        answer=answer,
        chunked_ttft=chunked.ttft_seconds,
        one_shot_ttft=one_shot.ttft_seconds,
        logit_error=difference / float(chunked.first_logits.std()),
        tokens_match=answer.tokens == chunked.tokens,
        near_tie=best - second < 4 * difference,
        damaged=any(copier.corrupted for copier in damage),
    )


def build_generators(
    options: argparse.Namespace, model: PreTrainedModel, tokenizer: Any
) -> tuple[PrefixCachedGenerator, PrefixCachedGenerator, list[CorruptingCopier]]:
    """The engine under test, the same engine without a cache, and the corrupting copiers of the first, if any."""
    damage: list[CorruptingCopier] = []
    group = group_to_corrupt(options, model) if options.corrupt else 0

    def corrupt_first_load(copier: Copier, tensors: Sequence[Sequence[torch.Tensor]]) -> Copier:
        damage.append(CorruptingCopier(copier, tensors, group))
        return damage[0]

    generator = PrefixCachedGenerator(
        model,
        tokenizer,
        device_blocks=options.device_blocks,
        host_bytes=options.host_bytes,
        offload=options.offload,
        policy=options.policy,
        below=options.tier,
        wrap_copier=corrupt_first_load if options.corrupt else None,
    )
    reference = PrefixCachedGenerator(model, tokenizer, device_blocks=options.device_blocks, prefix_caching=False)
    return generator, reference, damage


def group_to_corrupt(options: argparse.Namespace, model: PreTrainedModel) -> int:
    groups = groups_of(ModelPast(model), block_tokens=16)
    for at, group in enumerate(groups):
        if group.kind in PIECES[options.corrupt]:
            return at
    raise UserError(f"--corrupt {options.corrupt}: {options.model or options.arch} has no such piece")


def load_model(options: argparse.Namespace) -> tuple[PreTrainedModel, Any, str]:
    """The model, its tokenizer (None: bytes are tokens), and its name."""
    if options.model is None:
        return build_model(options.arch), None, options.arch
    try:
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load the model {options.model!r}: {one_line(error)}") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    except (OSError, ValueError, KeyError):
        tokenizer = None
        if model.config.get_text_config().vocab_size < 256:
            raise UserError(f"{options.model!r} has no tokenizer, and too few tokens for bytes to be tokens") from None
    return model, tokenizer, options.model


def load_prompts(options: argparse.Namespace, tokenizer: Any, max_model_len: int) -> tuple[list[list[list[int]]], str]:
    """Token ids of the prompts of each round, and their source."""

    def encode(text: str) -> list[int]:
        return (ByteTokenizer() if tokenizer is None else tokenizer).encode(text)

    if options.prompts is not None:
        prompts = [encode(text) for text in read_prompts(options.prompts)]
        return [prompts] * options.rounds, str(options.prompts)
    longest = max(len(encode(question)) for question in QUESTIONS) + options.max_new_tokens
    if max_model_len <= longest:
        raise UserError(f"a question and {options.max_new_tokens} new tokens are more than the model's {max_model_len}")
    documents, names = load_documents(options.documents, encode, max_model_len - longest)
    rounds = []
    for number in range(options.rounds):
        first = number * QUESTIONS_PER_ROUND
        questions = [QUESTIONS[(first + each) % len(QUESTIONS)] for each in range(QUESTIONS_PER_ROUND)]
        rounds.append([document + encode(question) for document in documents for question in questions])
    return rounds, f"Python's help topics {', '.join(names)} (pydoc_data.topics)"


def load_documents(count: int, encode: Any, limit: int) -> tuple[list[list[int]], list[str]]:
    """Documents of DOCUMENT_TOKENS tokens, from texts that are part of every Python installation."""
    least, most = DOCUMENT_TOKENS
    documents, names = [], []
    for name in sorted(topics):
        tokens = encode(topics[name])
        if len(tokens) >= least and len(documents) < count:
            documents.append(tokens[: min(most, limit)])
            names.append(name)
    if len(documents) < count:
        raise UserError(f"there are only {len(documents)} documents of at least {least} tokens; ask for no more")
    return documents, names


def read_prompts(file: Path) -> list[str]:
    try:
        lines = [line for line in file.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the prompts in {file}: {error}") from error
    if not lines:
        raise UserError(f"there are no prompts in {file}")
    return [read_prompt(line, file) for line in lines]


def read_prompt(line: str, file: Path) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f'{file} has a line that is not {{"prompt": "..."}}: {line[:60]}') from error
    if not isinstance(prompt, str) or any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise UserError(f"{file} has a prompt that is not a text: {line[:60]}")
    return prompt


def judge_control(checks: Sequence[Check]) -> str:
    """Whether the damage was detected. Answers before the damage must agree."""
    if not all(each.agrees for each in checks if not each.damaged):
        return "differs without damage"
    damaged = [each for each in checks if each.damaged]
    if not damaged:
        return "nothing to corrupt"
    return "missed" if all(each.agrees for each in damaged) else "caught"


def verdict(checks: Sequence[Check], control: str | None, *, exact: bool) -> int:
    if control is not None:
        print(f"control: {control}")
        return 1 if control == "caught" else 3
    differing = [each for each in checks if not each.agrees]
    if not differing:
        print("every answer agrees with the same engine without a cache")
        return 0
    ties = sum(each.near_tie for each in differing)
    print(f"{len(differing)} answers differ from the same engine without a cache, {ties} of them at a near tie")
    return 1 if exact else 0


def print_table(rounds: Sequence[Round]) -> None:
    has_tier = any(line.tier_hit_tokens is not None for line in rounds)
    tier = "  of it from tier" if has_tier else ""
    print(
        f"\nround  requests  prompt tokens = computed + on device + on host{tier}   stored   loaded   TTFT median"
        "  host hits   no cache  logit error"
    )
    for line in rounds:
        host_hit = "-" if line.ttft_ms_median_host_hit is None else f"{line.ttft_ms_median_host_hit:.1f} ms"
        tier = f"  {line.tier_hit_tokens:15}" if has_tier else ""
        print(
            f"{line.round:5}  {line.requests:8}  {line.prompt_tokens:13}  {line.computed_tokens:9}"
            f"  {line.device_hit_tokens:9}  {line.host_hit_tokens:8}{tier}  {line.bytes_stored / 1e6:4.0f} MB"
            f"  {line.bytes_loaded / 1e6:4.0f} MB  {line.ttft_ms_median:8.1f} ms  {host_hit:>9}"
            f"  {line.ttft_ms_median_no_cache:6.1f} ms  {line.max_logit_error:11.1e}"
        )
    print()


def write_json(
    options: argparse.Namespace,
    arch: str,
    generator: PrefixCachedGenerator,
    rounds: Sequence[Round],
    control: str | None,
) -> None:
    statistics = generator.statistics()
    report = {
        "arch": arch,
        "device": options.device,
        "offload": options.offload,
        "policy": options.policy,
        "groups": [
            {
                "name": group.name,
                "kind": group.kind.value,
                "layers": layers,
                "block_tokens": group.block_tokens,
                "bytes_per_block": group.block_bytes * group.device_blocks,
            }
            for group, layers in zip(generator.planner.groups, generator.past.num_layers(), strict=True)
        ],
        "grid_tokens": generator.planner.grid_tokens,
        "host_block_bytes": generator.planner.host_block_bytes,
        "rounds": [asdict(line) for line in rounds],
        "bytes_stored": statistics.bytes_stored if statistics else 0,
        "bytes_loaded": statistics.bytes_loaded if statistics else 0,
        "evictions": statistics.pool.evictions if statistics else 0,
    }
    tier = generator.tier_statistics()
    if tier is not None:
        report["tier"] = {
            "mode": tier.mode,
            "found": tier.found,
            "hit_tokens": tier.hit_tokens,
            "refused": tier.refused,
        }
    if control is not None:
        report["control"] = control
    options.json.write_text(json.dumps(report, indent=2) + "\n")


def check_options(options: argparse.Namespace) -> None:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: there is no CUDA device here")
    if options.json and not (options.json.parent.is_dir() and not options.json.is_dir()):
        raise UserError(f"--json {options.json} is not a file that can be written")
    for option in ("device_blocks", "host_bytes", "documents", "rounds", "max_new_tokens"):
        if getattr(options, option) < 1:
            raise UserError(f"--{option.replace('_', '-')} must be at least 1, got {getattr(options, option)}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--arch", choices=ARCHITECTURES, default="full", help="a small built-in model")
    which.add_argument("--model", help="a local or hub checkpoint, with its tokenizer if it has one")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--offload", choices=(*OFFLOAD_MODES, "off"), default="lazy")
    parser.add_argument("--policy", choices=POLICIES, default="lru")
    parser.add_argument("--device-blocks", type=int, default=512, help="blocks of 16 tokens in the device pool")
    parser.add_argument("--host-bytes", type=size, default="2GiB", help="host memory, such as 2GiB or 500MB")
    parser.add_argument("--tier", metavar="file:PATH:SIZE", help="files below host memory, such as file:/nvme/kv:64GiB")
    parser.add_argument("--documents", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=12)
    parser.add_argument("--prompts", type=Path, help='lines of {"prompt": "..."}, asked in every round')
    parser.add_argument("--corrupt", choices=tuple(PIECES), help="damage one loaded piece: the run must notice")
    parser.add_argument("--json", type=Path, help="write what the table shows, and more, to this file")
    return parser.parse_args(argv)


def size(text: str) -> int:
    """Bytes, for argparse."""
    try:
        return parse_bytes(text)
    except ConfigurationError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


if __name__ == "__main__":
    sys.exit(main())
