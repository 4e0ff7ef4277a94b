"""One forward pass of a causal model over a past without padding. Models differ in the arguments that they take."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache

from cpu_prefix_cache import ConfigurationError, PrefixCacheError

# What a model's parameter for the past may be called: in transformers 5.24 always `cache`, before it one of the others.
PAST_NAMES = ("cache", "cache_params", "past_key_values")
NO_OTHERS: Mapping[str, torch.Tensor] = {}


@contextmanager
def refusing(model: PreTrainedModel) -> Iterator[None]:
    """Turn what the code of `model` raises while it is tried into a ConfigurationError: not every one takes a Cache."""
    try:
        yield
    except (PrefixCacheError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{type(model).__name__} fails in a forward pass with transformers' Cache: {type(error).__name__}: {error}"
        ) from error


class ForwardPass:
    """Calls `model`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        usual = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
        self.past_name = next(name for taken in (parameters, usual) for name in PAST_NAMES if name in taken)
        self._takes_positions = takes_any or "position_ids" in parameters
        self._keeps_logits = takes_any or "logits_to_keep" in parameters

    def __call__(
        self,
        ids: torch.Tensor,
        begin: int,
        past: Cache,
        last: int = 0,
        others: Mapping[str, torch.Tensor] = NO_OTHERS,
    ) -> torch.Tensor:
        """Compute the tokens `ids`, [rows, tokens], after the `begin` tokens that `past` has. `others` stand for some,
        as images do.

        Returns the logits, [rows, tokens, vocabulary]; with `last` most models return those of the last so many tokens
        alone.
        """
        options: dict[str, Any] = {self.past_name: past, **others}
        if self._takes_positions:  # without them some models count from 0 again
            options["position_ids"] = torch.arange(begin, begin + ids.shape[1], device=ids.device).expand_as(ids)
        if self._keeps_logits and last:
            options["logits_to_keep"] = last
        logits: torch.Tensor = self._model(ids, use_cache=True, **options).logits
        return logits
