"""Windows and states of a past: copied out as bytes that do not depend on when, and back.

Poisoned bytes are what nothing may depend on.
"""

from functools import cache
from itertools import pairwise

import pytest
import torch

from connector.transformers import ModelPast, Past
from connector.transformers.forward import ForwardPass
from connector.transformers.layers import first_seen
from connector.transformers.paged import PagedKV
from cpu_prefix_cache import MisuseError
from random_models import FAMILIES, tiny
from tests.connector.running import BLOCK, prompt

POISON = 0xAB
LOCAL = ("gemma3", "gpt_oss", "llama4")


class Bench:
    """A model, and pasts of it without a cache around them."""

    def __init__(self, family) -> None:
        torch.set_num_threads(1)
        self.model = tiny(family)
        self.past = ModelPast(self.model)
        self.kv = PagedKV(self.past, 1, BLOCK, self.model.device)

    def fresh(self):
        return Past(self.model.config, self.past, self.kv, BLOCK)

    @torch.inference_mode()
    def run(self, past, ids, cuts):
        for begin, end in pairwise([past.get_seq_length(), *cuts]):
            ForwardPass(self.model)(ids[None, begin:end], [begin], past)
        return past

    def begun(self, ids, cuts):
        return self.run(self.fresh(), ids, cuts)

    def window(self, past, group):
        """The blocks that a checkpoint needs where this past ends, each whole, and the first token of them."""
        end = past.get_seq_length()
        first = first_seen(group.local, end) // BLOCK * BLOCK
        rows = poisoned((end - first) // BLOCK, BLOCK * group.token_bytes)
        for row, begin in zip(rows, range(first, end, BLOCK), strict=True):
            past.snapshot_window(group, begin, begin + BLOCK, row)
        return rows, first

    def states(self, past):
        page = poisoned(self.past.states.num_bytes)
        past.snapshot_states(page)
        return page


def poisoned(*shape):
    return torch.full(shape, POISON, dtype=torch.uint8)


@cache
def bench(family):
    return Bench(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_snapshot_of_a_restored_past_has_the_same_bytes(family):
    """The bytes that it is restored from may be given to others at once, and begin at any address."""
    models = bench(family)
    past, again = models.begun(prompt(2), [80]), models.fresh()
    windows = [models.window(past, group) for group in models.past.locals]
    states = models.states(past)
    for group, (blocks, first) in zip(models.past.locals, windows, strict=True):
        lent = blocks.clone()
        again.restore_window(group, first, 80, lent)
        lent.fill_(POISON)
    lent = poisoned(len(states) + 1)
    lent[1:] = states
    again.restore_states(lent[1:])
    lent.fill_(POISON)
    for group, (blocks, first) in zip(models.past.locals, windows, strict=True):
        for at, block in enumerate(blocks):
            begin = first + at * BLOCK
            again.snapshot_window(group, begin, begin + BLOCK, out := poisoned(len(block)))
            assert out.equal(block)
            assert len(blocks) == 1 or not out.equal(blocks[at - 1])
    assert models.states(again).equal(states)


@pytest.mark.parametrize("family", LOCAL)
@pytest.mark.parametrize("chunk", [16, 32, 80])
def test_a_block_has_the_same_bytes_whenever_it_is_taken(family, chunk):
    """So one checkpoint's blocks serve the next one."""
    models, rows = bench(family), {}
    (group,) = models.past.locals
    past = models.fresh()
    for end in (*range(chunk, 161, chunk), 176):
        blocks, first = models.window(models.run(past, prompt(3), [end]), group)
        for at, block in enumerate(blocks):
            assert rows.setdefault(first + at * BLOCK, block).equal(block)
    assert rows


def test_where_a_chunk_of_attention_begins_nothing_of_the_last_one_is_needed():
    models = bench("llama4")
    (group,) = models.past.locals
    assert [len(models.window(models.begun(prompt(4), [end]), group)[0]) for end in (64, 48)] == [0, 1]


def test_parts_stand_layer_by_layer_keys_first():
    parts = [*bench("gpt_oss").past.locals[0].parts, *bench("bamba").past.states]
    assert [(part.layer, part.name) for part in parts] == [
        (layer, name) for names in (("keys", "values"), ("conv", "recurrent")) for layer in (0, 2) for name in names
    ]


def test_latent_attention_has_keys_and_values_of_different_widths():
    keys, values = list(bench("deepseek_v3").past.full)[:2]
    assert (keys.shape, values.shape) == ((1, 16), (1, 4))


# Misuse


def test_a_block_that_is_no_longer_there_is_not_copied_out():
    models = bench("gemma3")
    (group,) = models.past.locals
    past, out = models.begun(prompt(5), [64, 80]), poisoned(BLOCK * group.token_bytes)
    past.snapshot_window(group, 48, 64, out)
    for first in (16, 80):
        with pytest.raises(MisuseError, match=r"but \[34, 80\) are held"):
            past.snapshot_window(group, first, first + BLOCK, out)


def test_a_window_restored_too_short_is_refused():
    models = bench("gemma3")
    (group,) = models.past.locals
    blocks, first = models.window(models.begun(prompt(5), [64]), group)
    with pytest.raises(MisuseError, match="the tokens from 33 are needed, not 48"):
        models.fresh().restore_window(group, first + BLOCK, 64, blocks[1:])


def test_bytes_of_another_size_are_refused():
    models = bench("bamba")
    page = poisoned(models.past.states.num_bytes)
    with pytest.raises(MisuseError, match="otherwise than when it was probed"):
        models.fresh().snapshot_states(page)
    for wrong in (page[1:], page.view(torch.int8), page[None]):
        with pytest.raises(MisuseError, match="does not fit"):
            models.fresh().restore_states(wrong)
    (group,) = bench("gemma3").past.locals
    with pytest.raises(MisuseError, match="does not fit"):
        bench("gemma3").begun(prompt(5), [32]).snapshot_window(group, 0, 16, poisoned(15 * group.token_bytes))
