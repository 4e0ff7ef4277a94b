"""One forward pass of a causal model over a past. Models differ in the arguments that they take."""

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache


class ForwardPass:
    """Calls `model`."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        parameters = inspect.signature(model.forward).parameters
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        self._past_name = "cache_params" if "cache_params" in parameters else "past_key_values"
        self._takes_positions = takes_any or "position_ids" in parameters
        self._keeps_logits = takes_any or "logits_to_keep" in parameters

    def __call__(self, ids: torch.Tensor, begin: int, past: Cache, last_only: bool = False) -> torch.Tensor:
        """Compute the tokens `ids`, [1, tokens], which follow the `begin` tokens in `past`.

        Returns the logits, [tokens, vocabulary]; with `last_only` some models return those of the last token alone.
        """
        options: dict[str, Any] = {self._past_name: past}
        if self._takes_positions:  # without them some models count from 0 again
            options["position_ids"] = torch.arange(begin, begin + ids.shape[1], device=ids.device)[None]
        if self._keeps_logits and last_only:
            options["logits_to_keep"] = 1
        logits: torch.Tensor = self._model(ids, use_cache=True, **options).logits[0]
        return logits
