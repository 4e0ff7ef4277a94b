"""What may be given as prompts, each turned into a text or a list of token ids.

    one prompt     a text; a sequence, a tensor or an array of token ids; a tokenizer's output for one text
    several        any iterable of these; a tensor or an array [prompts, tokens]; a tokenizer's output for several

A tokenizer's output (`tokenizer(text)`, `apply_chat_template(messages)`) is a mapping with `input_ids`. Where it has an
`attention_mask`, what the mask leaves out is padding and is dropped.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch

from cpu_prefix_cache import PrefixCacheError

Prompt = str | Sequence[int] | torch.Tensor | np.ndarray[Any, Any] | Mapping[str, Any]


class PromptRefused(PrefixCacheError):
    """A prompt is empty, not of the model's tokens, or too long for the model or the device pool. The user's error."""


def each_prompt(prompts: Any) -> Iterator[str | list[int]]:
    """The prompts in `prompts`, a Prompt or an iterable of them, each as a text or as a list of token ids.

    An iterable is read as far as prompts are asked for.

    Raises PromptRefused for what is neither a prompt nor made of prompts.
    """
    if isinstance(prompts, str):
        yield prompts
    elif isinstance(prompts, Mapping):
        yield from _rows(prompts)
    elif isinstance(prompts, torch.Tensor | np.ndarray):
        yield from _rows({"input_ids": prompts})
    elif isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], Integral | float):
        yield _token_ids(prompts)
    elif isinstance(prompts, Iterable):
        for prompt in prompts:
            yield from each_prompt(prompt)
    else:
        raise PromptRefused(f"a prompt is a text or token ids, got {type(prompts).__name__}")


def one_prompt(prompt: Prompt) -> str | list[int]:
    """The only prompt in `prompt`. Raises PromptRefused if there are several, or none."""
    prompts = list(each_prompt(prompt))
    if not prompts:
        raise PromptRefused("a prompt needs at least one token")
    if len(prompts) > 1:
        raise PromptRefused(f"answer takes one prompt, got {len(prompts)}: give them to generate")
    return prompts[0]


def _rows(encoded: Mapping[str, Any]) -> Iterator[list[int]]:
    """The prompts of a tokenizer's output, without padding."""
    if "input_ids" not in encoded:
        raise PromptRefused(
            f"a prompt that is a mapping has input_ids, this one has {', '.join(map(str, encoded)) or 'nothing'}; make "
            "messages of a chat a prompt with tokenizer.apply_chat_template(messages, add_generation_prompt=True)"
        )
    ids = _table(encoded["input_ids"])
    mask = _table(encoded["attention_mask"]) if "attention_mask" in encoded else [[1] * len(row) for row in ids]
    if [len(row) for row in mask] != [len(row) for row in ids]:
        raise PromptRefused("the attention_mask of a prompt must have the shape of its input_ids")
    for row, kept in zip(ids, mask, strict=True):
        yield [token for token, keep in zip(row, kept, strict=True) if keep]


def _table(ids: Any) -> list[list[int]]:
    """`ids` as rows of integers: it is one row, or several of any lengths."""
    if isinstance(ids, torch.Tensor | np.ndarray) and ids.ndim not in (1, 2):
        raise PromptRefused(f"token ids have the shape [tokens] or [prompts, tokens], got {list(ids.shape)}")
    rows = ids.tolist() if isinstance(ids, torch.Tensor | np.ndarray) else list(ids)
    return [_token_ids(row) for row in (rows if rows and isinstance(rows[0], Sequence) else [rows])]


def _token_ids(tokens: Sequence[Any]) -> list[int]:
    """As Python's integers. A tensor is none of them, though it can be made one."""
    kinds = set(map(type, tokens))
    for kind in kinds:
        if not issubclass(kind, Integral):
            strange = next(token for token in tokens if type(token) is kind)
            raise PromptRefused(f"a prompt is a text or token ids, which are integers; got {strange!r} among them")
    return list(tokens) if kinds == {int} else [int(token) for token in tokens]
