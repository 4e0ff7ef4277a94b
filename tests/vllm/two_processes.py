"""Two processes of their own, as the ranks of an engine are."""

import multiprocessing

# They are forks of one process that has imported what takes them 7 s each, and has no other thread.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["vllm.v1.core.sched.scheduler", "vllm.distributed.kv_transfer", "connector.vllm"])


def said_by(target, *arguments):
    """Result of each of two processes: `target(rank, *arguments, told)` puts (rank, something) into `told`."""
    told = PROCESSES.Queue()
    processes = [PROCESSES.Process(target=target, args=(rank, *arguments, told), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    said = dict(told.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(timeout=60)
    return said
