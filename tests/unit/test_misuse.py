"""Misuse by an engine's author raises an error with a sentence, before blocks are held, overwritten or silently lost.

Where seeing it costs a look at every block of a load, only `strict` sees it: the stories without it show what happens.
"""

import os
from contextlib import nullcontext

import numpy
import pytest
import torch

from cpu_prefix_cache import ChainHasher, Hit, Miss, MisuseError
from tests.support.host_engine import GRID, allocating, keys_of
from tests.support.small_engine import SmallEngine
from tests.support.troubled_copiers import FailingLoads
from tests.unit.test_host_cache import Engine, HybridEngine, served, with_late_loads

STRICT = pytest.mark.parametrize("strict", [True, False])


def refuses(engine, id, prompt, match, table):
    """The load is refused, the request does not run, and no block is held: those that the engine took are in use."""
    waiting, used = list(engine.blocks.free_blocks), sum(engine.blocks.counts)
    taken = len(keys_of(prompt))
    with pytest.raises(MisuseError, match=match):
        engine.starts(id, prompt, table=table)
    assert engine.host.statistics().cache.running == len(engine.requests)
    assert list(engine.blocks.free_blocks) == waiting[taken:]
    assert sum(engine.blocks.counts) == used + taken


def start(host, id, keys, num_tokens, n0):
    blocks = range(1_000)
    return host.start(id, keys, num_tokens=num_tokens, on_device=n0, allocate=allocating(blocks))


# Blocks that a load must not fill


@STRICT
def test_two_loads_into_the_same_blocks(strict):
    engine, _ = with_late_loads("abcd", "wxyz", device_blocks=12, strict=strict)
    assert engine.starts("r", "abcd") == Hit(16, 0)
    engine.host.begin_step()
    if strict:
        refuses(engine, "s", "wxyz", "being filled by the load of request 'r'", lambda blocks: engine.tables["r"])
        engine.host.drain()
        assert all(engine.right("r"))
        return
    assert engine.starts("s", "wxyz", table=lambda blocks: engine.tables["r"]) == Hit(16, 0)
    engine.host.begin_step()
    assert engine.host.drain() == [("r", 16), ("s", 16)]
    assert not any(engine.right("r"))


def test_blocks_of_an_aborted_load_that_still_moves():
    engine, _ = with_late_loads("abcd", "wxyz", device_blocks=12)
    engine.starts("r", "abcd")
    engine.host.begin_step()
    filled = engine.tables["r"]
    engine.ends("r")
    refuses(engine, "s", "wxyz", "being filled by the load of request 'r'", lambda blocks: filled)
    engine.host.drain()
    assert engine.starts("s", "wxyz") == Hit(16, 0)


@STRICT
def test_a_load_into_what_another_request_has_computed(strict):
    engine = served("abcd", device_blocks=12, strict=strict)
    engine.starts("r", "wxyz")
    engine.steps("r")
    if strict:
        refuses(engine, "s", "abcd", "has the key of a chunk", lambda blocks: engine.tables["r"])
        assert all(engine.right("r"))
        return
    assert engine.starts("s", "abcd", table=lambda blocks: engine.tables["r"]) == Hit(16, 0)
    engine.steps()
    assert not any(engine.right("r"))


@STRICT
def test_a_load_into_blocks_that_are_free(strict):
    engine = served("abcd", strict=strict)
    free = list(engine.blocks.free_blocks)[-4:]
    if strict:
        refuses(engine, "r", "abcd", "is in the queue", lambda blocks: free)
        return
    assert engine.starts("r", "abcd", table=lambda blocks: free) == Hit(16, 0)
    engine.steps()
    assert set(free) <= set(engine.blocks.free_blocks), "they are handed out while the request believes it has them"


@pytest.mark.parametrize("order", [[1, 0, 2, 3], [3, 0, 1, 2]], ids=["two exchanged", "all one further on"])
@pytest.mark.parametrize("ends", [True, False])
@STRICT
def test_a_load_into_its_own_blocks_in_another_order(order, ends, strict):
    """Their number is right, and the request reads the KV of other tokens."""
    engine = served("abcd", strict=strict)
    assert engine.starts("r", "abcd", table=lambda blocks: [blocks[at] for at in order]) == Hit(16, 0)
    engine.steps()
    assert not all(engine.right("r"))
    told = "chunk 0 was loaded into block ., but the device finds it in block ., which another place has filled"
    with pytest.raises(MisuseError, match=told) if strict else nullcontext():
        engine.ends("r") if ends else engine.steps("r")


def test_blocks_of_a_load_that_failed_may_be_used_in_another_order():
    """The request computes what was not loaded, and an engine may have freed its blocks in between."""
    engine = served("abcd", wrap_copier=FailingLoads)
    assert engine.starts("r", "abcd") == Hit(16, 0)
    assert engine.steps() == [("r", 0)]
    engine.tables["r"].reverse()
    engine.steps("r")
    assert all(engine.right("r"))
    engine.ends("r")


