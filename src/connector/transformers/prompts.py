"""Prompts as they may be given, each turned into a text or a list of token ids.

    one prompt     a text; a sequence, a tensor or an array of token ids; a tokenizer's output for one text
    several        any iterable of these; a tensor or an array [prompts, tokens]; a tokenizer's output for several

A tokenizer's output (`tokenizer(text)`, `apply_chat_template(messages)`) is a mapping with `input_ids`. Where it has an
`attention_mask`, what the mask leaves out is padding and is dropped; ids without a mask are read as `generate` reads
them, which takes `pad_token_id` for padding unless it ends answers. Any other key (images, positions, ...) is refused
by its name, unless it provably changes nothing.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from cpu_prefix_cache import PrefixCacheError

Prompt = str | Sequence[int] | torch.Tensor | np.ndarray[Any, Any] | Mapping[str, Any]


# A placeholder is called in a configuration image_token_id, video_token_index, media_placeholder_token_id, ...; tokens
# that begin or end a stretch of them (vision_start_token_id) are ordinary ones.
KINDS_OF_INPUT = {
    "image",
    "img",
    "video",
    "frame",
    "vision",
    "visual",
    "audio",
    "sound",
    "speech",
    "media",
    "placeholder",
}
ORDINARY = {"start", "end", "bos", "eos"}
BYTES = (bytes, bytearray, memoryview)  # sequences of integers that are no token ids


class PromptRefused(PrefixCacheError):
    """A prompt is empty, not of the model's tokens, or too long for the model or the device pool. The user's error."""


def padding_of(config: GenerationConfig) -> int | None:
    """The token that `generate` takes for padding in a prompt without a mask; None if it takes none."""
    pad, ends = config.pad_token_id, config.eos_token_id
    return None if pad in (ends if isinstance(ends, list) else [ends]) else pad


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Reads prompts for one model and one call.

    `padding` is the token that counts as padding in ids without a mask, if one does. `ignores_zeros` says of a key of a
    mapping whether the model computes the same with zeros for it, in the shape of `input_ids`, as without it.
    """

    padding: int | None
    ignores_zeros: Callable[[str], bool]

    def each(self, prompts: Any) -> Iterator[str | list[int]]:
        """The prompts in `prompts`, a Prompt or an iterable of them, each as a text or as a list of token ids.

        An iterable is read as far as prompts are needed.

        Raises PromptRefused for what is neither a prompt nor made of prompts, and for inputs beside the tokens.
        """
        if isinstance(prompts, str):
            yield prompts
        elif isinstance(prompts, Mapping):
            yield from self._rows(prompts)
        elif isinstance(prompts, torch.Tensor | np.ndarray):
            yield from self._rows({"input_ids": prompts})
        elif isinstance(prompts, Sequence) and prompts and isinstance(prompts[0], Integral | float):
            yield from self._rows({"input_ids": [prompts]})
        elif isinstance(prompts, Iterable):
            for prompt in prompts:
                yield from self.each(prompt)
        else:
            raise PromptRefused(f"a prompt is a text or token ids, got {type(prompts).__name__}")

    def one(self, prompt: Any) -> str | list[int]:
        """The only prompt in `prompt`. Raises PromptRefused if there are several, or none."""
        prompts = list(self.each(prompt))
        if not prompts:
            raise PromptRefused("a prompt needs at least one token")
        if len(prompts) > 1:
            raise PromptRefused(f"answer takes one prompt, got {len(prompts)}: give them to generate")
        return prompts[0]

    def _rows(self, encoded: Mapping[str, Any]) -> Iterator[list[int]]:
        """The prompts of a tokenizer's output, without padding."""
        given = {name: value for name, value in encoded.items() if value is not None}
        if "input_ids" not in given:
            raise PromptRefused(
                f"a prompt that is a mapping has input_ids, this one has {', '.join(map(str, given)) or 'nothing'}; "
                "make messages of a chat a prompt with "
                "tokenizer.apply_chat_template(messages, add_generation_prompt=True)"
            )
        ids = _table(given.pop("input_ids"))
        mask = self._mask(ids, given.pop("attention_mask", None))
        if refused := [name for name, value in given.items() if not self._is_without_effect(name, value, ids)]:
            raise PromptRefused(
                f"this generator answers from token ids alone, and the prompt has {', '.join(map(str, refused))}: use "
                "model.generate for it, or leave out what should not count"
            )
        for row, kept in zip(ids, mask, strict=True):
            yield [token for token, keep in zip(row, kept, strict=True) if keep]

    def _mask(self, ids: list[list[int]], given: Any) -> list[list[bool]]:
        """Which of `ids` are no padding."""
        if given is None:
            return [[token != self.padding for token in row] for row in ids]
        mask = [_kept(row) for row in _rows("an attention_mask", given)]
        if [len(row) for row in mask] != [len(row) for row in ids]:
            raise PromptRefused("the attention_mask of a prompt must have the shape of its input_ids")
        return mask

    def _is_without_effect(self, name: str, value: Any, ids: list[list[int]]) -> bool:
        """Whether the model computes the same without this value: it is zeros, and the model ignores them."""
        try:
            zeros = _table(value)
        except (PromptRefused, TypeError):  # of another shape or type
            return False
        same_shape = [len(row) for row in zeros] == [len(row) for row in ids]
        return same_shape and not any(map(any, zeros)) and self.ignores_zeros(name)


