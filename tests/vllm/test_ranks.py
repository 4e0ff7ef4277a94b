"""Several ranks begin together, or none does; and nothing is left of those that did not."""

import threading
from unittest.mock import patch

import pytest
import torch
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.v1.kv_cache_interface import KVCacheConfig

from connector.vllm import ranks, regions
from connector.vllm import worker as worker_module
from connector.vllm.messages import StepMetadata
from connector.vllm.settings import Settings
from connector.vllm.worker import WorkerHalf
from cpu_prefix_cache import ConfigurationError
from cpu_prefix_cache.deciding import Direction, GroupCopy, StepPlan, TransferPlan
from cpu_prefix_cache.memory import claims, limits, mapping
from tests.vllm.engine import BLOCK, latent, one_group, vllm_config
from tests.vllm.two_processes import PROCESSES, said_by

BLOCKS = 48


def half(folder, group, size, rank=0, memory=64 << 20):
    """The worker's half of one rank of so many."""
    config = vllm_config(folder, cpu_bytes_to_use=memory)
    config.parallel_config.world_size = config.parallel_config.tensor_parallel_size = size
    config.parallel_config.rank = rank
    config.instance_id = "test"
    config.cache_config.num_gpu_blocks = BLOCKS
    caches = one_group(BLOCKS) if group is None else KVCacheConfig(BLOCKS, [], [group])
    return WorkerHalf(Settings.of(config, caches), config, caches)


def latent_caches(group):
    spec = group.kv_cache_spec
    return {name: torch.zeros(BLOCKS, spec.block_size, spec.head_size, dtype=spec.dtype) for name in group.layer_names}


def plain_caches():
    """KV caches of `one_group`."""
    return {f"layer.{at}": torch.zeros(BLOCKS, 2, BLOCK, 2, 16) for at in range(2)}


AXES = ("get_tp_group", "get_pcp_group", "get_pp_group")


def meet(rank, file, axis="get_tp_group"):
    """Two processes are the ranks of an engine along one axis."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    for each in AXES:
        members = [[0, 1]] if each == axis else [[0], [1]]
        group = GroupCoordinator(members, rank, "gloo", use_device_communicator=False)
        setattr(ranks, each, lambda group=group: group)


def begins(rank, folder, file, told, cannot=1):
    """In a process of its own: register one of two ranks, of which the second cannot have its region, or the first
    cannot make it.
    """
    meet(rank, file)
    if rank == cannot == 1:
        mapping.check_fits = regions.check_fits = refuse
    if rank == cannot == 0:
        regions.make_shared = refuse
    group = latent()
    try:
        half(folder, group, 2, rank).register_kv_caches(latent_caches(group))
        told.put((rank, "began"))
    except ConfigurationError as error:
        told.put((rank, str(error)))


def agrees(rank, axis, file, told):
    """In a process of its own: the second of two ranks has a problem, and other numbers than the first."""
    meet(rank, file, axis)
    assert (ranks.largest(5 + rank), ranks.as_on_the_first(7 + rank)) == (6, 7)
    try:
        ranks.agree(ConfigurationError("there is no room") if rank else None)
        told.put((rank, "goes on"))
    except ConfigurationError as error:
        told.put((rank, str(error)))


def lives(rank, folder, file, told, go_on):
    """In a process of its own: both ranks have the region, of which the first writes what the second reads."""
    meet(rank, file)
    group = latent()
    worker = half(folder, group, 2, rank)
    worker.register_kv_caches(latent_caches(group))
    region = worker._arena.blocks
    told.put("began")
    for number in (1, 2):
        go_on.acquire()
        if rank == 0:
            region.fill_(number)
        told.put(int(region.min()))


def refuse(*arguments, **options):
    raise ConfigurationError("there is no room")


def shared_files():
    """Files that outlive a process. Claims do (`memory/claims.py`), until somebody reads them."""
    return [file.name for file in claims.SHARED.iterdir() if "cpu-prefix-cache" in file.name and not file.is_dir()]


def test_all_ranks_refuse_if_one_does(tmp_path):
    """Nobody waits for one that has given up, and no file is left in shared memory."""
    before = shared_files()
    said = said_by(begins, tmp_path, tmp_path / "meeting")
    assert said == {0: "there is no room", 1: "there is no room"}
    assert shared_files() == before


def begins_where_the_first_cannot(rank, folder, file, told):
    begins(rank, folder, file, told, cannot=0)


def test_a_region_that_the_first_rank_cannot_make_is_one_that_no_rank_has(tmp_path):
    said = said_by(begins_where_the_first_cannot, tmp_path, tmp_path / "meeting")
    assert said[0] == "there is no room" and "the first rank of this tensor-parallel group could not" in said[1]


@pytest.mark.parametrize("axis", AXES)
def test_a_problem_of_one_rank_is_one_of_all_others(tmp_path, axis):
    """Ranks of its tensor-parallel group, those that compute other tokens of a prompt, and other stages."""
    said = said_by(agrees, axis, tmp_path / "meeting")
    assert said == {0: "there is no room", 1: "there is no room"}


def test_a_rank_that_is_killed_leaves_nothing_and_the_other_keeps_the_region(tmp_path):
    before = shared_files()
    told = [PROCESSES.Queue() for _ in range(2)]  # a killed process may take the lock of its queue along
    first, second = (PROCESSES.Semaphore(0) for _ in range(2))
    processes = [
        PROCESSES.Process(target=lives, args=(rank, tmp_path, tmp_path / "meeting", told[rank], go_on), daemon=True)
        for rank, go_on in enumerate((first, second))
    ]
    for process in processes:
        process.start()
    assert [each.get(timeout=120) for each in told] == ["began", "began"]
    assert shared_files() == before
    first.release()
    assert told[0].get(timeout=60) == 1
    second.release()
    assert told[1].get(timeout=60) == 1, "the ranks have a region each"
    processes[1].kill()
    processes[1].join(timeout=60)
    first.release()
    assert told[0].get(timeout=60) == 2
    processes[0].kill()
    processes[0].join(timeout=60)
    assert shared_files() == before


def test_ranks_that_cannot_share_memory_are_refused(tmp_path, monkeypatch):
    """Each machine would have a region of its own, of which a part is written, and all is read."""
    monkeypatch.setattr(ranks, "share_memory", lambda: False)
    monkeypatch.setattr(ranks, "agree", _raise)
    group = latent()
    with pytest.raises(ConfigurationError, match="one tensor-parallel group on each machine"):
        half(tmp_path, group, 16).register_kv_caches(latent_caches(group))


def test_the_regions_of_all_ranks_must_fit_the_machine_together(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "agree", _raise)
    monkeypatch.setattr(limits, "promises", list)
    monkeypatch.setattr(limits, "_available_bytes", lambda: limits.RESERVED_BYTES + (64 << 20))
    with pytest.raises(ConfigurationError, match="ask for at most 67108864 bytes"):
        half(tmp_path, None, 2, memory=96 << 20).register_kv_caches(plain_caches())


def test_ranks_that_decide_by_themselves_are_refused(tmp_path):
    config = vllm_config(tmp_path, cpu_bytes_to_use=64 << 20)
    config.parallel_config.world_size = config.parallel_config.tensor_parallel_size = 2
    config.parallel_config.distributed_executor_backend = "external_launcher"
    with pytest.raises(ConfigurationError, match="let vLLM start its ranks"):
        Settings.of(config, one_group(BLOCKS))


def _raise(problem):
    if problem is not None:
        raise problem


def test_a_copier_is_made_in_a_thread_of_its_own(tmp_path):
    """vLLM's sleep mode empties the memory that its own thread took while it registered."""
    makers = []

    def choose(*arguments, **options):
        makers.append(threading.get_ident())
        return chosen(*arguments, **options)

    chosen = worker_module.choose_copier
    worker = half(tmp_path, None, 1)
    with patch.object(worker_module, "choose_copier", choose):
        worker.register_kv_caches(plain_caches())
    worker.close()
    assert makers and threading.get_ident() not in makers


