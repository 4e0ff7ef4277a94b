"""A HostCache with a tier of files, in the batching engine of the examples: answers are those of the model alone.

The host has room for a fifth of the documents, so prefixes go to the files and come back; and a second engine finds
what the first one left. Logits are compared, and a copier that damages what it loads must be seen.
"""

import errno
import functools
import os
import shutil
import sys
import threading
import time
import weakref
from functools import cache

import pytest
import torch

from batching_engine import BLOCK_TOKENS, Engine, Request, prompts
from cpu_prefix_cache import ChainHasher, ConfigurationError, FileTier, MisuseError, SharedTier
from cpu_prefix_cache.memory import claims
from cpu_prefix_cache.slab import allocation, opening
from cpu_prefix_cache.slab.rank_tier import RankTier
from cpu_prefix_cache.stores import opening as stores_opening
from cpu_prefix_cache.testing import FailingCopier, MemoryStore
from cpu_prefix_cache.tier import TierUnavailable
from tests.support.host_options import with_options
from tests.support.troubled_copiers import COPIERS
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
    sizes = {"host_bytes": HOST_BLOCKS * BLOCK_BYTES, "max_model_len": 1_000}
    engine = Engine(num_blocks=40, below=below, **with_options(**sizes, **{"strict": True, **options}))
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


@pytest.mark.parametrize("mode", MODES)
def test_a_cache_that_turns_off_leaves_the_files_to_the_next_engine(tmp_path, mode):
    found = []
    for copies in (None, FailingCopier, None):
        wrap = None if copies is None else functools.partial(copies, share=1.0)
        engine = engine_with(tier(tmp_path, offload=mode), wrap_copier=wrap, strict=False)
        wrong, seen = serve(engine)
        assert wrong == [] and engine.host.cache.is_off == (copies is not None)
        found.append(seen.found)
        engine.host.close()
    assert found[2] >= found[1] > HOST_BLOCKS and seen.hit_tokens > found[2] * BLOCK_TOKENS / 2


@pytest.mark.parametrize("has_tier", [True, False])
def test_a_closed_cache_that_is_kept_has_given_its_region_back(tmp_path, has_tier):
    engine = engine_with(tier(tmp_path) if has_tier else None)
    serve(engine, number=3)
    region = weakref.ref(engine.host._arena.blocks.untyped_storage())
    assert region() is not None
    engine.host.close()
    assert region() is None
    statistics = engine.host.statistics()
    assert statistics.host_bytes > 0 and (statistics.tier is not None) is has_tier


@pytest.mark.parametrize("has_tier", [True, False])
def test_a_close_that_was_interrupted_may_be_called_again(tmp_path, monkeypatch, has_tier):
    engine = engine_with(tier(tmp_path, offload="lazy") if has_tier else None)
    serve(engine, number=3)
    with monkeypatch.context() as during:
        during.setattr(engine.host._worker, "close", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.host.close()
    engine.host.close()
    assert (engine.host.statistics().tier is not None) is has_tier


def interrupt():
    raise KeyboardInterrupt


def test_chunks_that_only_the_host_has_are_written_at_the_end(tmp_path):
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


def test_a_tier_gets_the_number_of_tokens_that_each_step_has_computed(tmp_path, monkeypatch):
    """The time that loading saves depends on it."""
    engine, told = engine_with(tier(tmp_path)), []
    monkeypatch.setattr(engine.host.cache, "prefilled", lambda tokens, seconds: told.append(tokens))
    request = Request(0, next(prompts(1, 0)), OUTPUT)
    engine.add(request)
    while not engine.is_idle:
        engine.step()
    engine.host.close()
    assert sum(told) == len(request.tokens) - 1, "all but the last one, which is never needed"


@pytest.mark.parametrize(("mode", "copies"), [("lazy", "late"), ("eager", "fails")])
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


def next_that_finds_nothing(folder):
    engine = engine_with(tier(folder, offload="eager"))
    for _ in range(20):
        engine.step()
    assert engine.host.statistics().tier.found == 0
    return engine


def test_a_reset_ends_what_the_files_hold_also_for_the_next_engine(tmp_path):
    first = engine_with(tier(tmp_path, offload="eager"))
    serve(first)
    first.host.reset()
    first.host.begin_step()
    first.host.close()
    second = next_that_finds_nothing(tmp_path)
    second.host.close()


@pytest.mark.parametrize("revision", [None, "step 2"])
def test_chunks_stored_after_a_reset_are_for_no_later_engine(tmp_path, revision):
    """A later engine begins with the weights of before, whose name the files have."""
    first = engine_with(tier(tmp_path, offload="eager"))
    first.host.reset(revision)
    _, seen = serve(first)
    assert seen.hit_tokens > 0, "nothing was stored after the reset"
    first.host.close()
    second = next_that_finds_nothing(tmp_path)
    serve(second)
    second.host.close()
    third = engine_with(tier(tmp_path, offload="eager"))
    _, seen = serve(third)
    assert seen.found > HOST_BLOCKS, "what no reset has followed is found"
    third.host.close()


@pytest.mark.parametrize("revision", ["", "step-\udcff"])
def test_a_reset_to_what_names_no_weights_changes_nothing(revision):
    engine = engine_with(SharedTier(MemoryStore(), model="tiny", revision="1"))
    serve(engine, number=5)
    cached = engine.host.statistics().cache.pool.cached
    with pytest.raises(ConfigurationError, match="is a text"):
        engine.host.reset(revision)
    with pytest.raises(ConfigurationError, match="is a text"):
        engine.host.cache.reset(revision)
    engine.host.begin_step()
    assert engine.host.statistics().cache.pool.cached == cached > 0
    engine.host.close()


def test_keys_that_are_no_cryptographic_digests_are_refused(tmp_path):
    engine = engine_with(tier(tmp_path))
    for key in (bytes(16), bytes(40)):  # a record on disk has room for 32 bytes
        with pytest.raises(MisuseError, match=r"tier or a pool.*digests, 32 bytes.*algorithm='sha256'"):
            engine.host.start("r", [key], num_tokens=17, on_device=0, allocate=lambda *_: [0])
    engine.host.close()
    with pytest.raises(ConfigurationError, match=r"xxh3_128.*sha256"):
        tier(tmp_path, hash="xxh3_128")


def test_a_tier_smaller_than_twice_the_host_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="at least"):
        engine_with(FileTier(str(tmp_path), HOST_BLOCKS * BLOCK_BYTES, model="tiny", revision="1"))


