"""Trials of a model: whether `generate` answers with a past as without one.

    when it is loaded        fields in which it keeps more of a prompt than its past has
    with its first batch     rows of different lengths, which padding must not change
    with its first images    text behind them, computed from a past after another prompt

Nothing in a configuration says so. The logits of some steps are compared, before anything is kept.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, GenerationConfig, PreTrainedModel

from connector.transformers.continuing import TAIL, TOLERANCE
from connector.transformers.forward import ForwardPass
from connector.transformers.held import Past
from connector.transformers.inputs import Images
from connector.transformers.prompts import PromptRefused, placeholders
from cpu_prefix_cache import ConfigurationError

LENGTHS = 24, 19  # of the rows of a batch
STEPS = 2


def check_positions(model: PreTrainedModel) -> None:
    """Raise ConfigurationError for a model that keeps positions of its latest prompt, which another would get."""
    if any("rope_deltas" in vars(module) for module in model.modules()):
        raise ConfigurationError(
            f"{type(model).__name__} keeps positions of its latest prompt in itself (rope_deltas), and any other "
            "prompt that goes on would get them: a past for `generate` is not supported"
        )


def try_batch(model: PreTrainedModel, empty: Callable[[], Past], left: int) -> None:
    """Raise PromptRefused for a model that answers otherwise where rows of other lengths are beside a prompt.

    `left` tokens are left to `generate` behind the past.
    """
    ids = torch.arange(sum(LENGTHS), device=model.device) % model.config.get_text_config().vocab_size
    rows = ids.split(LENGTHS)
    alone = torch.cat([_logits(model, row[None]) for row in rows], dim=1)
    pads, pasts = [max(LENGTHS) - len(row) for row in rows], [empty() for _ in rows]
    for row, past in zip(rows, pasts, strict=True):
        ForwardPass(model)(row[None, :-left], 0, past)
    padded = torch.stack([torch.nn.functional.pad(row, (pad, 0)) for row, pad in zip(rows, pads, strict=True)])
    mask = torch.arange(max(LENGTHS), device=model.device) >= torch.tensor(pads, device=model.device)[:, None]
    past = Past.joined(pasts, pads, room=0)
    _compare(
        model,
        "in a batch with padding",
        _logits(model, padded, attention_mask=mask.long(), past_key_values=past),
        alone,
    )


def try_images(model: PreTrainedModel, tokens: list[int], images: Images) -> None:
    """Raise PromptRefused for a model that cannot go on behind these images by the tokens and its past alone."""
    text = [token for token in range(images.end) if token not in placeholders(model.config.to_dict())]
    ids = torch.tensor([[*tokens[: images.end], *text[:TAIL]]], device=model.device)
    wanted = _logits(model, ids, **images.up_to(ids.shape[1]))
    past = DynamicCache(config=model.config)
    ForwardPass(model)(ids[:, : images.end], 0, past, others=images.up_to(images.end))
    _logits(model, ids[:, images.end :])  # what the model keeps elsewhere is of this prompt then
    _compare(model, "behind images", _logits(model, ids, past_key_values=past), wanted)


def _logits(model: PreTrainedModel, ids: torch.Tensor, **options: Any) -> torch.Tensor:
    """Logits of some greedy steps, [steps, rows, vocabulary]."""
    config = GenerationConfig(
        max_new_tokens=STEPS,
        min_new_tokens=STEPS,
        do_sample=False,
        num_beams=1,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    options = {"attention_mask": torch.ones_like(ids), **options}  # else it is made of padding tokens
    generate: Any = model.generate
    return torch.stack(generate(ids, generation_config=config, **options).logits).float()


def _compare(model: PreTrainedModel, where: str, logits: torch.Tensor, wanted: torch.Tensor) -> None:
    error = float((logits - wanted).abs().max() / wanted.std())
    if not error <= TOLERANCE[model.dtype == torch.float32]:
        raise PromptRefused(
            f"{type(model).__name__} cannot go on from a past {where}: its logits are off by {error:.1e} deviations"
        )
