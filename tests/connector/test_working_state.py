"""A request restored from a snapshot goes on as if it had never stopped, in every family of models.

The reference runs on transformers' own cache, with the same cuts. The second half of the file is the control: damage
any one piece of the snapshot and the same comparison must fail, in at least 7 of 8 prompts. A comparison that let a
damage pass would prove nothing about the other pieces either.
"""

from functools import cache
from itertools import pairwise

import pytest
import torch

from cpu_prefix_cache import MisuseError
from random_models import FAMILIES
from tests.connector.damages import (
    CONVOLUTION,
    DAMAGES,
    PAGE,
    RECURRENT,
    WINDOW,
    nothing,
)
from tests.connector.running import BLOCK, POISON_BYTE, bench, error, poisoned, prompt

TOLERANCE = 1e-4
CONTINUING = [family for family in FAMILIES if family != "jamba"]
LOCAL = ["gemma3", "gpt_oss", "llama4"]
BOUNDARIES = [  # (tokens of a block, boundary, cuts before it): on and off the edges of windows, blocks and chunks
    (16, 16, [16]),
    (16, 32, [16, 32]),
    (16, 48, [32, 48]),
    (16, 112, [112]),  # one chunk, longer than three windows
    (16, 128, [16, 96, 128]),
    (1, 1, [1]),
    (1, 31, [7, 31]),
    (1, 32, [32]),
    (1, 33, [32, 33]),
    (1, 63, [62, 63]),
    (1, 65, [65]),
]


@pytest.mark.parametrize("family", CONTINUING)
@pytest.mark.parametrize(("block", "boundary", "cuts"), BOUNDARIES)
def test_a_restored_request_goes_on_as_if_it_had_never_stopped(family, block, boundary, cuts):
    models, ids = bench(family, block), prompt(boundary)
    snapshot = models.begun(ids, cuts).snapshot()
    tail = [boundary + more for more in (2, 3, 4, 44, 45)]  # decode steps, and a chunk longer than a window
    whole = models.uninterrupted(ids, [*cuts, *tail])
    assert error(models.restored(snapshot).run(ids, tail), whole[boundary:]) <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_it_goes_on_token_by_token(family):
    """The only way for Jamba, whose states are read by single tokens alone."""
    models, ids = bench(family), prompt(1)
    snapshot = models.begun(ids, [64]).snapshot()
    tail = list(range(65, 75))
    whole = models.uninterrupted(ids, [64, *tail])
    assert error(models.restored(snapshot).run(ids, tail), whole[64:]) <= TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_a_snapshot_of_a_restored_request_has_the_same_bytes(family):
    models, ids = bench(family), prompt(2)
    snapshot = models.begun(ids, [64]).snapshot()
    restored = models.restored(snapshot)
    again = restored.snapshot()
    assert all(map(torch.equal, [*snapshot.full, *snapshot.windows], [*again.full, *again.windows]))
    assert snapshot.states.equal(again.states)


@pytest.mark.parametrize("family", FAMILIES)
def test_restored_states_are_copied_from_any_address(family):
    """Pages and blocks may be given to others at once, and begin at any byte."""
    models, ids = bench(family), prompt(2)
    snapshot = models.begun(ids, [48]).snapshot()  # for llama4 a single block: the easiest to share by mistake
    region = poisoned(len(snapshot.states) + 1)
    region[1:] = snapshot.states
    restored = models.restored(snapshot.but(states=region[1:]))
    for lent in (region, *snapshot.windows):
        lent.fill_(POISON_BYTE)
    logits = restored.run(ids, [49, 50])
    assert error(logits, models.uninterrupted(ids, [48, 49, 50])[48:]) <= TOLERANCE
    assert all(lent.eq(POISON_BYTE).all() for lent in (region, *snapshot.windows))


