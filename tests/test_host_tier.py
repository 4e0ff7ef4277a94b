"""A HostCache with a tier of files, in the batching engine of the examples: answers are those of the model alone.

The host has room for a fifth of the documents, so prefixes go to the files and come back; and a second engine finds
what the first one left. Logits are compared, and a copier that damages what it loads must be seen.
"""

import logging
from functools import cache

import pytest
import torch

from batching_engine import BLOCK_TOKENS, Engine, Request, prompts
from cpu_prefix_cache import ChainHasher, ConfigurationError, FileTier, MisuseError
from tests.troubled_copiers import COPIERS
from tiny_model import answer_alone

BLOCK_BYTES = 4096  # K and V of two layers, 16 tokens, 8 numbers of 8 bytes
HOST_BLOCKS = 60
OUTPUT = 6
MODES = ["lazy", "eager"]


@cache
def alone(prompt):
    return answer_alone(list(prompt), OUTPUT)


def tier(path, **said):
    return FileTier(str(path), 2 << 20, model="tiny", revision="1", **said)


def engine_with(below, **options):
    engine = Engine(
        num_blocks=40,
        host_bytes=HOST_BLOCKS * BLOCK_BYTES,
        max_model_len=1_000,
        below=below,
        **{"strict": True, **options},
    )
    engine.hasher = ChainHasher(BLOCK_TOKENS, "sha256")
    return engine


def serve(engine, number=40, seed=0, each_step=lambda engine: None):
    """The numbers of the prompts whose answers are not the model's own, and what the tier came to."""
    requests = [Request(at, prompt, OUTPUT) for at, prompt in enumerate(prompts(number, seed))]
    for request in requests:
        engine.add(request)
    while not engine.is_idle:
        engine.step()
        engine.host.cache.check_valid()
        each_step(engine)
    wrong = []
    for request in requests:
        tokens, logits = alone(tuple(request.tokens[: request.num_prompt]))
        if tokens != request.answer or not torch.allclose(logits, torch.stack(request.logits)):
            wrong.append(request.id)
    return wrong, engine.host.statistics().tier


@pytest.mark.parametrize("mode", MODES)
def test_prefixes_that_left_the_host_come_back_from_the_files(tmp_path, mode):
    engine = engine_with(tier(tmp_path, offload=mode))
    wrong, seen = serve(engine)
    engine.host.close()
    assert wrong == []
    assert seen.hit_tokens > 0 and seen.cache.chunks_loaded > 0, "nothing came from the tier: this compares nothing"
    assert seen.refused == 0 and seen.state == "open" and seen.mode == mode


@pytest.mark.parametrize("mode", MODES)
def test_a_second_engine_finds_what_the_first_one_left(tmp_path, mode):
    first = engine_with(tier(tmp_path, offload=mode))
    serve(first)
    first.host.close()
    second = engine_with(tier(tmp_path, offload=mode))
    wrong, seen = serve(second)
    second.host.close()
    assert wrong == []
    assert seen.found > HOST_BLOCKS, "lazy writes at the end what only the host had"
    assert seen.hit_tokens > seen.found * BLOCK_TOKENS / 2


def test_what_only_the_host_has_is_written_at_the_end(tmp_path):
    first = engine_with(tier(tmp_path, offload="lazy"), offload="eager")
    _, seen = serve(first, number=2)
    cached = first.host.statistics().cache.pool.cached
    first.host.close()
    assert 0 < cached < HOST_BLOCKS and seen.cache.chunks_stored == 0, "nothing had to leave the host"
    second = engine_with(tier(tmp_path, offload="lazy"))
    while (found := second.host.statistics().tier).state == "opening":
        second.step()
    second.host.close()
    assert found.found == cached


def test_a_tier_is_told_what_each_step_has_computed(tmp_path, monkeypatch):
    """What loading saves depends on it."""
    engine, told = engine_with(tier(tmp_path)), []
    monkeypatch.setattr(engine.host.cache, "prefilled", lambda tokens, seconds: told.append(tokens))
    request = Request(0, next(prompts(1, 0)), OUTPUT)
    engine.add(request)
    while not engine.is_idle:
        engine.step()
    engine.host.close()
    assert sum(told) == len(request.tokens) - 1, "all but the last one, which nobody asks for"


def test_an_engine_with_other_weights_finds_nothing(tmp_path, caplog):
    """S8.15"""
    first = engine_with(tier(tmp_path))
    serve(first)
    first.host.close()
    other = FileTier(str(tmp_path), 4 << 20, model="tiny", revision="2")
    with caplog.at_level(logging.WARNING):
        second = engine_with(other)
    assert "revision '1'" in caplog.text, "the folder of the old weights is named, and counts"
    wrong, seen = serve(second)
    second.host.close()
    assert wrong == [] and seen.found == 0