@pytest.mark.parametrize("shares", [True, False])
def test_a_load_into_a_block_of_two_requests(shares, monkeypatch):
    monkeypatch.setattr(SmallEngine, "shares_unfinished", shares)
    engine = served("abcd")

    def shared(blocks):
        engine.blocks.counts[blocks[2]] += 1
        return blocks

    if shares:
        assert engine.starts("r", "abcd", table=shared) == Hit(16, 0)
        return
    with pytest.raises(MisuseError, match="has 2 users"):
        engine.starts("r", "abcd", table=shared)


def test_a_pool_of_ours_knows_which_blocks_are_allocated():
    engine, keys = HybridEngine(strict=True), keys_of("abcd")
    chunks, node, tables = engine.takes(keys)
    own = [block for table in tables for block in table if block >= 0]
    engine.host._device.check_own(own)
    with pytest.raises(MisuseError, match="block 15 is no block that was allocated"):
        engine.host._device.check_own([0, 15])
    engine.commits(keys, chunks, node)
    for block in own:
        with pytest.raises(MisuseError, match=f"block {block} is no block that was allocated"):
            engine.host._device.check_own([block])


# Numbers of blocks


@pytest.mark.parametrize("given", [list, allocating], ids=["list", "function"])
@pytest.mark.parametrize("wrong", [-1, 8, 99, 2**70])
@STRICT
def test_a_block_that_does_not_exist(wrong, given, strict):
    engine = served("abcd", strict=strict)
    refuses(engine, "r", "abcd", f"block {wrong} does not exist", lambda blocks: given([*blocks[:2], wrong, blocks[3]]))
    assert engine.starts("r", "abcd"[:2]) == Hit(8, 0)


@pytest.mark.parametrize("wrong", [True, 1.0, "1", None], ids=repr)
def test_a_number_of_a_block_is_an_integer(wrong):
    engine = served("abcd")
    refuses(engine, "r", "abcd", "are given by their numbers, got", lambda blocks: [*blocks[:3], wrong])


@pytest.mark.parametrize("table", [7, torch.tensor(7), object()], ids=["int", "tensor", "object"])
def test_a_table_is_more_than_a_number(table):
    refuses(served("abcd"), "r", "abcd", "a list, a tensor or an array", lambda blocks: table)


@pytest.mark.parametrize(
    "form", [iter, tuple, numpy.array, torch.tensor, lambda blocks: list(map(numpy.int32, blocks))]
)
def test_numbers_come_in_any_form(form):
    engine = served("abcd")
    assert engine.starts("r", "abcd", table=form) == Hit(16, 0)
    engine.steps()
    assert all(engine.right("r"))


# Keys and tokens


