"""Whether a model goes on from its own past: asked of the model, through the layers its requests will use.

Some do not. A mask may look ahead; rotary factors may change with the length of the whole prompt, which a key does not
know; and some state layers (Mamba 1 in transformers) read their state only when one token follows, and start from
nothing, without a word, when several do. A list of names would be out of date at the next release, so the model is
asked when it is loaded: 24 tokens at once, against 16, a snapshot, a restore, and the other 8, at once and one by one.
"""

import enum
from collections.abc import Iterator, Sequence

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from connector.transformers.paged import BlockTable, PagedKV
from connector.transformers.past import LocalGroup, ModelPast
from connector.transformers.working import WorkingState
from cpu_prefix_cache import ConfigurationError

CUT, TAIL = 16, 8
BLOCK_TOKENS = 8
# The largest difference of a logit, in deviations, in float32 and in half precision. Models that continue measure 2e-6
# to 6e-6 and, in bfloat16, up to 5e-2; one that drops its states 1e-4 and more, a mask that looks ahead about 1.
TOLERANCE = {True: 2e-5, False: 2e-1}
NAN = 0xFF  # in every byte: not a number, in any floating type


class Continuation(enum.Enum):
    """How many tokens may follow a restored state in one forward."""

    CHUNKS = "any number"
    TOKENS = "one"


@torch.inference_mode()
def check_continues(model: PreTrainedModel, past: ModelPast) -> Continuation:
    """How `model` goes on from its own past, to the logits it has when it sees everything at once.

    Raises ConfigurationError for a model that does not.
    """
    name = type(model).__name__
    rope = model.config.get_text_config().to_dict().get("rope_parameters") or {}
    if "longrope" in str(rope):  # it may be nested by kind of layer
        raise ConfigurationError(
            f"{name} rotates its keys by factors that change with the length of the prompt (longrope): "
            "what one prompt computed is wrong for a longer one of the same beginning"
        )
    probe = _Probe(model, past)
    tolerance = TOLERANCE[model.dtype == torch.float32]
    one_by_one = probe.error([1] * TAIL)
    if not one_by_one <= tolerance or not probe.reads_states(1):
        raise ConfigurationError(
            f"{name} does not go on from its own cache: its logits are off by {one_by_one:.1e} deviations"
        )
    at_once = probe.error([TAIL]) <= tolerance and probe.reads_states(TAIL)
    return Continuation.CHUNKS if at_once else Continuation.TOKENS


class _Probe:
    """A model that has seen CUT tokens, and can go on from there again and again."""

    def __init__(self, model: PreTrainedModel, past: ModelPast) -> None:
        self._model = model
        self._past = past
        vocabulary = model.config.get_text_config().vocab_size
        self._ids = torch.arange(CUT + TAIL, device=model.device)[None] % vocabulary
        self._whole = _logits(model, self._ids, 0, DynamicCache(config=model.config))[CUT:]
        self._kv = PagedKV(past, (CUT + TAIL) // BLOCK_TOKENS, BLOCK_TOKENS, model.device)
        begun, table = self._request(0)
        self._run(begun, table, [CUT])
        self._windows = [self._snapshot(begun, group) for group in past.locals]
        self._states = torch.empty(past.states.num_bytes, dtype=torch.uint8, device=model.device)
        begun.snapshot_states(self._states)

    def error(self, steps: Sequence[int]) -> float:
        """How far the logits of the last TAIL tokens are off, in deviations, with `steps` tokens in each forward."""
        return float((self._go_on(steps, self._states) - self._whole).abs().max() / self._whole.std())

    def reads_states(self, tokens: int) -> bool:
        """Whether a forward of `tokens` tokens is spoilt by states of NaN, those of convolutions and the others each.

        This needs no tolerance: in half precision noise hides a state that is dropped.
        """
        return all(bool(self._go_on([tokens], page).isnan().any()) for page in self._spoilt())

    def _go_on(self, steps: Sequence[int], states: torch.Tensor) -> torch.Tensor:
        """The logits of the tokens after CUT, restored with these states, `steps` tokens in each forward."""
        request, table = self._request(CUT)
        for group, snapshot in zip(self._past.locals, self._windows, strict=True):
            request.restore_window(group, CUT - len(snapshot), CUT, snapshot)
        request.restore_states(states)
        return self._run(request, table, steps)

    def _run(self, request: WorkingState, table: BlockTable, steps: Sequence[int]) -> torch.Tensor:
        logits = []
        for step in steps:
            begin = table.length
            table.begin_forward(step, self._ids.device)
            logits.append(_logits(self._model, self._ids[:, begin : begin + step], begin, request.cache))
            table.end_forward()
        return torch.cat(logits)

    def _request(self, length: int) -> tuple[WorkingState, BlockTable]:
        table = BlockTable(BLOCK_TOKENS)
        table.blocks, table.length = list(range((CUT + TAIL) // BLOCK_TOKENS)), length
        return WorkingState(self._past, self._kv, table), table

    def _snapshot(self, request: WorkingState, group: LocalGroup) -> torch.Tensor:
        """What a token at CUT can see, a token to a block."""
        first = group.local.first(CUT)
        tokens = torch.empty(CUT - first, group.token_bytes, dtype=torch.uint8, device=self._ids.device)
        for row, token in zip(tokens, range(first, CUT), strict=True):
            request.snapshot_window(group, token, token + 1, row)
        return tokens

    def _spoilt(self) -> Iterator[torch.Tensor]:
        for name in ("conv", "recurrent"):
            page = self._states.clone()
            for part, span in self._past.states.spans():
                if part.name == name:
                    page[span] = NAN
            if not page.equal(self._states):
                yield page


def _logits(model: PreTrainedModel, ids: torch.Tensor, begin: int, cache: Cache) -> torch.Tensor:
    """[tokens, vocabulary]. Positions are given: some models count from 0 again without them."""
    positions = torch.arange(begin, begin + ids.shape[1], device=ids.device)[None]
    logits: torch.Tensor = model(ids, position_ids=positions, past_key_values=cache, use_cache=True).logits[0]
    return logits.float()
