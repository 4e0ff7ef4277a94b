"""Inputs of one call of `generate`, read as the prompts of its rows.

    input_ids         token ids, [tokens] or [rows, tokens]
    attention_mask    zeros for the padding on the left of each row, ones behind it
    all others        stand for placeholder tokens: pixels, their sizes, kinds of tokens (`Images`)

Placeholder tokens are the same whatever image they stand for. So the others are a part of the key of every chunk from
the first placeholder on. They are one whole: a past ends behind all of them, or has nothing.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from cpu_prefix_cache import ChainHasher, MultimodalItem, PrefixCacheError

# A placeholder is called in a configuration image_token_id, video_token_index, media_placeholder_token_id, ...; tokens
# that begin or end a stretch of them (vision_start_token_id) are ordinary ones.
SEEN = {"image", "img", "video", "frame", "vision", "visual", "media", "placeholder"}
HEARD = {"audio", "sound", "speech"}
ORDINARY = {"start", "end", "bos", "eos"}


class PromptRefused(PrefixCacheError):
    """A prompt is empty, not of the model's tokens, or too long for the model. The user's error."""


@dataclass(frozen=True, slots=True)
class Images:
    """Inputs that stand for the tokens [first, end) of a row. Those `by_token` have a value for each token up to `end`,
    and zeros behind.
    """

    values: Mapping[str, torch.Tensor]
    by_token: Mapping[str, torch.Tensor]
    first: int
    end: int

    def up_to(self, end: int) -> dict[str, torch.Tensor]:
        """Inputs of the first `end` tokens, which are not fewer than those up to the last placeholder."""
        padded = {name: torch.nn.functional.pad(value, (0, end - self.end)) for name, value in self.by_token.items()}
        return {**self.values, **padded}

    def item(self) -> MultimodalItem:
        digest = hashlib.sha256()
        for name, value in sorted(self.up_to(self.end).items()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return MultimodalItem(self.first, self.end, digest.digest())


@dataclass(slots=True, eq=False)
class Prompt:
    """A row behind `pad` columns of padding, and its request in the host cache between `past` and its end."""

    tokens: list[int]
    pad: int
    images: Images | None
    keys: list[bytes]
    id: object = field(default_factory=object)  # of its request
    resets: int = 0  # of the cache when it began
    is_running: bool = False  # in the host cache
    computed: int = 0  # tokens that have been in device blocks
    put_off: list[int] = field(default_factory=list)  # boundaries that are computed to at its end

    @property
    def behind(self) -> int:
        """No past of it ends before so many tokens."""
        return 0 if self.images is None else self.images.end


class InputReader:
    """Reads what `generate` of this model gets. Raises PromptRefused for what a past cannot stand for."""

    def __init__(self, model: PreTrainedModel, max_model_len: int, hasher: ChainHasher) -> None:
        self._model, self._max_model_len, self._hasher = model, max_model_len, hasher
        self._text = model.config.get_text_config()
        self._placeholders = placeholders(model.config.to_dict())

    def prompts(self, ids: torch.Tensor, mask: torch.Tensor | None, others: Mapping[str, torch.Tensor]) -> list[Prompt]:
        if ids.dim() != 2 or not len(ids) or ids.is_floating_point() or ids.dtype is torch.bool:
            raise PromptRefused(f"token ids are [tokens] or [rows, tokens], got {list(ids.shape)} {ids.dtype}")
        if odd := [name for name, value in others.items() if not isinstance(value, torch.Tensor)]:
            raise PromptRefused(f"{_listed(odd)} must be tensors, because their bytes are a part of the key")
        if others and len(ids) > 1:
            raise PromptRefused(f"which row has which {_listed(others)} is not known: give prompts with images singly")
        pads = [0] * len(ids) if mask is None else _pads(ids, mask)
        prompts = [self._prompt(tokens[pad:], pad, others) for tokens, pad in zip(ids.tolist(), pads, strict=True)]
        padding = padding_of(self._model.generation_config)
        if mask is None and padding is not None and (ids == padding).any():
            raise PromptRefused(f"the prompt has the padding token {padding}: give the attention_mask, too")
        return prompts

    def _prompt(self, tokens: list[int], pad: int, others: Mapping[str, torch.Tensor]) -> Prompt:
        images = self._images(tokens, pad, others)
        keys = self._hasher.for_request(items=[] if images is None else [images.item()]).keys(tokens)
        return Prompt(tokens, pad, images, keys)

    def _images(self, tokens: list[int], pad: int, others: Mapping[str, torch.Tensor]) -> Images | None:
        kinds = set(tokens)
        text, stand = kinds - self._placeholders.keys(), kinds & self._placeholders.keys()
        found = [at for at, token in enumerate(tokens) if token in stand] if stand else []
        if not tokens or not 0 <= min(text, default=0) <= max(text, default=0) < self._text.vocab_size:
            raise PromptRefused(f"a prompt has at least one token, with ids from 0 to {self._text.vocab_size - 1}")
        if len(tokens) > self._max_model_len:
            raise PromptRefused(f"a prompt of {len(tokens)} tokens is longer than the model's {self._max_model_len}")
        if found and not others:
            names = _listed({self._placeholders[token] for token in stand})
            raise PromptRefused(f"the prompt has tokens that stand for other input ({names}): give that input, too")
        if others and (not found or pad):
            raise PromptRefused(
                f"{_listed(others)} belong to a prompt with tokens that stand for them, without padding: leave them out"
            )
        if not found:
            return None
        end = found[-1] + 1
        by_token = {name: value for name, value in others.items() if value.shape == (1, len(tokens))}
        if late := [name for name, value in by_token.items() if value[:, end:].any()]:
            raise PromptRefused(f"{_listed(late)} must be zeros behind the images, where the tokens alone are the key")
        values = {name: value for name, value in others.items() if name not in by_token}
        return Images(values, {name: each[:, :end] for name, each in by_token.items()}, found[0], end)


def in_rows(given: torch.Tensor | Sequence[Any], device: torch.device) -> torch.Tensor:
    """Token ids or their mask as a tensor [rows, tokens]."""
    try:
        values = torch.as_tensor(given, device=device)
    except (TypeError, ValueError) as error:  # rows of different lengths
        raise PromptRefused(
            "token ids are [tokens] or [rows, tokens]: pad on the left, with an attention_mask"
        ) from error
    return values[None] if values.dim() == 1 else values


def _pads(ids: torch.Tensor, mask: torch.Tensor) -> list[int]:
    counts = mask.to(ids.dtype)
    if counts.shape != ids.shape or not counts.equal(mask) or not set(counts.unique().tolist()) <= {0, 1}:
        raise PromptRefused("an attention_mask has the shape of input_ids, a 1 for each token and a 0 for padding")
    if (counts.diff(dim=1) < 0).any():
        raise PromptRefused("an attention_mask hides tokens behind others: pad on the left (padding_side='left')")
    pads: list[int] = (1 - counts).sum(1).tolist()
    return pads


def _listed(names: Any) -> str:
    return ", ".join(sorted(names))


def padding_of(config: GenerationConfig) -> int | None:
    """The token that `generate` takes for padding in a prompt without a mask; None if it takes none."""
    pad, ends = config.pad_token_id, config.eos_token_id
    return None if pad in (ends if isinstance(ends, list) else [ends]) else pad


def placeholders(config: Mapping[str, Any]) -> dict[int, str]:
    """The tokens in whose place a model puts images or other input, with their names in its configuration."""
    found: dict[int, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            found |= placeholders(value)
        elif value is not None and _is_placeholder(str(name).split("_")):
            found |= dict.fromkeys(value if isinstance(value, list) else [value], str(name))
    return found


def _is_placeholder(words: Sequence[str]) -> bool:
    is_token = len(words) > 1 and words[-2] == "token" and words[-1] in ("id", "ids", "index")
    return is_token and not (SEEN | HEARD).isdisjoint(words) and ORDINARY.isdisjoint(words)
