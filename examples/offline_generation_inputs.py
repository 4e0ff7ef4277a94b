"""Inputs of the example: the model, its tokenizer, and the prompts of each round.

Prompts are read, encoded and checked before the first one is answered: a prompt that would be refused later would cost
the answers before it. `prompts_of` returns the rounds that differ; a longer run repeats them in turn.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, NamedTuple

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, logging

from builtin_models import build_model
from connector.transformers import PrefixCachedGenerator, PromptRefused
from cpu_prefix_cache import ConfigurationError

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

Encode = Callable[[str], list[int]]


class Prompt(NamedTuple):
    """Token ids, and where they are from, for messages."""

    source: str
    tokens: list[int]


def load_model(options: argparse.Namespace) -> tuple[PreTrainedModel, Any, str]:
    """The model, its tokenizer (None: each byte is a token), and its name. Raises ConfigurationError."""
    if options.model is None:
        logging.set_verbosity_error()  # on a CPU linear attention has no faster kernels than those it would warn of
        return build_model(options.arch).to(options.device), None, options.arch
    model = _load("model", AutoModelForCausalLM, options.model, dtype="auto").to(options.device)
    model.generation_config.do_sample = False  # two samples could not be compared
    if not options.byte_tokens:
        return model, _load("tokenizer", AutoTokenizer, options.model), options.model
    vocabulary = model.config.get_text_config().vocab_size
    if vocabulary < 256:
        raise ConfigurationError(f"--byte-tokens: {options.model!r} has {vocabulary} tokens, too few for bytes")
    return model, None, options.model


def _load(part: str, kind: Any, name: str, **arguments: Any) -> Any:
    try:
        return kind.from_pretrained(name, **arguments)
    except Exception as error:  # damaged files raise whatever their many readers raise
        hint = "; with --byte-tokens none is needed" if part == "tokenizer" else ""
        raise ConfigurationError(f"cannot load the {part} {name!r}: {_one_line(error)}{hint}") from error


def prompts_of(
    options: argparse.Namespace, texts: list[tuple[str, str]] | None, generator: PrefixCachedGenerator
) -> tuple[list[list[Prompt]], str]:
    """The prompts of the rounds that differ, and their description. `texts`, if given, come in every round.

    Raises ConfigurationError for a prompt that the generator would refuse.
    """
    encode: Encode = generator.tokenizer.encode
    if texts is not None:
        rounds, what = [[Prompt(source, encode(text)) for source, text in texts]], str(options.prompts)
    else:
        rounds, what = _questions(options, encode, generator.max_model_len)
    for prompts in rounds:
        for prompt in prompts:
            check_prompt(prompt, generator, options.max_new_tokens)
    return rounds, what


def _questions(options: argparse.Namespace, encode: Encode, max_model_len: int) -> tuple[list[list[Prompt]], str]:
    questions = [encode(question) for question in QUESTIONS]
    longest = max(map(len, questions)) + options.max_new_tokens
    if max_model_len <= longest:
        raise ConfigurationError(
            f"a question and {options.max_new_tokens} new tokens are more than the model's {max_model_len}"
        )
    documents = load_documents(options.documents, encode, max_model_len - longest)
    firsts = range(0, len(QUESTIONS), QUESTIONS_PER_ROUND)[: options.rounds]
    rounds = [
        [
            Prompt(f"{name}, question {at + 1}", document + questions[at])
            for name, document in documents.items()
            for at in range(first, first + QUESTIONS_PER_ROUND)
        ]
        for first in firsts
    ]
    return rounds, f"Python's help topics {', '.join(documents)} (pydoc_data.topics)"


def load_documents(count: int, encode: Encode, limit: int) -> dict[str, list[int]]:
    """Documents of DOCUMENT_TOKENS tokens by name, from texts that are part of every Python installation."""
    least, most = DOCUMENT_TOKENS
    documents: dict[str, list[int]] = {}
    for name in sorted(topics):
        if len(documents) == count:
            break
        tokens = encode(topics[name])
        if len(tokens) >= least:
            documents[name] = tokens[: min(most, limit)]
    if len(documents) < count:
        raise ConfigurationError(
            f"there are only {len(documents)} documents of at least {least} tokens; ask for no more, or give --prompts"
        )
    return documents


def check_prompt(prompt: Prompt, generator: PrefixCachedGenerator, max_new_tokens: int) -> None:
    """Raise ConfigurationError for a prompt that the generator would refuse."""
    vocabulary = generator.model.config.get_text_config().vocab_size
    largest = max(prompt.tokens, default=0)
    if largest >= vocabulary:
        raise ConfigurationError(
            f"{prompt.source}: the tokenizer gives token {largest}, and the model has {vocabulary}"
        )
    try:
        generator.check(prompt.tokens, max_new_tokens)
    except PromptRefused as error:
        raise ConfigurationError(f"{prompt.source}: {error}") from error


def read_prompts(file: Path) -> list[tuple[str, str]]:
    """Where each prompt is, and its text. Raises ConfigurationError."""
    try:
        lines = file.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigurationError(f"cannot read the prompts in {file}: {error.strerror}") from error
    numbered = [(f"{file}, line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise ConfigurationError(f"there are no prompts in {file}")
    return [(source, _prompt_in(line, source)) for source, line in numbered]


def _prompt_in(line: bytes, source: str) -> str:
    shown = ascii(line[:60].decode(errors="replace"))
    try:
        prompt = json.loads(line.decode("utf-8-sig"))["prompt"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigurationError(f'{source}, is not {{"prompt": "..."}} in UTF-8: {shown}') from error
    if not isinstance(prompt, str) or any("\ud800" <= letter <= "\udfff" for letter in prompt):
        raise ConfigurationError(f"{source}, has a prompt that is not a text: {shown}")
    return prompt


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
