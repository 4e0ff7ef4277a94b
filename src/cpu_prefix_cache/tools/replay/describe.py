"""Text of a replay before its table: the trace, the tiers it is replayed on, and the rates."""

import math
from collections.abc import Sequence

from cpu_prefix_cache.model.groups import Group
from cpu_prefix_cache.tools.replay.flops import Flops
from cpu_prefix_cache.tools.replay.models import checkpoint_bytes, prefix_bytes_per_token
from cpu_prefix_cache.tools.replay.seconds_saved import Rates
from cpu_prefix_cache.tools.replay.sharing import describe_sharing
from cpu_prefix_cache.tools.replay.tiers import BelowTier, DeviceTier, HostTier
from cpu_prefix_cache.tools.replay.trace_guesses import UNITS_A_SECOND
from cpu_prefix_cache.tools.replay.traces import Trace
from cpu_prefix_cache.tools.replay.units import show_bytes, show_seconds


def describe_trace(trace: Trace) -> str:
    lines = [
        f"{len(trace.requests):,} requests from {', '.join(trace.paths)}: {trace.blocks:,} blocks of "
        f"{trace.block_tokens} tokens, {trace.different_blocks:,} of them different"
    ]
    if trace.is_size_guessed:
        lines.append(
            f"a block of hash_ids is taken for {trace.block_tokens} tokens, from input_length and the number of ids; "
            "--block-tokens says otherwise"
        )
    if trace.guessed_from is not None:
        lines.append(_describe_time(trace.time_unit, trace.guessed_from))
    if apart := describe_sharing(trace.aparts):
        lines.append(apart)
    if trace.delayed:
        lines.append(
            f"timestamps computed from delays after the request before: {trace.delayed:,}; answers take no time here"
        )
    if trace.turns_anew:
        lines.append(
            f"requests of a session that do not begin like the one before: {trace.turns_anew:,}; each row is taken for "
            "a whole prompt"
        )
    if trace.failed:
        lines.append(f"requests that failed and were left out: {trace.failed:,}")
    if trace.bad_lines:
        lines.append(f"bad lines that were skipped: {len(trace.bad_lines):,}, the first: {trace.bad_lines[0]}")
    if trace.out_of_order:
        lines.append(
            f"requests with an earlier timestamp than the line above: {trace.out_of_order:,}; replayed in order of time"
        )
    if trace.odd_lengths:
        lines.append(
            f"requests with more or fewer blocks than their input_length takes: {trace.odd_lengths:,}; "
            f"is a block {trace.block_tokens} tokens (--block-tokens)?"
        )
    return "\n".join(lines)


def _describe_time(guessed: str, span: float) -> str:
    """`span` is the time from the first to the last timestamp, in the guessed unit."""
    readings = {unit: show_seconds(span / a_second) for unit, a_second in UNITS_A_SECOND.items()}
    names = {"s": "seconds", "ms": "milliseconds"}
    [other] = names.keys() - {guessed}
    return (
        f"timestamps are taken for {names[guessed]}, {readings[guessed]} in all; "
        f"with --time-unit {other} they would be {readings[other]}"
    )


def describe_admission(host: HostTier, *, has_below: bool) -> str:
    stored = "stored below" if has_below else "stored"
    return (
        f"{stored} is what {host.store_after:,} or more prompts of at least {host.min_store_tokens:,} tokens had; "
        "the references have no such thresholds"
    )


def describe_device(device: DeviceTier) -> str:
    ahead = f", looking {device.looks_ahead:,} blocks ahead" if device.offload == "lazy" else ""
    return f"behind a device of {device.capacity:,} blocks with LRU; {device.offload} stores{ahead}"


def describe_below(below: BelowTier, hosts: Sequence[HostTier]) -> str:
    modes = " or ".join(sorted({below.mode(host) for host in hosts}))
    others = "; eager where the host is not LRU" if modes != "eager" and below.offload is None else ""
    return f"above a tier of {below.capacity:,} blocks with LRU; {modes} stores{others}"


def describe_weights(groups: Sequence[Group]) -> str:
    """Bytes of a token and of a checkpoint; nothing if no model was given."""
    if not groups:
        return ""
    token, checkpoint = prefix_bytes_per_token(groups), checkpoint_bytes(groups)
    needs = f"a checkpoint {show_bytes(checkpoint)}" if checkpoint else "and needs no checkpoints to resume"
    return f"KV of a token takes {token:,} bytes on all ranks together, {needs}"


def describe_depth(flops: Flops | None, *, has_model: bool) -> str:
    """How the time of a token grows with its depth in the prompt; nothing if no model was given."""
    if flops is None:
        unknown = "hit time is not known of this model: give its --active-parameters, such as 22B"
        return unknown if has_model else ""
    if math.isinf(flops.even_depth):
        return ""
    return (
        f"compute of a token: {flops.token / 1e9:,.1f} GFLOP, and its attention, which is as much at position "
        f"{flops.even_depth:,.0f}"
    )


def describe_rates(rates: Rates, trace: Trace) -> str:
    whole = rates.seconds(trace.work)
    lines = [
        f"prefill at the beginning of a prompt: {rates.prefill_tokens:,.0f} tokens/s ({rates.source})",
        f"prefill on average: {rates.mean_tokens(trace.work):,.0f} tokens/s, {show_seconds(whole)} for all prompts"
        f"{_price(rates, whole)}",
    ]
    span = trace.requests[-1].now - trace.requests[0].now
    if 0 < span < whole:
        lines.append(
            f"without hits that is {whole / span:.1f} times as long as the trace, more than one engine at this rate "
            "can serve: each of several has a host cache of its own"
        )
    loads = "loads from the host take no time here: give --host-rate"
    if math.isfinite(rates.host_bytes):
        loads = f"loads come from the host at {rates.host_bytes / 1e9:,.2f} GB/s"
    if rates.below_bytes is not None:
        loads += f", from below at {rates.below_bytes / 1e9:,.2f} GB/s"
    lines.append(loads)
    if rates.block_bytes:
        lines.append(
            f"break-even: loading is faster than computing above {rates.even_bytes(trace.work) / 1e9:,.2f} GB/s"
        )
    return "\n".join(lines)


def _price(rates: Rates, seconds: float) -> str:
    money = rates.money(seconds)
    return "" if money is None else f", at a cost of {money:,.2f}"
