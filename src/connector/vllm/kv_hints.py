"""Actions that an orchestrator attaches to a request (vLLM's KvHintsEnvelope): the time until its next use, and other
prompts that are to come.

    kv.retain                its `ttl_seconds`, or the longest `duration` of its `directives`
    kv.demote                the same; without a time, late
    kv.evict, kv.release     never
    kv.prefetch              of another session, its `session_id`: that comes soon. (What a request itself needs is read
                             from the tier when it is queued.)
    others                   are for others: they fetch or share

vLLM fixes the envelope and no action (up to 0.33). These are the names and fields of Dynamo's router, and of what is
proposed for vLLM (its issues 51428 and 57103). A time to keep something is as a rule longer than the time until its
next use. That is no fault: what becomes of requests with that time is learned. Priorities, ranges of tokens and blocks
of other requests are not used.
"""

from collections.abc import Iterable, Iterator, Mapping
from math import inf, nan
from typing import Any

PREFETCH = "cpu_prefix_cache_prefetch"
NEXT_USE_WITHOUT_TIME = {"kv.retain": nan, "kv.demote": 65_536.0, "kv.evict": inf, "kv.release": inf}


def next_use_of_actions(actions: Iterable[Any]) -> Any:
    """As `Request.next_use`, of the first action that concerns this request; None: none does. Of a retention without
    a time it is no number, which the cache counts as malformed.
    """
    for action in actions:
        is_of_request = action.payload.get("include_current_request", True) is not False
        if action.action_type in NEXT_USE_WITHOUT_TIME and is_of_request:
            otherwise = NEXT_USE_WITHOUT_TIME[action.action_type]
            return otherwise if otherwise == inf else _time_of(action.payload, otherwise)
    return None


def sessions_to_come(params: Mapping[str, Any] | None, actions: Iterable[Any]) -> Iterator[Any]:
    """The sessions that a request's `kv_transfer_params` and actions name, each of which may be anything.

    >>> [*sessions_to_come({PREFETCH: "agent-7"}, [])], [*sessions_to_come(None, [])]
    (['agent-7'], [])
    """
    if PREFETCH in (params or {}):
        yield (params or {})[PREFETCH]
    for action in actions:
        if action.action_type == "kv.prefetch" and "session_id" in action.payload:
            yield action.payload["session_id"]


def _time_of(payload: Mapping[str, Any], otherwise: float) -> Any:
    if "ttl_seconds" in payload:
        return payload["ttl_seconds"]
    directives = payload.get("directives")
    given = [each.get("duration") for each in directives if isinstance(each, dict)] if type(directives) is list else []
    return max((each for each in given if isinstance(each, int | float)), default=otherwise)