@pytest.mark.parametrize("family", LOCAL)
@pytest.mark.parametrize("chunk", [16, 32, 80])
def test_blocks_taken_at_different_boundaries_make_one_window(family, chunk):
    """A block has the same bytes whenever it is taken, so one checkpoint's blocks serve the next one."""
    models, ids = bench(family), prompt(3)
    (group,) = models.past.locals
    request, rows = models.request(), {}
    cuts = [*range(chunk, 161, chunk), 176]
    for begin, end in pairwise([0, *cuts]):
        request.run(ids, [end])
        for first in range(begin, end, BLOCK):
            rows[first] = request.blocks(group, first, first + BLOCK)[0]
    snapshot = request.snapshot()
    needed = range(176 - BLOCK * len(snapshot.windows[0]), 176, BLOCK)
    recombined = [torch.stack([rows[first] for first in needed])]
    assert recombined[0].equal(snapshot.windows[0])
    whole = models.uninterrupted(ids, [*cuts, 178, 179])
    assert error(models.restored(snapshot.but(windows=recombined)).run(ids, [178, 179]), whole[176:]) <= TOLERANCE


def test_where_a_chunk_of_attention_begins_nothing_of_the_last_one_is_needed():
    models, ids = bench("llama4"), prompt(4)
    snapshot = models.begun(ids, [64]).snapshot()
    assert snapshot.windows[0].shape[0] == 0
    assert models.begun(ids, [48]).snapshot().windows[0].shape[0] == 1
    assert error(models.restored(snapshot).run(ids, [66]), models.uninterrupted(ids, [64, 66])[64:]) <= TOLERANCE


# --- the control: every damage shows -----------------------------------------------------------------------------

AT = 112  # in the middle of a chunk of 32
TAIL = [113, 114]
PROMPTS = 8


@cache
def prepared(family, seed):
    """A snapshot at AT, the states a block earlier, and the logits to go on to."""
    models, ids = bench(family), prompt(seed)
    cuts = [AT] if family == "jamba" else [AT - BLOCK, AT]
    snapshot = models.begun(ids, cuts).snapshot()
    stale = models.begun(ids, [AT - BLOCK]).snapshot().states
    return snapshot, stale, models.uninterrupted(ids, [*cuts, *TAIL])[AT:]


def seen(family, damage):
    """In how many prompts the damage shows."""
    models, count = bench(family), 0
    for seed in range(PROMPTS):
        snapshot, stale, reference = prepared(family, seed)
        logits = models.restored(damage(models.past, snapshot, stale, seed)).run(prompt(seed), TAIL)
        count += error(logits[-1:], reference[-1:]) > TOLERANCE
    return count


@pytest.mark.parametrize("family", FAMILIES)
def test_without_damage_nothing_shows(family):
    assert seen(family, nothing) == 0


