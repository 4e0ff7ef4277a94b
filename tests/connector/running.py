"""One request at a time over the layers of connector.transformers, without a cache around it.

A snapshot is taken of everything a request keeps, and a request is restored from it into a poisoned pool, its pages in
another order. The pages of full attention are gathered and spread by code of this file.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import torch
from transformers import DynamicCache

from connector.transformers.forward import ForwardPass
from connector.transformers.layers import first_seen
from connector.transformers.paged import PagedKV
from connector.transformers.past import ModelPast
from connector.transformers.rows import BlockTable
from connector.transformers.working import WorkingState
from random_models import tiny

BLOCK = 16
POOL_TOKENS = 208
POISON = 7.7
POISON_BYTE = 0xAB


@dataclass(frozen=True)
class Snapshot:
    """`full` are tensors [tokens, heads, width], `windows` uint8 [blocks, bytes] a group, `states` uint8 [bytes]."""

    length: int
    full: list[torch.Tensor]
    windows: list[torch.Tensor]
    states: torch.Tensor

    def but(self, **changes):
        return replace(self, **changes)


class Bench:
    """A model and its pool."""

    def __init__(self, model, block_tokens=BLOCK, pool_tokens=POOL_TOKENS) -> None:
        self.model = model
        self.block_tokens = block_tokens
        self.past = ModelPast(model)
        self.kv = PagedKV(self.past, pool_tokens // block_tokens, block_tokens, model.device)
        full = [pool for pools in self.kv.pools.values() for pool in pools]
        self.pools = [pool.transpose(1, 2) for pool in full]  # of full attention, [blocks, block_tokens, heads, width]
        self._pages = pool_tokens // block_tokens

    def request(self, order=1):
        """A request without a past, its pages in an order of their own."""
        for pool in self.pools:
            pool.fill_(POISON)
        pages = torch.randperm(self._pages, generator=torch.Generator().manual_seed(order))
        return Running(self, pages.tolist())

    def restored(self, snapshot, order=2):
        request = self.request(order)
        request.restore(snapshot)
        return request

    def begun(self, ids, cuts):
        request = self.request()
        request.run(ids, cuts)
        return request

    @torch.inference_mode()
    def uninterrupted(self, ids, cuts):
        """The logits of all tokens, with transformers' own cache."""
        past = DynamicCache(config=self.model.config)
        return torch.cat([run(self.model, ids, begin, end, past) for begin, end in pairwise([0, *cuts])])


class Running:
    """A request."""

    def __init__(self, bench, pages) -> None:
        self.bench = bench
        self.table = BlockTable(bench.block_tokens)
        self.table.blocks = pages
        self.state = WorkingState(bench.past, bench.kv, self.table)

    @torch.inference_mode()
    def run(self, ids, cuts):
        """Compute up to each cut in turn. The logits of every token computed."""
        logits = []
        for cut in cuts:
            begin = self.table.length
            self.table.begin_forward(cut - begin, ids.device)
            logits.append(run(self.bench.model, ids, begin, cut, self.state.cache))
            self.table.end_forward()
        return torch.cat(logits)

    def snapshot(self):
        length = self.table.length
        states = poisoned(self.bench.past.states.num_bytes)
        self.state.snapshot_states(states)
        full = [pool[self.table.blocks].flatten(0, 1)[:length].clone() for pool in self.bench.pools]
        return Snapshot(length, full, [self.window(group) for group in self.bench.past.locals], states)

    def window(self, group):
        """The blocks that a checkpoint here needs, each whole."""
        first = first_seen(group.local, self.table.length) // self.bench.block_tokens * self.bench.block_tokens
        return self.blocks(group, first, self.table.length)

    def blocks(self, group, first, end):
        tokens = self.bench.block_tokens
        rows = poisoned((end - first) // tokens, tokens * group.token_bytes)
        for row, begin in zip(rows, range(first, end, tokens), strict=True):
            self.state.snapshot_window(group, begin, begin + tokens, row)
        return rows

    def restore(self, snapshot):
        length = self.table.length = snapshot.length
        tokens = self.bench.block_tokens
        for pool, states in zip(self.bench.pools, snapshot.full, strict=True):
            for page, each in zip(self.table.blocks, states.split(tokens), strict=False):
                pool[page, : len(each)] = each
        for group, blocks in zip(self.bench.past.locals, snapshot.windows, strict=True):
            self.state.restore_window(group, length - len(blocks) * self.bench.block_tokens, length, blocks)
        self.state.restore_states(snapshot.states)


def run(model, ids, begin, end, past):
    return ForwardPass(model)(ids[None, begin:end], [begin], past)[0]


def poisoned(*shape):
    return torch.full(shape, POISON_BYTE, dtype=torch.uint8)


def error(logits, reference):
    """How far apart they are, in deviations of the reference."""
    return float((logits - reference).abs().max() / reference.std())


def prompt(seed, length=POOL_TOKENS):
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed))


@cache
def bench(family, block_tokens=BLOCK):
    torch.set_num_threads(1)
    return Bench(tiny(family), block_tokens)
