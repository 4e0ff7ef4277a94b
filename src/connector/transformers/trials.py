"""Trials of a model: whether `generate` answers with a past as without one.

    when it is loaded        26 tokens against 16, a snapshot, two other prompts, a restore, the rest, at once or one
                             by one; the same behind the end of the smallest window or attention chunk
    with its first batch     rows of different lengths, which padding must not change
    with its first images    text behind them, computed from a past after another prompt

Some models fail. A mask may look ahead; some state layers (Mamba 1 in transformers) read their state only when one
token follows, and ignore it when several do; some keep a part of their past in their modules, where no snapshot finds
it (RecurrentGemma). No list of model names would stay up to date, and no configuration says so: logits are compared.
"""

import torch
from transformers import DynamicCache, PreTrainedModel

from connector.transformers.held import Past
from connector.transformers.inputs import Images, PromptRefused, placeholders
from connector.transformers.layers import Local
from connector.transformers.past import ModelPast, tensors_of
from connector.transformers.running import logits, refusing
from cpu_prefix_cache import ConfigurationError

CUT, TAIL, STEPS = 16, 8, 2
BLOCK_TOKENS = 8
LENGTHS = 24, 19  # of the rows of a batch
# A window of so many tokens is crossed. It takes two forward passes of as many: a matter of seconds for most, and with
# attention that writes its scores out (eager) of a GB or two. Larger ones are not.
LARGEST_WINDOW = 2048
# The largest difference of a logit, in standard deviations, in float32 and in half precision. Models that continue have
# 2e-6 to 6e-6 (behind a window, too), in bfloat16 up to 5e-2; one that drops its states has 1e-4 and more, a mask that
# looks ahead about 1.
TOLERANCE = {True: 2e-5, False: 2e-1}


@torch.inference_mode()
def takes_several(model: PreTrainedModel, max_model_len: int = LARGEST_WINDOW) -> bool:
    """Whether several tokens may follow a restored past of `model` at once, or only one.

    Raises ConfigurationError for a model whose logits behind one are not those of an uninterrupted `generate`.
    """
    with refusing(model):
        past = ModelPast(model, BLOCK_TOKENS)
        trial = _Continued(model, past)
        _check(model, "its own cache", trial.error(1), ConfigurationError)
        if not trial.reads_states(1):
            name = type(model).__name__
            raise ConfigurationError(f"{name} cannot continue from its own cache: it does not read the states there")
        at_once = trial.error(TAIL) <= _tolerance(model) and trial.reads_states(TAIL)
        cut = _behind_a_window(past)
        if CUT < cut <= max_model_len - TAIL - STEPS:
            where = f"its own cache after {cut} tokens, more than its window has"
            _check(model, where, _Continued(model, past, cut).error(TAIL if at_once else 1), ConfigurationError)
        return at_once


def try_batch(model: PreTrainedModel, kept: ModelPast, left: int) -> None:
    """Raise PromptRefused for a model that padding changes. `left` tokens are left to `generate` behind the past."""
    ids = _tokens(model, sum(LENGTHS))
    rows, then = ids.split(LENGTHS), ids[: len(LENGTHS) * STEPS].view(len(LENGTHS), STEPS)
    wanted = torch.cat([logits(model, row[None], then=after[None]) for row, after in zip(rows, then, strict=True)], 1)
    pads, pasts = [max(LENGTHS) - len(row) for row in rows], [Past(kept) for _ in rows]
    for row, past in zip(rows, pasts, strict=True):
        logits(model, row[None, :-left], past)
    padded = torch.stack([torch.nn.functional.pad(row, (pad, 0)) for row, pad in zip(rows, pads, strict=True)])
    mask = torch.arange(max(LENGTHS), device=model.device) >= torch.tensor(pads, device=model.device)[:, None]
    past = Past.joined(pasts, pads, room=0)
    ours = logits(model, padded, past, then, attention_mask=mask.long())
    _check(model, "a past in a batch with padding", _error(ours, wanted), PromptRefused)


