"""A model is run by its own `generate` alone: so a past holds what that computes, whatever arguments a model takes."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache

from cpu_prefix_cache import ConfigurationError, PrefixCacheError

TAKEN = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
PAST = "cache" if "cache" in TAKEN else "past_key_values"  # before transformers 5.24


class _OwnConfig(GenerationConfig):
    """Takes nothing over from the model's: what ends, forces or drafts an answer would do so here, too."""

    def update(self, defaults_only: bool = False, allow_custom_entries: bool = False, **given: Any) -> dict[str, Any]:
        if allow_custom_entries:  # `generate` gives it the model's
            return {}
        unused: dict[str, Any] = super().update(defaults_only, **given)
        return unused


def generating(model: PreTrainedModel) -> PreTrainedModel:
    """The model that `generate` calls: the one given, or the one within a compiled one or a wrapper such as PEFT's."""
    return next((each for each in model.modules() if isinstance(each, PreTrainedModel)), model)


@contextmanager
def refusing(model: PreTrainedModel) -> Iterator[None]:
    """Turn what the code of `model` raises while it is tried into a ConfigurationError: not every one takes a Cache."""
    try:
        yield
    except (PrefixCacheError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{type(model).__name__} fails in `generate` with transformers' Cache: {type(error).__name__}: {error}"
        ) from error


def logits(
    model: PreTrainedModel,
    ids: torch.Tensor,
    past: Cache | None = None,
    then: torch.Tensor | None = None,
    **others: Any,
) -> torch.Tensor:
    """The logits, [1 + steps, rows, vocabulary], behind the tokens `ids`, [rows, tokens], of which `past` has some, and
    behind each of `then`, which come one by one.
    """
    next_tokens = [[]] * len(ids) if then is None else then.tolist()
    config = _OwnConfig(
        max_length=ids.shape[1] + 1 + len(next_tokens[0]),
        do_sample=False,
        num_beams=1,
        num_return_sequences=1,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    given: dict[str, Any] = {"attention_mask": torch.ones_like(ids), **others}  # else it is made of padding tokens
    if past is not None:
        given[PAST] = past
    generate: Any = model.generate

    def allowed(row: int, tokens: torch.Tensor) -> list[int]:
        return next_tokens[row][len(tokens) - ids.shape[1] :][:1] or [0]

    forced = None if then is None else allowed
    return torch.stack(generate(ids, generation_config=config, prefix_allowed_tokens_fn=forced, **given).logits).float()