@pytest.mark.parametrize("copies", ["late", "fails"])
@pytest.mark.parametrize("mode", MODES)
def test_answers_stay_right_whatever_happens_to_copies(tmp_path, mode, copies):
    engine = engine_with(tier(tmp_path, offload=mode), wrap_copier=COPIERS[copies], strict=False)
    wrong, seen = serve(engine)
    engine.host.close()
    assert wrong == [] and seen.cache.chunks_stored > 0


def test_a_slot_whose_bytes_have_changed_is_refused_and_computed_again(tmp_path):
    """S8.2, S8.6"""
    first = engine_with(tier(tmp_path, offload="eager"))
    serve(first)
    first.host.close()
    [blocks] = tmp_path.glob("*/rank-0-of-1/blocks")
    with blocks.open("r+b") as file:
        for slot in range(0, blocks.stat().st_size // BLOCK_BYTES, 3):
            file.seek(slot * BLOCK_BYTES + 5)
            file.write(b"\xff\x01\xff")
    second = engine_with(tier(tmp_path, offload="eager"))
    wrong, seen = serve(second)
    second.host.close()
    assert wrong == [] and seen.refused > 0 and seen.state == "open"


def test_a_copier_that_damages_what_it_loads_is_seen(tmp_path):
    """The control."""
    engine = engine_with(tier(tmp_path), wrap_copier=COPIERS["corrupts"])
    wrong, _ = serve(engine)
    engine.host.close()
    assert len(wrong) > 3


def test_a_byte_that_changes_in_the_host_after_it_was_promoted_is_seen(tmp_path):
    """The control of the path through the tier: what it promotes is what is compared."""
    first = engine_with(tier(tmp_path, offload="eager"))
    serve(first)
    first.host.close()

    def damage(engine):
        engine.host._arena.blocks.add_(1)

    second = engine_with(tier(tmp_path, offload="eager"))
    wrong, seen = serve(second, each_step=damage)
    second.host.close()
    assert seen.found > 0 and len(wrong) > 3


def test_a_reset_ends_what_the_files_hold_also_for_the_next_engine(tmp_path):
    first = engine_with(tier(tmp_path, offload="eager"))
    serve(first)
    first.host.reset()
    first.host.begin_step()
    first.host.close()
    second = engine_with(tier(tmp_path, offload="eager"))
    for _ in range(20):
        second.step()
    assert second.host.statistics().tier.found == 0
    second.host.close()


def test_keys_that_are_no_cryptographic_digests_are_refused(tmp_path):
    engine = engine_with(tier(tmp_path))
    with pytest.raises(MisuseError, match="32 bytes, and sha256"):
        engine.host.start("r", [bytes(16)], 17, 0, [0])
    engine.host.close()
    with pytest.raises(ConfigurationError, match=r"xxh3_128.*sha256"):
        tier(tmp_path, hash="xxh3_128")


def test_a_second_engine_at_the_same_time_is_refused(tmp_path):
    """S8.22"""
    first = engine_with(tier(tmp_path))
    with pytest.raises(ConfigurationError, match=r"another process|in use"):
        engine_with(tier(tmp_path))
    first.host.close()


def test_a_tier_smaller_than_twice_the_host_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="at least"):
        engine_with(FileTier(str(tmp_path), HOST_BLOCKS * BLOCK_BYTES, model="tiny", revision="1"))


@pytest.mark.parametrize(
    ("whose", "missing"), [({}, "model"), ({"model": "tiny"}, "revision"), ({"revision": "1"}, "model")]
)
def test_a_tier_that_does_not_say_whose_kv_it_holds_is_refused(tmp_path, whose, missing):
    with pytest.raises(ConfigurationError, match=rf"{missing} is missing: give it model=.* or weights="):
        engine_with(FileTier(str(tmp_path), 2 << 20, **whose))
    assert not list(tmp_path.iterdir())


def test_two_fine_tunes_named_by_their_folders_never_meet(tmp_path):
    """The same shapes and the same keys: nothing but the weights differs."""

    def found_by(weights):
        engine = engine_with(FileTier(str(tier), 2 << 20, weights=weights, offload="eager"))
        _, seen = serve(engine, number=10)
        engine.host.close()
        return seen.found

    tier, base, tuned = (tmp_path / name for name in ("tier", "base", "tuned"))
    for folder in tier, base, tuned:
        folder.mkdir()
    for at, folder in enumerate((base, tuned)):
        (folder / "model.safetensors").write_bytes(bytes([at]))
    assert found_by(base) == 0 < found_by(base)
    for each in tier.iterdir():
        each.rename(tmp_path / each.name)  # the first has all bytes of the path
    assert found_by(tuned) == 0
