"""The past of one running request, in all layers of its model, with snapshots and restores.

    full attention    in blocks of the device pool, found by the request's block table
    local attention   the recent tokens, in a LocalLayer; snapshots are blocks of consecutive tokens
    states            in transformers' own layers; a snapshot is one page of all states at one position

A snapshot is plain bytes in the order of past.py. In a block of local attention every part has the shape
[tokens, heads, width]. Snapshots and restores copy: a request never changes the snapshot it was restored from.
"""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin, LinearAttentionLayer

from connector.transformers.layers import FullAndStateLayer, LayerPast, LocalLayer
from connector.transformers.paged import BlockTable, PagedKV
from connector.transformers.past import LocalGroup, ModelPast, Part, states_of
from cpu_prefix_cache import MisuseError

AnyLayer = CacheLayerMixin | LinearAttentionCacheLayerMixin


class WorkingState:
    """The past of one request. `cache` is passed to forward passes as `past_key_values`.

    A fresh one is at position 0. To continue from a boundary b, restore every group of `past.locals` and the states at
    b before the first forward pass. The blocks of full attention must be in `table`.
    """

    def __init__(self, past: ModelPast, kv: PagedKV, table: BlockTable) -> None:
        self._past = past
        self._kv = kv
        self._table = table
        self._layers = [_layer(index, each, kv, table) for index, each in enumerate(past.layers)]
        self.cache = Cache(layers=self._layers)

    def fork(self) -> tuple["WorkingState", BlockTable]:
        """A second request at the same position, which does not change this one, nor a block; and its table."""
        table = self._table.reader()
        twin = WorkingState(self._past, self._kv, table)
        for mine, other in zip(self._layers, twin._layers, strict=True):
            if isinstance(mine, LocalLayer) and isinstance(other, LocalLayer):
                other.continue_from(mine)
        if table.length:
            page = torch.empty(self._past.states.num_bytes, dtype=torch.uint8, device=self._kv.region.device)
            self.snapshot_states(page)
            twin.restore_states(page)
        return twin, table

    def snapshot_window(self, group: LocalGroup, first: int, end: int, out: torch.Tensor) -> None:
        """Write the tokens [first, end) of a local group into `out`, uint8 [(end - first) * group.token_bytes].

        Available are the tokens that a later token can see, from the beginning of a block on, and all that the last
        forward pass computed. Raises MisuseError for other tokens.
        """
        tokens = end - first
        _check_bytes(out, tokens * group.token_bytes)
        for part, span in group.parts.spans(tokens):
            keys, values = self._local(part).held(first, end)
            out[span] = _bytes(keys if part.name == "keys" else values)

    def restore_window(self, group: LocalGroup, first: int, length: int, blocks: torch.Tensor) -> None:
        """Restore the tokens [first, length) of a local group from snapshots of equal size, in order.

        `blocks` is uint8 [blocks, bytes of one], empty where an attention chunk begins (`first` equals `length`).
        Raises MisuseError if a token at `length` can see tokens before `first`.
        """
        tokens = (length - first) // max(len(blocks), 1)
        if blocks.dim() != 2 or tokens * len(blocks) != length - first:
            raise MisuseError(
                f"{list(blocks.shape)} bytes are not the {length - first} tokens [{first}, {length}) in equal blocks"
            )
        if len(blocks):
            _check_bytes(blocks[0], tokens * group.token_bytes)
        states = {}
        for part, span in group.parts.spans(tokens):
            states[part.layer, part.name] = _tensor(blocks[:, span], part.dtype).view(length - first, *part.shape)
        for part in group.parts:
            if part.name == "keys":
                self._local(part).restore(first, length, states[part.layer, "keys"], states[part.layer, "values"])

    def snapshot_states(self, out: torch.Tensor) -> None:
        """Write the present states into `out`, uint8 [past.states.num_bytes].

        Raises MisuseError before the first forward pass, and if a state has another shape or dtype than the probed one.
        """
        _check_bytes(out, self._past.states.num_bytes)
        for part, span in self._past.states.spans():
            found = {(name, index): state for name, index, state in states_of(self._linear(part))}
            state = found.get((part.name, part.index))
            if state is None:
                raise MisuseError("there are no states before the first forward")
            if (tuple(state.shape), state.dtype) != (part.shape, part.dtype):
                raise MisuseError(
                    f"layer {part.layer} keeps its {part.name} state as {list(state.shape)} {state.dtype}, but kept it "
                    f"as {list(part.shape)} {part.dtype} when it was probed: begin with a forward of several tokens"
                )
            out[span] = _bytes(state)

    def restore_states(self, page: torch.Tensor) -> None:
        """Restore all states from `page`, uint8 [past.states.num_bytes], a snapshot at the position to resume from."""
        _check_bytes(page, self._past.states.num_bytes)
        for part, span in self._past.states.spans():
            state = _tensor(page[span], part.dtype).view(part.shape)
            if part.name == "conv":
                self._linear(part).update_conv_state(state, part.index)
            else:
                self._linear(part).update_recurrent_state(state, part.index)

    def _local(self, part: Part) -> LocalLayer:
        layer = self._layers[part.layer]
        if not isinstance(layer, LocalLayer):
            raise MisuseError(f"layer {part.layer} keeps no window: the group is another model's")
        return layer

    def _linear(self, part: Part) -> LinearAttentionLayer:
        layer = self._layers[part.layer]
        if not isinstance(layer, LinearAttentionLayer):
            raise MisuseError(f"layer {part.layer} keeps no states: the page is another model's")
        return layer


def _layer(index: int, past: LayerPast, kv: PagedKV, table: BlockTable) -> AnyLayer:
    if past.local is not None:
        return LocalLayer(past.local, table.block_tokens)
    if past.full and past.states:
        return FullAndStateLayer(kv.layer(index, table), past.states)
    return kv.layer(index, table) if past.full else LinearAttentionLayer(past.states)


def _check_bytes(row: torch.Tensor, num_bytes: int) -> None:
    if row.dtype != torch.uint8 or row.shape != (num_bytes,):
        raise MisuseError(f"a snapshot of {num_bytes} bytes does not fit {row.dtype} {list(row.shape)}")


def _bytes(state: torch.Tensor) -> torch.Tensor:
    return state.contiguous().view(-1).view(torch.uint8)


def _tensor(row: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A copy of the bytes as values. It must be a copy, because a part in a page may not be aligned."""
    return row.clone(memory_format=torch.contiguous_format).view(-1).view(dtype)