def test_a_step_that_computes_nothing_or_is_timed_always_reports(tmp_path):
    """vLLM keeps an empty output to itself. Beside computing, nothing is reported twice."""
    worker = half(tmp_path, None, 1)
    worker.register_kv_caches(plain_caches())
    said = []
    for computes, timed in ((False, None), (False, None), (True, None), (True, 7), (True, None)):
        worker.begin(StepMetadata(StepPlan(0, ()), {}, computes, timed=timed))
        worker.results()
        reports = worker.reports()
        said.append(reports and (len(reports.reports), reports.timed))
    worker.close()
    assert said == [(1, None), (1, None), None, (1, 7), None]


def test_a_rank_carries_its_share_of_a_store_and_all_of_a_load(tmp_path, monkeypatch):
    monkeypatch.setattr(ranks, "share_memory", lambda: True)
    monkeypatch.setattr(ranks, "agree", _raise)
    monkeypatch.setattr(regions, "_shared_region", mapping.private)
    group = latent()
    halves = [half(tmp_path, group, 2, rank) for rank in range(2)]
    (piece,) = halves[0]._settings.planner.pieces
    first = piece.host_blocks  # of the second piece in the region, and after that the third and the fourth
    copies = (GroupCopy(0, tuple(range(first, 4 * first)), tuple(range(1, 1 + 3 * piece.device_blocks))),)
    plan = StepPlan(
        0, tuple(TransferPlan(at, direction, copies, 3 * piece.num_bytes) for at, direction in enumerate(Direction))
    )
    carried = []
    for each in halves:
        each.register_kv_caches(latent_caches(group))
        with patch.object(each._worker, "run") as run:
            each.begin(StepMetadata(plan, {}, True))
        carried.append([transfer.num_bytes // piece.num_bytes for transfer in run.call_args.args[0].transfers])
        each.close()
    assert carried == [[1, 3], [2, 3]]
