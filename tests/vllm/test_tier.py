"""A tier of files below a real engine: after a restart prefixes come from the files, and answers are as if computed.

Every engine of a test finds the same folder. The first one writes, to the end; the next begins with empty caches. The
control changes what a block on disk holds and makes its record fit; then the comparison fails.
"""

import json
import multiprocessing
import os
import signal
from contextlib import closing
from pathlib import Path

import pytest
import torch

from connector.vllm import CPUPrefixCacheConnector, tier_namespace
from cpu_prefix_cache.slab import opening, records
from cpu_prefix_cache.slab.namespace import Namespace
from cpu_prefix_cache.tiers import promotions
from tests.stores.disk.mounts import Ext4, missing
from tests.vllm.models import some_tokens
from tests.vllm.real_cache import BLOCKS, PROMPTS, CachedEngine, expected_of, folder_of
from tests.vllm.real_engine import BLOCK, PATIENCE, TOLERANCE, RealEngine, differences

MISSING = missing()
SIZE = 2**28
HOST = 2**25


@pytest.fixture
def path(tmp_path):
    folder = tmp_path / "tier"
    folder.mkdir()
    return folder


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    """Deadlines are of tens of milliseconds, and this machine may be busy."""
    monkeypatch.setattr(promotions, "PENDING_GRACE_SECONDS", PATIENCE)


def started(path, of="llama", *, engine=None, **tier):
    """At rest: all that the files have is taken in."""
    said = {"kind": "file", "path": str(path), "bytes": SIZE, "offload": "eager"} | tier
    engine = CachedEngine(folder_of(of), offload="eager", host_bytes=HOST, engine=engine, tier=said)
    engine.rest()
    return engine


def write_prompts(path, of="llama", prompts=PROMPTS, **options):
    """Chunks and checkpoints that an engine, which ends then, leaves in the files. Returns their numbers."""
    with started(path, of, **options) as engine:
        for prompt in prompts:
            engine.answer([prompt])
        engine.rest()
        statistics = engine.half.tier.tier_statistics().cache
        return statistics.chunks_stored, statistics.checkpoints_stored


def tier_hits(engine):
    return engine.half.tier.tier_statistics().hit_tokens


# A restart