def try_images(model: PreTrainedModel, tokens: list[int], images: Images) -> None:
    """Raise PromptRefused for a model that cannot go on behind these images by the tokens and its past alone."""
    text = [token for token in range(images.end) if token not in placeholders(model.config.to_dict())]
    ids = torch.tensor([[*tokens[: images.end], *text[:TAIL]]], device=model.device)
    then, past = ids[:, -STEPS:], DynamicCache(config=model.config)
    wanted = logits(model, ids, None, then, **images.up_to(ids.shape[1]))
    logits(model, ids[:, : images.end], past, **images.up_to(images.end))
    logits(model, ids[:, images.end :])  # what the model keeps elsewhere is of this prompt then
    _check(model, "a past behind images", _error(logits(model, ids, past, then), wanted), PromptRefused)


class _Continued:
    """A model, and its past after `cut` tokens, from which it can be continued repeatedly."""

    def __init__(self, model: PreTrainedModel, past: ModelPast, cut: int = CUT) -> None:
        self._model, self._past, self._cut = model, past, cut
        self._ids = _tokens(model, cut + TAIL + STEPS)[None]
        self._wanted = {end: self._uninterrupted(end) for end in (1, TAIL)}
        logits(model, self._ids[:, :cut], begun := Past(past))
        self._rows = {kept: begun.taken(kept, kept.first_needed(cut), cut) for kept in past.kept}

    def error(self, at_once: int) -> float:
        """The error of the logits where so many tokens follow at once, and the others one by one."""
        ours, ends = self._logits(at_once), [end for end in self._wanted if end >= at_once]
        behind = torch.cat([ours[end - at_once :][: 1 + STEPS] for end in ends])
        return _error(behind, torch.cat([self._wanted[end] for end in ends]))

    def reads_states(self, at_once: int) -> bool:
        """Whether so many tokens at once read the states before them: NaN in states of convolutions, or in the others,
        must appear in the logits. In half precision, noise would hide that a state is not read.
        """
        names = {part.key[0] for part in self._past.states.parts}
        return all(bool(self._logits(at_once, name)[0].isnan().any()) for name in names)

    def _uninterrupted(self, end: int) -> torch.Tensor:
        """Logits behind a prompt that ends so many tokens behind the cut, and behind the next STEPS tokens."""
        first, then, _ = self._ids.tensor_split([self._cut + end, self._cut + end + STEPS], dim=1)
        return logits(self._model, first, then=then)

    def _logits(self, at_once: int, lost: str | None = None) -> torch.Tensor:
        """Logits behind the cut, after two other prompts, and shorter ones: what a model keeps elsewhere than in its
        cache is theirs then. States of the name `lost` are NaN.
        """
        for begin in (1, 2):
            logits(self._model, self._ids[:, begin:CUT])
        past = Past(self._past)
        for kept, rows in self._rows.items():
            past.fill(kept, rows, self._cut)
        for layer in past.layers:
            for (name, _), held in tensors_of(layer).items():
                if name == lost:
                    held.fill_(torch.nan)
        first, then = self._ids.tensor_split([self._cut + at_once], dim=1)
        return logits(self._model, first, past, then)


def _tokens(model: PreTrainedModel, count: int) -> torch.Tensor:
    return torch.arange(count, device=model.device) % model.config.get_text_config().vocab_size


def _behind_a_window(past: ModelPast) -> int:
    """The end of the second block behind the smallest window or attention chunk; 0 if none is small enough."""
    windows = (each.kind.window_tokens for each in past.locals if isinstance(each.kind, Local))
    smallest = min(windows, default=LARGEST_WINDOW + 1)
    return (smallest // BLOCK_TOKENS + 2) * BLOCK_TOKENS if smallest <= LARGEST_WINDOW else 0


def _error(ours: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest, in standard deviations."""
    return float((ours - wanted).abs().max() / wanted.std())


def _tolerance(model: PreTrainedModel) -> float:
    return TOLERANCE[model.dtype == torch.float32]


def _check(model: PreTrainedModel, where: str, error: float, refusal: type[Exception]) -> None:
    if not error <= _tolerance(model):
        name = type(model).__name__
        off = f"{error:.1e} times their standard deviation"
        raise refusal(f"{name} cannot continue from {where}: its logits are off by {off}")
