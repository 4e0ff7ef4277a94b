"""Printed result of a replay: a table, and notes on the references in it.

Rows are sorted by capacity. Beside the policies stand references: no cache, a cache without a limit, MIN, and with
more than one tier a lowest one that stores exactly at eviction.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cpu_prefix_cache.tools.replay.outcome import Outcome, Ratios
from cpu_prefix_cache.tools.replay.units import show_bytes

MIN_NOTE = """\
min: knows the future, keeps what is used again soonest, and never stores what is used again too late. It is
     the most that any cache of this capacity finds, counted in blocks. In tokens or time a policy can exceed it.
infinite: a cache without a limit."""
TIERS_NOTE = """\
With several tiers, min is one cache as large as all of them together.
at eviction: a reference; LRU of single blocks in two tiers, stored in the lowest when what is above evicts them."""
BELOW_NOTE = "from below: blocks of prompts that only the tier below the host had, among the loaded ones."
TIME_NOTE = """\
hit time: hits weighed by the time to compute them. The deeper a token in its prompt, the more it has to attend to."""
RATES_NOTE = """\
of prefill: the time to compute the loaded tokens, less the time of all loaded bytes on the link from the host, as a
     share of the time to compute all prompts. Hits on the device save nothing here, and nothing waits for others."""
MONEY_NOTE = "money: what these seconds cost at --gpu-price; saved only if hours of GPUs are given back."
READING_NOTE = """\
     Less the time of what was read below, too. Where reading would take longer than computing, nothing is read, and
     those blocks are missed."""
NONE = Ratios()
BYTES, DEVICE, BELOW, SAVED, MONEY = "bytes", "device_capacity", "below_capacity", "seconds_saved", "money_saved"


@dataclass(frozen=True, slots=True)
class References:
    """References that policies are compared with. `at_eviction` has (host capacity, ratios); empty without a device
    tier."""

    ideal: Ratios
    clairvoyant: Sequence[Outcome]
    at_eviction: Sequence[tuple[int, Ratios]] = ()


def table(
    outcomes: Sequence[Outcome], references: References, block_bytes: int | None, *, has_time: bool = False
) -> str:
    """The table of results. `block_bytes` is the size of a block, if known. `has_time`: whether hit time is known."""
    columns = [column for column in _COLUMNS if column.is_shown(outcomes, block_bytes)]
    ratios = ["hit blocks", "hit tokens", *(["hit time"] if has_time else [])]

    def start(name: str, capacity: int | None, found: Ratios) -> list[str]:
        values = (found.block_hit_ratio, found.token_hit_ratio, found.time_hit_ratio)
        size = "-" if capacity is None else f"{capacity:,}"
        return [name, size, *(_or_dash(value, ".4f") for value in values[: len(ratios)])]

    def reference(name: str, capacity: int | None, found: Ratios) -> list[str]:
        return [*start(name, capacity, found), *["-"] * len(columns)]

    rows = [["policy", "capacity", *ratios, *(column.name for column in columns)], reference("no cache", None, NONE)]
    for capacity in sorted({outcome.capacity for outcome in outcomes}):
        for outcome in (each for each in outcomes if each.capacity == capacity):
            cells = [column.cell(outcome, block_bytes or 0) for column in columns]
            rows.append([*start(outcome.policy, capacity, outcome.ratios), *cells])
        rows += [reference("at eviction", size, found) for size, found in references.at_eviction if size == capacity]
        rows += [
            reference(known.policy, capacity, known.ratios)
            for known in references.clairvoyant
            if known.capacity == capacity and known not in outcomes
        ]
    rows.append(reference("infinite", None, references.ideal))
    return aligned(rows)


def notes(outcomes: Sequence[Outcome], *, has_time: bool = False) -> str:
    """Notes on the table's words."""

    def has(field: str) -> bool:
        return any(getattr(outcome, field) is not None for outcome in outcomes)

    texts = {
        MIN_NOTE: True,
        TIERS_NOTE: has(DEVICE) or has(BELOW),
        BELOW_NOTE: has(BELOW),
        TIME_NOTE: has_time,
        RATES_NOTE: has(SAVED),
        READING_NOTE: has(SAVED) and has(BELOW),
        MONEY_NOTE: has(MONEY),
    }
    return "\n".join(text for text, is_shown in texts.items() if is_shown)


def best(outcomes: Sequence[Outcome], references: References) -> str:
    """The best policy of each capacity, and by how much; nothing if no two were replayed."""
    candidates = [outcome for outcome in outcomes if outcome not in references.clairvoyant]
    found = []
    for capacity in sorted({outcome.capacity for outcome in candidates}):
        first, *others = sorted((each for each in candidates if each.capacity == capacity), key=_worth, reverse=True)
        if others:
            points = 100 * (_worth(first) - _worth(others[0]))
            found.append(f"{first.policy} at {capacity:,} blocks ({points:.1f} points above {others[0].policy})")
    if not found:
        return ""
    what = "prefill saved" if candidates[0].share_saved is not None else "hits"
    return f"\n\nmost {what}: {', '.join(found)}"


def _worth(outcome: Outcome) -> float:
    return outcome.ratios.block_hit_ratio if outcome.share_saved is None else outcome.share_saved


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
    _Column("host bytes", lambda outcome, block: show_bytes(outcome.capacity * block), BYTES),
    _Column("stored", lambda outcome, _: f"{outcome.tally.stored_blocks:,}"),
    _Column("loaded", lambda outcome, _: f"{outcome.tally.loaded_blocks:,}"),
    _Column("from below", lambda outcome, _: _from_below(outcome), BELOW),
    _Column("of prefill", lambda outcome, _: _or_dash(outcome.share_saved, ".1%"), SAVED),
    _Column("money", lambda outcome, _: _or_dash(outcome.money_saved, ",.2f"), MONEY),
)


def _from_below(outcome: Outcome) -> str:
    return "-" if outcome.below_capacity is None else f"{outcome.tally.below_hit_blocks:,}"


def _or_dash(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """The rows as lines, names aligned to the left and numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *cells in rows:
        numbers = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *numbers]))
    return "\n".join(lines)
