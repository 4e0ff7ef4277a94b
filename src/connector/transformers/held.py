"""The past of one prompt in transformers' own cache, and the rows of bytes that it is filled from and copied into.

    full attention    keys and values of every token, with room for more
    local attention   the recent tokens, as many as whole blocks take
    states            all states at one position

Each prompt is brought in as a past of one row. The rows of a batch end in the same column, behind zeros that the
attention mask of the batch hides. Beams and candidates, which `generate` makes of a row, have its prompt in common.
"""

import copy
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from connector.transformers.past import KEYS_AND_VALUES, Kept, ModelPast, put, tensors_of
from cpu_prefix_cache import MisuseError

logger = logging.getLogger(__name__)

BY_TOKEN = ("input_ids", "position_ids", "token_type_ids", "mm_token_type_ids")  # arguments of a model
OF_ALL_TOKENS = ("output_attentions", "output_hidden_states")
KEEPS_NONE = "the model keeps no past, as with gradient checkpointing in training mode: call its `eval()` first"


class Past(DynamicCache):
    """`past_key_values` for a prompt, of which it holds the first `hit_tokens` tokens when it is handed out.

    `device_hit_tokens` of them were in device blocks; of a batch all rows are counted. `inputs` are what `generate` is
    given beside it. It is the argument of one `generate` or of several calls of the model that go on with each other.
    """

    def __init__(self, past: ModelPast) -> None:
        super().__init__()
        self.hit_tokens = self.device_hit_tokens = 0
        self.kept, self._block_tokens, self._rows = past, past.block_tokens, 1
        self.inputs: dict[str, torch.Tensor] = {}
        self.leaves_out = False  # whether `inputs` lack some, like images, that the past has
        self._pads = [0]  # columns of padding before each prompt
        self._checks_drafts = False
        self._memory: dict[int, tuple[torch.Tensor, list[torch.Tensor]]] = {}  # of a layer: its K; K and V with room
        # Once handed out, until the model goes on: called with how many tokens are here.
        self.goes_on: Callable[[int], object] | None = None
        self._empty()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Past":
        """A past of its own, of the same prompts of the same cache."""
        memo |= {id(shared): shared for shared in (self.goes_on, self.kept)}
        memo[id(self)] = new = Past.__new__(Past)
        vars(new).update(copy.deepcopy(vars(self), memo))
        return new

    @staticmethod
    def joined(pasts: Sequence["Past"], pads: Sequence[int], room: int) -> "Past":
        """One past of several rows that end in the same column, each behind so many columns of padding. Some may have
        no token. `room` is for the tokens of attention to come.
        """
        lengths = [past.get_seq_length() for past in pasts]
        columns = max(map(operator.add, pads, lengths))
        first = pasts[lengths.index(max(lengths))]
        if list(pads) == [0]:
            return first
        first._pads, first._rows = list(pads), len(pasts)
        first.hit_tokens = sum(past.hit_tokens for past in pasts)
        first.device_hit_tokens = sum(past.device_hit_tokens for past in pasts)
        for index, layer in enumerate(first.layers):
            rows, memory = [tensors_of(past.layers[index]) for past in pasts], list[torch.Tensor]()
            for key, like in tensors_of(layer).items():
                if key in KEYS_AND_VALUES:
                    each = [row.get(key, like[:, :, :0]) for row in rows]
                    memory.append(_aligned(each, _most(layer, columns), 0 if layer.is_sliding else room))
                else:
                    put(layer, key, torch.cat([row.get(key, torch.zeros_like(like)) for row in rows]))  # as it begins
            if memory:
                first._begin(index, memory, columns)
        return first

    def activate_past_recording(self) -> None:
        """Drafts are checked from now on, the first ones with the whole prompt."""
        self._checks_drafts = True
        super().activate_past_recording()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.goes_on is not None:
            self.goes_on = _refuse  # states of layers before are of other tokens already
            _refuse(0)
        if (appended := self._append(layer_idx, key_states, value_states)) is not None:
            return appended
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def repeat(self, rows: int) -> None:
        """`generate` makes several answers of each row: what is here is the beginning of each."""
        times = rows // self._rows
        if times <= 1:
            return
        for layer in self.layers:
            for key, tensor in tensors_of(layer).items():
                put(layer, key, tensor.repeat_interleave(times, dim=0))
        self._rows = rows

    def go_on(self, ids: torch.Tensor, options: Mapping[str, Any]) -> int:
        """The model is called with these tokens, [rows, tokens], and other `options`. Returns how many of them are
        here: transformers (5.19 to 5.24) gives the whole prompt with first drafts. Raises MisuseError if they are not
        those of the prompts, or if their positions are within the prompts, which are here already.
        """
        (rows, tokens), held = ids.shape, self.get_seq_length()
        is_whole = self._checks_drafts and self.goes_on is not None and tokens >= self.inputs["input_ids"].shape[1]
        if is_whole and held and any(options.get(name) for name in OF_ALL_TOKENS):
            self._begin_anew()
            held = 0
        if self.goes_on is not None:
            self.goes_on(held)
        elif self.inputs and not held:  # not the first, and none are here
            raise MisuseError(KEEPS_NONE)
        begun = held if is_whole else 0
        if self.inputs:
            self._check(ids, held - begun, options.get("position_ids"))
        self.goes_on = None  # behind what may refuse these tokens: others may follow
        self.repeat(rows)
        self._count(tokens - begun)
        return begun

    def _begin_anew(self) -> None:
        """Forget all tokens, before the first drafts are checked. Raises MisuseError where `inputs` lack some."""
        if self.leaves_out:
            raise MisuseError(
                "with drafts the prompt would be computed anew for the attentions or hidden states of all its tokens, "
                "and `past.inputs` lack its images: generate without drafts, without these outputs or without a past"
            )
        logger.warning("the prompt is computed anew: attentions or hidden states of all its tokens are asked for")
        self._empty()
        super().activate_past_recording()

    def _check(self, ids: torch.Tensor, begin: int, positions: torch.Tensor | None) -> None:
        (rows, tokens), prompts = ids.shape, self.inputs["input_ids"]
        wanted = prompts[:, begin : begin + tokens]
        is_more = self.goes_on is not None and begin > 0 and tokens > wanted.shape[1]
        given = ids[:, : wanted.shape[1]]
        if is_more or (wanted.numel() and not given.equal(wanted.repeat_interleave(rows // len(wanted), 0))):
            raise MisuseError(
                f"behind {begin} tokens of {prompts.shape[1]} the model is given others than the past is of: give "
                "`past.inputs`"
            )
        if not wanted.numel() and tokens > 1 and positions is not None and self._are_of_prompts(positions):
            raise MisuseError(
                f"the past has {begin} tokens, an answer among them, and the model is given the prompt again: take a "
                "past for each answer, or `copy.deepcopy(past)` before the first"
            )

    def _are_of_prompts(self, positions: torch.Tensor) -> bool:
        """Whether the first of these positions, [rows, tokens], is one that the shortest prompt has."""
        shortest = self.inputs["input_ids"].shape[1] - max(self._pads)
        return positions.dim() == 2 and bool(positions[:, 0].min() < shortest)

    def length(self, prompt: int) -> int:
        """How many tokens of a prompt, or of it and its answers, are held."""
        return max(0, self.get_seq_length() - self._pads[prompt])

    def fill(self, kept: Kept, rows: torch.Tensor, length: int, room: int = 0) -> None:
        """Begin at `length` with these rows of bytes: of attention the tokens before it, in whole blocks, and of full
        attention with room for more; or all states. MisuseError if the next token can see others.
        """
        if kept.kind.is_state:
            self._count(length)
            for part, state in kept.views(rows):
                put(self.layers[part.layer], part.key, state[0])
            return
        known, memories = len(rows) * self._block_tokens, dict[int, list[torch.Tensor]]()
        if length - known > kept.first_needed(length):
            raise MisuseError(f"at {length} more tokens are needed than the last {known}")
        for part, values in kept.views(rows):
            # each in memory of its own, which is free once transformers has replaced the layer's
            held = _most(self.layers[part.layer], length)
            memory = values.new_empty(1, values.shape[1], held + room * kept.kind.is_prefix, values.shape[3])
            if held > known:
                memory[..., : held - known, :] = 0  # out of sight
            _in_blocks(memory[:, :, held - known : held], self._block_tokens).copy_(values)
            memories.setdefault(part.layer, []).append(memory)
        for index, both in memories.items():
            self._begin(index, both, length)

    def taken(self, kept: Kept, first: int, end: int) -> torch.Tensor:
        """Rows of bytes: the tokens [first, end) in whole blocks, or of one block all states as they are now."""
        size = (end - first) // self._block_tokens, kept.row_bytes
        self.take(kept, rows := torch.zeros(size, dtype=torch.uint8, device=self.kept.device), first)
        return rows

    def take(self, kept: Kept, rows: torch.Tensor, first: int, prompt: int = 0) -> None:
        """Fill rows of bytes with the tokens of a prompt from `first` on, in whole blocks, or with all states."""
        end = first + len(rows) * self._block_tokens
        for part, place in kept.views(rows):
            held = tensors_of(self.layers[part.layer]).get(part.key, torch.empty(1, 1, 0, 1))
            held = held[None, :1] if kept.kind.is_state else self._cut(part.layer, held, first, end, prompt)
            if (held.dtype, held.shape) != (place.dtype, place.shape):
                raise MisuseError(f"layer {part.layer} keeps its {part.key[0]} otherwise than when it was probed")
            place.copy_(held)

    def _cut(self, index: int, held: torch.Tensor, first: int, end: int, prompt: int) -> torch.Tensor:
        """The tokens [first, end) of a prompt in K or V of a layer, as [blocks, heads, block_tokens, width]."""
        begin = self.layers[index].get_seq_length() - held.shape[-2]
        if self._pads[prompt] + first < begin or self.length(prompt) < end:
            raise MisuseError(f"asked for the tokens [{first}, {end}), but [{begin}, {self.length(prompt)}) are held")
        row, at = prompt * (self._rows // len(self._pads)), self._pads[prompt] + first - begin
        return _in_blocks(held[row : row + 1, :, at : at + end - first], self._block_tokens)

    def _begin(self, index: int, memory: list[torch.Tensor], length: int) -> None:
        """An attention layer begins at `length` with K and V in `memory`, and appends the next there if it has room."""
        layer = self.layers[index]
        if not layer.is_initialized:
            layer.lazy_initialization(*memory)
        if layer.is_sliding:
            layer.cumulative_length = length
        held = _most(layer, length)
        layer.keys, layer.values = (each.narrow(-2, 0, held) for each in memory)
        self._memory[index] = layer.keys, memory

    def _append(self, index: int, *new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Append to the memory of a layer, without a copy. None if it has no room, or `generate` has replaced it."""
        held, memory = self._memory.pop(index, (None, []))
        layer = self.layers[index]
        if held is None or layer.keys is not held:
            return None
        begin, tokens = held.shape[-2], new[0].shape[-2]
        if begin + tokens > memory[0].shape[-2]:
            return None
        for states, each in zip(memory, new, strict=True):
            states.narrow(-2, begin, tokens).copy_(each)
        self._begin(index, memory, begin + tokens)
        return layer.keys, layer.values

    def _empty(self) -> None:
        """Begin without tokens. transformers keeps of a window what the next token sees. So the first block of a
        checkpoint would be some tokens short, and wrong for another checkpoint that shares it. Masks go by the model's
        window, not by this.
        """
        self.layer_class_to_replicate = None  # the model has no other layers
        self.layers: list[Any] = [layer.make() for layer in self.kept.layers]
        self.layers += [] if self.kept.has_attention else [DynamicLayer()]  # see `_count`
        for layer in self.layers:
            if isinstance(layer, DynamicSlidingWindowLayer):
                layer.sliding_window += self._block_tokens - 1

    def _count(self, tokens: int) -> None:
        """States do not know of how many tokens they are, and `generate` would compute all again behind them alone: a
        past of those has one more layer, which no model computes, with a zero for each token.
        """
        if not self.kept.has_attention:
            zeros = torch.zeros(self._rows, 1, tokens, 1, dtype=torch.bool, device=self.kept.device)
            self.layers[-1].update(zeros, zeros)


def before_forward(
    kept: ModelPast, model: torch.nn.Module, arguments: tuple[torch.Tensor, ...], options: dict[str, Any]
) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]] | None:
    """Rows and tokens that `model` is about to compute behind a past of what is `kept`. A hook of the model, which
    takes out the tokens that are there already.
    """
    past = next((value for value in (*arguments, *options.values()) if isinstance(value, Past)), None)
    ids = arguments[0] if arguments else options.get("input_ids")
    if past is None or past.kept is not kept or ids is None:
        return None
    if not (begun := past.go_on(ids, options)):
        return None
    behind = {name: options[name][..., begun:] for name in BY_TOKEN if options.get(name) is not None}
    return tuple(each[:, begun:] if each is ids else each for each in arguments), {**options, **behind}


def _refuse(_: int) -> NoReturn:
    raise MisuseError("a past goes on with the `input_ids` of its prompt, in a call of the model that it was made for")


def _most(layer: object, length: int) -> int:
    """How many tokens a layer of attention holds of so many."""
    return min(length, layer.sliding_window - 1) if isinstance(layer, DynamicSlidingWindowLayer) else length


def _in_blocks(states: torch.Tensor, block_tokens: int) -> torch.Tensor:
    """A view of [1, heads, tokens, width] as blocks have it: [blocks, heads, block_tokens, width]."""
    _, heads, tokens, width = states.shape
    _, by_head, by_token, by_number = states.stride()
    size = tokens // block_tokens, heads, block_tokens, width
    return states.as_strided(size, (block_tokens * by_token, by_head, by_token, by_number))


def _aligned(rows: Sequence[torch.Tensor], columns: int, room: int) -> torch.Tensor:
    """K or V of rows of their own, which end in column `columns`, behind zeros, and with room behind it."""
    latest = [row[:, :, -columns:] for row in rows]
    return torch.cat([torch.nn.functional.pad(row, (0, 0, columns - row.shape[-2], room)) for row in latest])
