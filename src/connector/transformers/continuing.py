"""Checks that a model can continue from a restored past, by running it with the layers its requests will use.

Some models cannot. A mask may look ahead; rotary factors may depend on the length of the whole prompt, which is not in
a key; and some state layers (Mamba 1 in transformers) read their state only when one token follows, and ignore it when
several do. Some keep a part of their past in their modules, where no snapshot finds it (RecurrentGemma). No list of
model names would stay up to date, so each model is tested when it is loaded: the logits of 24 tokens at once, against
those of 16, a snapshot, two other requests, a restore, and the other 8, at once and one by one. The same behind the
end of the smallest window or attention chunk. Whether it can decode several requests together is tested in the same
way, with two of different lengths.
"""

import enum
from collections.abc import Iterator, Sequence

import torch
from transformers import DynamicCache, PreTrainedModel

from connector.transformers.forward import ForwardPass, refusing
from connector.transformers.layers import first_seen
from connector.transformers.paged import PagedKV
from connector.transformers.past import LocalGroup, ModelPast
from connector.transformers.rows import BlockTable
from connector.transformers.working import WorkingState
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import ChunkLocalGroup

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
    smallest = min((group.local.window_tokens for group in past.locals), default=LARGEST_WINDOW + 1)
    return (smallest // BLOCK_TOKENS + 2) * BLOCK_TOKENS if smallest <= LARGEST_WINDOW else 0


@torch.inference_mode()
def check_decodes_together(model: PreTrainedModel, past: ModelPast) -> None:
    """Raise ConfigurationError for a model whose logits change where requests of other lengths are decoded with it."""
    name = type(model).__name__
    if any(isinstance(group.local, ChunkLocalGroup) for group in past.locals):
        # transformers 5.19 leaves the mask out where fewer columns than a chunk are there and none of them is padding
        raise ConfigurationError(
            f"{name} attends in chunks (Llama 4), which transformers does not mask for requests of different lengths: "
            "set batch_size to 1"
        )
    with refusing(model):
        error = _Probe(model, past).error_together()
    if not error <= TOLERANCE[model.dtype == torch.float32]:
        raise ConfigurationError(
            f"{name} cannot decode several requests together: its logits are off by {error:.1e} deviations; "
            "set batch_size to 1"
        )


class _Probe:
    """A model, and its past after `cut` tokens, from which it can be continued repeatedly."""

    def __init__(self, model: PreTrainedModel, past: ModelPast, cut: int = CUT) -> None:
        self._compute = ForwardPass(model)
        self._model = model
        self._past = past
        self._cut = cut
        self._vocabulary = model.config.get_text_config().vocab_size
        self._ids = torch.arange(cut + TAIL, device=model.device)[None] % self._vocabulary
        whole = self._compute(self._ids, [0], DynamicCache(config=model.config), last=TAIL)
        self._whole = whole[0, -TAIL:].float()
        self._num_blocks = -(-(cut + TAIL) // BLOCK_TOKENS)
        self._kv = PagedKV(past, self._num_blocks, BLOCK_TOKENS, model.device)
        begun = self._request(0)
        self._run(begun, [cut])
        self._windows = [self._snapshot(begun, group) for group in past.locals]
        self._states = torch.empty(past.states.num_bytes, dtype=torch.uint8, device=model.device)
        begun.snapshot_states(self._states)

    def error(self, steps: Sequence[int]) -> float:
        """The largest error of the logits of the last TAIL tokens, in standard deviations, with these `steps`."""
        logits = self._run(self._restored(self._states), steps)[0]
        return float((logits - self._whole).abs().max() / self._whole.std())

    def error_together(self) -> float:
        """The same where two requests go on together: one has had TAIL / 2 tokens more than the other."""
        more = TAIL // 2
        requests = [self._restored(self._states) for _ in range(2)]
        self._run(requests[0], [1])
        self._run(requests[1], [1] * (more + 1))
        both = WorkingState.joined([(request, 0) for request in requests])
        late, early = self._whole[1 + more :], self._whole[1 : TAIL - more]
        off = self._run(both, [1] * (TAIL - more - 1)) - torch.stack([early, late])
        return float(off.abs().max() / self._whole.std())

    def reads_states(self, tokens: int) -> bool:
        """Whether a forward pass of `tokens` tokens reads its states: NaN in them must appear in the logits.

        Tested for states of convolutions and for the others. It needs no tolerance: in half precision, noise would hide
        a state that is not read.
        """
        return all(bool(self._run(self._restored(page), [tokens]).isnan().any()) for page in self._pages_of_nan())

    def _restored(self, states: torch.Tensor) -> WorkingState:
        """A request at the cut, with these states, after others were computed."""
        self._run_others()
        request = self._request(self._cut)
        for group, snapshot in zip(self._past.locals, self._windows, strict=True):
            request.restore_window(group, self._cut - len(snapshot), self._cut, snapshot)
        request.restore_states(states)
        return request

    def _run_others(self) -> None:
        """Compute two other requests together: what a model keeps elsewhere than in its cache is theirs then."""
        ids = self._ids[0, : CUT - 1]
        others = torch.stack([ids + 3, 5 * ids + 1]) % self._vocabulary
        self._compute(others, [0, 0], DynamicCache(config=self._model.config))

    def _run(self, requests: WorkingState, steps: Sequence[int]) -> torch.Tensor:
        """The logits [rows, tokens, vocabulary] of the next tokens, with `steps` of them in each forward pass."""
        logits, rows = [], requests.rows
        for step in steps:
            ids = torch.stack([self._ids[0, begin : begin + step] for begin in rows.lengths])
            rows.begin_forward(step, ids.device)
            logits.append(self._compute(ids, rows.lengths, requests.cache, last=TAIL).float())
            rows.end_forward()
        return torch.cat(logits, dim=1)

    def _request(self, length: int) -> WorkingState:
        table = BlockTable(BLOCK_TOKENS)
        table.blocks, table.length = list(range(self._num_blocks)), length
        return WorkingState(self._past, self._kv, table)

    def _snapshot(self, request: WorkingState, group: LocalGroup) -> torch.Tensor:
        """The tokens that a token at the cut can see, each as a block."""
        first = first_seen(group.local, self._cut)
        tokens = torch.empty(self._cut - first, group.token_bytes, dtype=torch.uint8, device=self._ids.device)
        for row, token in zip(tokens, range(first, self._cut), strict=True):
            request.snapshot_window(group, token, token + 1, row)
        return tokens

    def _pages_of_nan(self) -> Iterator[torch.Tensor]:
        """The states with NaN in those of one name, for each name that there is."""
        for name in ("conv", "recurrent"):
            page = self._states.clone()
            for part, span in self._past.states.spans():
                if part.name == name:
                    page[span] = NAN
            if not page.equal(self._states):
                yield page