@pytest.mark.parametrize(
    ("family", "damage"),
    [(family, damage) for family, damages in DAMAGES.items() for damage in damages],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_control_every_damage_shows(family, damage):
    assert seen(family, damage) >= PROMPTS - 1


def test_the_controls_cover_whatever_a_model_keeps():
    assert DAMAGES.keys() == FAMILIES.keys()
    for family, damages in DAMAGES.items():
        past = bench(family).past
        kept = {part.name for part in past.states}
        assert (past.full.num_bytes > 0, bool(past.locals)) == (set(PAGE) <= set(damages), set(WINDOW) <= set(damages))
        assert ("conv" in kept, "recurrent" in kept) == (
            set(CONVOLUTION) <= set(damages),
            set(RECURRENT) <= set(damages),
        )


def test_control_jamba_does_not_go_on_with_several_tokens():
    count = 0
    for seed in range(PROMPTS):
        snapshot, _, reference = prepared("jamba", seed)
        logits = bench("jamba").restored(snapshot).run(prompt(seed), TAIL[-1:])
        count += error(logits[-1:], reference[-1:]) > TOLERANCE
    assert count >= PROMPTS - 1


# --- the place of each byte, which logits cannot show -----------------------------------------------------------------


def feed(request, cuts):
    """Fill every attention layer with K and V that encode their place: layer, K or V, token, head, width."""
    for cut in cuts:
        begin = request.table.length
        request.table.begin_forward(cut - begin, torch.device("cpu"))
        for part in (*request.bench.past.full, *(part for group in request.bench.past.locals for part in group.parts)):
            if part.name == "keys":
                keys, values = (pattern(part.layer, name, begin, cut, part.shape) for name in ("keys", "values"))
                shown = request.state.cache.update(*(each.transpose(0, 1)[None] for each in (keys, values)), part.layer)
                yield part, cut, shown
        request.table.end_forward()


def pattern(layer, name, begin, end, shape):
    """[tokens, heads, width], no two values alike (width and heads of the tiny models are at most 16 and 4)."""
    tokens = torch.arange(begin, end)
    heads = torch.arange(shape[0])
    width = torch.arange(shape[1])
    place = (2 * layer + (name == "values")) * 256 + tokens[:, None, None]
    return (place * 64 + heads[:, None] * 16 + width).float()


@pytest.mark.parametrize("family", ["gpt_oss", "llama4"])
@pytest.mark.parametrize("cuts", [[16, 32, 48, 64, 80], [80], [33, 34, 79, 80], list(range(1, 81))])
def test_every_token_is_where_it_belongs(family, cuts):
    models = bench(family)
    request = models.request()
    for part, end, (keys, values) in feed(request, cuts):
        first = end - keys.shape[2]
        assert keys[0].transpose(0, 1).equal(pattern(part.layer, "keys", first, end, part.shape))
        assert values[0].transpose(0, 1).equal(pattern(part.layer, "values", first, end, part.shape))
    snapshot = request.snapshot()
    for part, states in zip(models.past.full, snapshot.full, strict=True):
        assert states.equal(pattern(part.layer, part.name, 0, 80, part.shape))
    (group,) = models.past.locals
    first = 80 - BLOCK * len(snapshot.windows[0])
    assert first == {"gpt_oss": 48, "llama4": 64}[family]
    for number, block in enumerate(snapshot.windows[0]):
        begin = first + number * BLOCK
        row = [pattern(part.layer, part.name, begin, begin + BLOCK, part.shape).flatten() for part in group.parts]
        assert block.equal(torch.cat(row).view(torch.uint8))
    restored = models.restored(snapshot)
    for part, end, (keys, _) in feed(restored, [81, 100]):
        assert keys[0].transpose(0, 1).equal(pattern(part.layer, "keys", end - keys.shape[2], end, part.shape))


def test_parts_stand_layer_by_layer_keys_first():
    past = bench("gpt_oss").past
    assert [(part.layer, part.name) for part in past.locals[0].parts] == [
        (0, "keys"),
        (0, "values"),
        (2, "keys"),
        (2, "values"),
    ]
    assert [(part.layer, part.name) for part in bench("bamba").past.states] == [
        (0, "conv"),
        (0, "recurrent"),
        (2, "conv"),
        (2, "recurrent"),
    ]


def test_latent_attention_has_keys_and_values_of_different_widths():
    keys, values = list(bench("deepseek_v3").past.full)[:2]
    assert (keys.shape, values.shape) == ((1, 16), (1, 4))


# --- misuse ------------------------------------------------------------------------------------------------------


def test_a_block_that_is_no_longer_there_is_not_snapshotted():
    models, ids = bench("gemma3"), prompt(5)
    (group,) = models.past.locals
    request = models.begun(ids, [64, 80])
    request.blocks(group, 32, 80)  # what the chunk [64, 80) could see is still there
    out = poisoned(BLOCK * group.token_bytes)
    for first in (16, 80):
        with pytest.raises(MisuseError, match=r"but \[32, 80\) are held"):
            request.state.snapshot_window(group, first, first + BLOCK, out)
    assert out.eq(poisoned(1)).all()


def test_a_window_restored_too_short_is_refused():
    models, ids = bench("gemma3"), prompt(5)
    snapshot = models.begun(ids, [64]).snapshot()
    with pytest.raises(MisuseError, match="needs the tokens from 33; got those from 48"):
        models.restored(snapshot.but(windows=[snapshot.windows[0][1:]]))
    request = models.restored(snapshot)
    with pytest.raises(MisuseError, match="in a layer that is not fresh"):
        request.restore(snapshot)


def test_bytes_of_another_size_are_refused():
    models = bench("bamba")
    request = models.request()
    page = poisoned(models.past.states.num_bytes)
    with pytest.raises(MisuseError, match="no states before the first forward"):
        request.state.snapshot_states(page)
    for wrong in (page[1:], page.view(torch.int8), page[None]):
        with pytest.raises(MisuseError, match="does not fit"):
            request.state.restore_states(wrong)
    (group,) = bench("gemma3").past.locals
    with pytest.raises(MisuseError, match="in equal blocks"):
        bench("gemma3").request().state.restore_window(group, 0, 32, poisoned(3, 10 * group.token_bytes))
    with pytest.raises(MisuseError, match="does not fit"):
        bench("gemma3").request().state.restore_window(group, 0, 32, poisoned(2, 15 * group.token_bytes))