def _table(ids: Any) -> list[list[int]]:
    """`ids` as rows of integers: it is one row, or several of any lengths."""
    return [_token_ids(row) for row in _rows("token ids", ids)]


def _rows(name: str, values: Any) -> list[Sequence[Any]]:
    if isinstance(values, torch.Tensor | np.ndarray) and values.ndim not in (1, 2):
        raise PromptRefused(f"{name} must have the shape [tokens] or [prompts, tokens], got {list(values.shape)}")
    if isinstance(values, BYTES):
        return [values]
    rows = values.tolist() if isinstance(values, torch.Tensor | np.ndarray) else list(values)
    return rows if rows and isinstance(rows[0], Sequence) else [rows]


def _token_ids(tokens: Sequence[Any]) -> list[int]:
    """As Python's integers. A tensor is none of them, though it can be made one; nor are bytes and truth values."""
    if isinstance(tokens, BYTES):
        raise PromptRefused(f"a prompt is a text or token ids, which are integers; got {type(tokens).__name__}")
    kinds = set(map(type, tokens))
    for kind in kinds:
        if kind is bool or not issubclass(kind, Integral):
            strange = next(token for token in tokens if type(token) is kind)
            raise PromptRefused(f"a prompt is a text or token ids, which are integers; got {strange!r} among them")
    return list(tokens) if kinds == {int} else [int(token) for token in tokens]


def _kept(mask: Sequence[Any]) -> list[bool]:
    """Whether each token counts: 1 or 0, of any type."""
    for value in mask:
        if not isinstance(value, Real | np.bool_) or value not in (0, 1):
            raise PromptRefused(f"an attention_mask is 1 for each token that counts, and 0 for others; got {value!r}")
    return [bool(value) for value in mask]


def placeholders(config: Mapping[str, Any]) -> dict[int, str]:
    """The tokens in whose place a model puts images or other input, by a configuration and those within it.

    Each has the name that the configuration gives it.
    """
    found: dict[int, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= placeholders(value)
        elif _is_placeholder(str(name).split("_")) and value is not None:
            found |= dict.fromkeys(value if isinstance(value, list) else [value], str(name))
    return found


def _is_placeholder(words: Sequence[str]) -> bool:
    is_token = len(words) > 1 and words[-2] == "token" and words[-1] in ("id", "ids", "index")
    return is_token and not KINDS_OF_INPUT.isdisjoint(words) and ORDINARY.isdisjoint(words)