@STRICT
def test_keys_of_smaller_chunks(strict):
    """A prompt that shares 96 tokens would go on at 192, with another prompt's KV."""
    engine = served("abcd", strict=strict)
    keys = ChainHasher(GRID // 2).keys(list(range(GRID)))
    with pytest.raises(MisuseError, match="4 tokens fill 1 chunks of 4, but 2 keys are given"):
        start(engine.host, "r", keys, GRID, 0)


@pytest.mark.parametrize("wrong", [b"eight by", b"sixteen bytes".ljust(16), "a text of 16 chr", 7, None], ids=repr)
@pytest.mark.parametrize("at", [1, 2])
def test_each_key_is_a_digest_of_one_length(wrong, at):
    engine, keys = Engine(), keys_of("abc")
    keys[at] = wrong
    with pytest.raises(MisuseError, match=r"keys are at least 16 bytes|digests of one length"):
        start(engine.host, "r", keys, 3 * GRID + 1, 0)


def test_each_key_is_that_of_one_chunk():
    """Two chunks under one key: a pool that finds one of them breaks, in a later step."""
    engine, keys = Engine(), keys_of("ab")
    with pytest.raises(MisuseError, match="chunks 0 and 2 have the same key"):
        start(engine.host, "r", [*keys, keys[0]], 3 * GRID, 0)


@pytest.mark.parametrize("keys", [None, 7, iter(keys_of("ab"))], ids=lambda keys: type(keys).__name__)
@STRICT
def test_keys_are_a_list(keys, strict):
    with pytest.raises(MisuseError, match="keys are a list, which may grow, of the keys of full chunks, got"):
        start(Engine(strict=strict).host, "r", keys, 2 * GRID, 0)


def test_a_request_is_called_by_what_can_be_a_key_of_a_dict():
    with pytest.raises(MisuseError, match=r"a request is named by something hashable, got \[\]"):
        start(Engine().host, [], keys_of("ab"), 2 * GRID, 0)


def test_the_last_key_is_looked_at_always():
    engine, keys = Engine(strict=False), keys_of("abc")
    with pytest.raises(MisuseError, match="keys are at least 16 bytes"):
        start(engine.host, "r", [*keys[:2], b"short"], 3 * GRID + 1, 0)


@pytest.mark.parametrize(
    ("num_tokens", "n0", "named"),
    [
        *((each, 0, "num_tokens") for each in (-5, 1_001, 2**70, 17.0, True, None, "17")),
        *((17, each, "on_device") for each in (-16, 18, 2**70, 4.0, True, None)),
        (4, 17, "on_device"),  # one for the other
    ],
)
@STRICT
def test_numbers_of_tokens_that_cannot_be(num_tokens, n0, named, strict):
    engine = served("abcd", strict=strict)
    with pytest.raises(MisuseError, match=f"{named} must be a whole number of tokens from 0 to"):
        start(engine.host, "r", [], num_tokens, n0)
    assert engine.host.statistics().cache.running == 0


@pytest.mark.parametrize("num_tokens", [-1, 2**80, None, 4.0])
def test_a_request_ends_with_a_number_of_tokens(num_tokens):
    engine = Engine()
    engine.starts("r", "ab")
    with pytest.raises(MisuseError, match="num_tokens must be a whole number"):
        engine.host.end("r", num_tokens)
    engine.steps("r")
    engine.ends("r")
    engine.rests()
    assert engine.is_at_rest()


def test_in_serving_a_request_that_is_too_long_ends():
    for strict in (True, False):
        engine = Engine(strict=strict)
        engine.starts("r", "ab")
        engine.steps("r")
        with pytest.raises(MisuseError, match="from 0 to 1000, got 1001") if strict else nullcontext():
            engine.host.end("r", 1_001)


@pytest.mark.parametrize("num_tokens", [-1, 2**80, None, "8", True, 1.5])
def test_a_step_ends_with_a_number_of_tokens(num_tokens):
    engine = Engine()
    engine.starts("r", "ab")
    engine.steps("r")  # nothing is due, so without `strict` nothing is read
    with pytest.raises(MisuseError, match="what request 'r' has computed must be a whole number"):
        engine.host.end_step({"r": num_tokens})


def test_a_step_ends_for_requests_that_run():
    engine = Engine()
    with pytest.raises(MisuseError, match="'r' is reported as computed, and does not run"):
        engine.host.end_step([("r", 4)])
    assert Engine(strict=False).host.end_step([("r", 4)]) == []


@pytest.mark.parametrize("later", [0, 1])
def test_a_step_may_report_a_request_that_it_has_ended(later):
    """An engine that overlaps may begin the next step before it sees the outcome of the one in which it was aborted."""
    engine = Engine()
    engine.starts("r", "ab")
    engine.host.begin_step()
    engine.has("r", 8)
    engine.ends("r")
    for _ in range(later):
        engine.host.begin_step()
    engine.host.end_step({"r": 8})
    for _ in range(2 - later):
        engine.host.begin_step()
    with pytest.raises(MisuseError, match="does not run"):
        engine.host.end_step({"r": 8})


@pytest.mark.parametrize("computed", [None, 7, ["r"], [("r", 4, 4)]], ids=repr)
def test_a_step_ends_with_pairs(computed):
    with pytest.raises(MisuseError, match="a mapping of requests to tokens, or pairs"):
        Engine().host.end_step(computed)


# After the end, and in another process

CALLS = {
    "start": lambda host: start(host, "s", keys_of("a"), GRID + 1, 0),
    "begin_step": lambda host: host.begin_step(),
    "end_step": lambda host: host.end_step({}),
    "drain": lambda host: host.drain(),
    "end": lambda host: host.end("r", 0),
    "boundaries": lambda host: host.boundaries("r"),
    "reset": lambda host: host.reset(),
    "prepare": lambda host: host.prepare(),
}


@pytest.mark.parametrize("call", CALLS)
def test_after_close_a_call_is_refused(call):
    engine = Engine(strict=False)
    engine.starts("r", "ab")
    engine.host.close()
    engine.host.close()
    with pytest.raises(MisuseError, match="this HostCache was closed"):
        CALLS[call](engine.host)
    assert engine.host.statistics().host_bytes and not engine.host.is_busy


def test_a_host_cache_is_closed_by_a_with():
    with Engine().host as host:
        host.begin_step()
    with pytest.raises(MisuseError, match="this HostCache was closed"):
        host.begin_step()


@pytest.mark.parametrize("call", CALLS)
def test_a_fork_has_no_host_memory(call, monkeypatch):
    engine = Engine(strict=False)
    engine.starts("r", "ab")
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(MisuseError, match=r"belongs to process \d+, and its memory is not in a fork"):
            CALLS[call](engine.host)
        engine.host.close()
    engine.host.begin_step()


def test_a_prompt_that_a_fork_starts_is_not_loaded():
    """The region is wiped in a fork and the index is not: it would resume behind blocks of zeros."""
    engine = served("abcd")
    if not (child := os.fork()):
        status = 1
        try:
            engine.starts("r", "abcd")
        except MisuseError:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert engine.starts("r", "abcd") == Hit(16, 0)
    engine.steps()
    assert all(engine.right("r"))


def test_correct_use_raises_no_misuse_error():
    engine = served("abcd")
    assert engine.starts("r", "abcd") == Hit(16, 0)
    engine.steps()
    engine.ends("r")
    engine.rests()
    assert engine.starts("s", "abcd") == Miss()
    engine.ends("s")
    assert engine.is_at_rest()
