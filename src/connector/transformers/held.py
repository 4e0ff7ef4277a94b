"""The past of one prompt in transformers' own cache, and what is copied between it and blocks.

    full attention    keys and values of every token, in transformers' layers; copied block by block
    local attention   the recent tokens, in a WindowLayer, which keeps whole blocks
    states            in transformers' layers; one page of all states at one position

Everything is of one row. Beams and candidates, which `generate` makes of it, have the prompt in common.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from connector.transformers.layers import first_seen
from connector.transformers.paged import PagedKV, in_blocks
from connector.transformers.past import LocalGroup, ModelPast, PastPart, states_of
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
    """`past_key_values` for one prompt, of which it holds the first `hit_tokens` tokens when it is handed out.

    `device_hit_tokens` of them were in device blocks. It is the argument of one `generate` or of several calls of the
    model that go on with each other.
    """

    def __init__(self, config: PretrainedConfig, past: ModelPast, kv: PagedKV, block_tokens: int) -> None:
        super().__init__(config=config)
        self.hit_tokens = self.device_hit_tokens = 0
        self._config, self._past, self._kv, self._block_tokens, self._rows = config, past, kv, block_tokens, 1
        self._begun = 0  # tokens when it was handed out
        self._goes_on: Callable[[int], object] | None = None  # called once, before the first tokens behind it
        self._count = None if past.has_attention else TokenCount()
        self._keep_whole_blocks()
        self.layers += [] if self._count is None else [self._count]

    def hand_out(self, hit_tokens: int, device_hit_tokens: int, goes_on: Callable[[int], object]) -> None:
        """Nothing more is filled in. `goes_on` is called with how many tokens first come behind it."""
        self.hit_tokens, self.device_hit_tokens, self._begun = hit_tokens, device_hit_tokens, self.get_seq_length()
        self._goes_on = goes_on

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
        if len(key_states) > self._rows:  # `generate` makes several answers: what is here is the beginning of each
            self.batch_repeat_interleave(len(key_states) // self._rows)
            self._rows = len(key_states)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def count(self, tokens: int) -> None:
        """So many tokens come behind, in a past of states alone."""
        self._begin_behind(tokens)
        if self._count is not None:
            self._count.tokens += tokens

    def read(self, blocks: Sequence[int]) -> None:
        """Begin with the tokens of these blocks of full attention."""
        ids = torch.tensor(blocks, device=self._kv.region.device)
        for index, pools in self._kv.pools.items():
            keys, values = (_gathered(pool, ids) for pool in pools)
            layer = attention(self.layers[index])
            layer.lazy_initialization(keys, values)
            layer.keys, layer.values = keys, values

    def write(self, blocks: Sequence[int], first: int) -> None:
        """Write the tokens from `first` on, as many as they hold, to these blocks of full attention."""
        ids, tokens = torch.tensor(blocks, device=self._kv.region.device), len(blocks) * self._block_tokens
        for index, pools in self._kv.pools.items():
            for pool, held in zip(pools, states_held(self.layers[index]), strict=True):
                pool[ids] = in_blocks(held[0, :, first : first + tokens], self._block_tokens)

    def snapshot_window(self, group: LocalGroup, first: int, end: int, out: torch.Tensor, row: int = 0) -> None:
        """Write the tokens [first, end) of a local group to `out`, uint8 [(end - first) * group.token_bytes]."""
        check_bytes(out, (end - first) * group.token_bytes)
        for part, span in group.parts.spans(end - first):
            keys, values = self._window(part).held(first, end)
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
                self._window(part).restore(first, length, *both)

    def snapshot_states(self, out: torch.Tensor, row: int = 0) -> None:
        """Write all states into `out`, uint8 [bytes of the page]. MisuseError for one that is not as it was probed."""
        check_bytes(out, self._past.states.num_bytes)
        for part, span in self._past.states.spans():
            found = {(name, index): state for name, index, state in states_of(self._linear(part))}
            state = found.get((part.name, part.index))
            if state is None or (tuple(state[:1].shape), state.dtype) != (part.shape, part.dtype):
                raise MisuseError(f"layer {part.layer} keeps its {part.name} state otherwise than when it was probed")
            out[span] = as_bytes(state[:1])

    def restore_states(self, page: torch.Tensor) -> None:
        """Restore all states from `page`, a snapshot at the position to resume from."""
        check_bytes(page, self._past.states.num_bytes)
        for part, span in self._past.states.spans():
            state = as_tensor(page[span], part.dtype).view(part.shape)
            set_state(self._linear(part), part.name, part.index, state)

    def _begin_behind(self, tokens: int) -> None:
        if self._goes_on is not None:
            goes_on, self._goes_on = self._goes_on, None
            goes_on(tokens)

    def _keep_whole_blocks(self) -> None:
        for index, layer in enumerate(self._past.layers):
            if layer.local is not None:
                self.layers[index] = WindowLayer(layer.local.window_tokens, self._block_tokens)

    def _window(self, part: PastPart) -> WindowLayer:
        layer = self.layers[part.layer]
        if not isinstance(layer, WindowLayer):
            raise MisuseError(f"layer {part.layer} has no local attention")
        return layer

    def _linear(self, part: PastPart) -> LinearAttentionLayer:
        layer: object = self.layers[part.layer]
        if not isinstance(layer, LinearAttentionLayer):
            raise MisuseError(f"layer {part.layer} has no states")
        return layer


def count_tokens(model: torch.nn.Module, arguments: tuple[torch.Tensor, ...], options: dict[str, Any]) -> None:
    """Count what `model` is about to compute behind a past. A hook of models that keep states alone."""
    past = next((value for value in options.values() if isinstance(value, Past)), None)
    if past is not None:
        past.count((arguments[0] if arguments else options["input_ids"]).shape[1])


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


def _gathered(pool: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """These blocks of [blocks, heads, tokens of one, width], as [1, heads, tokens, width]."""
    _, heads, tokens, width = pool.shape
    joined = pool.new_empty(1, heads, len(ids) * tokens, width)
    torch.index_select(pool, 0, ids, out=in_blocks(joined[0], tokens))
    return joined


def _after_zeros(states: torch.Tensor, count: int) -> torch.Tensor:
    """[tokens, heads, width] behind so many tokens of zeros, as [1, heads, tokens, width]."""
    return torch.cat([states.new_zeros(count, *states.shape[1:]), states]).transpose(0, 1)[None].contiguous()
