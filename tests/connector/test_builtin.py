"""The built-in models of --arch see a damaged piece of a long document, after a question of ordinary length."""

from functools import cache
from pydoc_data.topics import topics

import pytest
import torch

from builtin_models import ARCHITECTURES, build_model
from connector.transformers.continuing import Continuation, check_continues
from cpu_prefix_cache import ConfigurationError
from tests.connector.damages import DAMAGES, nothing
from tests.connector.running import BLOCK, Bench, error

TOLERANCE = 1e-4
PROMPTS = 8
AT, END = 1_024, 1_064
DOCUMENTS = [topics[name].encode()[:END] for name in sorted(topics) if len(topics[name]) >= END][:PROMPTS]


@cache
def bench(arch):
    torch.set_num_threads(1)
    return Bench(build_model(arch), pool_tokens=END + BLOCK)


@cache
def prepared(arch, seed):
    """A snapshot at AT, the states a chunk earlier, and the logits of the last token."""
    models, ids = bench(arch), torch.tensor(list(DOCUMENTS[seed]))
    cuts = [*range(256, AT + 1, 256), END]
    request = models.begun(ids, cuts[:-2])
    stale = request.snapshot().states
    request.run(ids, cuts[-2:-1])
    return ids, request.snapshot(), stale, models.uninterrupted(ids, cuts)[-1]


def seen(arch, damage):
    """In how many documents the damage shows."""
    models, count = bench(arch), 0
    for seed in range(PROMPTS):
        ids, snapshot, stale, reference = prepared(arch, seed)
        logits = models.restored(damage(models.past, snapshot, stale, seed)).run(ids, [END])[-1]
        count += error(logits, reference) > TOLERANCE
    return count


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_without_damage_nothing_shows(arch):
    assert seen(arch, nothing) == 0


@pytest.mark.parametrize(
    ("arch", "damage"),
    [(arch, damage) for arch, family in ARCHITECTURES.items() for damage in DAMAGES[family]],
    ids=lambda each: each if isinstance(each, str) else each.__name__,
)
def test_control_every_damage_shows(arch, damage):
    assert seen(arch, damage) >= PROMPTS - 1


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_goes_on_with_any_number_of_tokens(arch):
    models = bench(arch)
    assert check_continues(models.model, models.past) is Continuation.CHUNKS


def test_an_architecture_that_is_not_there_is_refused():
    with pytest.raises(ConfigurationError, match="known are full, swa, hybrid, mla"):
        build_model("rnn")
