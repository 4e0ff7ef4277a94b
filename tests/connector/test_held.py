"""Attention, windows and states of a past: copied out as bytes that do not depend on when, and back.

Poisoned bytes are what nothing may depend on.
"""

from functools import cache

import pytest
import torch

from connector.transformers import ModelPast, Past
from connector.transformers.layers import STATES
from connector.transformers.past import Kept, PastPart
from connector.transformers.running import logits
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
        self.past = ModelPast(self.model, BLOCK)

    def fresh(self):
        return Past(self.past)

    @torch.inference_mode()
    def run(self, past, ids, cuts):
        for end in cuts:
            logits(self.model, ids[None, :end], past)
        return past

    def begun(self, ids, cuts):
        return self.run(self.fresh(), ids, cuts)

    def window(self, past, kept):
        """The blocks that a checkpoint needs where this past ends, each whole, and the first token of them."""
        end = past.get_seq_length()
        first = kept.first_needed(end)
        return past.taken(kept, first, end), first


@cache
def bench(family):
    return Bench(family)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_taken_of_a_filled_past_are_those_it_was_filled_from(family):
    """The bytes that it is filled from may be given to others at once."""
    models = bench(family)
    past, again = models.begun(prompt(2), [80]), models.fresh()
    rows = {kept: models.window(past, kept) for kept in models.past.kept}
    for kept, (taken, _) in rows.items():
        lent = taken.clone()
        again.fill(kept, lent, 80)
        lent.fill_(POISON)
    for kept, (taken, first) in rows.items():
        assert again.taken(kept, first, 80).equal(taken)
        assert len(taken) == 1 or not taken[1].equal(taken[0])


@pytest.mark.parametrize("family", ["llama", *LOCAL])
def test_each_layer_has_memory_of_its_own(family):
    """transformers replaces one layer after the other: what it has replaced is free before the next."""
    models = bench(family)
    past, again = models.begun(prompt(2), [80]), models.fresh()
    for kept in models.past.kept:
        again.fill(kept, models.window(past, kept)[0], 80)
    held = [each.untyped_storage().data_ptr() for layer in again.layers for each in (layer.keys, layer.values)]
    assert len(set(held)) == len(held)


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
    parts = [*bench("gpt_oss").past.locals[0].parts, *bench("bamba").past.states.parts]
    assert [(part.layer, part.key[0]) for part in parts] == [
        (layer, name) for names in (("keys", "values"), ("conv", "recurrent")) for layer in (0, 2) for name in names
    ]


def test_latent_attention_has_keys_and_values_of_different_widths():
    keys, values = bench("deepseek_v3").past.full.parts[:2]
    assert (keys.shape, values.shape) == ((1, BLOCK, 16), (1, BLOCK, 4))


def test_a_state_begins_where_its_type_can_be_read():
    odd = PastPart(0, ("conv", 0), (1, 3), torch.bfloat16), PastPart(0, ("recurrent", 0), (1, 2), torch.float32)
    kept = Kept(STATES, odd, BLOCK)
    rows = torch.full((1, 16), POISON, dtype=torch.uint8)
    places = [(values.data_ptr() - rows.data_ptr(), values.nbytes) for _, values in kept.views(rows)]
    assert places == [(0, 6), (8, 8)] and kept.row_bytes == 16
    for part, values in kept.views(rows):
        values.fill_(1 + part.key[1])
    assert rows.view(torch.bfloat16)[0, :3].tolist() == [1, 1, 1] and rows.view(torch.float32)[0, 2:].tolist() == [1, 1]


# Misuse


def test_a_block_that_is_no_longer_there_is_not_copied_out():
    models = bench("gemma3")
    (kept,) = models.past.locals
    past = models.begun(prompt(5), [64, 80])
    past.taken(kept, 48, 64)
    for first in (16, 80):
        with pytest.raises(MisuseError, match=r"but \[34, 80\) are held"):
            past.taken(kept, first, first + BLOCK)


def test_a_window_filled_too_short_is_refused():
    models = bench("gemma3")
    (kept,) = models.past.locals
    blocks, _ = models.window(models.begun(prompt(5), [64]), kept)
    with pytest.raises(MisuseError, match="at 64 more tokens are needed than the last 16"):
        models.fresh().fill(kept, blocks[1:], 64)


def test_a_part_that_is_kept_otherwise_is_not_copied_out():
    for family, kind in (("bamba", "states"), ("llama", "full")):
        models = bench(family)
        past, kept = models.begun(prompt(5), [32]), getattr(models.past, kind)
        part = kept.parts[0]
        wrong = Kept(kept.kind, [part._replace(dtype=torch.float16)], BLOCK)
        with pytest.raises(MisuseError, match="otherwise than when it was probed"):
            past.taken(wrong, 0, 32)


def test_states_that_nothing_was_computed_of_are_not_copied_out():
    models = bench("bamba")
    with pytest.raises(MisuseError, match="otherwise than when it was probed"):
        models.fresh().taken(models.past.states, 0, 0)


def test_attention_that_nothing_was_computed_of_is_not_copied_out():
    models = bench("llama")
    past = models.begun(prompt(5), [32])
    past.layers[1] = type(past.layers[1])()
    with pytest.raises(MisuseError, match="layer 1 keeps its keys otherwise than when it was probed"):
        past.taken(models.past.full, 0, 32)
