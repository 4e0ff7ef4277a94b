"""Checks that a model can continue from a restored past, by running it with the layers that prompts will use.

Some models cannot. A mask may look ahead; rotary factors may depend on the length of the whole prompt, which is not in
a key; and some state layers (Mamba 1 in transformers) read their state only when one token follows, and ignore it when
several do. Some keep a part of their past in their modules, where no snapshot finds it (RecurrentGemma). No list of
model names would stay up to date, so each model is tested when it is loaded: the logits of 24 tokens at once, against
those of 16, a snapshot, two other prompts, a restore, and the other 8, at once and one by one. The same behind the end
of the smallest window or attention chunk.
"""

import enum
from collections.abc import Iterator, Mapping, Sequence

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel

from connector.transformers.forward import ForwardPass, refusing
from connector.transformers.held import Past
from connector.transformers.past import Kept, ModelPast
from cpu_prefix_cache import ConfigurationError

CUT, TAIL = 16, 8
BLOCK_TOKENS = 8
# A window of so many tokens is crossed. It takes two forward passes of as many: a matter of seconds for most, and with
# attention that writes its scores out (eager) of a GB or two. Larger ones are not.
LARGEST_WINDOW = 2048
# The largest difference of a logit, in standard deviations, in float32 and in half precision. Models that continue have
# 2e-6 to 6e-6 (behind a window, too), in bfloat16 up to 5e-2; one that drops its states has 1e-4 and more, a mask that
# looks ahead about 1.
TOLERANCE = {True: 2e-5, False: 2e-1}
NAN = 0xFF  # in every byte: NaN in any floating type


class Continuation(enum.Enum):
    """How many tokens may follow a restored state in one forward."""

    CHUNKS = "any number"
    TOKENS = "one"


@torch.inference_mode()
def check_continues(model: PreTrainedModel, past: ModelPast, max_model_len: int = LARGEST_WINDOW) -> Continuation:
    """How `model` can continue from a restored past, so that its logits are those of an uninterrupted forward pass.

    Raises ConfigurationError for a model that cannot.
    """
    with refusing(model):
        return _check_continues(model, past, max_model_len)


def _check_continues(model: PreTrainedModel, past: ModelPast, max_model_len: int) -> Continuation:
    name = type(model).__name__
    rope = model.config.get_text_config().to_dict().get("rope_parameters") or {}
    if "longrope" in str(rope):  # it may be nested by kind of layer
        raise ConfigurationError(
            f"{name} rotates its keys by factors that change with the length of the prompt (longrope): "
            "what one prompt computed is wrong for a longer prompt with the same beginning"
        )
    if ForwardPass(model).past_name == "cache_params":  # Mamba's own, before 5.24
        raise ConfigurationError(
            f"with transformers {transformers.__version__}, `generate` of {name} computes the whole prompt behind a "
            "past: take 5.24"
        )
    probe = _Probe(model, past)
    tolerance = TOLERANCE[model.dtype == torch.float32]
    one_by_one = probe.error([1] * TAIL)
    if not one_by_one <= tolerance or not probe.reads_states(1):
        raise ConfigurationError(
            f"{name} cannot continue from its own cache: its logits are off by {one_by_one:.1e} deviations"
        )
    at_once = probe.error([TAIL]) <= tolerance and probe.reads_states(TAIL)
    cut = _behind_a_window(past)
    if CUT < cut <= max_model_len - TAIL:
        far = _Probe(model, past, cut).error([TAIL] if at_once else [1] * TAIL)
        if not far <= tolerance:
            raise ConfigurationError(
                f"{name} cannot continue from its own cache after {cut} tokens, more than its window has: its logits "
                f"are off by {far:.1e} deviations"
            )
    return Continuation.CHUNKS if at_once else Continuation.TOKENS


def _behind_a_window(past: ModelPast) -> int:
    """The end of the second block behind the smallest window or attention chunk; 0 if none is small enough."""
    smallest = min((kept.local.window_tokens for kept in past.kept if kept.local), default=LARGEST_WINDOW + 1)
    return (smallest // BLOCK_TOKENS + 2) * BLOCK_TOKENS if smallest <= LARGEST_WINDOW else 0


class _Probe:
    """A model, and its past after `cut` tokens, from which it can be continued repeatedly."""

    def __init__(self, model: PreTrainedModel, past: ModelPast, cut: int = CUT) -> None:
        self._compute, self._model, self._past, self._cut = ForwardPass(model), model, past, cut
        self._vocabulary = model.config.get_text_config().vocab_size
        self._ids = torch.arange(cut + TAIL, device=model.device)[None] % self._vocabulary
        self._whole = self._compute(self._ids, 0, DynamicCache(config=model.config), last=TAIL)[0, -TAIL:].float()
        self._compute(self._ids[:, :cut], 0, begun := self._fresh(), last=1)
        self._rows = {kept: begun.taken(kept, kept.first_needed(cut, BLOCK_TOKENS), cut) for kept in past.kept}

    def error(self, steps: Sequence[int]) -> float:
        """The largest error of the logits of the last TAIL tokens, in standard deviations, with these `steps`."""
        logits = self._continued(self._rows, steps)
        return float((logits - self._whole).abs().max() / self._whole.std())

    def reads_states(self, tokens: int) -> bool:
        """Whether a forward pass of `tokens` tokens reads its states: NaN in them must appear in the logits.

        Tested for states of convolutions and for the others. It needs no tolerance: in half precision, noise would hide
        a state that is not read.
        """
        return all(bool(self._continued(rows, [tokens]).isnan().any()) for rows in self._with_nan())

    def _continued(self, rows: Mapping[Kept, torch.Tensor], steps: Sequence[int]) -> torch.Tensor:
        """The logits [tokens, vocabulary] of the next tokens, with `steps` of them in each forward pass: from the cut,
        with these rows, after others were computed.
        """
        self._compute_others()
        past, begin, logits = self._fresh(), self._cut, []
        for kept, each in rows.items():
            past.fill(kept, each, begin)
        for step in steps:
            logits.append(self._compute(self._ids[:, begin : begin + step], begin, past, last=TAIL)[0].float())
            begin += step
        return torch.cat(logits)

    def _compute_others(self) -> None:
        """Compute two other prompts together: what a model keeps elsewhere than in its cache is theirs then."""
        ids = self._ids[0, : CUT - 1]
        others = torch.stack([ids + 3, 5 * ids + 1]) % self._vocabulary
        self._compute(others, 0, DynamicCache(config=self._model.config))

    def _fresh(self) -> Past:
        return Past(self._past, BLOCK_TOKENS)

    def _with_nan(self) -> Iterator[Mapping[Kept, torch.Tensor]]:
        """The rows with NaN in the states of one name, for each name that there is."""
        states = self._past.states
        for name in dict.fromkeys(part.name for part in states.parts):
            page = self._rows[states].clone()
            for part, span in states.spans(BLOCK_TOKENS):
                if part.name == name:
                    page[:, span] = NAN
            yield {**self._rows, states: page}
