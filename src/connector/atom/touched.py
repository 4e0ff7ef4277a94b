"""Assumptions that the connector makes of ATOM beyond its interface of connectors, checked once, when it starts.

    block pool, block      waiting blocks are held and put back by hand, in the queues of the pool
    block manager          it is cleared with our cache; the states that it keeps
    scheduler, sequence    fields that are read

ATOM promises none of it. A release that has changed a name is refused: later the engine would stop in the middle of a
request. How the pool hands out its blocks is tried on a small pool of the same kind (`is_ordered`): a pool that chooses
in a way that we do not know can be offloaded eagerly, which does not need an order.
"""

from collections.abc import Callable, Iterable, Sequence
from inspect import signature
from typing import Any

from connector.atom.device import AtomDevice
from connector.atom.pool_view import BLOCK, KNOWN_PARTS, POOL
from connector.atom.states import STATES, STORE
from cpu_prefix_cache import ConfigurationError

MANAGER = (
    "clear_cache",
    "hash_block_size",
    "kv",
    "num_per_req_cache_groups",
    "paged_state_checkpoints",
    "state_checkpoint_interval_tokens",
)
SCHEDULER = ("block_manager", "kv_connector", "waiting")
SEQUENCE = (
    "block_table",
    "id",
    "kv_transfer_params",
    "multimodal_data",
    "num_cached_tokens",
    "num_draft_tokens",
    "num_placeholder_tokens",
    "num_prompt_tokens",
    "num_rejected",
    "num_tokens",
    "per_req_cache_group",
    "status",
    "token_ids",
)
STATUS = ("ABORTED", "WAITING_FOR_REMOTE_KVS")

POLICY, POLICIES = "cache_policy", ("lru", "slru")


def check_manager(manager: Any) -> None:
    """Raises ConfigurationError for a block manager that lacks a name of those above."""
    check_names(manager, MANAGER)
    check_names(manager.kv, POOL)
    check_names(manager.kv.block(0), BLOCK)
    if manager.paged_state_checkpoints is not None:
        check_names(manager.paged_state_checkpoints, STATES)
        check_names(manager.paged_state_checkpoints.store, STORE)


def check_sequence(kind: Callable[..., Any], block_tokens: int) -> None:
    """`kind` is ATOM's class of requests. Raises ConfigurationError if they lack a name, or cannot be made."""
    try:
        sequence = kind([1], block_tokens, id=1)
    except TypeError as wrong:
        raise _misfit(f"a request cannot be made of tokens, a block size and an id ({wrong})") from wrong
    check_names(sequence, SEQUENCE)
    check_names(type(sequence.status), STATUS)


def check_names(thing: Any, names: Iterable[str]) -> None:
    """Raises ConfigurationError if this lacks one of these attributes."""
    if missing := sorted(set(names).difference(dir(thing))):
        what = thing.__name__ if isinstance(thing, type) else type(thing).__name__
        raise _misfit(f"{what} has no {missing[0]}")


def why_not_ordered(pool: Any) -> str | None:
    """Why it is not known which blocks this pool hands out next, as a sentence; None if it is known."""
    parts = vars(pool)
    if unknown := sorted(name for name, part in parts.items() if name not in KNOWN_PARTS and not _is_number(part)):
        return f"ATOM's {type(pool).__name__} also has {', '.join(unknown)}, and it is not known what that does"
    if (policy := parts.get(POLICY, POLICIES[0])) not in POLICIES:
        return f"ATOM's prefix cache has the policy {policy!r}, which is not known"
    try:
        small = _small(type(pool), policy)
    except TypeError as wrong:
        return f"ATOM's {type(pool).__name__} cannot be tried, as it is made of more than its blocks: {wrong}"
    if not is_ordered(small):
        return f"ATOM's {type(pool).__name__} does not hand out its blocks in the order of its queues"
    return None


def _small(kind: Callable[..., Any], policy: str) -> Any:
    """A pool of six blocks. Raises TypeError for a kind that takes more."""
    takes = signature(kind)
    given = takes.bind(6, **({POLICY: policy} if POLICY in takes.parameters else {}))
    return kind(*given.args, **given.kwargs)


def is_ordered(pool: Any) -> bool:
    """Whether this pool of six blocks hands them out as AtomDevice expects it, also after some of them were held."""
    blocks = [pool.pop() for _ in range(5)]
    for block in blocks:
        pool.allocate(block)
        pool.publish(block, block + 1, [])
        pool.free(block)
    for block in blocks[1:3]:  # used again: they wait in the second queue, if there is one
        pool.free(pool.claim(block).block_id)
    device = AtomDevice(pool)
    order = [block for block, _ in device.soonest_evicted()]
    holds = [device.hold(blocks[at : at + 2]) for at in (0, 2)]
    rest = [block for block, _ in device.soonest_evicted()]
    for hold in holds:
        device.release(hold)
    return rest == [each for each in order if each not in blocks[:4]] and _handed_out(pool) == order


def _handed_out(pool: Any) -> Sequence[int]:
    """All blocks of a pool, in the order in which it hands them out."""
    order = []
    for _ in range(pool.num_free):
        order.append(pool.pop())
        pool.allocate(order[-1])
    return order


def _is_number(part: Any) -> bool:
    """Whether blocks cannot wait in it."""
    return part is None or isinstance(part, (bool, int, float))


def _misfit(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"the host cache does not fit this ATOM: {what}; use a commit that it is tested with (docs/atom.md)"
    )
