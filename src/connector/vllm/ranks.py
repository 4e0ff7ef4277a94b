"""Collective decisions of an engine's ranks, so that no rank waits forever for one that has failed."""

from itertools import chain
from typing import Any, TypeVar

import torch
from vllm.distributed.parallel_state import (
    GroupCoordinator,
    get_pcp_group,
    get_pp_group,
    get_tp_group,
    in_the_same_node_as,
)

from cpu_prefix_cache import ConfigurationError

Value = TypeVar("Value")


def _axes() -> tuple[GroupCoordinator, ...]:
    """This rank's groups, one along each axis of the engine. What is decided in one after another, all ranks have."""
    return get_tp_group(), get_pcp_group(), get_pp_group()


def agree(problem: Exception | None) -> None:
    """Continue on all ranks or on none. Each rank calls this with its own problem, or None.

    Raises `problem` if given, else ConfigurationError if another rank has one.
    """
    messages = of_all(None if problem is None else str(problem))
    if problem is not None:
        raise problem
    message = next((each for each in messages if each is not None), None)
    if message is not None:
        raise ConfigurationError(message)


def of_all(value: Value) -> list[Value]:
    """The values of all ranks, in their order. Each rank calls this with its own."""
    found = [value]
    for group in _axes():  # the ranks along the first are adjacent
        if group.world_size > 1:
            parts: list[list[Value]] = [[]] * group.world_size
            torch.distributed.all_gather_object(parts, found, group=group.cpu_group)
            found = list(chain(*parts))
    return found


def as_on_the_first_stage(numbers: list[int]) -> list[int]:
    """The `numbers` of the pipeline's first stage. Each rank calls this with its own."""
    first: list[int] = get_pp_group().broadcast_object(numbers, src=0)
    return first


def as_on_the_first(value: Any) -> Any:
    """The `value` of the engine's first rank. Each rank calls this with its own."""
    for group in _axes():
        value = group.broadcast_object(value, src=0)
    return value


def largest(number: int) -> int:
    """The largest `number` of any rank. Each rank calls this with its own."""
    return max(of_all(number))


def place_in_the_group() -> tuple[int, int]:
    """The number of this rank in its tensor-parallel group, and how many it has."""
    group = get_tp_group().cpu_group
    return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)


def as_on_the_first_of_the_group(word: str | None) -> str | None:
    """The `word` of the first rank of the tensor-parallel group. Each rank of it calls this with its own."""
    group = get_tp_group().cpu_group
    of_all: list[str | None] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(of_all, word, group=group)
    return of_all[0]


def share_memory() -> bool:
    """Whether all ranks of this tensor-parallel group can map one file. Each rank calls this."""
    return all(in_the_same_node_as(get_tp_group().cpu_group))
