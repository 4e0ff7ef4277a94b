"""Prompts that are refused, and tokens that are no part of one: padding, and placeholders of images and sound."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import GenerationConfig

from cpu_prefix_cache import PrefixCacheError

# A placeholder is called in a configuration image_token_id, video_token_index, media_placeholder_token_id, ...; tokens
# that begin or end a stretch of them (vision_start_token_id) are ordinary ones.
SEEN = {"image", "img", "video", "frame", "vision", "visual", "media", "placeholder"}
HEARD = {"audio", "sound", "speech"}
ORDINARY = {"start", "end", "bos", "eos"}


class PromptRefused(PrefixCacheError):
    """A prompt is empty, not of the model's tokens, or too long for the model. The user's error."""


def padding_of(config: GenerationConfig) -> int | None:
    """The token that `generate` takes for padding in a prompt without a mask; None if it takes none."""
    pad, ends = config.pad_token_id, config.eos_token_id
    return None if pad in (ends if isinstance(ends, list) else [ends]) else pad


def placeholders(config: Mapping[str, Any]) -> dict[int, str]:
    """The tokens in whose place a model puts images or other input, by a configuration and those within it.

    Each has the name that the configuration gives it.
    """
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
