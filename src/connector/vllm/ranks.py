"""What the ranks of an engine must come to together, or one waits for ever for another that has given up."""

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group, in_the_same_node_as

from cpu_prefix_cache import ConfigurationError


def agree(problem: Exception | None) -> None:
    """All ranks go on, or none does. Each of them calls it.

    Raises `problem`, and ConfigurationError where another rank has one.
    """
    said = None if problem is None else str(problem)
    for group in (get_tp_group(), get_pp_group()):  # what one stage has heard the others hear
        if group.world_size > 1:
            of_all: list[str | None] = [None] * group.world_size
            torch.distributed.all_gather_object(of_all, said, group=group.cpu_group)
            said = next((each for each in of_all if each is not None), None)
    if problem is not None:
        raise problem
    if said is not None:
        raise ConfigurationError(said)


def as_on_the_first_stage(numbers: list[int]) -> list[int]:
    """What the first stage of the pipeline has said. Each rank calls it."""
    said: list[int] = get_pp_group().broadcast_object(numbers, src=0)
    return said


def share_memory() -> bool:
    """Whether all ranks of this tensor-parallel group can map one file. Each of them calls it."""
    return all(in_the_same_node_as(get_tp_group().cpu_group))
