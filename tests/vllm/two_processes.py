"""Two processes of their own, as the ranks of an engine are."""

import multiprocessing


def said_by(target, *arguments):
    """Result of each of two processes: `target(rank, *arguments, told)` puts (rank, something) into `told`."""
    context = multiprocessing.get_context("spawn")
    told = context.Queue()
    processes = [context.Process(target=target, args=(rank, *arguments, told), daemon=True) for rank in range(2)]
    for process in processes:
        process.start()
    said = dict(told.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(timeout=60)
    return said
