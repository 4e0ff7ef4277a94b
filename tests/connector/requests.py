"""One request at a time over the layers of connector.transformers, without a cache around it."""

import torch

from connector.transformers.paged import BlockTable, PagedKV
from connector.transformers.past import ModelPast
from connector.transformers.working import WorkingState

BLOCK = 16
BLOCKS = 24
POISON = 7.7


class Bench:
    """A model, and a pool whose pages are poisoned and handed out in no order."""

    def __init__(self, model) -> None:
        self.model = model
        self.past = ModelPast(model)
        self.kv = PagedKV(self.past, BLOCKS, BLOCK, model.device)
        for pool in self.kv.tensors:
            pool.fill_(POISON)
        self.pages = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1)).tolist()

    def request(self, length=0):
        """A request that has `length` tokens in the pages already."""
        return Running(self, length)


class Running:
    def __init__(self, bench, length) -> None:
        self.bench = bench
        self.table = BlockTable(BLOCK)
        self.table.blocks = list(bench.pages)
        self.table.length = length
        self.state = WorkingState(bench.past, bench.kv, self.table)

    @torch.inference_mode()
    def run(self, ids, cuts):
        """Compute up to each cut in turn. The logits of every computed token."""
        logits = []
        for cut in cuts:
            begin = self.table.length
            self.table.begin_forward(cut - begin, ids.device)
            output = self.bench.model(
                ids[None, begin:cut],
                position_ids=torch.arange(begin, cut)[None],
                past_key_values=self.state.cache,
                use_cache=True,
            )
            self.table.end_forward()
            logits.append(output.logits[0])
        return torch.cat(logits)

    def windows(self, first_block=True):
        """For each local group, the blocks that a checkpoint here needs: first token, and bytes [blocks, bytes]."""
        return [
            self.blocks(group, floor(group.local.first(self.table.length)), self.table.length)
            for group in self.bench.past.locals
        ]

    def blocks(self, group, first, end):
        rows = torch.full((-(-(end - first) // BLOCK), BLOCK * group.token_bytes), 0xAB, dtype=torch.uint8)
        for row, begin in zip(rows, range(first, end, BLOCK), strict=True):
            self.state.snapshot_window(group, begin, begin + BLOCK, row)
        return rows

    def states(self):
        page = torch.full((self.bench.past.states.num_bytes,), 0xAB, dtype=torch.uint8)
        self.state.snapshot_states(page)
        return page

    def restore(self, windows, states):
        length = self.table.length
        for group, blocks in zip(self.bench.past.locals, windows, strict=True):
            self.state.restore_window(group, length - BLOCK * len(blocks), length, blocks)
        self.state.restore_states(states)
        return self


def floor(position):
    return position - position % BLOCK
