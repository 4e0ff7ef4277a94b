"""A store that several engines share, below real engines: what one has put there, another one finds.

The first engine is at rest, and may have ended, when the second one begins with empty caches. The control changes what
a value holds and makes its frame fit; then the comparison fails.
"""

import pytest

from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.stores import frame, opening
from cpu_prefix_cache.tiers import promotions
from tests.vllm.memory_by_url import STORES
from tests.vllm.real_cache import BLOCKS, PROMPTS, CachedEngine, expected_of, folder_of
from tests.vllm.real_engine import BLOCK, PATIENCE, TOLERANCE, differences

HOST = 2**25
URL = "memory://one"


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch):
    """Deadlines are of tens of milliseconds, and this machine may be busy."""
    monkeypatch.setattr(promotions, "PENDING_GRACE_SECONDS", PATIENCE)
    monkeypatch.setitem(opening.OURS, "memory", "tests.vllm.memory_by_url:MemoryByUrl")
    STORES.clear()


def engine_on(url=URL, model="llama", *, engine=None, **tier):
    said = {"kind": url.partition(":")[0], "store": url, "ask_seconds": 10, **tier}
    started = CachedEngine(folder_of(model), offload="eager", host_bytes=HOST, engine=engine, tier=said)
    started.rest()  # all ranks have reported that they have the store
    return started


def fill(model="llama", **options):
    with engine_on(model=model, **options) as engine:
        for prompt in PROMPTS:
            engine.answer([prompt])
        engine.rest()
        return engine.half.tier.tier_statistics().cache.chunks_stored


def answers_of(model="llama", **options):
    with engine_on(model=model, **options) as engine:
        answers = [answer for prompt in PROMPTS for answer in engine.answer([prompt])]
        engine.rest()
        return answers, engine.half.tier.tier_statistics()


@pytest.mark.parametrize(("model", "asynchronous"), [("llama", True), ("gemma3", False)])
def test_another_engine_finds_what_the_first_one_has_put_there(model, asynchronous):
    assert fill(model) == len(PROMPTS) * BLOCKS
    answers, seen = answers_of(model, engine=dict(asynchronous=asynchronous))
    assert [answer.loaded_tokens for answer in answers] == [BLOCKS * BLOCK] * len(PROMPTS)
    assert seen.hit_tokens == len(PROMPTS) * BLOCKS * BLOCK and seen.unanswered == seen.refused == 0
    assert max(differences(answers, expected_of(model))) <= TOLERANCE


def test_control_bytes_that_are_wrong_under_a_right_frame_are_seen(monkeypatch):
    fill()
    values = list(STORES[URL].values())
    bodies = [bytes(value[frame.SIZE :]) for value in values]
    for value, other in zip(values, bodies[1:] + bodies[:1], strict=True):
        value[frame.SIZE :] = other
        value[88:104] = bytes(16)  # the checksum
    monkeypatch.setattr(frame, "checksum", lambda view: bytes(16))
    answers, seen = answers_of()
    assert seen.refused == 0 and seen.hit_tokens > 0
    assert max(differences(answers, expected_of("llama"))) > TOLERANCE


def test_other_weights_find_nothing():  # tiers 15
    fill(revision="1")
    _, seen = answers_of(revision="2")
    assert seen.found == seen.hit_tokens == 0


@pytest.mark.parametrize(
    ("tier", "sentence"),
    [
        (dict(kind="redis"), "a tier of kind redis has a URL that begins with redis://, not with memory://"),
        (dict(path="/nvme"), "unknown key 'path' in a tier"),
        (dict(ask_seconds=0), "ask_seconds of a tier is a number of seconds above 0; got 0"),
        (dict(ask_milliseconds=20), "ask_milliseconds of a tier is ask_seconds, in seconds: 0.02 in place of 20"),
    ],
)
def test_invalid_options_of_a_tier_are_refused(tier, sentence):
    with pytest.raises(ConfigurationError, match=sentence):
        engine_on(**tier)
