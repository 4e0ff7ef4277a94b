"""What a replay prints: the trace, a table, and notes on the references in it.

Rows are sorted by capacity. Beside the policies stand references: no cache, a cache without a limit, MIN, and with two
tiers a host that stores exactly at eviction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cpu_prefix_cache.replay.outcome import Outcome, Ratios
from cpu_prefix_cache.replay.tiers import DeviceTier, HostTier
from cpu_prefix_cache.replay.traces import UNITS_A_SECOND, Trace
from cpu_prefix_cache.replay.units import show_bytes, show_seconds

MIN_NOTE = """\
min: knows the future, keeps what is used again soonest, and never stores what is used again too late. It is
     a ceiling on hit blocks: no cache of this capacity finds more of them. It is none on tokens or time.
infinite: a cache without a limit."""
TWO_TIERS_NOTE = """\
In two tiers, min is one cache as large as device and host together.
at eviction: a reference; LRU of single blocks, each stored when the device evicts it.
lost before store: blocks that left the device before the host was offered them."""
NONE = Ratios(0.0, 0.0)


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


def describe_admission(host: HostTier) -> str:
    return (
        f"stored is what {host.store_after:,} or more prompts of at least {host.min_store_tokens:,} tokens had; "
        "the references have no such thresholds"
    )


def describe_device(device: DeviceTier) -> str:
    ahead = f", looking {device.looks_ahead:,} blocks ahead" if device.offload == "lazy" else ""
    return f"behind a device of {device.capacity:,} blocks with LRU; {device.offload} stores{ahead}"


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


def notes(has_device: bool) -> str:
    return f"{MIN_NOTE}\n{TWO_TIERS_NOTE}" if has_device else MIN_NOTE


@dataclass(frozen=True, slots=True)
class _Column:
    name: str
    cell: Callable[[Outcome, int], str]
    needs_bytes: bool = False
    needs_device: bool = False

    def is_shown(self, outcomes: Sequence[Outcome], block_bytes: int | None) -> bool:
        has_device = any(outcome.device_capacity is not None for outcome in outcomes)
        return (has_device or not self.needs_device) and (block_bytes is not None or not self.needs_bytes)


_COLUMNS = (
    _Column("stored", lambda outcome, _: f"{outcome.tally.stored_blocks:,}"),
    _Column("stored bytes", lambda outcome, block: show_bytes(outcome.tally.stored_blocks * block), needs_bytes=True),
    _Column("loaded", lambda outcome, _: f"{outcome.tally.loaded_blocks:,}"),
    _Column("loaded bytes", lambda outcome, block: show_bytes(outcome.tally.loaded_blocks * block), needs_bytes=True),
    _Column("evictions", lambda outcome, _: f"{outcome.tally.evictions:,}"),
    _Column("lost before store", lambda outcome, _: f"{outcome.tally.lost_before_store:,}", needs_device=True),
    _Column("seconds", lambda outcome, _: f"{outcome.seconds:.3f}"),
    _Column("blocks/s", lambda outcome, _: f"{outcome.trace_blocks / max(outcome.seconds, 1e-9):,.0f}"),
)


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
