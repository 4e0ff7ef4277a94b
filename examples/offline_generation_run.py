"""A run of the example: two engines, with and without the cache, answer the same prompts, round by round."""

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from connector.transformers import ModelPast, PrefixCachedGenerator, groups_of
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.copying import Copier
from cpu_prefix_cache.testing import CorruptingCopier
from offline_generation_checks import Check, Round, check, summary
from offline_generation_inputs import Prompt, load_model, prompts_of, read_prompts
from offline_generation_options import PIECES, read_options
from offline_generation_report import (
    header,
    judge_control,
    open_stdout,
    picture,
    row,
    say,
    verdict,
    write_json,
)


def run(argv: Sequence[str] | None) -> int:
    """The exit status. Raises PrefixCacheError, with a sentence for the user, for what cannot be done."""
    torch.set_num_threads(1)  # with two OpenMP threads, another busy process makes a small model 50 times slower
    open_stdout()
    options = read_options(argv)
    texts = None if options.prompts is None else read_prompts(options.prompts)
    model, tokenizer, name = load_model(options)
    generator, reference, damage = build_generators(options, model, tokenizer)
    with closing(generator):
        prompts, what = prompts_of(options, texts, generator)
        say(f"model: {name}, {model.dtype} on {model.device}; input: {what}")
        say(header(has_tier=generator.tier_statistics() is not None))
        rounds: list[Round] = []
        checks: list[Check] = []
        try:
            for line, answered in ask(options, prompts, generator, reference, damage):
                rounds.append(line)
                checks += answered
                say(row(line))
            control = judge_control(checks) if options.corrupt else None
            status, sentence = verdict(checks, control, exact=model.dtype == torch.float32)
            say(f"\n{sentence}\n\n{picture(checks)}\n")
        finally:  # also of a run that is cut off
            if options.json:
                write_json(options, name, generator, rounds, checks)
    return status


def ask(
    options: argparse.Namespace,
    prompts: Sequence[Sequence[Prompt]],
    generator: PrefixCachedGenerator,
    reference: PrefixCachedGenerator,
    damage: Sequence[CorruptingCopier],
) -> Iterator[tuple[Round, list[Check]]]:
    """Answer all prompts. Returns each round when it has finished."""
    has_tier = generator.tier_statistics() is not None
    total = options.rounds * len(prompts[0])
    hidden = True if sys.stderr is None else None  # None: shown on terminals only
    with tqdm(total=total, unit="request", disable=hidden, mininterval=1.0) as bar:
        for number in range(1, options.rounds + 1):
            before = generator.statistics()
            answered = []
            for prompt in prompts[(number - 1) % len(prompts)]:
                answered.append(check(prompt.tokens, generator, reference, options.max_new_tokens, damage))
                bar.update()
                if options.show:
                    say(f"  {prompt.source}: {answered[-1].answer.text!r}")
            yield summary(number, answered, before, generator.statistics(), has_tier), answered


def build_generators(
    options: argparse.Namespace, model: PreTrainedModel, tokenizer: Any
) -> tuple[PrefixCachedGenerator, PrefixCachedGenerator, list[CorruptingCopier]]:
    """The engine under test, the same engine without a cache, and the corrupting copiers of the first, if any."""
    damage: list[CorruptingCopier] = []
    group = group_to_corrupt(options, model) if options.corrupt else 0

    def corrupt_first_load(copier: Copier, tensors: Sequence[Sequence[torch.Tensor]]) -> Copier:
        damage.append(CorruptingCopier(copier, tensors, group))
        return damage[0]

    engine = partial(
        PrefixCachedGenerator,
        model,
        tokenizer,
        device_blocks=options.device_blocks,
        max_model_len=options.max_model_len,
    )
    generator = engine(
        host_bytes=options.host_bytes,
        offload=options.offload,
        policy=options.policy,
        below=options.tier,
        wrap_copier=corrupt_first_load if options.corrupt else None,
    )
    return generator, engine(prefix_caching=False), damage


def group_to_corrupt(options: argparse.Namespace, model: PreTrainedModel) -> int:
    groups = groups_of(ModelPast(model), block_tokens=16)
    for at, group in enumerate(groups):
        if group.kind in PIECES[options.corrupt]:
            return at
    raise ConfigurationError(f"--corrupt {options.corrupt}: {options.model or options.arch} has no such piece")