@pytest.mark.parametrize(
    ("whose", "missing"), [({}, "model"), ({"model": "tiny"}, "revision"), ({"revision": "1"}, "model")]
)
def test_a_tier_without_the_identity_of_a_model_is_refused(tmp_path, whose, missing):
    with pytest.raises(ConfigurationError, match=rf"{missing} is missing: give it model=.* or weights="):
        engine_with(FileTier(str(tmp_path), 2 << 20, **whose))
    assert not list(tmp_path.iterdir())


def test_a_url_by_itself_is_refused_without_its_password():
    with pytest.raises(ConfigurationError, match="got str") as refused:
        engine_with("redis://:hunter2@cache:6379")
    assert "hunter2" not in str(refused.value)


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


# An engine's start with a folder that another one left


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """A folder that an engine has left, to be copied."""
    folder = tmp_path_factory.mktemp("left")
    first = engine_with(tier(folder, offload="eager"))
    serve(first, number=4)
    first.host.close()
    return folder


@pytest.fixture
def path(left, tmp_path):
    return shutil.copytree(left, tmp_path / "tier")


def starts(below, state="open"):
    """An engine with this tier, which answers right and comes to this state. How many chunks it has found."""
    engine = engine_with(below)
    until(engine, state)
    wrong, seen = serve(engine, number=1)
    engine.host.close()
    assert wrong == [] and seen.state == state
    return seen.found


def until(engine, state):
    for _ in range(5_000):
        engine.step()
        if engine.host.statistics().tier.state == state:
            return
        time.sleep(0.002)
    raise AssertionError(f"the tier does not come to be {state}")


def of_rank(path):
    [rank] = path.glob("*/rank-0-of-1")
    return rank


def test_control_the_same_again_finds_all(path):
    assert starts(tier(path)) > 20


def test_after_an_upgrade_an_engine_starts_with_all_of_its_bytes(path, caplog):
    """S8.15. The path and the bytes are as before, and the folder of the old weights or release has all of them."""
    [old] = path.iterdir()
    assert starts(FileTier(str(path), 2 << 20, model="tiny", revision="2")) == 0
    [new] = path.iterdir()
    assert new != old and "of 'tiny', revision '1'" in caplog.text


def test_a_new_revision_has_a_folder_beside_the_old_one_that_is_kept(path):
    assert starts(FileTier(str(path), 2 << 20, model="tiny", revision="2", keep_others=True)) == 0
    assert len(list(path.iterdir())) == 2


@pytest.mark.parametrize("nbytes", [3 << 20, 1 << 20])
def test_with_other_bytes_what_fits_is_kept(path, nbytes):
    assert starts(FileTier(str(path), nbytes, model="tiny", revision="1")) > 20


