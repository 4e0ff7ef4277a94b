"""The past of the running requests that are computed together, in all layers of their model.

    full attention    in blocks of the device pool, found by each request's block table
    local attention   the recent tokens, in a LocalLayer; snapshots are blocks of consecutive tokens
    states            in transformers' own layers; a snapshot is one page of all states at one position

A request begins as the only row of a state of its own. `joined` makes one state of rows of several, to decode them
together, or of those of a state whose requests go on.

A snapshot is of one row, plain bytes in the order of past.py. In a block of local attention every part has the shape
[tokens, heads, width]. Snapshots, restores and joins copy: a request never changes what it was made from.
"""

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, LinearAttentionLayer

from connector.transformers.layers import FullAndStateLayer, LayerPast, LocalLayer, NothingLayer
from connector.transformers.paged import PagedKV
from connector.transformers.past import LocalGroup, ModelPast, PastPart, states_of
from connector.transformers.rows import BlockTable, Rows
from connector.transformers.snapshots import as_bytes, as_tensor, check_bytes, set_state
from cpu_prefix_cache import MisuseError


class WorkingState:
    """The past of one row for each table. `cache` is passed to forward passes as `past_key_values`.

    A fresh one is at position 0. To continue a single row from a boundary b, restore every group of `past.locals` and
    the states at b before the first forward pass. The blocks of full attention must be in its table.
    """

    def __init__(self, past: ModelPast, kv: PagedKV, *tables: BlockTable) -> None:
        self._past = past
        self._kv = kv
        self.rows = Rows(tables)
        kept = list(enumerate(past.layers))
        self._full = {index: kv.layer(index, self.rows) for index, each in kept if each.full}
        self._locals = {index: LocalLayer(each.local, self.rows) for index, each in kept if each.local is not None}
        self._states = {index: self._with_states(index, each) for index, each in kept if each.states}
        layers: dict[int, Any] = self._full | self._locals | self._states  # with full attention and states: the last
        self.cache = Cache(layers=[layers[index] if index in layers else NothingLayer() for index, _ in kept])

    @staticmethod
    def joined(sources: Sequence[tuple["WorkingState", int]]) -> "WorkingState":
        """A state of these rows, each of which has had its first forward pass; of all rows of one state that state."""
        first, _ = sources[0]
        if sources == [(first, row) for row in range(len(first.rows))]:
            return first
        state = WorkingState(first._past, first._kv, *(source.rows.tables[at] for source, at in sources))
        state._join_recent(sources)
        for index, layer in state._full.items():
            layer.join([(source._full[index], at) for source, at in sources])
        return state

    def fork(self) -> "WorkingState":
        """A second request at the position of the only row, which does not change this one, nor a block."""
        table = self.rows.tables[0].reader()
        twin = WorkingState(self._past, self._kv, table)
        if table.length:
            twin._join_recent([(self, 0)])  # full attention is in the blocks
        return twin

    def snapshot_window(self, group: LocalGroup, first: int, end: int, out: torch.Tensor, row: int = 0) -> None:
        """Write the tokens [first, end) of a row in a local group to `out`, uint8 [(end - first) * group.token_bytes].

        Available are the tokens that a later token can see, from the beginning of a block on, and all that the last
        forward pass computed. Raises MisuseError for other tokens.
        """
        tokens = end - first
        check_bytes(out, tokens * group.token_bytes)
        for part, span in group.parts.spans(tokens):
            keys, values = self._local(part).held(row, first, end)
            out[span] = as_bytes(keys if part.name == "keys" else values)

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
            check_bytes(blocks[0], tokens * group.token_bytes)
        states = {}
        for part, span in group.parts.spans(tokens):
            states[part.layer, part.name] = as_tensor(blocks[:, span], part.dtype).view(length - first, *part.shape)
        for part in group.parts:
            if part.name == "keys":
                self._local(part).restore(first, length, states[part.layer, "keys"], states[part.layer, "values"])

    def snapshot_states(self, out: torch.Tensor, row: int = 0) -> None:
        """Write the present states of a row into `out`, uint8 [past.states.num_bytes].

        Raises MisuseError before the first forward pass, and if a state has another shape or dtype than the probed one.
        """
        check_bytes(out, self._past.states.num_bytes)
        for part, span in self._past.states.spans():
            found = {(name, index): state[row, None] for name, index, state in states_of(self._linear(part))}
            state = found.get((part.name, part.index))
            if state is None:
                raise MisuseError("there are no states before the first forward")
            if (tuple(state.shape), state.dtype) != (part.shape, part.dtype):
                raise MisuseError(
                    f"layer {part.layer} keeps its {part.name} state as {list(state.shape)} {state.dtype}, but kept it "
                    f"as {list(part.shape)} {part.dtype} when it was probed: begin with a forward of several tokens"
                )
            out[span] = as_bytes(state)

    def restore_states(self, page: torch.Tensor) -> None:
        """Restore all states from `page`, uint8 [past.states.num_bytes], a snapshot at the position to resume from."""
        check_bytes(page, self._past.states.num_bytes)
        for part, span in self._past.states.spans():
            state = as_tensor(page[span], part.dtype).view(part.shape)
            set_state(self._linear(part), part.name, part.index, state)

    def _join_recent(self, sources: Sequence[tuple["WorkingState", int]]) -> None:
        """Begin with the windows and states of these rows of others."""
        for index, local in self._locals.items():
            local.join([(source._locals[index], at) for source, at in sources])
        for index, layer in self._states.items():
            rows = [states_of(source._states[index]) for source, _ in sources]
            for same in zip(*rows, strict=True):
                name, number, _ = same[0]
                states = [each[at, None] for (_, _, each), (_, at) in zip(same, sources, strict=True)]
                set_state(layer, name, number, torch.cat(states))

    def _with_states(self, index: int, past: LayerPast) -> LinearAttentionLayer:
        if past.full:
            return FullAndStateLayer(self._full[index], past.states)
        return LinearAttentionLayer(past.states)

    def _local(self, part: PastPart) -> LocalLayer:
        layer = self._locals.get(part.layer)
        if layer is None:
            raise MisuseError(f"layer {part.layer} keeps no window: the group is another model's")
        return layer

    def _linear(self, part: PastPart) -> LinearAttentionLayer:
        layer = self._states.get(part.layer)
        if layer is None:
            raise MisuseError(f"layer {part.layer} keeps no states: the page is another model's")
        return layer
