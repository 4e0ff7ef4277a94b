"""The past of one prompt in transformers' own cache, and what is copied between it and blocks.

    full attention    keys and values of every token, in transformers' layers; copied block by block
    local attention   the recent tokens, in a WindowLayer, which keeps whole blocks
    states            in transformers' layers; one page of all states at one position

Each prompt is brought in as a past of one row. The rows of a batch end in the same column, behind zeros that the
attention mask of the batch hides. Beams and candidates, which `generate` makes of a row, have its prompt in common.
"""

import copy
import logging
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from connector.transformers.layers import first_seen
from connector.transformers.paged import PagedKV, in_blocks
from connector.transformers.past import LocalGroup, ModelPast, states_of
from connector.transformers.snapshots import as_bytes, as_tensor, check_bytes, set_state
from cpu_prefix_cache import MisuseError

logger = logging.getLogger(__name__)


class WindowLayer(DynamicSlidingWindowLayer):
    """One layer of local attention that keeps whole blocks.

    transformers' own keeps the `window - 1` tokens before the next one; this one up to `block_tokens - 1` more, because
    a block of a checkpoint has the same bytes whenever it is taken. After `restore`, those out of sight are zeros.
    """

    def __init__(self, window: int, block_tokens: int) -> None:
        super().__init__(sliding_window=window)
        self._kept = window - 1 + block_tokens - 1
        self._first = 0  # the first token that is not zeros

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.record_past:
            keys, values = super().update(key_states, value_states, *args, **kwargs)
            return keys, values
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.cumulative_length += key_states.shape[-2]
        visible = self.sliding_window - 1 + key_states.shape[-2]
        before = states_held(self)
        keys, values = (torch.cat(both, dim=-2) for both in zip(before, (key_states, value_states), strict=True))
        self.keys, self.values = keys[:, :, -self._kept :], values[:, :, -self._kept :]
        return keys[:, :, -visible:], values[:, :, -visible:]

    def held(self, first: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of K and V of the tokens [first, end), each [tokens, heads, width]. Raises MisuseError for others."""
        both = states_held(self)
        begin = self.cumulative_length - both[0].shape[-2]
        if not max(begin, self._first) <= first < end <= self.cumulative_length:
            raise MisuseError(
                f"asked for the tokens [{first}, {end}), but [{max(begin, self._first)}, {self.cumulative_length}) are "
                "held"
            )
        keys, values = (each[0, :, first - begin : end - begin].transpose(0, 1) for each in both)
        return keys, values

    def restore(self, first: int, length: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Begin at position `length` with the tokens [first, length), given as [tokens, heads, width]."""
        self.lazy_initialization(keys, values)
        missing = max(0, min(length, self.sliding_window - 1) - len(keys))
        self.keys, self.values = (_after_zeros(each, missing) for each in (keys, values))
        self.cumulative_length, self._first = length, first

    def join(self, rows: Sequence[object], columns: int) -> None:
        """Begin with the windows of these rows, which end in column `columns`. Their blocks are not held any more."""
        kept = min(columns, self._kept)
        self.keys, self.values = (_aligned(each, kept) for each in zip(*map(_tokens_of, rows), strict=True))
        self.cumulative_length = self._first = columns


class TokenCount(DynamicLayer):
    """A layer of no model: how many tokens a past of states alone has. Their own layers do not know it, and `generate`
    would compute all tokens again behind them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0
        self.keys = self.values = torch.empty(1, 1, 0, 1)

    def get_seq_length(self) -> int:
        return self.tokens


class Past(DynamicCache):
    """`past_key_values` for a prompt, of which it holds the first `hit_tokens` tokens when it is handed out.

    `device_hit_tokens` of them were in device blocks; of a batch all rows are counted. `inputs` are what `generate` is
    given beside it. It is the argument of one `generate` or of several calls of the model that go on with each other.
    """

    def __init__(self, config: PretrainedConfig, past: ModelPast, kv: PagedKV, block_tokens: int) -> None:
        super().__init__(config=config)
        self.hit_tokens = self.device_hit_tokens = 0
        self._config, self._past, self._kv, self._block_tokens, self._rows = config, past, kv, block_tokens, 1
        self._begun = 0  # columns when it was handed out
        self.inputs: dict[str, torch.Tensor] = {}
        self._pads = [0]  # columns of padding before each prompt
        self._memory: dict[int, tuple[list[torch.Tensor], torch.Tensor]] = {}  # of a layer: K and V with room; its K
        self._goes_on: Callable[[int], object] | None = None  # called once, before the first tokens behind it
        self._count = None if past.has_attention else TokenCount()
        self._keep_whole_blocks()
        self.layers += [] if self._count is None else [self._count]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Past":
        """A past of its own, of the same prompts of the same cache."""
        memo |= {id(shared): shared for shared in (self._goes_on, self._kv, self._past)}
        memo[id(self)] = new = Past.__new__(Past)
        vars(new).update(copy.deepcopy(vars(self), memo))
        return new

    def hand_out(self, inputs: dict[str, torch.Tensor], goes_on: Callable[[int], object]) -> None:
        """Nothing more is filled in. `goes_on` is called with how many tokens first come behind it."""
        self.inputs, self._begun, self._goes_on = inputs, self.get_seq_length(), goes_on

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
        for index, kept in enumerate(first._past.layers if any(lengths) else ()):
            rows = [past.layers[index] for past in pasts]
            if kept.local is not None:
                first._window(index).join(rows, columns)
            if kept.full:
                keys, values = (_aligned(each, columns, room) for each in zip(*map(_tokens_of, rows), strict=True))
                first._begin(index, [keys, values], columns)
            if kept.states:
                _join_states([past._linear(index) for past in pasts], first._linear(index))
        if first._count is not None:
            first._count.tokens = columns
        return first

    def activate_past_recording(self) -> None:
        """Before drafts are checked. If nothing has followed yet, begin without a past: transformers (5.19 to 5.24)
        computes the whole prompt then, behind the past that is there, and the answer would be wrong.
        """
        if 0 < self._begun == self.get_seq_length():
            logger.warning("the prompt is computed anew: transformers gives its drafts no past")
            self.layers = DynamicCache(config=self._config).layers
            self._keep_whole_blocks()
        super().activate_past_recording()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._begin_behind(key_states.shape[-2])
        self.repeat(len(key_states))
        if (appended := self._append(layer_idx, key_states, value_states)) is not None:
            return appended
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def repeat(self, rows: int) -> None:
        """`generate` makes several answers of each row: what is here is the beginning of each."""
        if rows <= self._rows:
            return
        for layer in self.layers:
            if isinstance(layer, DynamicLayer):
                layer.batch_repeat_interleave(rows // self._rows)
            if isinstance(layer, LinearAttentionLayer):
                _join_states([layer], layer, rows // self._rows)
        self._rows = rows

    def count(self, tokens: int) -> None:
        """So many tokens come behind, in a past of states alone."""
        self._begin_behind(tokens)
        if self._count is not None:
            self._count.tokens += tokens

    def length(self, prompt: int) -> int:
        """How many tokens of a prompt, or of it and its answers, are held."""
        return max(0, self.get_seq_length() - self._pads[prompt])

    def read(self, blocks: Sequence[int], room: int = 0) -> None:
        """Begin with the tokens of these blocks of full attention, and room for so many behind them."""
        tokens = len(blocks) * self._block_tokens
        for index, pools in self._kv.pools.items():
            self._begin(index, [_gathered(pool, blocks, tokens + room) for pool in pools], tokens)

    def write(self, blocks: Sequence[int], first: int, prompt: int = 0) -> None:
        """Write the tokens of a prompt from `first` on, as many as they hold, to these blocks of full attention."""
        ids, tokens = torch.tensor(blocks, device=self._kv.region.device), len(blocks) * self._block_tokens
        row, column = prompt * (self._rows // len(self._pads)), self._pads[prompt] + first
        for index, pools in self._kv.pools.items():
            for pool, held in zip(pools, states_held(self.layers[index]), strict=True):
                pool[ids] = in_blocks(held[row, :, column : column + tokens], self._block_tokens)

    def snapshot_window(self, group: LocalGroup, first: int, end: int, out: torch.Tensor) -> None:
        """Write the tokens [first, end) of a local group to `out`, uint8 [(end - first) * group.token_bytes]."""
        check_bytes(out, (end - first) * group.token_bytes)
        for part, span in group.parts.spans(end - first):
            keys, values = self._window(part.layer).held(first, end)
            out[span] = as_bytes(keys if part.name == "keys" else values)

    def restore_window(self, group: LocalGroup, first: int, length: int, blocks: torch.Tensor) -> None:
        """Restore the tokens [first, length) of a local group from snapshots of equal size, in order. None of them
        where an attention chunk begins. Raises MisuseError if the next token can see tokens before `first`.
        """
        if first > first_seen(group.local, length):
            raise MisuseError(f"at {length} the tokens from {first_seen(group.local, length)} are needed, not {first}")
        tokens = (length - first) // max(len(blocks), 1)
        states = {}
        for part, span in group.parts.spans(tokens):
            values = as_tensor(blocks[:, span], part.dtype) if len(blocks) else blocks.new_empty(0).view(part.dtype)
            states[part.layer, part.name] = values.view(length - first, *part.shape)
        for part in group.parts:
            if part.name == "keys":
                both = (states[part.layer, name] for name in ("keys", "values"))
                self._window(part.layer).restore(first, length, *both)

    def snapshot_states(self, out: torch.Tensor) -> None:
        """Write all states into `out`, uint8 [bytes of the page]. MisuseError for one that is not as it was probed."""
        check_bytes(out, self._past.states.num_bytes)
        for part, span in self._past.states.spans():
            found = {(name, index): state for name, index, state in states_of(self._linear(part.layer))}
            state = found.get((part.name, part.index))
            if state is None or (tuple(state[:1].shape), state.dtype) != (part.shape, part.dtype):
                raise MisuseError(f"layer {part.layer} keeps its {part.name} state otherwise than when it was probed")
            out[span] = as_bytes(state[:1])

    def restore_states(self, page: torch.Tensor) -> None:
        """Restore all states from `page`, a snapshot at the position to resume from."""
        check_bytes(page, self._past.states.num_bytes)
        for part, span in self._past.states.spans():
            state = as_tensor(page[span], part.dtype).view(part.shape)
            set_state(self._linear(part.layer), part.name, part.index, state)

    def _begin(self, index: int, memory: list[torch.Tensor], tokens: int) -> None:
        """A layer of full attention begins with the first `tokens` tokens in `memory`, and appends the next there."""
        layer = attention(self.layers[index])
        if not layer.is_initialized:
            layer.lazy_initialization(*memory)
        layer.keys, layer.values = (each[:, :, :tokens] for each in memory)
        self._memory[index] = memory, layer.keys

    def _append(
        self, index: int, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Append to the memory of a layer, which transformers would copy. None where there is no room, or `generate`
        has chosen, repeated or dropped what is there.
        """
        memory, held = self._memory.get(index, ([], None))
        layer = attention(self.layers[index])
        if held is None or layer.keys is not held:
            return None
        begin, end = held.shape[-2], held.shape[-2] + key_states.shape[-2]
        if end > memory[0].shape[-2]:
            return None
        for states, new in zip(memory, (key_states, value_states), strict=True):
            states[:, :, begin:end] = new
        self._begin(index, memory, end)
        return states_held(layer)

    def _begin_behind(self, tokens: int) -> None:
        if self._goes_on is not None:
            goes_on, self._goes_on = self._goes_on, None
            goes_on(tokens)

    def _keep_whole_blocks(self) -> None:
        for index, layer in enumerate(self._past.layers):
            if layer.local is not None:
                self.layers[index] = WindowLayer(layer.local.window_tokens, self._block_tokens)

    def _window(self, index: int) -> WindowLayer:
        layer = self.layers[index]
        if not isinstance(layer, WindowLayer):
            raise MisuseError(f"layer {index} has no local attention")
        return layer

    def _linear(self, index: int) -> LinearAttentionLayer:
        layer: object = self.layers[index]
        if not isinstance(layer, LinearAttentionLayer):
            raise MisuseError(f"layer {index} has no states")
        return layer


def count_tokens(model: torch.nn.Module, arguments: tuple[torch.Tensor, ...], options: dict[str, Any]) -> None:
    """Rows and tokens that `model` is about to compute behind a past. A hook of models that keep states."""
    past = next((value for value in options.values() if isinstance(value, Past)), None)
    if past is not None:
        rows, tokens = (arguments[0] if arguments else options["input_ids"]).shape
        past.repeat(rows)
        past.count(tokens)


def attention(layer: object) -> CacheLayerMixin:
    if not isinstance(layer, CacheLayerMixin):
        raise MisuseError(f"a {type(layer).__name__} has no keys and values")
    return layer


def states_held(layer: object) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of an attention layer, [rows, heads, tokens, width] each."""
    keys, values = (each := attention(layer)).keys, each.values
    if keys is None or values is None:
        raise MisuseError("asked for the keys and values of a layer that nothing was computed of")
    return keys, values


def _gathered(pool: torch.Tensor, blocks: Sequence[int], columns: int) -> torch.Tensor:
    """These blocks of [blocks, heads, tokens of one, width], as the beginning of [1, heads, columns, width]."""
    _, heads, tokens, width = pool.shape
    memory = pool.new_empty(1, heads, columns, width)
    out, first = in_blocks(memory[0, :, : len(blocks) * tokens], tokens), blocks[0]
    if list(blocks) == list(range(first, first + len(blocks))):  # neighbours take three quarters of the time
        out.copy_(pool[first : first + len(blocks)])
    else:
        torch.index_select(pool, 0, torch.tensor(blocks, device=pool.device), out=out)
    return memory


def _tokens_of(layer: object) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """K and V of one row, [1, heads, tokens, width] each; None of a row without tokens."""
    return attention(layer).keys, attention(layer).values


def _aligned(rows: Sequence[torch.Tensor | None], columns: int, room: int = 0) -> torch.Tensor:
    """The rows with their ends in column `columns`, behind zeros, and room behind it."""
    held = [row for row in rows if row is not None]
    _, heads, _, width = held[0].shape
    joined = held[0].new_zeros(len(rows), heads, columns + room, width)
    for out, row in zip(joined, rows, strict=True):
        if row is not None:
            latest = row[0, :, -columns:]
            out[:, columns - latest.shape[1] : columns] = latest
    return joined


def _join_states(rows: Sequence[LinearAttentionLayer], layer: LinearAttentionLayer, times: int = 1) -> None:
    """Begin `layer`, one of them, with the states of all rows; with zeros, as states begin, for one without tokens.
    Each of them so many times.
    """
    found = [{(name, index): state for name, index, state in states_of(row)} for row in rows]
    for name, index, state in list(states_of(layer)):
        kept = layer.conv_states if name == "conv" else layer.recurrent_states
        joined = torch.cat([row.get((name, index), torch.zeros_like(state)) for row in found])
        kept[index] = joined.repeat_interleave(times, dim=0)


def _after_zeros(states: torch.Tensor, count: int) -> torch.Tensor:
    """[tokens, heads, width] behind so many tokens of zeros, as [1, heads, tokens, width]."""
    return torch.cat([states.new_zeros(count, *states.shape[1:]), states]).transpose(0, 1)[None].contiguous()
