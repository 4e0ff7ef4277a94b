"""Numbers of a server for each alert of examples/vllm/alerts.yml: one course that must fire it, and one that must not.

A course is a value for each minute, in promtool's notation: "0+5x60" grows by 5, "1x60" stays at 1, "0x30 1x30" is one
after the other. Names are those of /metrics, without "vllm:".
"""

from collections.abc import Mapping
from typing import NamedTuple

ENGINE = {"model_name": "m", "engine": "0"}  # labels of every series
OURS = "cpu_prefix_cache_"


class Case(NamedTuple):
    fires: Mapping[str, str]  # from a series to its course
    quiet: Mapping[str, str]
    minutes: int  # after which the one has fired, and the other has not
    labels: Mapping[str, str] = {}  # of the alert, beside those of ENGINE


def _asked_and_late(late: str) -> dict[str, str]:
    requests = OURS + "tier_requests_total"
    return {f'{requests}{{outcome="asked"}}': "0+100x90", f'{requests}{{outcome="late"}}': late}


def _pinned(blocks: int) -> dict[str, str]:
    return {
        OURS + 'dropped_chunks_total{reason="pool_full"}': "0+10x60",
        OURS + "pinned_blocks": f"{blocks}x60",
        OURS + "resident_blocks": "1000x60",
    }


def _full_host(hits: str, resident: int = 990) -> dict[str, str]:
    return {
        OURS + "hit_tokens_total": hits,
        "prompt_tokens_total": "0+10000x500",
        OURS + "resident_blocks": f"{resident}x500",
        OURS + "capacity_blocks": "1000x500",
    }


def _in_flight(ended: str) -> dict[str, str]:
    load = '{direction="load"}'
    return {OURS + "transfers_in_flight" + load: "2x60", OURS + "transfer_seconds_count" + load: ended}


def _ready(course: str) -> dict[str, str]:
    return {OURS + "ready_blocks": course, OURS + "capacity_blocks": "1000x60"}


def _evicted(unused: str) -> dict[str, str]:
    kinds = {f'{OURS}evicted_unused_chunks_total{{kind="{kind}"}}': unused for kind in ("chunk", "checkpoint")}
    return {OURS + "evicted_chunks_total": "0+100x500", **kinds}


CASES = {
    "CPUPrefixCacheOff": Case({OURS + "off": "0x5 1x30"}, {OURS + "off": "0x40"}, 10),
    "CPUPrefixCacheNotReady": Case(_ready("800x60"), _ready("0x2 1000x60"), 30),
    "CPUPrefixCacheStuck": Case(_in_flight("40x60"), _in_flight("0+1x60"), 40, {"direction": "load"}),
    "CPUPrefixCacheLoadsFail": Case(
        {OURS + "failed_loads_total": "0+2x60"}, {OURS + "failed_loads_total": "0x20 5x40"}, 40
    ),
    "CPUPrefixCachePinned": Case(_pinned(950), _pinned(200), 40, {"reason": "pool_full"}),
    "CPUPrefixCacheLost": Case(
        {OURS + "lost_before_store_chunks_total": "0+90x90"}, {OURS + "lost_before_store_chunks_total": "0+30x90"}, 80
    ),
    "CPUPrefixCacheFewHits": Case(_full_host("0+20x500"), _full_host("0+4000x500"), 480),
    "CPUPrefixCacheNeverHit": Case(_evicted("0+50x500"), _evicted("0+40x500"), 480),
    "CPUPrefixCacheTierPaused": Case(
        {OURS + 'tier_state{state="paused"}': "0x5 1x30"},
        {OURS + 'tier_state{state="open"}': "1x40"},
        20,
        {"state": "paused"},
    ),
    "CPUPrefixCacheTierRefused": Case(
        {OURS + "tier_refused_slots_total": "0+1x90"}, {OURS + "tier_refused_slots_total": "0x20 5x70"}, 70
    ),
    "CPUPrefixCacheTierLate": Case(_asked_and_late("0+20x90"), _asked_and_late("0+1x90"), 80),
}
