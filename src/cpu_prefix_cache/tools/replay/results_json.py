"""Output of `--json`. `schema_version` grows when a name goes or changes its meaning; names may be added before.

1    the first version with a number
"""

from collections.abc import Sequence
from typing import Any

from cpu_prefix_cache.tools.replay.flops import Flops
from cpu_prefix_cache.tools.replay.outcome import Outcome, Ratios
from cpu_prefix_cache.tools.replay.report import References
from cpu_prefix_cache.tools.replay.seconds_saved import Rates
from cpu_prefix_cache.tools.replay.traces import Trace

SCHEMA_VERSION = 1


def head(
    command: str, trace: Trace, block_bytes: int | None, flops: Flops | None, rates: Rates | None
) -> dict[str, Any]:
    """Beginning of the results of every command."""
    return {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "traces": trace.paths,
        "requests": len(trace.requests),
        "blocks": trace.blocks,
        "different_blocks": trace.different_blocks,
        "tokens": trace.tokens,
        "block_tokens": trace.block_tokens,
        "block_bytes": block_bytes,
        "flops": None if flops is None else {"of_a_token": flops.token, "of_a_pair": flops.pair},
        "prefill": None if rates is None else _prefill(rates, trace),
    }


def of_replay(references: References, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "ideal": ratios(references.ideal),
        "min": [{"capacity_blocks": each.capacity, **ratios(each.ratios)} for each in references.clairvoyant],
        "at_eviction": [{"capacity_blocks": size, **ratios(found)} for size, found in references.at_eviction],
        "results": [_outcome(outcome) for outcome in outcomes],
    }


def ratios(found: Ratios) -> dict[str, float | None]:
    return {
        "block_hit_ratio": found.block_hit_ratio,
        "token_hit_ratio": found.token_hit_ratio,
        "time_hit_ratio": found.time_hit_ratio,
    }


def saved(seconds: float | None, share: float | None, money: float | None) -> dict[str, float | None]:
    return {"prefill_seconds_saved": seconds, "prefill_share_saved": share, "money_saved": money}


def _prefill(rates: Rates, trace: Trace) -> dict[str, Any]:
    return {
        "tokens_per_second_at_start": rates.prefill_tokens,
        "tokens_per_second_on_average": rates.mean_tokens(trace.work),
        "source": rates.source,
        "seconds_of_all_prompts": rates.seconds(trace.work),
        "money_of_all_prompts": rates.money(rates.seconds(trace.work)),
    }


def _outcome(outcome: Outcome) -> dict[str, Any]:
    tally = outcome.tally
    return {
        "policy": outcome.policy,
        "capacity_blocks": outcome.capacity,
        "device_capacity_blocks": outcome.device_capacity,
        "offload": outcome.offload,
        **ratios(outcome.ratios),
        "stored_blocks": tally.stored_blocks,
        "loaded_blocks": tally.loaded_blocks,
        "evictions": tally.evictions,
        "lost_before_store_blocks": tally.lost_before_store,
        "trace_blocks": outcome.trace_blocks,
        "seconds": outcome.seconds,
        **saved(outcome.seconds_saved, outcome.share_saved, outcome.money_saved),
        **(_below(outcome) if outcome.below_capacity is not None else {}),
    }


def _below(outcome: Outcome) -> dict[str, Any]:
    tally, blocks = outcome.tally, max(1, outcome.trace_blocks)
    return {
        "below_capacity_blocks": outcome.below_capacity,
        "below_offload": outcome.below_offload,
        "block_hit_ratio_by_tier": {
            "device": (tally.hit_blocks - tally.loaded_blocks) / blocks,
            "host": (tally.loaded_blocks - tally.below_hit_blocks) / blocks,
            "below": tally.below_hit_blocks / blocks,
        },
        "loaded_from_below_blocks": tally.below_loaded_blocks,
        "stored_below_blocks": tally.below_stored_blocks,
        "unsaved_blocks": tally.unsaved,
        "requests_not_worth_reading": tally.declined,
    }
