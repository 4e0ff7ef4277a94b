"""What a replay prints: the trace, a table, and notes on the references in it.

Rows are sorted by capacity. Beside the policies stand references: no cache, a cache without a limit, MIN, and with
more than one tier a lowest one that stores exactly at eviction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cpu_prefix_cache.replay.outcome import Outcome, Ratios
from cpu_prefix_cache.replay.seconds_saved import Rates
from cpu_prefix_cache.replay.tiers import BelowTier, DeviceTier, HostTier
from cpu_prefix_cache.replay.traces import UNITS_A_SECOND, Trace
from cpu_prefix_cache.replay.units import show_bytes, show_seconds

MIN_NOTE = """\
min: knows the future, keeps what is used again soonest, and never stores what is used again too late. It is
     a ceiling on hit blocks: no cache of this capacity finds more of them. It is none on tokens or time.
infinite: a cache without a limit."""
TIERS_NOTE = """\
With several tiers, min is one cache as large as all of them together.
at eviction: a reference; LRU of single blocks in two tiers, stored in the lowest when what is above evicts them."""
DEVICE_NOTE = "lost before store: blocks that left the device before the host was offered them."
BELOW_NOTE = """\
from below: blocks of prompts that only the tier below the host had, among the loaded ones. read below: what was read
     for them. unsaved: blocks that left the host before they could be written to the tier."""
RATES_NOTE = """\
prefill saved: the time to compute the loaded tokens, less the time of all loaded bytes on the link from the host. Hits
     on the device save nothing here, and nothing waits for others."""
READING_NOTE = """\
     Less the time of what was read below, too. Where reading would take longer than computing, nothing is read, and
     those blocks are missed."""
NONE = Ratios(0.0, 0.0)
BYTES, DEVICE, BELOW, SAVED = "bytes", "device_capacity", "below_capacity", "seconds_saved"


@dataclass(frozen=True, slots=True)
class References:
    """What policies are compared with. `at_eviction` has (host capacity, ratios); empty without a device tier."""

    ideal: Ratios
    clairvoyant: Sequence[Outcome]
    at_eviction: Sequence[tuple[int, Ratios]] = ()


def describe_trace(trace: Trace) -> str:
    lines = [
        f"{len(trace.requests):,} requests from {', '.join(trace.paths)}: {trace.blocks:,} blocks of "
        f"{trace.block_tokens} tokens, {trace.different_blocks:,} of them different"
    ]
    if trace.guessed_from is not None:
        lines.append(_describe_time(trace.time_unit, trace.guessed_from))
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


def describe_rates(rates: Rates) -> str:
    below = "" if rates.below_bytes is None else f", {rates.below_bytes / 1e9:,.2f} GB/s from below"
    return (
        f"rates: prefill {rates.prefill_tokens:,.0f} tokens/s, {rates.host_bytes / 1e9:,.2f} GB/s from the host"
        f"{below}\nreading is as fast as computing at {rates.even / 1e9:,.2f} GB/s"
    )


def table(outcomes: Sequence[Outcome], references: References, block_bytes: int | None) -> str:
    """The table of results. `block_bytes` is the size of a block, if known."""
    columns = [column for column in _COLUMNS if column.is_shown(outcomes, block_bytes)]
    rows = [["policy", "capacity", "hit blocks", "hit tokens"] + [column.name for column in columns]]
    rows.append(_reference("no cache", None, NONE, len(columns)))
    for capacity in sorted({outcome.capacity for outcome in outcomes}):
        for outcome in (each for each in outcomes if each.capacity == capacity):
            cells = [column.cell(outcome, block_bytes or 0) for column in columns]
            rows.append([*_start(outcome.policy, capacity, outcome.ratios), *cells])
        for size, ratios in references.at_eviction:
            if size == capacity:
                rows.append(_reference("at eviction", capacity, ratios, len(columns)))
        rows += [
            _reference(known.policy, capacity, known.ratios, len(columns))
            for known in references.clairvoyant
            if known.capacity == capacity and known not in outcomes
        ]
    rows.append(_reference("infinite", None, references.ideal, len(columns)))
    return _aligned(rows)


def notes(outcomes: Sequence[Outcome]) -> str:
    """What the table's words mean."""

    def has(field: str) -> bool:
        return any(getattr(outcome, field) is not None for outcome in outcomes)

    texts = {
        MIN_NOTE: True,
        TIERS_NOTE: has(DEVICE) or has(BELOW),
        DEVICE_NOTE: has(DEVICE),
        BELOW_NOTE: has(BELOW),
        RATES_NOTE: has(SAVED),
        READING_NOTE: has(SAVED) and has(BELOW),
    }
    return "\n".join(text for text, is_shown in texts.items() if is_shown)


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    cell: Callable[[Outcome, int], str]
    needs: str = ""  # bytes of a block, or that field of an outcome

    def is_shown(self, outcomes: Sequence[Outcome], block_bytes: int | None) -> bool:
        if self.needs == BYTES:
            return block_bytes is not None
        return not self.needs or any(getattr(outcome, self.needs) is not None for outcome in outcomes)


_COLUMNS = (
    _Column("stored", lambda outcome, _: f"{outcome.tally.stored_blocks:,}"),
    _Column("stored bytes", lambda outcome, block: show_bytes(outcome.tally.stored_blocks * block), BYTES),
    _Column("loaded", lambda outcome, _: f"{outcome.tally.loaded_blocks:,}"),
    _Column("loaded bytes", lambda outcome, block: show_bytes(outcome.tally.loaded_blocks * block), BYTES),
    _Column("evictions", lambda outcome, _: f"{outcome.tally.evictions:,}"),
    _Column("lost before store", lambda outcome, _: f"{outcome.tally.lost_before_store:,}", DEVICE),
    _Column("from below", lambda outcome, _: _below(outcome, outcome.tally.below_hit_blocks), BELOW),
    _Column("read below", lambda outcome, _: _below(outcome, outcome.tally.below_loaded_blocks), BELOW),
    _Column("stored below", lambda outcome, _: _below(outcome, outcome.tally.below_stored_blocks), BELOW),
    _Column("unsaved", lambda outcome, _: _below(outcome, outcome.tally.unsaved), BELOW),
    _Column("prefill saved", lambda outcome, _: _seconds(outcome.seconds_saved), SAVED),
    _Column("seconds", lambda outcome, _: f"{outcome.seconds:.3f}"),
    _Column("blocks/s", lambda outcome, _: f"{outcome.trace_blocks / max(outcome.seconds, 1e-9):,.0f}"),
)


def _below(outcome: Outcome, blocks: int) -> str:
    return "-" if outcome.below_capacity is None else f"{blocks:,}"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:,.1f} s"


def _start(name: str, capacity: int | None, ratios: Ratios) -> list[str]:
    size = "-" if capacity is None else f"{capacity:,}"
    return [name, size, f"{ratios.block_hit_ratio:.4f}", f"{ratios.token_hit_ratio:.4f}"]


def _reference(name: str, capacity: int | None, ratios: Ratios, columns: int) -> list[str]:
    return [*_start(name, capacity, ratios), *["-"] * columns]


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """The rows as lines, names aligned to the left and numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        numbers = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *numbers]))
    return "\n".join(lines)