@pytest.mark.parametrize("asynchronous", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_another_engine_finds_what_the_first_one_wrote(path, model, asynchronous):
    expected = expected_of(model)
    chunks, checkpoints = write_prompts(path, model)
    assert chunks == len(PROMPTS) * BLOCKS and (checkpoints > 0) is (model == "gemma3")
    with started(path, model, engine=dict(asynchronous=asynchronous)) as engine:
        assert engine.half.tier.tier_statistics().found == chunks
        assert (engine.statistics.pool.cached, len(engine.cached(PROMPTS[0]))) == (0, 0)
        answers = [answer for prompt in PROMPTS for answer in engine.answer([prompt])]
        engine.rest()
        assert tier_hits(engine) == len(PROMPTS) * BLOCKS * BLOCK
    assert [answer.loaded_tokens for answer in answers] == [BLOCKS * BLOCK] * len(PROMPTS)
    assert max(differences(answers, expected)) <= TOLERANCE


def serve_until_killed(path, model_folder, told):
    """In a process of its own."""
    said = {"kind": "file", "path": str(path), "bytes": SIZE, "offload": "eager"}
    engine = CachedEngine(Path(model_folder), offload="eager", host_bytes=HOST, tier=said)
    engine.answer(PROMPTS)
    engine.rest()
    told.put(engine.half.tier.tier_statistics().cache.chunks_stored)
    signal.pause()


def test_slots_that_a_killed_process_wrote_are_found_by_the_next(path):
    expected = expected_of("llama")
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    process = context.Process(target=serve_until_killed, args=(path, folder_of("llama"), told), daemon=True)
    process.start()
    written = told.get(timeout=120)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert written == len(PROMPTS) * BLOCKS
    with started(path) as engine:
        answers = engine.answer(PROMPTS)
        assert tier_hits(engine) == len(PROMPTS) * BLOCKS * BLOCK
    assert max(differences(answers, expected)) <= TOLERANCE


def test_a_small_host_gets_back_from_the_tier_what_it_has_evicted(path):
    """Lazy, in one life: five prompts for which the host has no room together."""
    said = {"kind": "file", "path": str(path), "bytes": SIZE, "offload": "lazy"}
    long = [some_tokens(20 * BLOCK + 5, ("long", seed)) for seed in range(10)]
    options = dict(offload="eager", host_bytes=100 * 2**16, tier=said)
    with CachedEngine(folder_of("llama"), **options) as engine:
        before = [answer for prompt in long for answer in engine.answer([prompt])]
        engine.rest()
        after = [answer for prompt in long for answer in engine.answer([prompt])]
        engine.rest()
        assert tier_hits(engine) > 0
        assert engine.connectors.worker.worker._tier.statistics().bytes_read > 0
    assert max(differences(after, before)) <= TOLERANCE


# A queue


@pytest.mark.parametrize("is_reported", [True, False], ids=["queued", "control"])
def test_a_prompt_that_waits_for_its_turn_is_read_meanwhile(path, monkeypatch, is_reported):
    """The engine runs one request at a time. In the control vLLM does not report what it queues."""
    expected = expected_of("llama")
    write_prompts(path, prompts=PROMPTS[:1])
    if not is_reported:
        monkeypatch.setattr(CPUPrefixCacheConnector, "on_new_request", lambda self, request: None)
    with started(path, engine=dict(max_requests=1)) as engine:
        long = engine.submit(some_tokens(BLOCK, "long"), max_tokens=200)
        name = engine.submit(PROMPTS[0])
        keys = engine.hashes(PROMPTS[0])[:BLOCKS]
        for _ in range(100):
            engine.step()
        assert long not in engine.finished and engine.status(name) == "WAITING"
        assert engine.cache.pool.resident_run(keys, 0, BLOCKS) == (BLOCKS if is_reported else 0)
        engine.step_until(lambda: name in engine.finished)
        engine.rest()
        engine.check_nothing_leaked()
        assert tier_hits(engine) == BLOCKS * BLOCK
        answer = engine.finished.pop(name)
    assert answer.loaded_tokens == BLOCKS * BLOCK
    assert max(differences([answer], expected[:1])) <= TOLERANCE


# Wrong bytes


def damage(path, *, is_sealed):
    """Change some bytes of every block on disk. With `is_sealed` its record has the checksum of the damaged bytes."""
    (folder,) = path.glob("*/rank-0-of-1")
    manifest = json.loads((folder / "manifest.json").read_text())
    namespace = Namespace(tuple(manifest["namespace"].items()))
    seed, width = records.seed_of(namespace.digest, 0, 1), manifest["slot_bytes"]
    content = bytearray((folder / "records").read_bytes())
    with open(folder / "blocks", "r+b") as file:
        for slot in range(manifest["slots"]):
            at = slot * records.SIZE
            record = records.parse(bytes(content[at : at + records.SIZE]), seed)
            if record is None:
                continue
            file.seek(slot * width)
            block = torch.frombuffer(bytearray(file.read(width)), dtype=torch.float32)
            block[: block.numel() // 4].normal_(std=float(block.std()))
            damaged = block.numpy().tobytes()
            file.seek(slot * width)
            file.write(damaged)
            if is_sealed:
                sealed = record._replace(checksum=records.checksum(damaged))
                content[at : at + records.SIZE] = records.pack(sealed, seed)
    (folder / "records").write_bytes(content)


@pytest.mark.parametrize("model", ["llama", "gemma3"])
def test_damage_that_no_checksum_sees_shows_in_the_answers(path, model):
    """The control of all comparisons in this file."""
    expected = expected_of(model)
    write_prompts(path, model)
    damage(path, is_sealed=True)
    with started(path, model) as engine:
        answers = engine.answer(PROMPTS)
        assert tier_hits(engine) == len(PROMPTS) * BLOCKS * BLOCK
    assert sum(difference > TOLERANCE for difference in differences(answers, expected)) >= 7


def test_damaged_blocks_are_refused_and_computed(path):
    expected = expected_of("llama")
    write_prompts(path)
    damage(path, is_sealed=False)
    with started(path) as engine:
        answers = engine.answer(PROMPTS)
        engine.rest()
        statistics = engine.half.tier.tier_statistics()
        engine.check_nothing_leaked()
    assert (statistics.refused >= len(PROMPTS), statistics.hit_tokens) == (True, 0)
    assert [answer.loaded_tokens for answer in answers] == [0] * len(PROMPTS)
    assert max(differences(answers, expected)) <= TOLERANCE


def test_one_damaged_block_takes_with_it_only_what_hangs_below(path):
    expected = expected_of("llama")
    write_prompts(path, prompts=PROMPTS[:1])
    (folder,) = path.glob("*/rank-0-of-1")
    with started(path) as engine:
        key = engine.hashes(PROMPTS[0])[7]
        below = engine.half.tier.below.pool
        (slot,) = below.blocks_of([below.find(key)])
    width = json.loads((folder / "manifest.json").read_text())["slot_bytes"]
    with open(folder / "blocks", "r+b") as file:
        file.seek(slot * width)
        file.write(b"what this is nobody knows")
    with started(path) as engine:
        answers = engine.answer(PROMPTS[:1])
    assert [answer.loaded_tokens for answer in answers] == [7 * BLOCK]
    assert max(differences(answers, expected[:1])) <= TOLERANCE


def test_a_disk_that_fails_is_a_miss(path, monkeypatch):
    expected = expected_of("llama")
    write_prompts(path)

    def fail(*arguments):
        raise OSError(5, "Input/output error")

    with started(path) as engine:
        monkeypatch.setattr(os, "preadv", fail)
        answers = engine.answer(PROMPTS)
        engine.rest()
        assert engine.half.tier.tier_statistics().cache.loads_failed > 0
        assert not engine.cache.is_off
        monkeypatch.undo()
    assert max(differences(answers, expected)) <= TOLERANCE


# Nothing is served to others


def found_by(path, of="llama", **options):
    with started(path, of, **options) as engine:
        answers = engine.answer(PROMPTS[:2])
        assert [answer.loaded_tokens for answer in answers] == [tier_hits(engine) // 2] * 2
        return engine.half.tier.tier_statistics().found


@pytest.mark.parametrize(
    "other",
    [
        dict(revision="another"),
        dict(model="another"),
        dict(engine=dict(dtype="bfloat16")),
        dict(engine=dict(block_tokens=2 * BLOCK)),
        dict(engine=dict(prefix_caching_hash_algo="sha256_cbor")),
        dict(engine=dict(hf_overrides={"rms_norm_eps": 1e-3})),
    ],
    ids=["revision", "model", "dtype", "blocks", "hash", "configuration"],
)
def test_an_engine_that_differs_finds_nothing(path, other):
    written, _ = write_prompts(path)
    assert found_by(path, keep_others=True, **other) == 0
    assert found_by(path) == written


def test_an_upgraded_engine_starts_with_all_of_its_bytes_and_serves(path, monkeypatch):
    """The folder of the release before has all of them, since they are allocated at its start."""
    with monkeypatch.context() as before:
        before.setattr(tier_namespace.vllm, "__version__", "0.31.9")
        write_prompts(path)
    [old] = path.iterdir()
    with started(path) as engine:
        assert engine.half.tier.tier_statistics().state == "open"
        answers = engine.answer(PROMPTS[:2])
        assert [answer.loaded_tokens for answer in answers] == [0, 0]
        engine.rest()
    [new] = path.iterdir()
    assert new != old
    assert max(differences(answers, expected_of("llama")[:2])) <= TOLERANCE
    assert found_by(path) == 2 * BLOCKS


def test_an_engine_starts_without_its_disk_and_finds_what_is_there_later(path, monkeypatch):
    monkeypatch.setattr(opening, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(opening, "LONGEST_PAUSE_SECONDS", 0.01)
    write_prompts(path, prompts=PROMPTS[:1])
    away = path.rename(path.with_name("away"))
    with started(path) as engine:
        assert engine.half.tier.tier_statistics().state == "paused"
        answers = engine.answer(PROMPTS[1:2])
        engine.forget()
        [again] = engine.answer(PROMPTS[1:2])
        assert again.loaded_tokens == BLOCKS * BLOCK, "hits on the host go on"
        away.rename(path)
        engine.halves[0][1]._tier._attempts.join(PATIENCE)
        answers += engine.answer(PROMPTS[2:3])  # an idle engine does not step, so it does not learn of it
        engine.rest()
        tier = engine.half.tier.tier_statistics()
        assert (tier.state, tier.found) == ("open", BLOCKS)
        [first] = engine.answer(PROMPTS[:1])
        assert first.loaded_tokens == BLOCKS * BLOCK
    assert max(differences([first, *answers], expected_of("llama")[:3])) <= TOLERANCE


@pytest.mark.parametrize("is_restarted_twice", [False, True])
def test_after_a_reset_nothing_of_before_is_served(path, is_restarted_twice):
    """Also by the next engine: neither what was before the reset, nor what other weights may have written after it."""
    write_prompts(path)
    with started(path) as engine:
        engine.forget(host=True)
        assert engine.half.tier.tier_statistics().cache.pool.cached == 0
        answers = engine.answer(PROMPTS[:2])
        assert [answer.loaded_tokens for answer in answers] == [0, 0]
        engine.rest()
        assert engine.half.tier.tier_statistics().cache.chunks_stored == 2 * BLOCKS
    assert found_by(path) == 0
    if is_restarted_twice:  # what it has written itself
        assert found_by(path) == 2 * BLOCKS


def test_weights_that_are_reloaded_in_place_find_nothing_of_the_old_ones(path):
    """As an operator does it: new weights, then a reset with the connector."""
    other = expected_with_other_weights()
    write_prompts(path)
    with started(path) as engine:
        engine.answer(PROMPTS[:1])
        spoil_weights(engine)
        engine.forget(host=True)
        answers = engine.answer(PROMPTS[:2])
        engine.forget()
        again = engine.answer(PROMPTS[:2])
        assert [answer.loaded_tokens for answer in again] == [BLOCKS * BLOCK] * 2
    assert max(differences(answers, other)) <= TOLERANCE
    assert max(differences(again, other)) <= TOLERANCE
    with started(path) as engine:
        answers = engine.answer(PROMPTS[:2])
    assert max(differences(answers, expected_of("llama")[:2])) <= TOLERANCE


@pytest.mark.skipif("ext4" in MISSING, reason=MISSING.get("ext4", ""))
def test_a_disk_that_is_frozen_and_then_read_only_costs_hits_alone(tmp_path):
    """With a reset in each: it neither waits nor raises, and prefixes are found on the host."""
    expected = expected_of("llama")[:2]
    answers = []
    again = []

    def answer(engine):
        """After a reset, and after one that does not reach the host. Slots to be written may still wait."""
        engine.step_until(lambda: engine.core.reset_prefix_cache(reset_connector=True))
        answers.extend(engine.answer(PROMPTS[:2]))
        engine.step_until(lambda: engine.core.reset_prefix_cache(reset_connector=False))
        again.extend(engine.answer(PROMPTS[:2]))

    with closing(Ext4(tmp_path, mib=512)) as disk, started(disk.path) as engine:
        answer(engine)
        engine.rest()
        with disk.frozen():
            answer(engine)
        engine.rest()
        disk.fail()
        answer(engine)
    assert [each.loaded_tokens for each in answers] == [0] * 6
    assert [each.loaded_tokens for each in again] == [BLOCKS * BLOCK] * 6
    assert max(differences(answers + again, expected * 6)) <= TOLERANCE


def spoil_weights(engine):
    with torch.no_grad():
        for name, weight in engine.worker.model_runner.model.named_parameters():
            if "o_proj" in name:
                weight.mul_(-1)


def expected_with_other_weights():
    with RealEngine(folder_of("llama")) as engine:
        spoil_weights(engine)
        return engine.answer(PROMPTS[:2])
