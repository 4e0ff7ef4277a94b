"""Two ranks of one engine, each a process with its own host cache, and copies that fail or are late on one of them:
both go on alike, since SGLang and the linker restore only what both have.
"""

import multiprocessing
import traceback

import pytest
import torch.distributed

from cpu_prefix_cache.deciding import Direction
from cpu_prefix_cache.testing import FailingCopier, LateCopier
from tests.sglang.copiers import Failing, with_copier
from tests.sglang.engine import LONGER, PROMPT, Engine, server_args
from tests.sglang.models import KINDS
from tests.sglang.test_faults import requests

SECONDS = 100
FORK = multiprocessing.get_context("fork")  # SGLang takes seconds to import


def a_store_fails_on_one_rank(rank, monkeypatch, host_bytes):
    copiers = with_copier(monkeypatch, Failing)
    with server_args(host_bytes=host_bytes) as args:
        engine = rank_of(args, KINDS["full"])
        if rank == 1:
            copiers[0].fails = Direction.STORE
        engine.run(PROMPT)
        stored = engine.linker.host.statistics().cache.chunks_stored
        engine.evict()
        engine.computed = 0
        engine.run(LONGER)
        return outcome(engine), stored


def a_load_fails_on_one_rank(rank, monkeypatch, host_bytes):
    copiers = with_copier(monkeypatch, Failing)
    with server_args(host_bytes=host_bytes) as args:
        engine = rank_of(args, KINDS["all"])
        engine.run(PROMPT)
        engine.evict()
        if rank == 1:
            copiers[0].fails = Direction.LOAD
        engine.run(LONGER)
        return outcome(engine), len(engine.aborted)


def a_promise_is_gone_on_one_rank(rank, monkeypatch, host_bytes):
    with server_args(host_bytes=host_bytes) as args:
        engine = rank_of(args, KINDS["all"])
        engine.run(PROMPT)
        engine.evict()
        request = engine.submit(LONGER)
        request.init_next_round_input(engine.tree)
        engine._take_back_state(request)
        if rank == 1:
            engine.linker.host.reset()
        return request.host_hit_length, engine.tree.linker.load_back(request)[0]


def alone(rank, monkeypatch, host_bytes):
    """The control of the one before: the linker reduces nothing."""
    monkeypatch.setattr("connector.sglang.linker.Ranks.longest", lambda self, lengths, most: max(lengths, default=0))
    return a_promise_is_gone_on_one_rank(rank, monkeypatch, host_bytes)


FAULTS = [
    lambda copier, tensors: FailingCopier(copier, tensors, share=0.05),
    lambda copier, tensors: LateCopier(FailingCopier(copier, tensors, share=0.02, seed=3)),
]


def any_requests(rank, monkeypatch, host_bytes):
    with_copier(monkeypatch, FAULTS[rank])
    outcomes = []
    for name, kind in KINDS.items():
        with server_args(host_bytes=host_bytes) as args:
            engine = rank_of(args, kind)
            requests(engine, seed=name, num_requests=30)
            engine.drain()
            engine.linker.host.drain()
            engine.linker.host.cache.check_valid()
            assert engine.held_tokens == 0 and engine.linker.host.statistics().cache.bytes_loaded
            outcomes.append(outcome(engine))
    return outcomes


def rank_of(args, kind):
    return Engine(args, kind, tp_cache_group=torch.distributed.group.WORLD)


def outcome(engine):
    """All that both ranks must have done alike."""
    assert engine.wrong == []
    return engine.computed, [each.rid for each in engine.answered], [each.rid for each in engine.aborted]


def rank_main(rank, story, rendezvous, host_bytes, results):
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            results.put((rank, story(rank, monkeypatch, host_bytes)))
    except BaseException:
        results.put((rank, traceback.format_exc()))


def both(story, tmp_path, host_bytes="1MiB"):
    """The results of the story on each rank."""
    results = FORK.Queue()
    given = (story, tmp_path / "rendezvous", host_bytes, results)
    processes = [FORK.Process(target=rank_main, args=(rank, *given), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    returned = dict(results.get(timeout=SECONDS) for _ in processes)
    for process in processes:
        process.join()
    assert not any(isinstance(each, str) for each in returned.values()), returned
    return returned[0], returned[1]


def test_a_prefix_that_one_rank_could_not_store_is_restored_on_none(tmp_path):
    (first, stored), (second, stored_second) = both(a_store_fails_on_one_rank, tmp_path)
    assert first == second and stored > stored_second
    assert first[0] == len(LONGER), "the second rank lacks the beginning"


def test_a_load_that_fails_on_one_rank_aborts_its_request_on_both(tmp_path):
    (first, aborted), (second, aborted_second) = both(a_load_fails_on_one_rank, tmp_path)
    assert first == second and aborted == aborted_second == 1


def test_a_prefix_that_one_rank_has_no_more_is_computed_on_both(tmp_path):
    assert both(a_promise_is_gone_on_one_rank, tmp_path) == ((len(PROMPT), 0), (len(PROMPT), 0))


def test_ranks_that_do_not_reduce_would_part(tmp_path):
    (_, loaded), (_, loaded_second) = both(alone, tmp_path)
    assert loaded != loaded_second


@pytest.mark.parametrize("host_bytes", ["1MiB", "32KiB"])
def test_ranks_with_faults_of_their_own_go_on_alike(tmp_path, host_bytes):
    first, second = both(any_requests, tmp_path, host_bytes)
    assert first == second