@pytest.mark.parametrize("name", ["manifest.json", "generations"])
@pytest.mark.parametrize("text", ["", "NaN", "[" * 100_000], ids=["empty", "nan", "deep"])
def test_with_a_damaged_file_it_begins_anew(path, name, text, caplog):
    (of_rank(path) / name).write_text(text)
    assert starts(tier(path)) == 0
    assert caplog.text.count("begins anew") == 1 and "Traceback" not in caplog.text


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(opening, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(opening, "LONGEST_PAUSE_SECONDS", 0.01)


def opens_later(below, mend, caplog):
    """It starts paused, serves, and finds what is there once somebody has mended it."""
    engine = engine_with(below)
    until(engine, "paused")
    wrong, seen = serve(engine, number=1, seed=5)
    assert wrong == [] and seen.state == "paused" and seen.cache.chunks_stored == 0
    assert caplog.text.count("cannot be opened") == 1
    mend()
    until(engine, "open")
    wrong, seen = serve(engine, number=4)
    engine.host.close()
    assert wrong == [] and seen.found > 5 and seen.hit_tokens > 0


def test_a_disk_that_is_not_there_yet(path, impatient, caplog):
    away = path.rename(path.with_name("away"))
    opens_later(tier(path), lambda: away.rename(path), caplog)


def test_a_folder_that_another_engine_has(path, impatient, caplog):
    """S8.22"""
    first = engine_with(tier(path))
    opens_later(tier(path), first.host.close, caplog)


def test_an_attempt_that_fails_over_an_open_folder_lets_it_go(path, impatient, caplog, monkeypatch):
    made, errors = RankTier.__init__, []

    def fails(*arguments):
        errors.append(OSError(errno.EIO, "Input/output error"))
        raise errors[-1]

    monkeypatch.setattr(RankTier, "__init__", fails)
    opens_later(tier(path), lambda: monkeypatch.setattr(RankTier, "__init__", made), caplog)
    assert errors[0].__traceback__ is not None, "kept with all of its frames"
    assert "another process" not in caplog.text


def test_a_disk_without_room(path, impatient, caplog, monkeypatch):
    def is_full(file, num_bytes):
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(allocation, "reserve", is_full)
    opens_later(tier(path), monkeypatch.undo, caplog)


def test_a_disk_that_hangs_keeps_nobody_waiting(path, monkeypatch):
    """Neither the start, nor a step, nor a reset, nor the end."""
    monkeypatch.setattr(opening, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(opening, "CLOSE_SECONDS", 0.01)
    hangs, reserve = threading.Event(), allocation.reserve
    monkeypatch.setattr(allocation, "reserve", lambda *args: hangs.wait(60) and reserve(*args))
    engine = engine_with(tier(path))
    until(engine, "paused")
    engine.host.reset()
    wrong, _ = serve(engine, number=1)
    engine.host.close()
    assert wrong == [] and not hangs.is_set()
    hangs.set()


def test_the_engines_thread_opens_and_syncs_nothing(path, monkeypatch):
    threads = dict.fromkeys(("open", "fsync", "mkdir", "replace", "unlink", "pwrite", "pwritev", "preadv"), None)
    for name in threads:
        threads[name] = set()
        monkeypatch.setattr(os, name, recorded(getattr(os, name), threads[name]))
    engine = engine_with(tier(path, offload="eager"))
    until(engine, "open")
    serve(engine, number=4)
    engine.host.reset()
    serve(engine, number=4, seed=1)
    assert all(threads[name] for name in ("open", "fsync", "pwrite", "preadv")), "nothing was seen: this says nothing"
    here = threading.current_thread().name
    assert [name for name, seen in threads.items() if here in seen] == []
    engine.host.close()


def recorded(call, threads):
    """By which threads it is called; but for what engines of a host have claimed of its memory, which is no disk's."""

    def instead(*args, **more):
        if sys._getframe(1).f_globals["__name__"] != claims.__name__:
            threads.add(threading.current_thread().name)
        return call(*args, **more)

    return instead


def test_a_store_that_is_down_at_the_start(impatient, caplog, monkeypatch):
    values = MemoryStore()
    first = engine_with(SharedTier(values, model="tiny", revision="1", ask_seconds=5.0))
    serve(first, number=4)
    first.host.close()
    answers = []

    def open_store(url):
        if not answers:
            raise TierUnavailable(f"nobody answers at {url}")
        store = MemoryStore()
        store.values |= values.values
        return store

    monkeypatch.setattr(stores_opening, "open_store", open_store)
    opens_later(
        SharedTier("redis://host", model="tiny", revision="1", ask_seconds=5.0), lambda: answers.append(True), caplog
    )


def test_a_store_with_another_password_is_refused(monkeypatch):
    def open_store(url):
        raise ConfigurationError("wrong password")

    monkeypatch.setattr(stores_opening, "open_store", open_store)
    with pytest.raises(ConfigurationError, match="wrong password"):
        engine_with(SharedTier("redis://host", model="tiny", revision="1"))
